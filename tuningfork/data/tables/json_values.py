"""How many values a JSON text holds, told before they are made: three letters, an empty list, take 56 bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tuningfork.data.tables.rows import MOST_VALUES

_MARKS = re.compile(r"""[\[\]{},]|"[^"]*(?:"|\Z)""")


def loads(text: str) -> Any:
    """What a JSON text within a row says. Raises ValueError, also where it holds more values than a row may, and
    RecursionError."""
    check_values(text)
    return json.loads(text)


def check_values(text: str) -> None:
    """Raise ValueError where a JSON text holds more values than a row may."""
    for values in values_of(text):
        if values > MOST_VALUES:
            raise ValueError(f"it holds {values:,} values, {MOST_VALUES:,} at most")


def values_of(text: str, depth_of_rows: int = 0) -> Iterator[int]:
    """How many values each row of a JSON text holds, itself among them: nothing where they surely are no more than a
    row may have. A text is one row; with `depth_of_rows` 1 it is an array of rows, which are counted as they are drawn.

    A value stands behind a comma, or is the first in a list or an object. Most texts are too short, or have too few of
    these marks, for the exact count, which leaves out what stands in strings.
    """
    if len(text) <= 2 * MOST_VALUES or sum(map(text.count, ",[{")) <= MOST_VALUES:
        return
    if "\\" in text:
        text = text.replace("\\\\", "").replace('\\"', "")
    found, depth, opened = 1, 0, -1
    for mark in _MARKS.finditer(text):
        letter = text[mark.start()]
        if letter in "[{":
            found, depth, opened = found + (depth >= depth_of_rows), depth + 1, mark.end()
            continue
        if letter in "]}":
            depth -= 1
            if opened >= 0 and not text[opened : mark.start()].strip():
                found -= 1  # it was empty
        elif letter == "," and depth_of_rows and depth == depth_of_rows:
            yield found
            found = 1
        else:
            found += letter == ","
        opened = -1
    yield found
