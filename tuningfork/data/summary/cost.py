"""Where the token slots of an epoch go, in the layouts of a plain trainer, of a packing one, and of this one.

A slot is a row of a batch or pack: a token, or padding. Everything here is counted, nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from tuningfork.data.loader import EpochOrder
from tuningfork.data.pack import PackLimits, pack_evenly, rows_of
from tuningfork.records import TokenExample

PLAIN_BATCH = 8
"""Pairs of a plain trainer's batch: 16 sequences, padded to the longest of them."""

MOST_PACKED = 32_768
"""Examples that are really packed, at most: the steps of an epoch are shuffled, so the first ones speak for all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The token slots of one epoch in one layout; slots = prompt + prompt_again + chosen + rejected + padding.

    `name` is "padded" (batches of PLAIN_BATCH pairs, every sequence padded to the longest of its batch: the mean over
    all orders of the file), "packed" (each sequence by itself in packs of pack.tokens) or "shared" (the prompt once for
    both answers).
    """

    name: str
    slots: int
    prompt: int
    prompt_again: int  # prompts stored a second time, for the second answer
    chosen: int
    rejected: int
    padding: int
    pad_share: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What an epoch costs in slots and in attention, and what sharing prompts saves."""

    tokens: int  # as a plain trainer counts them: the prompt once per answer
    unique_tokens: int  # the prompt once per pair
    counted_tokens: int  # answer tokens whose log-prob counts in the loss
    tokens_saved: float  # share of tokens
    attention_pairs: int  # (query, key) pairs of causal attention, each sequence by itself
    attention_pairs_shared: int  # the same with the prompt once per pair
    attention_saved: float  # share of attention_pairs
    layouts: list[Layout]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the recipe's run will do. Packs are counted by packing the first `steps_packed` steps of an epoch."""

    examples: int
    examples_per_step: int
    steps_per_epoch: float
    epochs: float  # of the whole run
    steps: int
    packs_per_step: float
    packs_per_epoch: int
    packs: int
    steps_packed: int
    pad_share: float
    tokens: int  # of the run, the prompt once per answer
    slots: int  # of the run, padding included


