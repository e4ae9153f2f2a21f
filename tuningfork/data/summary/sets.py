"""What a data set holds, the one to train on or the held-out one: its tables, what became of their rows, repeats,
lengths, and what a limit would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuningfork.accounts import DataReport, Size
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import NOTED, ON_PURPOSE
from tuningfork.data.summary.lengths import length_bias, lengths, preview_truncation
from tuningfork.data.summary.records import ControlWords, Note, Numbers, SetSummary, TableSummary
from tuningfork.data.summary.repeats import find_repeats
from tuningfork.data.summary.sizes import Sizes
from tuningfork.data.tokens.control_tokens import RENDERED, WRITTEN
from tuningfork.data.tokens.truncate import size_of
from tuningfork.records import Source, TokenExample


@dataclass(frozen=True, slots=True)
class SetData:
    """A data set as it was read: the examples in use, their sizes, and the account of every row.

    `refusal` says what an example has that the recipe's objective cannot train on; nothing where it can.
    """

    examples: Sequence[TokenExample]
    sizes: Sequence[Size]  # of the examples, after any cut
    report: DataReport
    refusal: Callable[[TokenExample], str]

    @classmethod
    def of(
        cls,
        examples: Sequence[TokenExample],
        report: DataReport,
        bos: int | None,
        refusal: Callable[[TokenExample], str] = lambda example: "",
    ) -> SetData:
        return cls(examples, [size_of(example, bos) for example in examples], report, refusal)


def summarize_set(purpose: str, data: SetData, config: DataConfig, positions: int | None) -> SetSummary:
    """Count one data set. `purpose` says what it is for; `positions` are those that the model knows, if it says so."""
    examples, report = data.examples, data.report
    used = _used(data)
    before = [report.sizes.get(source, size) for source, size in _rows(data)]
    unused = [size for source, size in report.sizes.items() if source not in used]
    whole = Sizes.of(before)
    tables = _tables(data)
    return SetSummary(
        name=Path(tables[0].file).name if len(tables) == 1 else f"{purpose} data",
        tables=tables,
        passed_over=report.passed_over,
        rows_read=report.rows_read,
        used=report.used,
        dropped={reason: n for reason, n in report.dropped.items() if reason not in ON_PURPOSE},
        left_out={reason: n for reason, n in report.dropped.items() if reason in ON_PURPOSE},
        dropped_rows=[row for row in report.dropped_rows if row.reason not in ON_PURPOSE],
        notes=_notes(report, used),
        weights=_numbers(example.weight for example in examples if example.weight != 1),
        margins=_numbers(example.margin for example in examples if example.margin is not None),
        identical_answers=report.dropped.get("chosen equals rejected", 0),
        empty_answers=report.dropped.get("empty answer", 0),
        repeats=find_repeats(examples),
        rows_used=len(used),
        cut=len(used & report.sizes.keys()),
        joined=report.joined,
        pieces=report.pieces,
        lengths=lengths(whole),
        length_bias=length_bias(whole),
        truncation=preview_truncation(Sizes.of([*before, *unused]), config.max_length, config.over_length),
        refused=_refused(data),
        control_words=_control_words(report, used) if config.control_tokens is None else None,
        over_positions=[e.source for e in examples if positions is not None and e.longest > positions],
    )


def _used(data: SetData) -> set[Source]:
    """The rows in use; of files whose rows are joined, all that were not dropped."""
    report = data.report
    if not report.joined:
        return {example.source.whole for example in data.examples}
    every = {Source(file, row) for file, rows in report.rows_of.items() for row in range(1, rows + 1)}
    return every - {Source(row.file, row.row) for row in report.dropped_rows if not row.piece}


def _rows(data: SetData) -> Iterator[tuple[Source, Size]]:
    """The row of each example with a size of it, that of pieces once; of rows that are joined, each piece's."""
    seen: set[Source] = set()
    for example, size in zip(data.examples, data.sizes, strict=True):
        row = example.source.whole
        if data.report.joined or not example.source.piece or row not in seen:
            yield row, size
        seen.add(row)


def _tables(data: SetData) -> list[TableSummary]:
    report = data.report
    used = Counter(example.source.file for example in data.examples)
    tokens: Counter[str] = Counter()
    for example, size in zip(data.examples, data.sizes, strict=True):
        tokens[example.source.file] += len(size.answers) * size.prompt + sum(size.answers)
    left_out = Counter(row.file for row in report.dropped_rows if row.reason in ON_PURPOSE)
    dropped = Counter(row.file for row in report.dropped_rows if row.reason not in ON_PURPOSE)
    return [
        TableSummary(
            file=file,
            form=report.formats[file],
            source=source,
            rows_read=report.rows_of[file],
            used=used[file],
            dropped=dropped[file],
            left_out=left_out[file],
            used_share=used[file] / used.total(),
            tokens=tokens[file],
            tokens_share=tokens[file] / tokens.total(),
        )
        for source, files in report.sources.items()
        for file in files
    ]


def _notes(report: DataReport, used: set[Source]) -> dict[str, Note]:
    notes = {note: [place for place in places if place in used] for note, places in report.notes.items()}
    most = sorted(notes.items(), key=lambda item: -len(item[1]))
    return {note: Note(len(places), places[:NOTED]) for note, places in most if places}


def _control_words(report: DataReport, used: set[Source]) -> ControlWords | None:
    notes = {note: [place for place in places if place in used] for note, places in report.notes.items()}
    notes = {note: places for note, places in notes.items() if places and note.startswith(WRITTEN)}
    if not notes:
        return None
    rendered = len(notes.pop(RENDERED, []))
    rows = report.in_order(row for places in notes.values() for row in places)
    written = {note.rpartition(": ")[2]: 0 for note in notes}
    for note, places in notes.items():
        written[note.rpartition(": ")[2]] += len(places)
    most = sorted(written.items(), key=lambda item: -item[1])
    return ControlWords(len(rows), rows[:NOTED], dict(most), rendered)


def _refused(data: SetData) -> dict[str, Note]:
    found: dict[str, list[Source]] = {}
    for example in data.examples:
        if refusal := data.refusal(example):
            found.setdefault(refusal, []).append(example.source)
    return {refusal: Note(len(rows), rows[:NOTED]) for refusal, rows in found.items()}


def _numbers(values: Iterable[float]) -> Numbers | None:
    found = np.array(list(values))
    return Numbers(len(found), *map(float, (found.min(), found.mean(), found.max()))) if len(found) else None
