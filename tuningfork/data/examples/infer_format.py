"""A first look at a whole table, in one pass: its format, its number of rows, whether answers repeat their prompts."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tuningfork.data.examples.conversations import PLAIN
from tuningfork.data.examples.field_names import names_of, rename_fields, turned, within
from tuningfork.data.examples.formats import FORMATS, first_format, format_of
from tuningfork.data.examples.roles import MessageNames
from tuningfork.data.examples.row_reader import RowReader
from tuningfork.data.examples.values import Unusable, filled
from tuningfork.data.tables.delimited import with_numbers
from tuningfork.data.tables.read import Rows, is_delimited, read_rows
from tuningfork.data.tables.rows import Row
from tuningfork.errors import DataError

PLAINEST = "pairs"
"""The format that is the easiest to write."""
NUMBERS = sorted({"weight", "margin", *(name for format in FORMATS.values() for name in format.numbers)})
"""Fields, by our names, whose values are numbers or truth values and not text."""
REPEATS_TO_TELL = 3  # rows; by fewer it is not told: "Hello" may well be answered by "Hello!"
_UNTOLD = "..."  # a name for the reader to fill in

# What is in wide use and holds no one order of its answers, or none of answers at all: the fields that tell it, the
# most telling first, and what to do.
UNREAD = {
    ("instruction", "completions"): "completions are rated in several ways and not ordered (UltraFeedback): "
    "write chosen and rejected, or answers and scores, by the rating that you trust",
    ("prompt", "completions", "labels"): "labels judge steps of one answer, not answers: write whole answers as chosen "
    "and rejected",
    ("prompt", "response", "helpfulness"): "each answer is rated by itself (HelpSteer): write those of one prompt as "
    "chosen and rejected, or as answers and scores, by the rating that you trust",
    ("prompt", "response", "is_safe"): "each answer is judged by itself (BeaverTails): write those of one prompt as "
    "chosen and rejected, or say data.columns: {response: completion, is_safe: label} for single answers with a label",
    (
        "conversation_a",
        "conversation_b",
        "winner",
    ): "winner names one of two conversations: write it as chosen, the other as rejected",
    ("query", "answers", "tools"): "answers are calls to imitate (xLAM), not answers to compare: write messages",
}


class TableFormat(NamedTuple):
    """What holds for a table as a whole."""

    format: str
    rows: int
    repeat_prompts: bool  # answers have their whole prompt in front: in a file of prompts and whole texts
    fields: list[str]  # that rows have, by the file's own names


@dataclass(slots=True)
class _Tally:
    """What a first look at the rows of one format has counted."""

    format: str
    rows: int = 0
    strings: int = 0  # rows whose prompt and answers are strings
    repeats: int = 0  # of them, those whose answers all begin with the whole prompt
    refusal: str = ""  # the first

    def add(self, place: int, row: Row) -> None:
        format = FORMATS[self.format]
        self.rows += 1
        if not self.refusal and (refusal := format.refusal(row)):
            self.refusal = f"row {place} {refusal}"
        try:
            parts = format.parts(row)
        except Unusable:
            return
        if parts.asked and all(isinstance(answer, str) for _, answer in parts.answers):
            self.strings += 1
            self.repeats += parts.repeat_prompt


def open_table(
    path: str | Path,
    as_text: bool,
    format: str = "auto",
    columns: Mapping[str, str | None] | None = None,
    names: MessageNames = PLAIN,
) -> tuple[Rows, TableFormat, RowReader]:
    """A table's rows, what holds for all of them, and what makes examples of them.

    Args:
        format: a name of FORMATS, or auto.
        columns: fields of the file -> ours (data/examples/field_names.py).
        names: roles and fields in its messages.

    Raises DataError where the whole table is unusable.
    """
    rows = read_rows(path)
    given = names_of(rows)
    if columns:
        rows = Rows(partial(rename_fields, str(path), rows, columns))
    if is_delimited(str(path)):
        rows = Rows(partial(with_numbers, rows, NUMBERS))
    found = infer_format(str(path), rows, format, given, columns or {})
    return rows, found, RowReader(str(path), found.format, format == "auto", found.repeat_prompts, as_text, names)


def infer_format(path: str, rows: Rows, asked: str, given: list[str], columns: Mapping[str, str | None]) -> TableFormat:
    """Look at all rows. Their format is the one that most of them have, or the one asked for.

    Answers count as repeating their prompts where more than half of the rows with strings look like it, and enough of
    them to tell. Files decide that each for itself, shards of one data set too.

    Raises DataError where no row has any format, or the one asked for, or where a row shows that all mean something
    else.
    """
    tallies: dict[str, _Tally] = {}
    count = 0
    for place, row in rows:
        count += 1
        name = format_of(row) if asked == "auto" else asked if _has_fields(row, asked) else None
        if name is not None:
            tallies.setdefault(name, _Tally(name)).add(place, row)
    if not tallies:
        if asked != "auto":
            raise DataError(_not_as_asked(path, rows, asked))
        # Fields with nothing in them: each row says that of itself.
        hollow = Counter(name for _, row in rows if (name := first_format(frozenset(row))) is not None)
        if not hollow:
            raise DataError(_unknown(path, rows, given, columns))
        return TableFormat(hollow.most_common(1)[0][0], count, False, given)
    found = max(tallies.values(), key=lambda tally: tally.rows)
    if found.refusal:
        raise DataError(f"{path}: {found.refusal}")
    repeat = found.repeats >= REPEATS_TO_TELL and 2 * found.repeats > found.strings
    return TableFormat(found.format, count, repeat, given)


def _has_fields(row: Row, format: str) -> bool:
    return all(key in row for key in FORMATS[format].keys)


def _not_as_asked(path: str, rows: Rows, asked: str) -> str:
    counts = Counter(name for _, row in rows if (name := format_of(row)) is not None)
    hint = f"its rows look like {counts.most_common(1)[0][0]}" if counts else "they have no known format"
    needed = ", ".join(FORMATS[asked].keys)
    return f"{path}: no row has the fields of data.format {asked}: {needed}; {hint}. {_fields_found(rows)}"


def _unknown(path: str, rows: Rows, given: list[str], columns: Mapping[str, str | None]) -> str:
    """What was found, the two nearest formats, and how to name fields as ours."""
    there = {ours for name in given if (ours := columns.get(name, name)) is not None}
    wrong = [
        f"data.columns names {name!r}, which no row has{within(name, given)}. " for name in columns if name not in given
    ]
    if wrong and (other_way := turned(columns, given)):
        return f"{path}: no known format of data. {_fields_found(rows)} In data.columns, {other_way}"
    said = [text for keys, text in UNREAD.items() if any(all(filled(row, key) for key in keys) for _, row in rows)]
    if said and not wrong:
        return f"{path}: no known format of data. {_fields_found(rows)} {said[0]}."
    formats = sorted(FORMATS, key=lambda name: _distance(FORMATS[name].keys, there))[:2]
    names = _names_for(formats[0], there)
    plain = names.keys() <= set(FORMATS[PLAINEST].keys)
    if len(names) > 1 and set(names.values()) == {_UNTOLD} and not plain:  # nothing is alike
        formats = list(dict.fromkeys([PLAINEST, *formats]))[:2]
        names = _names_for(PLAINEST, there)
    near = [f"{name} ({', '.join(FORMATS[name].keys)}) lacks {_listed(FORMATS[name].keys, there)}" for name in formats]
    example = _example(names, sorted(there.difference(*(format.keys for format in FORMATS.values()))))
    header = ""
    if is_delimited(path):
        header = (
            " The first line of the file is taken for its header: if it is a row, write the fields' names above it."
        )
    return (
        f"{path}: no known format of data. {_fields_found(rows)} {''.join(wrong)}Nearest are {'; '.join(near)}. If the "
        f"file has these under other names, say so, such as data.columns: {example}.{header}"
    )


def _names_for(format: str, there: set[str]) -> dict[str, str]:
    """Each field that a format lacks, and what it may be called among those that are there and it does not read."""
    keys = FORMATS[format].keys
    return _matched(sorted(there.difference(keys)), [key for key in keys if key not in there])


def _example(names: Mapping[str, str], theirs: Sequence[str]) -> str:
    """A value of data.columns. Where as many fields, which no form reads, are left as are wanted, they are named; which
    of them is the better answer is for the reader to say."""
    told = {theirs: ours for ours, theirs in names.items() if theirs != _UNTOLD}
    untold = [ours for ours, theirs in names.items() if theirs == _UNTOLD]
    free, wanted = [name for name in theirs if name not in told], ""
    if len(free) != len(untold):
        free = [_UNTOLD] * len(untold)
    elif len(untold) > 1:
        wanted = f", with {', '.join(untold[:-1])} and {untold[-1]} for the dots"
        untold = [_UNTOLD] * len(free)
    pairs = [*told.items(), *zip(free, untold, strict=True)]
    return f"{{{', '.join(f'{theirs}: {ours}' for theirs, ours in pairs)}}}{wanted}"


def _distance(keys: Sequence[str], there: set[str]) -> tuple[bool, int, int]:
    """How far a format is from fields that are there, whatever their case: whether it has none of them, how many of its
    own are missing, one less where as many others are left that may be these, for no format reads them; of formats that
    are alike in this the largest comes first."""
    there = {name.casefold() for name in there}
    missing = sum(key not in there for key in keys)
    left = len(there.difference(keys, *(format.keys for format in FORMATS.values())))
    return missing == len(keys), missing - (missing == left), -len(keys)


def _matched(theirs: list[str], ours: list[str]) -> dict[str, str]:
    """Ours -> which of their fields it is, where names are alike, else "..." for the reader to fill: a guess that is
    copied would swap the better answer for the worse."""
    matched: dict[str, str] = {}
    for name in ours:
        left = [other for other in theirs if other not in matched.values()]
        matched[name] = (difflib.get_close_matches(name, left, n=1) or [_UNTOLD])[0]
    return matched


def _listed(keys: Sequence[str], there: set[str]) -> str:
    return " and ".join(key for key in keys if key not in there)


def _fields_found(rows: Rows) -> str:
    return f"Fields found: {', '.join(sorted(names_of(rows))[:40])[:1000] or 'none'}."
