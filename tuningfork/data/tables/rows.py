"""A row as its table has it: names of fields and their values, of the kinds that JSON knows."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

Row = dict[str, Any]

MOST_VALUES = 4_000_000  # of one row, those within its lists and objects among them: each takes some 70 bytes
MOST_BYTES = 1 << 28  # of one row, for texts and the like
MOST_COLUMNS = 100_000  # of a table, or fields within fields of one
ROWS = 1_000_000  # more than these, in a file with fewer bytes than rows, are the same row again and again


@dataclass(frozen=True, slots=True)
class Broken:
    """What stands for a value that cannot be had. It costs the rows of which somebody reads it, and no others."""

    reason: str
    detail: str


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
