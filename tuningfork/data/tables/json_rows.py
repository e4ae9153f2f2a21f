"""A JSON Lines file, or a .json file that is one array -> its rows, with the values exactly as the file has them.

Lines are read as they are drawn, so a file may be larger than memory; of an array the text is held as a whole. What is
read at once has a bound, the values of a row have one, and so has what a gzipped file may grow to: a megabyte of it can
be a gigabyte. Values are those of Python's json: `datasets` would guess types for whole columns, so that answers that
look like dates become timestamps, a missing field becomes null, and numbers change.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from tuningfork.data.tables.json_values import check_values, values_of
from tuningfork.data.tables.rows import MOST_VALUES, Row, kind_of
from tuningfork.errors import DataError
from tuningfork.files import opened

LONGEST_LINE = 64 << 20  # bytes of one row: texts of ten million characters, and their escapes
LONGEST_ARRAY = 1 << 30  # bytes of an array, which is held
MOST_BROKEN, SHOWN_BROKEN = 1000, 5  # lines that are not JSON: counted at once, and shown
BLANK = 1_000_000  # lines in a row that say nothing
RATIO, UNZIPPED = 200, 1 << 30  # how many times its size a gzipped file may have, if it has more than so many bytes
_AS_LINES = "Write it as .jsonl, an object a line: that is read line by line."
_GZIP = b"\x1f\x8b"  # what a gzipped file begins with
_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\n\r]*")


def is_array(path: Path) -> bool:
    """Whether the first thing in a file, plain or gzipped, is the beginning of an array."""
    heads = unzipped_pieces(path)
    first = next(heads, b"").removeprefix(_BOM)
    return next((head.lstrip() for head in chain([first], heads) if not head.isspace()), b"").startswith(b"[")


def array_text(path: Path) -> str:
    """The text of a file that is one array. Raises DataError."""
    text, size = [], 0
    try:
        for _, line in _lines(path, LONGEST_ARRAY):
            size += len(line)
            text.append(line)
            if size > LONGEST_ARRAY:
                raise DataError(f"{path}: {_too_long('this array', LONGEST_ARRAY)} {_AS_LINES}")
        return "".join(text)
    except MemoryError as error:
        raise DataError(
            f"{path}: one array of {size:,} characters takes more memory than there is. {_AS_LINES}"
        ) from error


def array_rows(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    """The rows of a text that is one array, with their places in it from 1. Raises DataError."""
    try:
        with _faults():
            for number, row in _elements(text):
                yield number, _checked(path, f"row {number}", row)
    except _Fault as fault:
        raise DataError(_broken(path, 1, fault, iter(()))) from None


def _elements(text: str) -> Iterator[tuple[int, Any]]:
    """The elements of a text that is one array, one by one, with their places from 1. Raises ValueError."""
    values = values_of(text, depth_of_rows=1)
    at = _behind_space(text, _behind_space(text, 0) + 1)
    number = 0
    while number or not text.startswith("]", at):
        number += 1
        if (held := next(values, 0)) > MOST_VALUES:
            raise ValueError(f"row {number} holds {held:,} values, {MOST_VALUES:,} at most")
        row, at = _decoded(text, at)
        yield number, row
        at = _behind_space(text, at)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _behind_space(text, at + 1)
    if (at := _behind_space(text, at + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def line_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a file with one object a line, with the numbers of their lines. Raises DataError."""
    lines = _lines(path, LONGEST_LINE)
    for number, line in lines:
        if line.strip():
            # Without its end, behind which a fault would be on the next line.
            try:
                row = _parsed(line.rstrip("\n"))
            except _Fault as fault:
                raise DataError(_broken(path, number, fault, lines)) from None
            yield number, _checked(path, f"line {number}", row)


def is_zipped(path: Path) -> bool:
    """Whether a file is gzipped, whatever its name. Raises DataError where it cannot be read."""
    with _explained(path), opened(path) as file:
        return file.read(len(_GZIP)) == _GZIP


