"""Which examples share a pack: a step's in packs of like size, a long sequence of them in full packs.

A pack is always whole examples, and a step always whole packs, so the batch size is exact. A pack has a slot for each
token of its content, rounded up a little: an exact batch does not mean padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tuningfork.data.packing.bin_packing import best_fit, even_fit, members_of, stream_fit
from tuningfork.errors import DataError
from tuningfork.records import DroppedRow, TokenExample, column, taken

COMPILED_QUANTUM = 128  # slots; matrix products of such sizes keep their kernels, and so a row's bits
SMALLEST_COMPILED = 1024  # below, a compiled graph may add up rows in another order
EAGER_QUANTUM = 64

Bin = tuple[int, Sequence[TokenExample]]
"""A pack's slots and its examples, in their given order."""


@dataclass(frozen=True, slots=True)
class PackLimits:
    """How large packs are, in token slots, and whether prompts are shared."""

    tokens: int  # of a full pack
    share_prompt: bool
    quantum: int
    smallest: int

    @classmethod
    def plan(cls, tokens: int, share_prompt: bool, compiled: bool) -> PackLimits:
        if compiled:
            return cls(tokens, share_prompt, COMPILED_QUANTUM, SMALLEST_COMPILED)
        return cls(tokens, share_prompt, EAGER_QUANTUM, EAGER_QUANTUM)

    def slots(self, used: int) -> int:
        """Slots of a pack whose content takes up `used` of them."""
        return min(max(_round_up(used, self.quantum), self.smallest), self.tokens)


def slots_of_each(examples: Sequence[TokenExample], share_prompt: bool) -> np.ndarray:
    """int64 [n]: what `TokenExample.slots` says of each example."""
    return column(examples, "unique_tokens" if share_prompt else "plain_tokens")


def split_fitting(
    examples: Sequence[TokenExample], tokens: int, share_prompt: bool
) -> tuple[Sequence[TokenExample], list[DroppedRow]]:
    """Part the examples into those that fit a pack of `tokens` and listed drops."""
    slots = slots_of_each(examples, share_prompt)
    dropped = []
    for place in np.flatnonzero(slots > tokens).tolist():
        source, detail = examples[place].source, f"needs {slots[place]:,} tokens, pack.tokens is {tokens}"
        dropped.append(DroppedRow(source.file, source.row, "larger than a pack", detail))
    return taken(examples, np.flatnonzero(slots <= tokens)), dropped


def pack_examples(examples: Sequence[TokenExample], limits: PackLimits) -> list[Bin]:
    """Best-fit decreasing: each example, largest first, goes into the fullest bin that still holds it.

    Deterministic; every example is in exactly one bin.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    slots = _fitting_slots(examples, limits)
    return [_bin(examples, slots, members, limits) for members in members_of(best_fit(slots, limits.tokens))]


def pack_evenly(examples: Sequence[TokenExample], limits: PackLimits) -> list[Bin]:
    """As few packs as `pack_examples` makes, and the largest of them as small as that allows.

    A small pack takes a GPU nearly as long as one of middle size, so what does not fit one pack is better halved than
    cut into a full pack and a rest.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    slots = _fitting_slots(examples, limits)
    return [_bin(examples, slots, members, limits) for members in members_of(even_fit(slots, limits.tokens))]


def pack_stream(examples: Sequence[TokenExample], limits: PackLimits, window: int) -> Iterator[Bin]:
    """Packs of many examples, one by one and nearly all of them full: see `stream_fit`.

    An example shares a pack with some of the `window` examples behind it; the last `window` lie in packs of like size.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    slots = _fitting_slots(examples, limits)
    return (_bin(examples, slots, members, limits) for members in stream_fit(slots, limits.tokens, window))


def _fitting_slots(examples: Sequence[TokenExample], limits: PackLimits) -> list[int]:
    slots = slots_of_each(examples, limits.share_prompt)
    for place in np.flatnonzero(slots > limits.tokens)[:1].tolist():
        raise DataError(
            f"{examples[place].id}: needs {slots[place]:,} tokens, but a pack has {limits.tokens}. "
            "Raise pack.tokens or lower data.max_length."
        )
    return slots.tolist()


def _bin(examples: Sequence[TokenExample], slots: list[int], members: list[int], limits: PackLimits) -> Bin:
    return limits.slots(sum(map(slots.__getitem__, members))), taken(examples, np.array(members))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
