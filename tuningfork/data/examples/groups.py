"""What a row belongs to, as a number: its conversation, or whatever a field of it names.

Rows become tokens only once, and templates print the same turns in other words as history, so tokens do not tell which
rows are of one conversation. What tells it is hashed while the row is at hand, and travels with its tokens.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import xxhash

from tuningfork.data.examples.row_reader import ReadRow
from tuningfork.data.examples.values import filled, unbroken
from tuningfork.data.tables.rows import Row, kind_of
from tuningfork.errors import ConfigError, DataError
from tuningfork.records import Example, Source

CONVERSATION = "conversation"
ALONE = "a group of its own, for train.group_by finds none"  # a note, behind the name of what is not there
SHOWN = 40  # names of fields in a message


def with_group(read: ReadRow, row: Row, by: str) -> ReadRow:
    """What was read of a row, with the hash of what it belongs to, and a note where it belongs to nothing.

    Args:
        by: CONVERSATION: how the row's conversation begins, which is its tools and all messages before the first
            assistant turn that answers a user, or the whole of a prompt that is text. Else the name of a field.

    Raises:
        DataError: the field holds something else than a string, a number or a truth value.
        Unusable: the field's value cannot be had.
    """
    said = _opening(read.example) if by == CONVERSATION else _scalar(row, by, read.example.source)
    not_read = [name for name in read.not_read if name != by]
    if said is None:
        note = f"no {'prompt' if by == CONVERSATION else by}: {ALONE}"
        return read._replace(notes=[*read.notes, note], not_read=not_read)
    group = xxhash.xxh3_64_intdigest(json.dumps(said, default=str).encode())
    return read._replace(example=replace(read.example, group=group), not_read=not_read)


def check_group_found(by: str, groups: np.ndarray, fields: Iterable[str]) -> None:
    """Raise ConfigError where no example has a group. `groups` uint64 [n] are theirs, `fields` the files' own names."""
    if groups.any():
        return
    if by == CONVERSATION:
        raise ConfigError(
            f"train.group_by is {by}, but no row of data.train has a prompt. Remove it and train.order: grouped."
        )
    there = list(fields)
    near = difflib.get_close_matches(by, there, n=1, cutoff=0.5)
    if by in there:
        hint = "data.columns gives it another name, or it is empty in all of them."
    else:
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(there)[:SHOWN])}."
    raise ConfigError(
        f"train.group_by is {by!r}, but no row of data.train says anything in a field of that name; {hint} Beside "
        f"fields, {CONVERSATION} and prompt can be given."
    )


def _opening(example: Example) -> list | str | None:
    """What a conversation begins with; None where nothing was asked. A greeting by the assistant is a part of it. A
    template argument such as enable_thinking is none: it may change from turn to turn."""
    if isinstance(example.prompt, str):
        return example.prompt or None
    roles = [turn.role for turn in example.prompt]
    asked = roles.index("user") if "user" in roles else 0
    end = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    turns = [[turn.role, turn.content, turn.extra] for turn in example.prompt[:end]]
    return [example.template.get("tools"), turns] if turns else None


def _scalar(row: Row, name: str, source: Source) -> list | str | None:
    """The value of a field, so that equal numbers are the same whatever their type, and "1", 1 and true are three
    things; None where it says nothing."""
    value = unbroken(row.get(name))
    if not filled(row, name) or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return [value]
    try:
        return list(value.as_integer_ratio())
    except (AttributeError, OverflowError):
        found = f"{value}" if isinstance(value, float) else kind_of(value)
        raise DataError(
            f"{source}: field {name!r}, by which train.group_by puts rows together, is {found}; it must be a "
            "string, a finite number, true or false. Name another field, or prompt or conversation."
        ) from None
