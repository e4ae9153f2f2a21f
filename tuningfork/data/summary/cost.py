"""Where the token slots of an epoch go, in the layouts of a plain trainer, of a packing one, and of this one.

A slot is a place for a token in a batch or pack: a token, or padding. Everything here is counted, nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from tuningfork.data.packing.loader import EpochOrder
from tuningfork.data.packing.pack import Bin, PackLimits, pack_evenly, pack_stream, portions_of, slots_of_each
from tuningfork.data.summary.layouts import PLAIN_BATCH, Cost, Layout
from tuningfork.data.summary.records import RunPlan
from tuningfork.data.summary.sizes import Sizes
from tuningfork.records import ROOT, TokenExample

MOST_PACKED = 32_768
"""Examples that are really packed, at most: chance decides which of them a step holds, so the first speak for all."""

BEGINNING = 1024  # tokens of a prompt by which examples are put side by side
KINDS = ("common_prompt", "common_answer", "prompt", "prompt_again", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Packed:
    """Some examples, really packed: in how many steps, and what their packs hold."""

    steps: int
    examples: int
    packs: int
    slots: int  # padding included
    used: int  # slots with a token
    tokens: int  # the prompt once per answer
    unique: int  # the prompt once per example
    attention_pairs: int  # of their trees
    kinds: dict[str, int]  # the slots with a token, by the fields of Layout that count them

    @property
    def slots_per_token(self) -> float:
        return self.slots / self.used


class FirstSteps:
    """The steps of an order: all of them, or the first of very many. Each way to pack them is tried once."""

    def __init__(self, steps: list[list[TokenExample]]) -> None:
        self.steps = steps
        self._packed: dict[tuple[PackLimits, bool], Packed] = {}

    @classmethod
    def of(cls, examples: Sequence[TokenExample], order: EpochOrder) -> FirstSteps:
        steps = min(order.total_steps, ceil(MOST_PACKED / order.examples_per_step))
        return cls([[examples[i] for i in order.indices(step)] for step in range(steps)])

    @property
    def examples(self) -> list[TokenExample]:
        """All of them, in their order."""
        return [example for members in self.steps for example in members]

    def changed(self, examples: Mapping[int, TokenExample]) -> FirstSteps:
        """These steps with other examples in some places of `examples`."""
        every = iter(examples.get(place, example) for place, example in enumerate(self.examples))
        return FirstSteps([[next(every) for _ in members] for members in self.steps])

    def packed(self, limits: PackLimits) -> Packed:
        """Their packs, as the run's loader makes them."""
        if (limits, False) not in self._packed:
            self._packed[limits, False] = _pack((_bins(members, limits) for members in self.steps), len(self.steps))
        return self._packed[limits, False]

    def packed_alone(self, limits: PackLimits) -> Packed:
        """Their packs if each sequence were an example of its own."""
        alone = ([one for example in members for one in example.alone()] for members in self.steps)
        unshared = replace(limits, share="none")
        return _pack((_bins(members, unshared) for members in alone), len(self.steps))

    def packed_together(self, limits: PackLimits) -> Packed:
        """Their packs if no step said which examples share one: those that begin alike lie side by side."""
        if (limits, True) not in self._packed:
            side_by_side = sorted(self.examples, key=beginning)
            self._packed[limits, True] = _pack(([found] for found in pack_stream(side_by_side, limits)), 1)
        return self._packed[limits, True]


def beginning(example: TokenExample) -> tuple[bytes, str, int]:
    """What to sort examples by so that those that begin alike are neighbours: a prompt's first tokens, and its row.

    Prompts that are the same for longer than that are mostly of one conversation, whose rows are neighbours in a file.
    """
    return example.prompt_ids[:BEGINNING].astype(">u4").tobytes(), example.source.file, example.source.row


