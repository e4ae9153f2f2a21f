"""A table -> its rows, with the values exactly as it has them: JSONL, JSON, Parquet, CSV or TSV, plain or gzipped; a
folder as `datasets` saves it; or a data set of the hub.

A file that cannot be used is a DataError that names file, line and column.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet

from tuningfork.data.tables.arrow_checks import check_buffers, check_uncompressed, of_bounded_size
from tuningfork.data.tables.arrow_rows import arrow_rows, cause_line
from tuningfork.data.tables.delimited import DELIMITERS, delimited_rows
from tuningfork.data.tables.file_kinds import PARQUET, check_kind
from tuningfork.data.tables.json_rows import (
    RATIO,
    UNZIPPED,
    array_rows,
    array_text,
    is_array,
    is_zipped,
    line_rows,
    unzipped_pieces,
)
from tuningfork.data.tables.parquet_pages import part_sizes
from tuningfork.data.tables.rows import MOST_VALUES, ROWS, Row
from tuningfork.errors import DataError, TuningforkError
from tuningfork.files import SCRATCH_CURE, checksum, explained, opened, scratch
from tuningfork.json_files import read_object
from tuningfork.wording import counted, first_line, from_here

SUFFIXES = (".jsonl", ".json", ".parquet", *DELIMITERS)
HUB = "hub:"  # in front of owner/name
HUB_NAME = r"\w[\w.-]*/\w[\w.-]*(?:@(?!.*\.\.)\w[\w.+/-]*)?"  # owner/name@revision
BATCH = 64  # rows of a table that are made at once: a text of megabytes may be there once, and stand in every row
PAGES = 1 << 30  # bytes that rows made at once may have: a page may be one text, which stands in all of them


class Rows:
    """A table's rows with their numbers from 1: the line of a JSONL file, else the place in the table.

    Each iteration reads them anew, so that a table may be larger than memory; only the text of a JSON array is held as
    a whole. Values are exactly the table's, but for nulls in the objects of a column: they all have the same fields
    there, and one that an object did not have is null. These go; a table cannot tell them from nulls that were meant.
    Raises DataError, naming file, line and column, where something is wrong.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[int, Row]]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        return iter(self._read())


def read_rows(path: str | Path) -> Rows:
    """The rows of a file, a saved data set or a hub name. Raises DataError where it cannot be opened or has none."""
    if str(path).startswith(HUB):
        check_hub_name(str(path))
        return _of_dataset(str(path), lambda: _from_hub(str(path)))
    path = Path(path)
    if is_saved_dataset(path):
        _check_saved(path)
        return _of_dataset(str(path), lambda: _from_disk(path))
    suffix = _checked_suffix(path)
    check_kind(path, suffix)
    if suffix == ".parquet":
        rows = _of_parquet(path)
    elif suffix in DELIMITERS:
        rows = _of_file(path, lambda: delimited_rows(path, DELIMITERS[suffix]))
    elif suffix == ".json" and is_array(path):
        text = array_text(path)
        rows = _of_file(path, lambda: array_rows(path, text))
    else:
        rows = _of_file(path, lambda: line_rows(path))
    if next(iter(rows), None) is None:
        raise DataError(f"{path}: the file has no rows. Give one with rows; docs/data.md shows what they hold.")
    return rows


def check_exists(table: str) -> None:
    """Raise DataError for a file that is not there, is empty or of no known kind; it is not opened."""
    if not table.startswith(HUB) and not is_saved_dataset(Path(table)):
        _checked_suffix(Path(table))


def digest_of(table: str) -> str:
    """A hash of a table's bytes and of what kind of file they are. Raises DataError where they cannot be read."""
    if table.startswith(HUB):
        with _loading(table):
            files = [Path(file["filename"]) for file in _from_hub(table).cache_files]
        if not files:
            raise DataError(f"{table}: is in memory only, so what is in it cannot be told. Set data.cache: null.")
        return f"{_parse_hub(table)[2]} {_digest_of_files(files)}"  # a part of a split lies in the same file
    path = Path(table)
    if is_saved_dataset(path):
        return _digest_of_files(sorted(file for file in path.iterdir() if file.is_file()))
    return f"{_checked_suffix(path)} {_digest_of_files([path])}"


def _digest_of_files(paths: Sequence[Path]) -> str:
    sums = []
    for path in paths:
        try:
            sums.append(checksum(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}). Check the file's rights.") from error
    return " ".join(sums)


