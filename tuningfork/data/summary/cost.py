"""Where the token slots of an epoch go, in the layouts of a plain trainer, of a packing one, and of this one.

A slot is a place for a token in a batch or pack: a token, or padding. Everything here is counted, nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from tuningfork.data.packing.loader import EpochOrder
from tuningfork.data.packing.pack import PackLimits, pack_evenly, portions_of, slots_of_each
from tuningfork.data.summary.records import PLAIN_BATCH, Cost, Layout, RunPlan
from tuningfork.data.summary.sizes import Sizes
from tuningfork.records import TokenExample

MOST_PACKED = 32_768
"""Examples that are really packed, at most: chance decides which of them a step holds, so the first speak for all."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Some steps, really packed: how many, of how many examples, and what their packs hold."""

    steps: int
    examples: int
    packs: int
    slots: int  # padding included
    used: int  # slots with a token
    tokens: int  # the prompt once per answer

    @property
    def slots_per_token(self) -> float:
        return self.slots / self.used


class FirstSteps:
    """The steps of an order: all of them, or the first of very many. Each way to pack them is tried once."""

    def __init__(self, examples: Sequence[TokenExample], order: EpochOrder) -> None:
        steps = min(order.total_steps, ceil(MOST_PACKED / order.examples_per_step))
        self.steps = [[examples[i] for i in order.indices(step)] for step in range(steps)]
        self._packed: dict[PackLimits, Packed] = {}

    def packed(self, limits: PackLimits) -> Packed:
        """Their packs, as the run's loader makes them."""
        if limits not in self._packed:
            self._packed[limits] = _pack(self.steps, limits)
        return self._packed[limits]

    def packed_alone(self, limits: PackLimits) -> Packed:
        """Their packs if each sequence were an example of its own."""
        alone = ([one for example in members for one in example.alone()] for members in self.steps)
        return _pack(alone, replace(limits, share="none"))


def count_cost(examples: Sequence[TokenExample], sizes: Sizes, steps: FirstSteps, limits: PackLimits) -> Cost:
    """Count one epoch of examples. `sizes` are theirs, `steps` its own; `limits` say how large the run's packs are."""
    prompt, answer, first = sizes.prompt, sizes.answer, sizes.first
    p, c, r = int(prompt.sum()), int(answer[first].sum()), int(answer[~first].sum())
    again = int(prompt[sizes.owner].sum()) - p
    tokens, unique = p + again + c + r, p + c + r
    alone = int(_causal(sizes.sequence).sum())
    shared = int(_causal(prompt).sum() + (answer * prompt[sizes.owner] + _causal(answer)).sum())
    padded = round(padded_slots(sizes.longest, sizes.answers, PLAIN_BATCH))
    packed = round(tokens * steps.packed_alone(limits).slots_per_token)
    ours = round(unique * steps.packed(replace(limits, share="prompt")).slots_per_token)
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


def plan_run(sizes: Sizes, order: EpochOrder, steps: FirstSteps, limits: PackLimits) -> RunPlan:
    """What a run in this order will do, in packs as its loader makes them. `sizes` are those of its examples, `steps`
    are its own."""
    packed = steps.packed(limits)
    n, in_all = len(sizes.prompt), order.total_examples
    whole = packed.steps == order.total_steps
    tokens = int(sizes.sequence.sum()) / n
    return RunPlan(
        examples=n,
        order="shuffled" if order.groups is None else str(order.groups),
        examples_per_step=order.examples_per_step,
        steps_per_epoch=n / order.examples_per_step,
        epochs=in_all / n,
        steps=order.total_steps,
        packs_per_step=packed.packs / packed.steps,
        packs_per_epoch=round(packed.packs / packed.examples * n),
        packs=round(packed.packs / packed.examples * in_all),
        steps_packed=packed.steps,
        pad_share=1 - packed.used / packed.slots,
        tokens=packed.tokens if whole else round(tokens * in_all),
        slots=packed.slots if whole else round(packed.slots / packed.examples * in_all),
    )


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


def _pack(steps: Iterable[Sequence[TokenExample]], limits: PackLimits) -> Packed:
    number = examples = packs = slots = used = tokens = 0
    for members in steps:
        bins = pack_evenly(portions_of(members, limits), limits)
        number, examples, packs = number + 1, examples + len(members), packs + len(bins)
        slots += sum(found.slots for found in bins)
        used += sum(found.forest.rows for found in bins)
        tokens += int(slots_of_each(members, "none").sum())
    return Packed(number, examples, packs, slots, used, tokens)
