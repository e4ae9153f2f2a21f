"""A JSON Lines file, or a .json file that is one array -> its rows, with the values exactly as the file has them.

Lines are read as they are drawn, so a file may be larger than memory; an array is parsed as a whole. Values are those
of Python's json: `datasets` would guess types for whole columns, so that answers that look like dates become
timestamps, a missing field becomes null, and numbers change.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast

from tuningfork.errors import DataError
from tuningfork.files import opened

Row = dict[str, Any]
_GZIP = b"\x1f\x8b"  # what a gzipped file begins with
_BOM = b"\xef\xbb\xbf"


def is_array(path: Path) -> bool:
    """Whether the first thing in a file, plain or gzipped, is the beginning of an array."""
    return next((line for _, line in _lines(path) if line.strip()), "").lstrip().startswith("[")


def array_rows(path: Path) -> list[tuple[int, Row]]:
    """The rows of a file that is one array, with their places in it from 1. Raises DataError."""
    rows = _parsed(path, 1, "".join(line for _, line in _lines(path)))
    return [(number, _checked(path, f"row {number}", row)) for number, row in enumerate(rows, 1)]


def line_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a file with one object a line, with the numbers of their lines. Raises DataError."""
    for number, line in _lines(path):
        if line.strip():
            # Without its end, behind which a fault would be on the next line.
            yield number, _checked(path, f"line {number}", _parsed(path, number, line.rstrip("\n")))


def is_zipped(path: Path) -> bool:
    """Whether a file is gzipped, whatever its name. Raises DataError where it cannot be read."""
    with _explained(path), opened(path) as file:
        return file.read(len(_GZIP)) == _GZIP


def pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unzipped, a megabyte at a time. Raises DataError where it cannot be read to its end."""
    with _unzipped(path) as file:
        while piece := file.read(1 << 20):
            yield piece


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


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _unzipped(path) as lines:
            for number, line in enumerate(lines, 1):
                yield number, line.removeprefix(_BOM if number == 1 else b"").decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: line {number} is not UTF-8 text. Save the file as UTF-8 ({error.reason}, byte {error.start})."
        ) from error


def _parsed(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        place, what = f"line {line}", f"{error.msg}, column {error.colno}"
    except (ValueError, RecursionError) as error:  # a field given twice; a number or a nesting beyond all use
        place, what = f"line {line}", str(error)
    raise DataError(
        f"{path}: {place} is not JSON ({what}). Mend or remove it: a file has one object a line, "
        "or (.json only) one array of objects."
    )


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"field {twice!r} is given twice")
    return row


def _checked(path: Path, place: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{path}: {place} is {kind_of(row)}, not an object like a preference pair.")
    return row


def kind_of(value: Any) -> str:
    """What a value is, in words, as messages name it."""
    names = {
        str: "a string",
        dict: "an object",
        list: "a list",
        bool: "a boolean",
        bytes: "bytes that are no UTF-8 text",
    }
    names |= dict.fromkeys((int, float, Decimal), "a number")
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")