def suffix_of(path: Path) -> str:
    """What kind of file this is by its name, behind a .gz or not."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix


def is_delimited(table: str) -> bool:
    """Whether this is a CSV or TSV file, whose values are all text."""
    return not table.startswith(HUB) and suffix_of(Path(table)) in DELIMITERS


def is_saved_dataset(folder: Path) -> bool:
    """Whether this is one table as `datasets` saves it."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _check_saved(folder: Path) -> None:
    """Raise DataError where a saved data set names something else than files of its own folder."""
    try:
        # private: datasets._data_files
        names = [str(part["filename"]) for part in read_object(folder / "state.json")["_data_files"]]
        for name in ("dataset_info.json", *names):
            if Path(name).name != name:
                raise ValueError(f"state.json names {name[:80]!r}, which does not lie in this folder")
            opened(folder / name).close()
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = (
            f"{Path(error.filename or '').name}: {error.strerror}" if isinstance(error, OSError) else first_line(error)
        )
        raise DataError(f"{folder}: cannot be loaded ({why[:300]}). Save it again.") from error


def saved_splits(folder: Path) -> list[str]:
    """The splits of a folder of several tables as `datasets` saves it; none for any other folder. Raises DataError."""
    names = folder / "dataset_dict.json"
    if not names.is_file():
        return []
    try:
        splits = read_object(names)["splits"]
        if isinstance(splits, list) and splits and all(isinstance(split, str) for split in splits):
            return splits
        why = 'it has no list "splits" of names'
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = str(error)
    raise DataError(f"{names}: does not tell the splits of this data set ({why[:300]}). Save it again.")


def check_hub_name(name: str) -> None:
    """Raise DataError for what is no name on the hub: the library would take it for a path on this machine."""
    named = name.removeprefix(HUB).partition(":")[0]
    if not re.fullmatch(HUB_NAME, named):
        raise DataError(
            f"{name}: {named!r} is no name on the hub, which is owner/name or owner/name@revision. A file or folder on "
            f"this machine is named without {HUB}"
        )


def hub_splits(name: str) -> list[str]:
    """The splits of `hub:owner/name@revision`. Raises DataError where the library cannot tell."""
    check_hub_name(name)
    repository, revision, _ = _parse_hub(name)
    with _loading(name):
        return list(datasets.get_dataset_split_names(repository, revision=revision))


def _from_hub(name: str) -> datasets.Dataset:
    """`hub:owner/name@revision:split`; the newest revision and the split `train` unless given."""
    repository, revision, split = _parse_hub(name)
    return datasets.load_dataset(repository, split=split or "train", revision=revision, keep_in_memory=False)


def _parse_hub(name: str) -> tuple[str, str | None, str]:
    repository, _, split = name.removeprefix(HUB).partition(":")
    repository, _, revision = repository.partition("@")
    return repository, revision or None, split


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        with _quiet_library():
            yield
    except (TuningforkError, MemoryError):
        raise
    except Exception as error:  # the library raises whatever its own libraries raise
        hint = (
            "Check the name, and the network unless it was loaded before; without one, get its files on another "
            f"machine (hf download {_parse_hub(name)[0]} --repo-type dataset --local-dir FOLDER) and name these"
            if name.startswith(HUB)
            else "Save it again"
        )
        raise DataError(f"{name}: cannot be loaded ({cause_line(error)[:300]}). {hint}.") from error


def _of_file(path: Path, read: Callable[[], Iterator[tuple[int, Row]]]) -> Rows:
    """The rows of a text file. A gzipped one is small, and may have very many."""

    def counted_rows() -> Iterator[tuple[int, Row]]:
        size = path.stat().st_size
        for count, row in enumerate(read(), 1):
            _check_rows(path, count, size)
            yield row

    return Rows(counted_rows if is_zipped(path) else read)


def _of_dataset(name: str, load: Callable[[], datasets.Dataset]) -> Rows:
    with _loading(name):
        table = load()
    if not len(table):
        raise DataError(f"{name}: has no rows.")
    arrow = table.with_format("arrow")
    return Rows(lambda: _readable_rows(name, arrow.iter(BATCH)))


def _from_disk(folder: Path) -> datasets.Dataset:
    """A saved data set whose buffers hold together."""
    # private: datasets._data_files
    files = [folder / str(part["filename"]) for part in read_object(folder / "state.json")["_data_files"]]
    for file in files:
        check_uncompressed(file)
    table = datasets.load_from_disk(str(folder))
    _check_rows(folder, len(table), sum(file.stat().st_size for file in files))
    check_buffers(str(folder), table.data.table)
    return table


