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
"""Examples of a plain trainer's batch; of pairs, 16 sequences. All are padded to the longest of them."""

MOST_PACKED = 32_768
"""Examples that are really packed, at most: the steps of an epoch are shuffled, so the first ones speak for all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The token slots of one epoch in one layout; slots = prompt + prompt_again + chosen + rejected + padding.

    `name` is "padded" (batches of PLAIN_BATCH examples, every sequence padded to the longest of its batch: the mean
    over all orders of the file), "packed" (each sequence by itself in packs of pack.tokens) or "shared" (the prompt
    once for all of its answers).
    """

    name: str
    slots: int
    prompt: int
    prompt_again: int  # prompts stored once more, for another answer than the first
    chosen: int  # first answers; those of examples with a single one, too
    rejected: int  # all others
    padding: int
    pad_share: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What an epoch costs in slots and in attention, and what sharing prompts saves."""

    tokens: int  # as a plain trainer counts them: the prompt once per answer
    unique_tokens: int  # the prompt once per example
    counted_tokens: int  # answer tokens whose log-prob counts in the loss
    tokens_saved: float  # share of tokens
    attention_pairs: int  # (query, key) pairs of causal attention, each sequence by itself
    attention_pairs_shared: int  # the same with the prompt once per example
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


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of N examples and their M answers, int64 but for `first`."""

    prompt: np.ndarray  # [N]
    answer: np.ndarray  # [M]
    owner: np.ndarray  # [M], the example of each answer
    first: np.ndarray  # bool [M], whether it is the first of its example: of a pair, the chosen one

    @classmethod
    def of(cls, examples: Sequence[TokenExample]) -> Sizes:
        answers = [len(answer.ids) for example in examples for answer in example.answers]
        numbers = [len(example.answers) for example in examples]
        owner = np.repeat(np.arange(len(examples)), numbers)
        first = np.diff(owner, prepend=-1) > 0
        prompt = np.array([len(example.prompt_ids) for example in examples], dtype=np.int64)
        return cls(prompt, np.array(answers, dtype=np.int64), owner, first)

    @property
    def answers(self) -> np.ndarray:
        """[N], how many answers each example has."""
        return np.bincount(self.owner, minlength=len(self.prompt))

    @property
    def sequence(self) -> np.ndarray:
        """[M], prompt + answer."""
        return self.prompt[self.owner] + self.answer

    @property
    def longest(self) -> np.ndarray:
        """[N], the longest sequence of each example."""
        return np.maximum.reduceat(self.sequence, np.flatnonzero(self.first))


def count_cost(examples: Sequence[TokenExample], order: EpochOrder, limits: PackLimits) -> Cost:
    """Count one epoch of examples. `order` is that of the run, `limits` say how large its packs are."""
    sizes = Sizes.of(examples)
    prompt, answer, first = sizes.prompt, sizes.answer, sizes.first
    p, c, r = int(prompt.sum()), int(answer[first].sum()), int(answer[~first].sum())
    again = int(prompt[sizes.owner].sum()) - p
    tokens, unique = p + again + c + r, p + c + r
    alone = int(_causal(sizes.sequence).sum())
    shared = int(_causal(prompt).sum() + (answer * prompt[sizes.owner] + _causal(answer)).sum())
    steps = first_steps(examples, order)
    padded = round(padded_slots(sizes.longest, sizes.answers, PLAIN_BATCH))
    sequences = ([alone for example in members for alone in example.alone()] for members in steps)
    packed = round(tokens * _slots_per_token(sequences, replace(limits, share_prompt=False)))
    ours = round(unique * _slots_per_token(steps, replace(limits, share_prompt=True)))
    layouts = [
        Layout("padded", padded, p, again, c, r, padded - tokens, 1 - tokens / padded),
        Layout("packed", packed, p, again, c, r, packed - tokens, 1 - tokens / packed),
        Layout("shared", ours, p, 0, c, r, ours - unique, 1 - unique / ours),
    ]
    return Cost(
        tokens=tokens,
        unique_tokens=unique,
        counted_tokens=sum(example.answer_tokens(i) for example in examples for i in range(len(example.answers))),
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


def padded_slots(longest: np.ndarray, sequences: np.ndarray, batch: int) -> float:
    """Slots of an epoch in batches of `batch` examples, every sequence padded to the longest of its batch.

    `longest` [N] is the longest sequence of each example, `sequences` [N] how many it has. This is the exact mean over
    all orders of the file, so no seed plays a part. The last batch holds the rest.
    """
    full, rest = divmod(len(longest), batch)
    slots = full * _mean_slots(longest, sequences, batch) if full else 0.0
    return slots + (_mean_slots(longest, sequences, rest) if rest else 0.0)


def _mean_slots(longest: np.ndarray, sequences: np.ndarray, drawn: int) -> float:
    """Mean of the slots of one batch, over all ways to draw its examples without putting back."""
    n = len(longest)
    order = np.argsort(longest, kind="stable")
    longest, sequences = longest[order], sequences[order].astype(np.float64)
    # The i-th shortest, i from 1, is the longest drawn with probability C(i-1, drawn-1) / C(n, drawn): drawn / n for
    # the last of all, and (i - drawn) / (i - 1) times that of the i-th for the one before it.
    places = np.arange(n, drawn, -1)
    chances = (drawn / n * np.cumprod(np.concatenate([[1.0], (places - drawn) / (places - 1)])))[::-1]
    # The others of the batch are then any of those before it.
    before = np.concatenate([[0.0], np.cumsum(sequences)[:-1] / np.arange(1, n)])[drawn - 1 :]
    drawn_with_it = sequences[drawn - 1 :] + (drawn - 1) * before
    return float(chances @ (longest[drawn - 1 :] * drawn_with_it))


def _causal(length: np.ndarray) -> np.ndarray:
    """(query, key) pairs of causal attention over so many tokens."""
    return length * (length + 1) // 2


def _slots_per_token(steps: Iterable[Sequence[TokenExample]], limits: PackLimits) -> float:
    """Slots of packs, padding included, for each token that they hold."""
    slots = used = 0
    for members in steps:
        slots += sum(rows for rows, _ in pack_evenly(members, limits))
        used += sum(rows_of(example, limits.share_prompt) for example in members)
    return slots / used
