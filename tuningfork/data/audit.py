"""The whole way from a file to token examples, with an account of every row: used, or dropped for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from tuningfork.data.config import DataConfig
from tuningfork.data.forms import read_examples
from tuningfork.data.shorten import shorten, size_of
from tuningfork.data.sources import Use, expand_all, mix
from tuningfork.data.template import RenderedExample, render
from tuningfork.data.tokenize import Encoded, Encoder, check_vocabulary
from tuningfork.data.turns import Unusable
from tuningfork.errors import DataError
from tuningfork.records import DataReport, DroppedRow, Example, TokenExample

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""

LEFT_OUT = "left out of the mix"
ON_PURPOSE = (LEFT_OUT, "weight 0")
"""Reasons for which a row is not used although nothing is wrong with it: the recipe or the row itself asks for it."""

NOTED = 20  # rows that a written report names for a note; all of them are counted
CHUNK = 256  # examples encoded in one call: enough to keep the tokenizer's threads busy, few enough to show progress


def prepare(
    sources: str | Path | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    vocab_size: int,
    progress: Progress | None = None,
    use: Use = "train",
) -> tuple[list[TokenExample], DataReport]:
    """Read, render, encode and, where asked, shorten the examples of all sources, in their order.

    Those to train on are mixed by the recipe's shares or counts. Rows that are not used are listed in the report;
    rows_read = used + dropped. vocab_size is the number of rows of the model's embedding. Raises DataError where a
    source or the tokenizer are unfit, or where no row is left.
    """
    check_vocabulary(tokenizer, vocab_size)
    encoder = Encoder(tokenizer, config.template)
    names = [str(sources)] if isinstance(sources, str | Path) else list(sources)
    report = DataReport()
    groups: list[list[TokenExample]] = []
    for tables in expand_all(names, use):
        report.sources[tables.source] = tables.taken
        report.passed_over += tables.left
        groups.append([])
        for table in tables.taken:
            groups[-1] += _prepare_table(table, tokenizer, encoder, config, report, progress)
    taken = _mix(groups, tokenizer, config, report) if use == "train" else groups
    used = [example for group in taken for example in group]
    report.used = len(used)
    places = {example.source for example in used}
    noted = {note: [place for place in found if place in places] for note, found in report.notes.items()}
    report.notes = {note: found for note, found in noted.items() if found}
    assert report.rows_read == report.used + sum(report.dropped.values()), "a row was lost"
    if not used:
        raise DataError(_unusable(report, names))
    return used, report


def _prepare_table(
    table: str,
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    config: DataConfig,
    report: DataReport,
    progress: Progress | None,
) -> list[TokenExample]:
    """The examples of one table. What became of its rows goes into the report."""
    read = read_examples(table, as_text=config.template == "none", form=config.format)
    before = report.rows_read
    report.rows_read += read.rows_read
    report.forms[table] = read.form
    for note, places in read.notes.items():
        report.notes.setdefault(note, []).extend(places)
    used: list[TokenExample] = []
    dropped = list(read.dropped)
    for start in range(0, len(read.examples), CHUNK):
        for encoded in _encode(read.examples[start : start + CHUNK], tokenizer, encoder, config, dropped):
            if encoded.example.longest > config.max_length:
                report.sizes[encoded.example.source] = size_of(encoded.example, tokenizer.bos_token_id)
            try:
                example, notes = shorten(encoded.example, config.max_length, config.over_length, tokenizer.bos_token_id)
                _check(example)
            except Unusable as unusable:
                dropped.append(_drop(encoded.example, unusable))
                continue
            used.append(example)
            for note in (*encoded.notes, *notes):
                report.notes.setdefault(note, []).append(example.source)
        if progress is not None:
            progress(before + min(start + CHUNK, len(read.examples)), before + len(read.examples))
    report.dropped_rows += sorted(dropped, key=lambda row: row.row)
    return used


def _mix(
    groups: Sequence[list[TokenExample]],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    report: DataReport,
) -> list[list[TokenExample]]:
    """Of each source the examples that the recipe's shares or counts take; the others are listed.

    Raises DataError where a source of a mix has none.
    """
    names = list(report.sources)
    if config.shares is not None or config.counts is not None:
        for name, group in zip(names, groups, strict=True):
            if not group:
                key = "shares" if config.counts is None else "counts"
                raise DataError(f"{_unusable(report, [name])} data.{key} takes a part of every source.")
    taken = mix([len(group) for group in groups], names, config.shares, config.counts, config.mix_seed)
    for group, indices in zip(groups, taken, strict=True):
        kept = set(indices.tolist())
        for example in (example for i, example in enumerate(group) if i not in kept):
            report.dropped_rows.append(DroppedRow(example.source.file, example.source.row, LEFT_OUT))
            report.sizes.setdefault(example.source, size_of(example, tokenizer.bos_token_id))
    return [[group[i] for i in indices] for group, indices in zip(groups, taken, strict=True)]


def _encode(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    encoder: Encoder,
    config: DataConfig,
    dropped: list[DroppedRow],
) -> list[Encoded]:
    """Render and encode examples; what their rows say beside the text goes along. Others are added to `dropped`."""
    kept: list[Example] = []
    rendered: list[RenderedExample] = []
    for example in examples:
        try:
            rendered.append(render(example, tokenizer, config.train_on))
            kept.append(example)
        except Unusable as unusable:
            dropped.append(_drop(example, unusable))
    return [
        encoded._replace(
            example=replace(encoded.example, label=example.label, weight=example.weight, margin=example.margin)
        )
        for example, encoded in zip(kept, encoder.encode(rendered), strict=True)
    ]


def report_dict(report: DataReport) -> dict[str, Any]:
    """The report as it is written to data_report.json."""
    rows = [{"file": r.file, "row": r.row, "reason": r.reason, "detail": r.detail} for r in report.dropped_rows]
    notes = {note: {"rows": len(at), "first": list(map(str, at[:NOTED]))} for note, at in report.notes.items()}
    return {
        "sources": report.sources,
        "passed_over": report.passed_over,
        "formats": report.forms,
        "rows_read": report.rows_read,
        "used": report.used,
        "dropped": report.dropped,
        "notes": notes,
        "dropped_rows": rows,
    }


def dataset_digest(examples: Iterable[TokenExample]) -> str:
    """A hash of what is trained on, in order: ids, masks, labels, weights, margins; not of where it was read."""
    digest = xxhash.xxh3_128()
    for example in examples:
        # The lengths go first, so that no two different cuts of the same ids look alike.
        lengths = [len(example.prompt_ids), *(len(answer.ids) for answer in example.answers)]
        digest.update(np.array([len(lengths), *lengths], dtype="<i8").tobytes())
        digest.update(example.prompt_ids.astype("<i4").tobytes())
        for answer in example.answers:
            digest.update(answer.ids.astype("<i4").tobytes())
            digest.update(answer.mask.astype(np.uint8).tobytes())
        said = (example.label, example.weight, example.margin)
        if said != (None, 1.0, None):
            digest.update(repr(said).encode())
    return digest.hexdigest()


def _check(example: TokenExample) -> None:
    """Raise Unusable where an encoded example cannot be trained on as a whole."""
    for place in range(len(example.answers)):
        if example.answer_tokens(place) == 0:
            raise Unusable("no token of an answer counts", f"answer {place} of {len(example.answers)}")
    for one, other in combinations(example.answers, 2):
        if np.array_equal(one.ids, other.ids):
            reason = "chosen equals rejected" if len(example.answers) == 2 else "answers are equal"
            raise Unusable(reason, "they differ in the file, but not as the tokens that are left")


def _drop(example: Any, unusable: Unusable) -> DroppedRow:
    return DroppedRow(example.source.file, example.source.row, unusable.reason, unusable.detail)


def _unusable(report: DataReport, names: Sequence[str]) -> str:
    """That no row of these sources can be used, with each reason, its count and the first row that it befell."""
    files = {file for name in names for file in report.sources[name]}
    dropped = [row for row in report.dropped_rows if row.file in files]
    first: dict[str, DroppedRow] = {}
    for row in dropped:
        first.setdefault(row.reason, row)
    parts = []
    for reason, count in Counter(row.reason for row in dropped).most_common():
        row = first[reason]
        place = f"row {row.row}" if len(files) == 1 else f"{row.file}, row {row.row}"
        parts.append(f"{count:,} x {reason} (first: {place}{', ' if row.detail else ''}{row.detail})")
    n = len(dropped)
    none = "its only row cannot be used" if n == 1 else f"none of its {n:,} rows can be used"
    return f"{', '.join(names)}: {none}: {'; '.join(parts)}. Mend the rows or change the settings named here."
