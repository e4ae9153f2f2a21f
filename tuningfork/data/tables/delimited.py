"""CSV and TSV -> rows. The header names the fields; a cell is text, and an empty one is a field that is not there."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tuningfork.data.tables.json_rows import LONGEST_LINE, text_lines
from tuningfork.data.tables.rows import MOST_COLUMNS, Row
from tuningfork.errors import DataError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Suffix -> what stands between the cells."""

LONGEST = LONGEST_LINE  # characters of a cell; Python's own limit is shorter than many an answer
QUOTING = 'A cell that holds {delimiter}, a quote or a line break stands in quotes ("), with quotes in it doubled.'


def delimited_rows(path: Path, delimiter: str) -> Iterator[tuple[int, Row]]:
    """The rows with their numbers from 1, the header not counted; empty lines are none. Raises DataError, naming row
    and line."""
    csv.field_size_limit(LONGEST)
    lines = _Lines(path)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    cure = QUOTING.format(delimiter="a tab" if delimiter == "\t" else "a comma")
    names: list[str] = []
    number = 0
    try:
        for cells in reader:
            lines.of_row = 0
            if not cells:
                continue
            if not names:
                names = _header(path, cells, delimiter)
                continue
            number += 1
            if len(cells) != len(names):
                raise DataError(
                    f"{path}: row {number}, which ends in line {reader.line_num}, has {len(cells)} cells, but the "
                    f"header names {len(names)} columns: {', '.join(names)[:300]}. {cure}"
                )
            yield number, {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise DataError(
            f"{path}: row {number + 1}, at line {reader.line_num}, cannot be read ({error}). {cure}"
        ) from error


class _Lines:
    """The lines of a file, as many as one row may have: a quote that never ends makes one row of all of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, text_lines(path)
        self.of_row = 0  # characters

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.of_row += len(line)
            if self.of_row > LONGEST_LINE:
                raise csv.Error(f"a row of more than {LONGEST_LINE >> 20:,} MiB, more than is read at once")
            yield line


def _header(path: Path, names: list[str], delimiter: str) -> list[str]:
    if len(names) == 1 and (other := next((mark for mark in ",;\t" if mark in names[0]), "")):
        called = {",": "commas", ";": "semicolons", "\t": "tabs"}
        raise DataError(
            f"{path}: the cells of its header stand between {called[other]}: {names[0][:80]!r}. Save it with "
            f"{called[delimiter]}{', or call it ' + '.tsv' if other == chr(9) else ''}."
        )
    if len(names) > MOST_COLUMNS:
        raise DataError(f"{path}: its header names {len(names):,} columns, {MOST_COLUMNS:,} at most. Remove some.")
    seen: set[str] = set()
    for place, name in enumerate(names, 1):
        if not name.strip():
            raise DataError(f"{path}: column {place} of its header has no name. The first line names the fields.")
        if name in seen:
            raise DataError(f"{path}: its header names {name!r} twice. Rename or remove one of the columns.")
        seen.add(name)
    return names


def with_numbers(rows: Iterable[tuple[int, Row]], names: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """The rows with the numbers and truth values that the text of the fields of these names spells."""
    for number, row in rows:
        yield number, row | {name: _number(row[name]) for name in names if isinstance(row.get(name), str)}


def _number(text: str) -> Any:
    """The number or truth value that a text spells, as JSON or Python writes it; else the text."""
    try:
        found = json.loads(text.strip().lower())
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, int | float) else text