def unzipped_pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unzipped, a megabyte at a time. Raises DataError where it cannot be read to its end."""
    with _unzipped(path) as file:
        most, size = _most(path) if isinstance(file, gzip.GzipFile) else None, 0
        while piece := file.read(1 << 20):
            size += len(piece)
            if most is not None and size > most:
                raise DataError(_bomb(path, most))
            yield piece


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, plain or gzipped, each with its end. Raises DataError where it is not UTF-8, or a line
    is too long."""
    return (line for _, line in _lines(path, LONGEST_LINE))


@contextmanager
def _unzipped(path: Path) -> Iterator[IO[bytes]]:
    zipped = is_zipped(path)
    with _explained(path), opened(path) as file, gzip.open(file) if zipped else file as content:
        yield cast(IO[bytes], content)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip data is cut short or damaged ({error}). Copy the file again.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}). Check the file's rights.") from error


def _lines(path: Path, longest: int) -> Iterator[tuple[int, str]]:
    """Lines with their numbers. Raises DataError for one of more than `longest` bytes, which is not read to its end."""
    number = blank = size = 0
    try:
        with _unzipped(path) as file:
            most = _most(path) if isinstance(file, gzip.GzipFile) else None
            while line := file.readline(longest + 1):
                number += 1
                size += len(line)
                blank = blank + 1 if line.isspace() else 0
                if len(line) > longest:
                    raise DataError(
                        f"{path}: {_too_long(f'line {number}', longest)} Look at what is there, and remove it."
                    )
                if blank > BLANK:
                    raise DataError(f"{path}: the {blank:,} lines before line {number + 1:,} are blank. Remove them.")
                if most is not None and size > most:
                    raise DataError(_bomb(path, most))
                yield number, line.removeprefix(_BOM if number == 1 else b"").decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: line {number} is not UTF-8 text. Save the file as UTF-8 ({error.reason}, byte {error.start})."
        ) from error


def _too_long(what: str, most: int) -> str:
    return f"{what} has more than {most >> 20:,} MiB, which is more than is read at once."


def _most(path: Path) -> int:
    """Bytes to which a gzipped file may grow. Text of people shrinks to a third or a tenth."""
    return max(UNZIPPED, RATIO * path.stat().st_size)


def _bomb(path: Path, most: int) -> str:
    return (
        f"{path}: unpacks to more than {most:,} bytes, {RATIO} times its size or more: it says the same again and "
        "again. Look at what is in it."
    )


class _Fault(ValueError):
    """Why a text is not JSON, and in which line of it, from 0."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line


def _parsed(text: str) -> Any:
    with _faults():
        check_values(text)
        return json.loads(text, object_pairs_hook=_object)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at a place, and where it ends."""
    return _DECODER.raw_decode(text, at)


@contextmanager
def _faults() -> Iterator[None]:
    """Turn whatever is wrong with JSON into a _Fault."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise _Fault(error.lineno - 1, f"{error.msg}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a field given twice; a number or a nesting beyond all use
        raise _Fault(0, str(error)) from None


def _broken(path: Path, number: int, fault: _Fault, rest: Iterator[tuple[int, str]]) -> str:
    """What to say of a line that is not JSON, and of all those behind it, so that they can be mended at once."""
    found, many = [(number + fault.line, fault)], False
    with suppress(DataError):  # a line behind it that cannot be read at all is said when this one is mended
        for place, line in rest:
            try:
                _parsed(line.rstrip("\n") if line.strip() else "null")
            except _Fault as other:
                found.append((place + other.line, other))
            if many := len(found) == MOST_BROKEN:
                break
    if len(found) == 1:
        said = f"line {found[0][0]} is not JSON ({found[0][1]}). Mend or remove it"
    else:
        more = len(found) - SHOWN_BROKEN
        first = ", ".join(f"line {place} ({why})" for place, why in found[:SHOWN_BROKEN])
        count = f"{len(found):,} lines{' or more' if many else ''}"
        said = f"{count} are not JSON: {first}{f' and {more:,} more' if more > 0 else ''}. Mend or remove them"
    return f"{path}: {said}: a file has one object a line, or (.json only) one array of objects."


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"field {twice[:80]!r} is given twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()


def _checked(path: Path, place: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{path}: {place} is {kind_of(row)}, not an object, which has its fields by name.")
    return row