def count_cost(
    examples: Sequence[TokenExample],
    sizes: Sizes,
    steps: FirstSteps,
    limits: PackLimits,
    compared: Mapping[str, FirstSteps] | None = None,
) -> Cost:
    """Count one epoch of examples.

    Args:
        sizes: of the examples.
        steps: of the epoch, in the recipe's order.
        limits: how large the run's packs are.
        compared: the steps of an epoch in other orders, by their names, in which trees are counted as well.
    """
    prompt, answer, first = sizes.prompt, sizes.answer, sizes.first
    p, c, r = int(prompt.sum()), int(answer[first].sum()), int(answer[~first].sum())
    again = int(prompt[sizes.owner].sum()) - p
    tokens, unique = p + again + c + r, p + c + r
    alone = int(_causal(sizes.sequence).sum())
    shared = int(_causal(prompt).sum() + (answer * prompt[sizes.owner] + _causal(answer)).sum())
    padded = round(padded_slots(sizes.longest, sizes.answers, PLAIN_BATCH))
    packed = round(tokens * steps.packed_alone(limits).slots_per_token)
    ours = round(unique * steps.packed(replace(limits, share="prompt")).slots_per_token)
    once = {"prompt": p, "chosen": c, "rejected": r}

    def layout(name: str, slots: int, kinds: Mapping[str, int], pairs: int, order: str = "") -> Layout:
        laid = sum(kinds.values())
        return Layout(
            name,
            order,
            slots,
            **{kind: kinds.get(kind, 0) for kind in KINDS},
            padding=slots - laid,
            pad_share=1 - laid / slots,
            tokens_saved=1 - laid / tokens,
            attention_pairs=pairs,
            attention_saved=1 - pairs / alone,
        )

    def trees(name: str, packed: Packed, order: str = "") -> Layout:
        kinds = {kind: round(n * unique / packed.unique) for kind, n in packed.kinds.items()}
        slots = round(sum(kinds.values()) * packed.slots_per_token)
        return layout(name, slots, kinds, round(packed.attention_pairs * unique / packed.unique), order)

    limits = replace(limits, share="tree")
    return Cost(
        tokens=tokens,
        unique_tokens=unique,
        counted_tokens=sum(example.answer_tokens(i) for example in examples for i in range(len(example.answers))),
        examples_packed=steps.packed(limits).examples,
        layouts=[
            layout("padded", padded, once | {"prompt_again": again}, alone),
            layout("packed", packed, once | {"prompt_again": again}, alone),
            layout("shared", ours, once, shared),
            trees("trees", steps.packed(limits)),
            *(trees("trees", other.packed(limits), name) for name, other in (compared or {}).items()),
            trees("together", steps.packed_together(limits)),
        ],
        parted=None,
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
        by_tokens=order.cuts is not None,
        steps_per_epoch=n / (order.total_examples / order.total_steps if order.cuts else order.examples_per_step),
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


def _bins(members: Sequence[TokenExample], limits: PackLimits) -> list[Bin]:
    """The packs of one step."""
    return pack_evenly(portions_of(members, limits), limits)


def _pack(steps: Iterable[Iterable[Bin]], number: int) -> Packed:
    """What the packs of some steps hold, `number` of them."""
    examples = packs = slots = tokens = unique = pairs = 0
    kinds = dict.fromkeys(KINDS, 0)
    for found in (found for bins in steps for found in bins):
        examples, packs, slots = examples + len(found.examples), packs + 1, slots + found.slots
        tokens += int(slots_of_each(found.examples, "none").sum())
        unique += int(slots_of_each(found.examples, "prompt").sum())
        pairs += sum(n * node.position + n * (n + 1) // 2 for node in found.forest.nodes for n in [len(node.ids)])
        for kind, rows in _kinds(found):
            kinds[kind] += rows
    return Packed(number, examples, packs, slots, sum(kinds.values()), tokens, unique, pairs, kinds)


def _kinds(found: Bin) -> Iterator[tuple[str, int]]:
    """How many of a pack's tokens are of which kind: (a field of Layout, tokens), in parts."""
    nodes = found.forest.nodes
    first, last = [len(found.examples)] * len(nodes), [-1] * len(nodes)  # examples that need each node
    answers = [2**62] * len(nodes)  # where the first answer of these begins
    place = [2**62] * len(nodes)  # which of an example's answers need it, the least: 0 is the first
    for number, (example, leaves) in enumerate(zip(found.examples, found.forest.leaves, strict=True)):
        for answer, leaf in enumerate(leaves):
            if leaf != ROOT:
                first[leaf], last[leaf] = min(first[leaf], number), max(last[leaf], number)
                answers[leaf] = min(answers[leaf], len(example.prompt_ids))
                place[leaf] = min(place[leaf], answer)
    for n in range(len(nodes) - 1, -1, -1):  # descendants lie behind
        node, common = nodes[n], first[n] != last[n]
        if node.parent != ROOT:
            above = node.parent
            first[above], last[above] = min(first[above], first[n]), max(last[above], last[n])
            answers[above], place[above] = min(answers[above], answers[n]), min(place[above], place[n])
        prompt = min(max(answers[n] - node.position, 0), len(node.ids))
        yield "common_prompt" if common else "prompt", prompt
        yield "common_answer" if common else "rejected" if place[n] else "chosen", len(node.ids) - prompt
