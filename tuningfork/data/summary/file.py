"""What one preference file holds: its rows and what became of them, repeats, lengths, and what a limit would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tuningfork.data.audit import CHUNK, report_dict
from tuningfork.data.config import DataConfig
from tuningfork.data.forms import read_examples
from tuningfork.data.summary.lengths import LengthBias, Lengths, Truncation, length_bias, lengths, preview_truncation
from tuningfork.data.summary.repeats import Repeats, find_repeats
from tuningfork.data.template import render
from tuningfork.data.tokenize import Encoder
from tuningfork.records import DataReport, TokenExample

TOO_LONG = "longer than max_length"  # the reason that a row is dropped for


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One file. Repeats, lengths and bias are those of the rows in use; truncation knows the rows that are too long."""

    file: str
    rows_read: int
    used: int
    dropped: dict[str, int]  # reason -> rows, the most frequent first
    dropped_rows: list[dict[str, Any]]  # file, row, reason and detail of each
    identical_answers: int  # of the dropped rows
    empty_answers: int
    repeats: Repeats
    lengths: dict[str, Lengths]  # of prompt, chosen, rejected, answer and sequence, as there are
    length_bias: LengthBias | None  # of examples with several answers
    truncation: list[Truncation]
    over_positions: list[int]  # rows in use with a sequence longer than the model knows positions


@dataclass(frozen=True, slots=True)
class FileData:
    """A file as it was read: examples in use, those dropped for their length alone, and the account of every row."""

    file: str
    examples: Sequence[TokenExample]
    too_long: Sequence[TokenExample]
    report: DataReport


def summarize_file(data: FileData, max_length: int, positions: int | None) -> FileSummary:
    """Count one file. `max_length` is the recipe's, `positions` are those that the model knows, if it says so."""
    examples, report = data.examples, data.report
    rows = report_dict(report)
    return FileSummary(
        file=data.file,
        rows_read=report.rows_read,
        used=report.used,
        dropped=report.dropped,
        dropped_rows=rows["dropped_rows"],
        identical_answers=report.dropped.get("chosen equals rejected", 0),
        empty_answers=report.dropped.get("empty answer", 0),
        repeats=find_repeats(examples),
        lengths=lengths(examples),
        length_bias=length_bias(examples),
        truncation=preview_truncation([*examples, *data.too_long], max_length),
        over_positions=[e.source.row for e in examples if positions is not None and e.longest > positions],
    )


def read_too_long(
    path: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig, report: DataReport
) -> list[TokenExample]:
    """The rows that were dropped for their length alone, encoded once more; the file is read again only for these."""
    rows = {row.row for row in report.dropped_rows if row.reason == TOO_LONG}
    if not rows:
        return []
    encoder = Encoder(tokenizer, config.template)
    read = read_examples(path, as_text=config.template == "none", form=config.format).examples
    wanted = [example for example in read if example.source.row in rows]
    encoded: list[TokenExample] = []
    for start in range(0, len(wanted), CHUNK):
        encoded += encoder([render(example, tokenizer, config.train_on) for example in wanted[start : start + CHUNK]])
    return encoded
