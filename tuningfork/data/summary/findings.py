"""What needs a person's attention, in words. `--strict` stops on the findings that are marked so: rows lost or doubtful
through no wish of the recipe, and what training would refuse or learn wrong. What the recipe asks for is no finding."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from tuningfork.data.examples.unpack import SOME_AS_JSON
from tuningfork.data.summary.layouts import Cost, Parted
from tuningfork.data.summary.records import ControlWords, Finding, Leaks, LengthBias, SetSummary, TokenizerFacts
from tuningfork.records import Source
from tuningfork.wording import counted

LOPSIDED = 0.6  # share of the pairs of unequal length from which on it is worth a word that one side is the longer
FEW = 5  # rows named with a finding
MOST = 40  # characters shown of what a template leaves out
PLACES = 4  # control tokens named with a finding, each with where it is written


def findings(
    train: SetSummary,
    held_out: SetSummary | None,
    leaks: Leaks | None,
    tokenizer: TokenizerFacts,
    cost: Cost,
) -> list[Finding]:
    """All findings, those that `--strict` stops on first."""
    found: list[Finding] = []
    for data in filter(None, (train, held_out)):
        found += _of_set(data, tokenizer.model_positions)
    if leaks is not None and held_out is not None and leaks.prompt_rows:
        found.append(_leaks(leaks, held_out))
    if tokenizer.begin_with_two_bos and tokenizer.bos is not None:
        n, bos = tokenizer.begin_with_two_bos, tokenizer.bos.text
        text = f"{counted(n, 'sequence begins', 'sequences begin')} with {bos} twice: data and template each have one"
        found.append(Finding("two_bos", True, text, n, train.name, []))
    return [*found, *_notes(train, tokenizer, cost)]


def _of_set(data: SetSummary, positions: int | None) -> Iterator[Finding]:
    name, repeats = data.name, data.repeats
    for refusal, rows in data.refused.items():
        has = "row has" if rows.count == 1 else "rows have"
        text = f"{name}: training would refuse to start: {rows.count:,} {has} {refusal}"
        yield Finding("refused", True, text, rows.count, name, rows.rows[:FEW])
    if n := len(data.dropped_rows):
        reasons = ", ".join(f"{reason} ({n:,})" for reason, n in data.dropped.items())
        text = f"{name}: {counted(n, 'row is', 'rows are')} dropped: {reasons}"
        yield Finding("dropped", True, text, n, name, [Source(row.file, row.row) for row in data.dropped_rows[:FEW]])
    if n := repeats.duplicate_rows:
        text = f"{name}: {counted(n, 'row repeats', 'rows repeat')} an earlier row: same prompt, same answers"
        again = _in_order(data, (row for rows in repeats.duplicates for row in rows[1:]))
        yield Finding("duplicates", True, text, n, name, again[:FEW])
    if n := repeats.conflicting_rows:
        text = f"{name}: {n:,} rows contradict each other: same prompt, same answers, other preference"
        opposed = _in_order(data, (row for sides in repeats.conflicts for rows in sides for row in rows))
        yield Finding("conflicts", True, text, n, name, opposed[:FEW])
    if data.control_words is not None:
        yield _control_tokens(name, data.control_words)
    if (note := data.notes.get(SOME_AS_JSON)) is not None:
        n = note.count
        text = (
            f"{name}: {counted(n, 'row has', 'rows have')} messages written as JSON text for some answers only, so all "
            "answers are read as text, brackets and quotes too; write them all in one way"
        )
        yield Finding("json_text", True, text, n, name, note.rows[:FEW])
    if n := len(data.over_positions):
        text = (
            f"{name}: {counted(n, 'row is', 'rows are')} longer than the {positions:,} positions that the model "
            "knows, so training would refuse to start; lower data.max_length"
        )
        yield Finding("positions", True, text, n, name, data.over_positions[:FEW])


def _control_tokens(name: str, words: ControlWords) -> Finding:
    n = words.count
    written = [f"{token} ({rows:,})" for token, rows in words.written.items()]
    more = f" and {counted(len(written) - PLACES, 'more place')}" if len(written) > PLACES else ""
    text = (
        f"{name}: {counted(n, 'row has a control token', 'rows have control tokens')} of the tokenizer written as "
        f"text: {', '.join(written[:PLACES])}{more}; "
    )
    if words.rendered:
        looks = "that row looks" if n == 1 else f"{words.rendered:,} of them look"
        text += f"{looks} as if rendered already, which needs data.template: none; "
    text += "say with data.control_tokens what they are: keep, as_text or drop"
    return Finding("control_tokens", True, text, n, name, words.rows[:FEW])


def _in_order(data: SetSummary, rows: Iterable[Source]) -> list[Source]:
    place = {table.file: i for i, table in enumerate(data.tables)}
    return sorted(rows, key=lambda row: (place[row.file], row.row))


def _leaks(leaks: Leaks, held_out: SetSummary) -> Finding:
    n, share = leaks.prompt_rows, leaks.prompt_rows / held_out.used
    also = f", {leaks.answer_rows:,} of them with an answer to it" if leaks.answer_rows else ""
    text = f"{counted(n, 'row has', 'rows have')} a prompt that is trained on ({share:.1%}){also}"
    text = f"{held_out.name}: {text}"
    return Finding("leaks", True, text, n, held_out.name, [shared.eval_row for shared in leaks.prompts[:FEW]])


def _notes(train: SetSummary, tokenizer: TokenizerFacts, cost: Cost) -> Iterator[Finding]:
    if train.length_bias is not None:
        yield from _length(train, train.length_bias)
    endless = tokenizer.sequences - tokenizer.end_with_eos - tokenizer.cut_before_eos
    if tokenizer.eos is not None and (n := endless):
        text = (
            f"{counted(n, 'answer does', 'answers do')} not end with the tokenizer's end token {tokenizer.eos.text}; "
            "what ends them must be known to whatever generates with the model"
        )
        yield Finding("no_eos", False, text, n, train.name, [])
    if cost.parted is not None:
        yield _history(train, cost, cost.parted)


def _history(train: SetSummary, cost: Cost, parted: Parted) -> Finding:
    n = parted.count
    change = f"leaves out {_shown(parted.left_out)}" if parted.left_out else f"adds {_shown(parted.added)}"
    trees, together = cost.layout("trees").tokens, cost.layout("together").tokens
    text = (
        f"{train.name}: {counted(n, 'row goes', 'rows go')} on from another row's answer, but the chat template prints "
        f"that answer otherwise as history ({change}), so the two part at its start and the answer is laid twice. "
        f"Of an epoch's tokens this costs {parted.tokens:,} of {trees:,} in the run's order, and "
        f"{parted.tokens_together:,} of {together:,} if all rows that begin alike lay together. No result is wrong "
        "for it: a template that prints history as it prints answers is only faster"
    )
    return Finding("history", False, text, n, train.name, parted.rows)


def _shown(piece: str) -> str:
    return json.dumps(piece if len(piece) <= MOST else f"{piece[:MOST]} ...", ensure_ascii=False)


def _length(train: SetSummary, bias: LengthBias) -> Iterator[Finding]:
    sides = {"chosen": bias.longer, "rejected": bias.shorter}
    side, n = max(sides.items(), key=lambda item: item[1])
    unequal = bias.longer + bias.shorter
    if n and n / unequal >= LOPSIDED:
        text = f"the {side} answer is longer in {n:,} of {unequal:,} pairs of unequal length ({n / unequal:.1%})"
        yield Finding("length", False, f"{text}; a model may learn just that", n, train.name, [])
