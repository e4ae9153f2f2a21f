"""How much a Parquet file unpacks to, by the headers of its pages, read before the library obeys them.

A page says how many values it holds, and a few bytes can stand for a hundred million equal ones. The sizes in the
file's footer are what its writer made of them, and the library reads a page whatever they say, so they are not trusted.
Headers are structures of Thrift's compact protocol, with the fields of Parquet's parquet.thrift.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tuningfork.data.tables.rows import MOST_COLUMNS

_TAIL = 8  # bytes: the footer's length and PAR1
_LEVELS = 32  # of structures within structures; those of Parquet have seven
_DEPTH = 64  # of fields within fields of a schema
_PADDING = 100  # bytes that the library reads beyond a chunk which some old writers give too short
# Numbers of fields in parquet.thrift: of the footer, of a row group, of a column's chunk, of a page's header.
_SCHEMA, _CHILDREN, _GROUPS = 2, 5, 4
_COLUMNS, _ROWS = 1, 3
_META, _VALUES, _LENGTH, _FIRST_DATA, _DICTIONARY = 3, 5, 7, 9, 11
_KIND, _UNPACKED, _PACKED, _PAGES, _COUNT = 1, 2, 3, (5, 7, 8), 1
_DATA_PAGES = (0, 3)


class PartSize(NamedTuple):
    """What the pages of a row group hold: the most values of one of its columns, with nulls and empty lists among them,
    the bytes of all together, and those of the largest page."""

    rows: int
    values: int
    bytes: int
    page: int


def part_sizes(path: Path) -> Iterator[PartSize]:
    """The size of each row group. Raises ValueError where headers cannot be followed, or a schema is beyond use."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            end = len(data) - _TAIL
            footer, _ = _Reader(data, end - int.from_bytes(data[end : end + 4], "little")).structure()
            _check_schema(footer[_SCHEMA])
            for group in footer.get(_GROUPS, ()):
                pages = [list(_pages(data, chunk[_META])) for chunk in group[_COLUMNS]]
                values = max((sum(count for count, _ in column) for column in pages), default=0)
                sizes = [size for column in pages for _, size in column]
                yield PartSize(group[_ROWS], values, sum(sizes), max(sizes, default=0))
        except (LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("the headers of its pages cannot be followed") from error


def _pages(data: mmap.mmap, chunk: dict[int, Any]) -> Iterator[tuple[int, int]]:
    """(values, bytes once unpacked) of the pages of a column's chunk, as far as the library reads it."""
    at = chunk[_FIRST_DATA]
    if 0 < chunk.get(_DICTIONARY, 0) < at:
        at = chunk[_DICTIONARY]
    end, left = at + chunk[_LENGTH] + _PADDING, chunk[_VALUES]
    while left > 0 and at < end:
        header, at = _Reader(data, at).structure()
        values = max((header[page][_COUNT] for page in _PAGES if page in header), default=0)
        yield values, header[_UNPACKED]
        if header[_KIND] in _DATA_PAGES:
            left -= values
        if header[_PACKED] < 0 or values < 0:
            raise ValueError("a page of it has a negative size")
        at += header[_PACKED]


def _check_schema(elements: list[dict[int, Any]]) -> None:
    """Raise ValueError for more columns, or fields within fields, than any table has."""
    if len(elements) > MOST_COLUMNS:
        raise ValueError(f"it has {len(elements):,} columns, {MOST_COLUMNS:,} at most")
    left: list[int] = []  # children that are still to come, of each field around the next one
    for element in elements:
        while left and not left[-1]:
            left.pop()
        if left:
            left[-1] -= 1
        if children := element.get(_CHILDREN, 0):
            left.append(children)
        if len(left) > _DEPTH:
            raise ValueError(f"it has fields within fields, more than {_DEPTH} times")


class _Reader:
    """Reads Thrift's compact protocol from a place on. Raises IndexError behind the end of the data."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        if at < 0:
            raise IndexError(at)
        self.data, self.at = data, at

    def structure(self, level: int = 0) -> tuple[dict[int, Any], int]:
        """The fields of a structure by their numbers, and where it ends."""
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            found[number] = self._value(head & 15, level + 1) if head & 15 > 2 else head & 15 == 1
        return found, self.at

    def _value(self, kind: int, level: int) -> Any:
        if level > _LEVELS:
            raise ValueError("its headers are nested too deeply")
        if kind in (1, 2, 3):  # truth values of a list, and bytes
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            self.at += 8
        elif kind == 8:  # text, of which nothing is needed here
            length = self._unsigned()
            self.at += length
        elif kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            return [self._value(head & 15, level + 1) for _ in range(count)]
        elif kind == 12:
            return self.structure(level + 1)[0]
        else:
            raise ValueError("its headers hold what no Parquet file has")
        return None

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _signed(self) -> int:
        found = self._unsigned()
        return found >> 1 ^ -(found & 1)

    def _unsigned(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found
            if shift > 63:
                raise ValueError("its headers hold a number beyond use")
