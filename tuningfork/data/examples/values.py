"""Values of a row, checked: there, of the right type, and text that can be written.

Whatever is wrong with a value raises Unusable, which costs its row and no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from tuningfork.data.tables.json_values import loads
from tuningfork.data.tables.rows import Broken, Row, kind_of

# Fields that change what is trained on and that no part of this house knows. Ignoring one would train on something else
# than the file says, so a row that fills it is dropped. Other extra fields (scores, ids) are noted as not read.
UNSUPPORTED = (
    *("images", "image", "videos", "video", "audios", "audio", "documents"),
    *("rejected_images", "rejected_videos", "rejected_audios"),
    "kto_tag",  # a label where none is read: data.columns can say that it is one
)
SHOWN = 300  # characters of a row's own names in a message, which may be of any length
DIGITS = 40  # of a number in a message
NEUTRAL: tuple[Any, ...] = (None, "", [], {})  # values with which such a field changes nothing


class Unusable(Exception):
    """One row cannot be trained on. `reason` is one of a few short phrases, `detail` says what was found where."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def filled(row: Row, key: str) -> bool:
    """Whether a field is there and says something."""
    return row.get(key) not in NEUTRAL


def required_fields(row: Row, keys: Iterable[str], place: str = "") -> list[Any]:
    """The values of the keys, none of them null, in a row or in the message at a place in it."""
    found = []
    for key in keys:
        if key not in row:
            raise Unusable("missing field", f"no {place}{key}; found {(', '.join(row) or 'none')[:SHOWN]}")
        if row[key] is None:
            raise Unusable("null field", f"{place}{key} is null")
        found.append(unbroken(row[key]))
    for key in UNSUPPORTED:
        if filled(row, key):
            raise Unusable("unsupported field", f"{place}{key} is filled; it would change what is trained on")
    return found


def unbroken(value: Any) -> Any:
    """The value. Raises Unusable where something stands for one that cannot be had."""
    if isinstance(value, Broken):
        raise Unusable(value.reason, value.detail)
    return value


def string(value: Any, field: str) -> str:
    """The value, which must be text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise Unusable("wrong type", f"{field} is {kind_of(value)}, expected a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unusable("broken text", f"{field} has half a surrogate pair at character {error.start + 1}") from None
    return value


def number(value: Any, field: str) -> float:
    """The value, which must be a finite number."""
    numeric = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    try:
        found = float(value) if numeric else math.nan
    except OverflowError:
        found = math.inf
    if abs(found) < 1e30:
        return found
    shown = str(value) if isinstance(value, int | float | Decimal) else kind_of(value)
    shown = shown if len(shown) <= DIGITS else f"{shown[:DIGITS]}... ({len(shown)} digits)"
    raise Unusable("wrong type", f"{field} is {shown}, expected a finite number")


def parsed_json(value: Any, field: str) -> Any:
    """The value, or what its JSON says where it is a string: columns of a table often hold lists as text."""
    if not isinstance(value, str):
        return value
    try:
        return loads(string(value, field))
    except (ValueError, RecursionError) as error:
        raise Unusable("wrong type", f"{field} is a string that is not JSON ({error})") from None


def optional_json(value: Any, field: str) -> Any:
    """The value, parsed where it is JSON text; None where it says nothing: null, an empty list or object, no text."""
    if isinstance(value, str) and not value.strip():
        return None
    value = parsed_json(value, field)
    return None if value in NEUTRAL else value
