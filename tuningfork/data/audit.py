"""The whole way from a file to token examples, with an account of every row: used, or dropped for a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from tuningfork.data.config import DataConfig
from tuningfork.data.forms import Unusable, read_examples
from tuningfork.data.template import RenderedExample, render
from tuningfork.data.tokenize import Encoder, check_vocabulary
from tuningfork.errors import DataError
from tuningfork.records import DataReport, DroppedRow, TokenExample

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""

CHUNK = 256  # examples encoded in one call: enough to keep the tokenizer's threads busy, few enough to show progress


def prepare(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    vocab_size: int,
    progress: Progress | None = None,
) -> tuple[list[TokenExample], DataReport]:
    """Read, render and encode a preference file, in the file's order.

    Rows that cannot be used are listed in the report; rows_read = used + dropped. vocab_size is the number of rows of
    the model's embedding. Raises DataError where file or tokenizer are unfit, or where no row is left.
    """
    check_vocabulary(tokenizer, vocab_size)
    encoder = Encoder(tokenizer, config.template)
    read = read_examples(path, as_text=config.template == "none")
    used: list[TokenExample] = []
    dropped = list(read.dropped)
    for start in range(0, len(read.examples), CHUNK):
        rendered: list[RenderedExample] = []
        for example in read.examples[start : start + CHUNK]:
            try:
                rendered.append(render(example, tokenizer))
            except Unusable as unusable:
                dropped.append(_drop(example, unusable))
        for encoded in encoder(rendered):
            try:
                _check(encoded, config.max_length)
                used.append(encoded)
            except Unusable as unusable:
                dropped.append(_drop(encoded, unusable))
        if progress is not None:
            progress(min(start + CHUNK, len(read.examples)), len(read.examples))
    report = DataReport(read.rows_read, len(used), sorted(dropped, key=lambda row: row.row))
    assert report.rows_read == report.used + sum(report.dropped.values()), "a row was lost"
    if not used:
        raise DataError(
            f"{path}: none of its {report.rows_read} rows can be used: {_reasons(report)}. "
            "Mend the rows or change the settings named here."
        )
    return used, report


def report_dict(report: DataReport) -> dict[str, Any]:
    """The report as it is written to data_report.json."""
    rows = [{"file": r.file, "row": r.row, "reason": r.reason, "detail": r.detail} for r in report.dropped_rows]
    return {"rows_read": report.rows_read, "used": report.used, "dropped": report.dropped, "dropped_rows": rows}


def dataset_digest(examples: Iterable[TokenExample]) -> str:
    """A hash of what is trained on, in order: prompt ids, answer ids and masks. Where it was read does not enter."""
    digest = xxhash.xxh3_128()
    for example in examples:
        # The lengths go first, so that no two different cuts of the same ids look alike.
        lengths = [len(example.prompt_ids), *(len(answer.ids) for answer in example.answers)]
        digest.update(np.array([len(lengths), *lengths], dtype="<i8").tobytes())
        digest.update(example.prompt_ids.astype("<i4").tobytes())
        for answer in example.answers:
            digest.update(answer.ids.astype("<i4").tobytes())
            digest.update(answer.mask.astype(np.uint8).tobytes())
    return digest.hexdigest()


def _check(example: TokenExample, max_length: int) -> None:
    """Raise Unusable where an encoded example cannot be trained on as a whole."""
    if example.longest > max_length:
        answers = " and ".join(str(len(answer.ids)) for answer in example.answers)
        detail = f"prompt {len(example.prompt_ids)}, answers {answers} tokens; data.max_length is {max_length}"
        raise Unusable("longer than max_length", detail)
    for place in range(len(example.answers)):
        if example.answer_tokens(place) == 0:
            raise Unusable("no token of an answer counts", f"answer {place} of {len(example.answers)}")
    first, *others = example.answers
    if others and all(np.array_equal(first.ids, other.ids) for other in others):
        raise Unusable("chosen equals rejected", "they differ in the file, but not as tokens")


def _drop(example: Any, unusable: Unusable) -> DroppedRow:
    return DroppedRow(example.source.file, example.source.row, unusable.reason, unusable.detail)


def _reasons(report: DataReport) -> str:
    """Each reason with its count and the first row that it befell."""
    parts = []
    for reason, count in report.dropped.items():
        first = next(row for row in report.dropped_rows if row.reason == reason)
        parts.append(f"{count} x {reason} (first: row {first.row}{', ' if first.detail else ''}{first.detail})")
    return "; ".join(parts)