def _checked_suffix(path: Path) -> str:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if any(s in SUFFIXES for s in p.suffixes))[:5]
        hint = f"Name one of its files: {', '.join(inside)}." if inside else f"It has no {', '.join(SUFFIXES)} file."
        raise DataError(f"{path}: is a folder, not a file. {hint}")
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path}: is a link to {path.readlink()}, which is not there. Mend the link, or name the file.")
    if not path.exists():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = (f"did you mean {path.parent / near[0]}?" if near else "check the path in the recipe.") + from_here(path)
        where = "no such file" if path.parent.is_dir() else f"no such file, there is no folder {path.parent}"
        raise DataError(f"{path}: {where}; {hint}")
    if not path.is_file():
        raise DataError(f"{path}: is a pipe or a device, and data is read more than once. Write it to a file first.")
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown suffix {suffix!r}. Give {', '.join(SUFFIXES)}, plain or with .gz.")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty. Give one with rows; docs/data.md shows what they hold.")
    return suffix


@contextmanager
def _quiet_library() -> Iterator[None]:
    """No progress bars and no log lines from `datasets`: what it has to say is in our errors."""
    level, silent = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not silent:
            datasets.enable_progress_bars()


def _of_parquet(path: Path) -> Rows:
    """The rows of a Parquet file, mapped; of a zipped one, from a file without a name."""
    with _readable(path, "is not a whole Parquet file", "Copy or write it again."):
        if is_zipped(path):
            with scratch() as folder:  # the map outlives the name
                plain = folder / "rows.parquet"
                with explained(plain, SCRATCH_CURE), open(plain, "wb") as out:
                    out.writelines(unzipped_pieces(path))
                table, at_once = _opened_parquet(path, plain)
        else:
            table, at_once = _opened_parquet(path, path)
    names = table.schema_arrow.names
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(
            f"{path}: its rows cannot be read: two columns are named {twice[0]!r}. Write it with plain columns, each "
            "with a name of its own."
        )
    return Rows(lambda: _readable_rows(str(path), _batches(table, at_once)) if names else ())


def _opened_parquet(path: Path, plain: Path) -> tuple[pyarrow.parquet.ParquetFile, int]:
    """A Parquet file, `plain` where it lies unzipped, and how many rows to make at once: fewer where its pages have
    room for texts that are very long.

    Raises DataError where it is small and holds very much, which can only be the same again and again.
    """
    size, largest = path.stat().st_size, 1
    with open(plain, "rb") as file:
        whole = file.read(len(PARQUET)) == PARQUET
    for part in part_sizes(plain) if whole else ():
        _check_rows(path, part.rows, size)
        if part.bytes > max(UNZIPPED, RATIO * size):
            what = f"{part.bytes:,} bytes, more than {RATIO} times the whole file"
        elif part.values > max(MOST_VALUES, size):
            what = f"{part.values:,} values of one column, more than the whole file has bytes"
        else:
            largest = max(largest, part.page)
            continue
        raise DataError(
            f"{path}: a part of it with {counted(part.rows, 'row')} unpacks to {what}: it says the same again and "
            "again. Look at it."
        )
    table = pyarrow.parquet.ParquetFile(pyarrow.memory_map(str(plain)))
    _check_rows(path, table.metadata.num_rows, size)
    return table, max(1, min(BATCH, PAGES // largest))


def _check_rows(name: object, rows: int, size: int) -> None:
    """Raise DataError where a table of so many bytes has more rows than it can have that differ."""
    if rows > max(ROWS, size):
        raise DataError(f"{name}: {rows:,} rows in {size:,} bytes are the same row again and again. Look at them.")


def _batches(table: pyarrow.parquet.ParquetFile, at_once: int) -> Iterator[pyarrow.Table]:
    for batch in table.iter_batches(at_once):
        yield pyarrow.Table.from_batches([batch])


def _readable_rows(name: str, batches: Iterable[pyarrow.Table]) -> Iterator[tuple[int, Row]]:
    with _readable(name, "its rows cannot be read", "Copy it again, or write it with plain columns."):
        yield from arrow_rows(of_bounded_size(name, batches))


@contextmanager
def _readable(name: str | Path, what: str, cure: str) -> Iterator[None]:
    try:
        yield
    except (TuningforkError, MemoryError):
        raise
    except Exception as error:  # the library raises whatever its own libraries raise
        raise DataError(f"{name}: {what} ({cause_line(error)[:300]}). {cure}") from error
