"""What needs a person's attention, in words. `--strict` stops on the findings that are marked so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuningfork.data.summary.file import FileSummary
from tuningfork.data.summary.lengths import LengthBias
from tuningfork.data.summary.repeats import Leaks
from tuningfork.data.summary.tokenizer import TokenizerFacts

LOPSIDED = 0.6  # share of the pairs of unequal length from which on it is worth a word that one side is the longer
FEW = 5  # rows named with a finding


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to look at. `rows` of `file` show it: the first few of them.

    kind: dropped, duplicates, conflicts, leaks, positions, two_bos (strict); length, no_eos (worth a look).
    """

    kind: str
    strict: bool
    text: str
    count: int
    file: str
    rows: list[int]


def findings(
    train: FileSummary,
    held_out: FileSummary | None,
    leaks: Leaks | None,
    tokenizer: TokenizerFacts,
) -> list[Finding]:
    """All findings, those that `--strict` stops on first."""
    found: list[Finding] = []
    for file in filter(None, (train, held_out)):
        found += _of_file(file, tokenizer.model_positions)
    if leaks is not None and held_out is not None and leaks.prompt_rows:
        found.append(_leaks(leaks, held_out))
    if tokenizer.begin_with_two_bos and tokenizer.bos is not None:
        n, bos = tokenizer.begin_with_two_bos, tokenizer.bos.text
        text = f"{_count(n, 'sequence begins', 'sequences begin')} with {bos} twice: data and template add one each"
        found.append(Finding("two_bos", True, text, n, train.file, []))
    return [*found, *_notes(train, tokenizer)]


def _of_file(file: FileSummary, positions: int | None) -> Iterator[Finding]:
    name = Path(file.file).name
    if file.dropped:
        count = file.rows_read - file.used
        reasons = ", ".join(f"{reason} ({n:,})" for reason, n in file.dropped.items())
        text = f"{name}: {_count(count, 'row is', 'rows are')} dropped: {reasons}"
        yield Finding("dropped", True, text, count, file.file, [row["row"] for row in file.dropped_rows[:FEW]])
    repeats = file.repeats
    if n := repeats.duplicate_rows:
        text = f"{name}: {_count(n, 'row repeats', 'rows repeat')} an earlier row: same prompt, same answers"
        again = sorted(row for rows in repeats.duplicates for row in rows[1:])
        yield Finding("duplicates", True, text, n, file.file, again[:FEW])
    if n := repeats.conflicting_rows:
        text = f"{name}: {n:,} rows contradict each other: same prompt, same answers, other preference"
        opposed = sorted(row for sides in repeats.conflicts for rows in sides for row in rows)
        yield Finding("conflicts", True, text, n, file.file, opposed[:FEW])
    if n := len(file.over_positions):
        text = (
            f"{name}: {_count(n, 'row is', 'rows are')} longer than the {positions:,} positions that the model "
            "knows, so training would refuse to start; lower data.max_length"
        )
        yield Finding("positions", True, text, n, file.file, file.over_positions[:FEW])


def _leaks(leaks: Leaks, held_out: FileSummary) -> Finding:
    n, share = leaks.prompt_rows, leaks.prompt_rows / held_out.used
    also = f", {leaks.answer_rows:,} of them with an answer to it" if leaks.answer_rows else ""
    text = f"{_count(n, 'row has', 'rows have')} a prompt that is trained on ({share:.1%}){also}"
    text = f"{Path(held_out.file).name}: {text}"
    return Finding("leaks", True, text, n, held_out.file, [shared.eval_row for shared in leaks.prompts[:FEW]])


def _notes(train: FileSummary, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    if train.length_bias is not None:
        yield from _length(train, train.length_bias)
    if tokenizer.eos is not None and (n := tokenizer.sequences - tokenizer.end_with_eos):
        text = (
            f"{_count(n, 'answer does', 'answers do')} not end with the tokenizer's end token {tokenizer.eos.text}; "
            "what ends them must be known to whatever generates with the model"
        )
        yield Finding("no_eos", False, text, n, train.file, [])


def _length(train: FileSummary, bias: LengthBias) -> Iterator[Finding]:
    sides = {"chosen": bias.longer, "rejected": bias.shorter}
    side, n = max(sides.items(), key=lambda item: item[1])
    pairs = bias.longer + bias.equal + bias.shorter
    if n and n / (bias.longer + bias.shorter) >= LOPSIDED:
        text = f"the {side} answer is the longer one in {n:,} of {pairs:,} pairs ({n / pairs:.1%})"
        yield Finding("length", False, f"{text}; a model may learn just that", n, train.file, [])


def _count(n: int, one: str, many: str) -> str:
    return f"{n:,} {one if n == 1 else many}"
