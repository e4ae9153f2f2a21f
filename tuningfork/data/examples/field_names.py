"""Fields that a file calls otherwise than our formats: `data.columns` renames them before anything looks at a row."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from tuningfork.data.examples.checks import ASKED
from tuningfork.data.examples.formats import FORMATS
from tuningfork.data.examples.roles import SHAREGPT
from tuningfork.data.examples.row_reader import COMMON_FIELDS
from tuningfork.data.tables.rows import Row
from tuningfork.errors import ConfigError, DataError

Names = Mapping[str, str]
"""A name in a file -> ours."""
Columns = Mapping[str, str | None]
"""A name of a field in a file -> ours, or None for a field that is left out."""

OURS = sorted({*COMMON_FIELDS, *ASKED, *(key for format in FORMATS.values() for key in (*format.keys, *format.more))})
"""Every field that some format reads."""
NAMES_KEPT = 1000  # names of fields of a table: more than any has whose fields mean something


def check_columns(given: Columns) -> None:
    """Raise ConfigError where `data.columns` names a field that no format reads, or two columns for one."""
    for theirs, ours in given.items():
        if ours is None:
            continue
        if ours not in OURS:
            near = difflib.get_close_matches(ours, OURS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"formats read {', '.join(OURS)}."
            hint = turned(given) or hint
            raise ConfigError(f"data.columns: {{{theirs}: {ours}}} names no field that is read; {hint}")
        if other := next((key for key, value in given.items() if value == ours and key != theirs), None):
            raise ConfigError(f"data.columns: {theirs} and {other} are both to be {ours}. Keep one.")


def turned(columns: Columns, there: Collection[str] | None = None) -> str:
    """A sentence on names that seem to stand the wrong way round: ours in front, and behind them those that are `there`
    in the file, where that is known. Empty for others."""
    other_way = {ours: theirs for theirs, ours in columns.items() if ours is not None}
    if not all(ours in OURS for ours in other_way.values()) or not all(
        there is None or key in there for key in other_way
    ):
        return ""
    shown = ", ".join(f"{theirs}: {ours}" for theirs, ours in other_way.items())
    return f"the file's own names stand first. Write it the other way round: {{{shown}}}." if shown else ""


def rename_fields(path: str, rows: Iterable[tuple[int, Row]], columns: Columns) -> Iterator[tuple[int, Row]]:
    """The rows under our names, without those that are left out. Raises DataError at a row that fills both a column and
    the field that it is to be."""
    taken = set(columns.values())
    for number, row in rows:
        changed = {ours: value for key, value in row.items() if (ours := columns.get(key)) is not None}
        for key, value in row.items():
            if key in columns:
                continue
            if key in changed and value is not None and changed[key] is not None:
                theirs = next(name for name, ours in columns.items() if ours == key)
                raise DataError(
                    f"{path}: row {number} fills {key!r} and also {theirs!r}, which data.columns makes {key!r}. Rename "
                    f"or remove the file's own {key!r}, or leave {theirs!r} out of data.columns."
                )
            if key not in taken or changed.get(key) is None:
                changed[key] = value
        yield number, changed


def names_of(rows: Iterable[tuple[int, Row]]) -> list[str]:
    """The names of all fields that rows have, in order, as far as there are not absurdly many."""
    found: dict[str, None] = {}
    for _, row in rows:
        if len(found) < NAMES_KEPT:
            found.update(dict.fromkeys(row))
    return list(found)


def within(name: str, there: Iterable[str]) -> str:
    """What to say of a name for something within a field: objects and messages are read as they are."""
    field = re.split(r"[.\[/]", name, maxsplit=1)[0]
    return f"; it names whole fields such as {field}, not what is within them" if field in there else ""


def check_renames_used(
    columns: Columns, roles: Names, fields: Iterable[str], notes: Iterable[str], complete: bool
) -> None:
    """Raise ConfigError where `data.columns` or `data.roles` name what no row of all tables has.

    Args:
        fields: names of fields, as the files have them.
        notes: of all rows in use, among them the roles that were read under another name.
        complete: whether every row is in use; a dropped one may have had the role.
    """
    there = list(fields)
    for theirs, ours in columns.items():
        if theirs not in there and len(there) < NAMES_KEPT:
            near = difflib.get_close_matches(theirs, there, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(there)[:40])}."
            hint = (
                within(theirs, there).removeprefix("; ") + "."
                if within(theirs, there)
                else turned(columns, there) or hint
            )
            entry = f"{{{theirs}: {'null' if ours is None else ours}}}"
            raise ConfigError(f"data.columns: {entry}: no row has a field {theirs!r}; {hint}")
    said = list(notes)
    for theirs, ours in roles.items():
        seen = theirs == ours or theirs in SHAREGPT or f"role {theirs} as {ours}" in said
        if complete and not seen:
            raise ConfigError(f"data.roles: {{{theirs}: {ours}}}: no message has the role {theirs!r}. Remove it.")
