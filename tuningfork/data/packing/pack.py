"""Which examples share a pack: a step's in packs of like size, a long sequence of them in full packs.

A pack is always whole examples, and a step always whole packs, so the batch size is exact. A pack has a slot for each
token of its content, rounded up a little: an exact batch does not mean padding. The number of slots is always a
multiple of a quantum, of a full pack too: with any other, matrix products may give a row other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tuningfork.accounts import DroppedRow
from tuningfork.data.packing.bin_packing import best_fit, even_fit, members_of, stream_fit
from tuningfork.data.packing.portions import Portion, joined, portion_out
from tuningfork.data.packing.tree import Forest, Share
from tuningfork.errors import DataError
from tuningfork.records import TokenExample, column, taken

COMPILED_QUANTUM = 128  # slots; matrix products of such sizes keep their kernels, and so a row's bits
SMALLEST_COMPILED = 1024  # below, a compiled graph may add up rows in another order
EAGER_QUANTUM = 64

WINDOW = 1024  # examples behind one, from which those are chosen that fill a pack best with it
WINDOW_TOKENS = 1 << 22  # of a long sequence, among which trees are looked for at a time: a second or two of work


class Bin(NamedTuple):
    """A pack to be laid out."""

    slots: int
    examples: list[TokenExample]
    forest: Forest  # their trees


@dataclass(frozen=True, slots=True)
class PackLimits:
    """How large packs are, and what of them is laid once."""

    tokens: int  # of a full pack's content
    share: Share  # none, prompt or tree: see tree.py
    quantum: int  # slots of a pack are a multiple of it
    smallest: int  # slots, where a full pack has as many

    @classmethod
    def plan(cls, tokens: int, share: Share, compiled: bool) -> PackLimits:
        if compiled:
            return cls(tokens, share, COMPILED_QUANTUM, SMALLEST_COMPILED)
        return cls(tokens, share, EAGER_QUANTUM, EAGER_QUANTUM)

    def slots(self, used: int) -> int:
        """Slots of a pack whose content takes up `used` of them; a full pack's are `tokens`, rounded up."""
        full = _round_up(self.tokens, self.quantum)
        return min(max(_round_up(used, self.quantum), self.smallest), full)


def slots_of_each(examples: Sequence[TokenExample], share: Share) -> np.ndarray:
    """int64 [n]: slots that each example takes up by itself; together with others it may take fewer."""
    return column(examples, "plain_tokens" if share == "none" else "unique_tokens")


def split_fitting(
    examples: Sequence[TokenExample], tokens: int, share: Share
) -> tuple[Sequence[TokenExample], list[DroppedRow]]:
    """Part the examples into those that fit a pack of `tokens` and listed drops."""
    slots = slots_of_each(examples, share)
    dropped = []
    for place in np.flatnonzero(slots > tokens).tolist():
        source, detail = examples[place].source, f"needs {slots[place]:,} tokens, pack.tokens is {tokens}"
        dropped.append(DroppedRow(source.file, source.row, "larger than a pack", detail))
    return taken(examples, np.flatnonzero(slots <= tokens)), dropped


def portions_of(examples: Sequence[TokenExample], limits: PackLimits) -> list[Portion]:
    """What is to be packed: examples one by one, or whole trees of them.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    _check_fitting(examples, limits)
    return portion_out(examples, limits.share, limits.tokens)


def pack_examples(portions: Sequence[Portion], limits: PackLimits) -> list[Bin]:
    """Best-fit decreasing: each portion, largest first, goes into the fullest bin that still holds it.

    Deterministic; every portion is in exactly one bin.
    """
    bin_of = best_fit([portion.rows for portion in portions], limits.tokens)
    return [pack_of([portions[i] for i in members], limits) for members in members_of(bin_of)]


def pack_evenly(portions: Sequence[Portion], limits: PackLimits) -> list[Bin]:
    """As few packs as `pack_examples` makes, and the largest of them as small as that allows.

    A small pack takes a GPU nearly as long as one of middle size, so what does not fit one pack is better halved than
    cut into a full pack and a rest.
    """
    return [pack_of(some, limits) for some in shared_evenly(portions, limits)]


def shared_evenly(portions: Sequence[Portion], limits: PackLimits) -> list[list[Portion]]:
    """What lies in each pack that `pack_evenly` makes."""
    bin_of = even_fit([portion.rows for portion in portions], limits.tokens)
    return [[portions[i] for i in members] for members in members_of(bin_of)]


def pack_of(portions: Sequence[Portion], limits: PackLimits) -> Bin:
    """One pack of portions that fit. Of none, it is the smallest there is, and all of it is padding."""
    examples, forest = joined(portions)
    return Bin(limits.slots(forest.rows), examples, forest)


def pack_stream(examples: Sequence[TokenExample], limits: PackLimits, window: int = WINDOW) -> Iterator[Bin]:
    """Packs of many examples, one by one and nearly all of them full: see `stream_fit`.

    Trees are looked for among as many examples as have WINDOW_TOKENS tokens, and lie in packs of like size. Without
    trees an example shares a pack with some of the `window` examples behind it, and the last `window` lie so.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    _check_fitting(examples, limits)
    return _stream(examples, limits, window)


def _stream(examples: Sequence[TokenExample], limits: PackLimits, window: int) -> Iterator[Bin]:
    if limits.share == "tree":  # portions are nearly as large as packs, so there is little to choose from
        for some in windows_of(examples):
            yield from pack_evenly(portion_out(list(some), limits.share, limits.tokens), limits)
        return
    waiting: dict[int, Portion] = {}  # by their number

    def rows() -> Iterator[int]:
        number = 0
        for some in windows_of(examples):
            for portion in portion_out(list(some), limits.share, limits.tokens):  # each example is made once
                waiting[number] = portion
                number += 1
                yield portion.rows

    for members in stream_fit(rows(), limits.tokens, window):
        yield pack_of([waiting.pop(number) for number in members], limits)


def windows_of(examples: Sequence[TokenExample]) -> Iterator[Sequence[TokenExample]]:
    """The examples in their order, cut where WINDOW_TOKENS tokens are reached."""
    ends = np.cumsum(column(examples, "plain_tokens"))
    first = 0
    while first < len(examples):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + WINDOW_TOKENS, side="right")), first + 1)
        yield taken(examples, np.arange(first, last))
        first = last


def _check_fitting(examples: Sequence[TokenExample], limits: PackLimits) -> None:
    slots = slots_of_each(examples, limits.share)
    for place in np.flatnonzero(slots > limits.tokens)[:1].tolist():
        raise DataError(
            f"{examples[place].id}: needs {slots[place]:,} tokens, but a pack has {limits.tokens}. "
            "Raise pack.tokens or lower data.max_length."
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
