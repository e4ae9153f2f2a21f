"""How reports word what comes from data: shares, lists of rows, and text that may hold anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from tuningfork.accounts import DroppedRow, in_pieces
from tuningfork.data.summary.layouts import Layout
from tuningfork.data.summary.records import DataSummary, Mix, Numbers, SetSummary, Truncation
from tuningfork.wording import counted


class Row(Protocol):
    """Whatever says which row of which file it stands for."""

    @property
    def file(self) -> str: ...

    @property
    def row(self) -> int: ...


CUTS = {
    "truncate_answers": "answers are cut at their end",
    "truncate_prompt_left": "prompts are cut at their front",
    "pieces": "documents are cut into pieces",
    "stream": "documents are joined and cut into pieces",
}
"""What data.over_length does to a row that is too long, where it does not drop it."""

_LOSSES: dict[str, Callable[[Truncation], tuple[int, float]]] = {
    "rows cut": lambda limit: (limit.rows_cut, limit.rows_cut_share),
    "rows lost": lambda limit: (limit.rows_lost, limit.rows_lost_share),
    "tokens lost": lambda limit: (limit.tokens_lost, limit.tokens_lost_share),
}


def headline(summary: DataSummary) -> str:
    """The whole report in one line."""
    train, unit = summary.train, summary.unit
    left_out = sum(train.left_out.values())
    taken = f"; {train.used:,} {'is' if train.used == 1 else 'are'} used" if left_out else ""
    refused = any(data.refused for data in (train, summary.eval) if data is not None)
    can = "can be read, but not trained on as they are" if refused else "can be trained on"
    usable = train.used + left_out - (train.pieces - train.cut - train.joined if train.pieces else 0)
    if usable == train.rows_read:
        return f"{'All ' if train.rows_read > 1 else ''}{counted(train.rows_read, unit)} {can}{taken}"
    return f"{usable:,} of {counted(train.rows_read, unit)} {can}{taken}"


def account(data: SetSummary) -> str:
    """What became of a data set's rows."""
    dropped, left_out = sum(data.dropped.values()), sum(data.left_out.values())
    words = f"{counted(data.rows_read, 'row')} read, {in_pieces(data)}{data.used:,} used, {dropped:,} dropped"
    return words + (f", {left_out:,} left out on purpose" if left_out else "")


def asked(mix: Mix) -> str:
    """The recipe's mix, as its numbers: ``data.shares 3 : 1``."""
    return f"data.{mix.by} {' : '.join(f'{part.asked:,g}' for part in mix.parts)}"


def short_names(summary: DataSummary) -> dict[str, str]:
    """File -> what to call it beside a row's number: nothing where its data set has no other file.

    That is its name, or all of its path where files of the report share a name.
    """
    sets = [data for data in (summary.train, summary.eval) if data is not None]
    files = [table.file for data in sets for table in data.tables]
    alike = Counter(Path(file).name for file in dict.fromkeys(files))
    found = {}
    for data in sets:
        for table in data.tables:
            name = Path(table.file).name
            called = name if alike[name] == 1 else table.file
            found[table.file] = called if len(data.tables) > 1 else ""
    return found


def given_numbers(name: str, given: Numbers | None) -> list[str]:
    """What rows say of their own weight or margin, as a sentence: ``12 rows have a margin of 0.5 to 3, mean 1.2``."""
    if given is None:
        return []
    reach = f"{given.min:g}" if given.min == given.max else f"{given.min:g} to {given.max:g}, mean {given.mean:.3g}"
    return [f"{counted(given.rows, 'row has', 'rows have')} a {name} of {reach}"]


def losses(policy: str) -> dict[str, Callable[[Truncation], tuple[int, float]]]:
    """What a limit on length costs with this data.over_length: name -> (how many, their share) at a limit."""
    return {name: look for name, look in _LOSSES.items() if policy in CUTS or name != "rows cut"}


def saving(layout: Layout) -> str:
    """What a layout saves of an epoch with each sequence by itself."""
    return f"{share(layout.tokens_saved)} of the tokens and {share(layout.attention_saved)} of the attention pairs"


def trees_save(trees: Layout, together: Layout, unit: str) -> str:
    """What trees save in the run's order, and what they could in another; `unit` is what an example is called."""
    if together.tokens_saved > trees.tokens_saved:
        return f"trees save {saving(trees)}; {saving(together)} if all {unit}s that begin alike lay together"
    return f"trees save {saving(trees)}, about as much as in any order"


def in_common(layout: Layout, unit: str) -> str:
    """How much of a layout is laid once for several examples; `unit` is what one of them is called."""
    prompt, answer = layout.common_prompt / layout.tokens, layout.common_answer / layout.tokens
    return (
        f"{share(prompt + answer)} of the tokens that they lay are common to several {unit}s, {share(prompt)} as "
        f"prompt and {share(answer)} within answers"
    )


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop; a file's name at its beginning stays as it is."""
    name, colon, _ = text.partition(": ")
    return f"{text if colon and '.' in name else text[:1].upper() + text[1:]}."


def share(value: float) -> str:
    """A share of 1 as a percentage that is never rounded to none or all: 37.7%, <0.1%, >99.9%, 0%, 100%."""
    if value in (0, 1):
        return f"{value:.0%}"
    return "<0.1%" if value < 0.0005 else ">99.9%" if value > 0.9995 else f"{value:.1%}"


def amount(value: float) -> str:
    """A mean or a fraction of things: three digits below ten, one decimal above: 0.0312, 2.84, 73.1, 36."""
    return f"{value:.3g}" if value < 9.995 else f"{value:,.1f}".removesuffix(".0")


def signed(value: int) -> str:
    """A difference: +1,200, −7, 0."""
    return f"{value:+,}".replace("-", "−") if value else "0"


def rows(places: Sequence[Row], names: Mapping[str, str], most: int = 5) -> str:
    """Rows, the first few of them: ``row 7``, ``rows 3, 17 … 45 more``, ``a.jsonl rows 3, 17; b.jsonl row 2``.

    `names` are those of `short_names`.
    """
    parts = []
    for file, some in groupby(places[:most], key=lambda place: place.file):
        listed = [str(place.row) for place in some]
        name = f"{names[file]} " if names[file] else ""
        parts.append(f"{name}{'row' if len(listed) == 1 else 'rows'} {', '.join(listed)}")
    return "; ".join(parts) + (f" … {len(places) - most:,} more" if len(places) > most else "")


def cut(text: str, most: int) -> str:
    """The text, or its beginning and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most:,} more characters"


def by_reason(dropped_rows: Sequence[DroppedRow]) -> dict[str, list[DroppedRow]]:
    """reason -> the rows that are dropped for it."""
    found: dict[str, list[DroppedRow]] = {}
    for row in dropped_rows:
        found.setdefault(row.reason, []).append(row)
    return found