def sizes(examples: Sequence[TokenExample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of each pair's prompt, chosen and rejected answer, int64 [N] each."""
    return (
        np.array([len(example.prompt_ids) for example in examples], dtype=np.int64),
        np.array([len(example.answers[0].ids) for example in examples], dtype=np.int64),
        np.array([len(example.answers[1].ids) for example in examples], dtype=np.int64),
    )


def count_cost(examples: Sequence[TokenExample], order: EpochOrder, limits: PackLimits) -> Cost:
    """Count one epoch of pairs. `order` is that of the run, `limits` say how large its packs are."""
    prompt, chosen, rejected = sizes(examples)
    p, c, r = int(prompt.sum()), int(chosen.sum()), int(rejected.sum())
    tokens, unique = 2 * p + c + r, p + c + r
    alone = sum(int(_causal(prompt + answer).sum()) for answer in (chosen, rejected))
    shared = int(_causal(prompt).sum()) + sum(
        int((answer * prompt + _causal(answer)).sum()) for answer in (chosen, rejected)
    )
    steps = first_steps(examples, order)
    padded = round(padded_slots(prompt + np.maximum(chosen, rejected), PLAIN_BATCH))
    packed = round(tokens * _slots_per_token(map(_each_sequence, steps), replace(limits, share_prompt=False)))
    ours = round(unique * _slots_per_token(steps, replace(limits, share_prompt=True)))
    layouts = [
        Layout("padded", padded, p, p, c, r, padded - tokens, 1 - tokens / padded),
        Layout("packed", packed, p, p, c, r, packed - tokens, 1 - tokens / packed),
        Layout("shared", ours, p, 0, c, r, ours - unique, 1 - unique / ours),
    ]
    return Cost(
        tokens=tokens,
        unique_tokens=unique,
        counted_tokens=sum(example.answer_tokens(i) for example in examples for i in (0, 1)),
        tokens_saved=1 - unique / tokens,
        attention_pairs=alone,
        attention_pairs_shared=shared,
        attention_saved=1 - shared / alone,
        layouts=layouts,
    )


def plan_run(examples: Sequence[TokenExample], order: EpochOrder, limits: PackLimits) -> RunPlan:
    """What a run in this order will do, in packs as its loader makes them."""
    steps = first_steps(examples, order)
    packs = [pack_evenly(members, limits) for members in steps]
    slots = sum(rows for bins in packs for rows, _ in bins)
    used = sum(rows_of(example, limits.share_prompt) for members in steps for example in members)
    seen = sum(len(members) for members in steps)
    per_example = sum(len(bins) for bins in packs) / seen
    in_all = order.total_examples
    rows = sum(rows_of(example, limits.share_prompt) for example in examples) / len(examples)
    tokens = sum(example.plain_tokens for example in examples) / len(examples)
    return RunPlan(
        examples=len(examples),
        examples_per_step=order.examples_per_step,
        steps_per_epoch=len(examples) / order.examples_per_step,
        epochs=in_all / len(examples),
        steps=order.total_steps,
        packs_per_step=sum(len(bins) for bins in packs) / len(packs),
        packs_per_epoch=round(per_example * len(examples)),
        packs=round(per_example * in_all),
        steps_packed=len(steps),
        pad_share=1 - used / slots,
        tokens=round(tokens * in_all),
        slots=round(rows * in_all * slots / used),
    )


def first_steps(examples: Sequence[TokenExample], order: EpochOrder) -> list[list[TokenExample]]:
    """The examples of the first epoch's steps, in the order of the run: all of them, or the first of very many."""
    epoch = replace(order, total_examples=len(examples))
    steps = min(epoch.total_steps, ceil(MOST_PACKED / order.examples_per_step))
    return [[examples[i] for i in epoch.indices(step)] for step in range(steps)]


def padded_slots(longest: np.ndarray, batch: int) -> float:
    """Slots of an epoch in batches of `batch` pairs, both sequences of each padded to the longest of the batch.

    `longest` [N] is the longer sequence of each pair. This is the exact mean over all orders of the file, so no seed
    plays a part. The last batch holds the rest.
    """
    full, rest = divmod(len(longest), batch)
    slots = 2 * batch * full * _mean_longest(longest, batch) if full else 0.0
    return slots + (2 * rest * _mean_longest(longest, rest) if rest else 0.0)


def _mean_longest(lengths: np.ndarray, drawn: int) -> float:
    """Mean of the longest of `drawn` lengths, over all ways to draw them without putting back."""
    n = len(lengths)
    # The i-th smallest, i from 1, is the longest drawn with probability C(i-1, drawn-1) / C(n, drawn): drawn / n for
    # the last of all, and (i - drawn) / (i - 1) times that of the i-th for the one before it.
    places = np.arange(n, drawn, -1)
    chances = drawn / n * np.cumprod(np.concatenate([[1.0], (places - drawn) / (places - 1)]))
    return float(chances @ np.sort(lengths)[::-1][: len(chances)])


def _causal(length: np.ndarray) -> np.ndarray:
    """(query, key) pairs of causal attention over so many tokens."""
    return length * (length + 1) // 2


def _each_sequence(members: Sequence[TokenExample]) -> list[TokenExample]:
    """Every answer as an example of its own, with its own copy of the prompt."""
    return [TokenExample(e.source, e.prompt_ids, (answer,)) for e in members for answer in e.answers]


def _slots_per_token(steps: Iterable[Sequence[TokenExample]], limits: PackLimits) -> float:
    """Slots of packs, padding included, for each token that they hold."""
    slots = used = 0
    for members in steps:
        slots += sum(rows for rows, _ in pack_evenly(members, limits))
        used += sum(rows_of(example, limits.share_prompt) for example in members)
    return slots / used
