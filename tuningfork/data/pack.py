"""Which examples share a pack: best-fit decreasing, in packs of like size.

A pack is always whole examples, and a step always whole packs, so the batch size is exact. A pack has as many rows as
its content, rounded up a little: an exact batch does not mean padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tuningfork.errors import DataError
from tuningfork.records import DroppedRow, TokenExample

COMPILED_QUANTUM = 128  # rows; matrix products of such sizes keep their kernels, and so a row's bits
SMALLEST_COMPILED = 1024  # below, a compiled graph may add up rows in another order
EAGER_QUANTUM = 64


@dataclass(frozen=True, slots=True)
class PackLimits:
    """How large packs are, in rows, and whether prompts are shared."""

    tokens: int  # of a full pack
    share_prompt: bool
    quantum: int
    smallest: int

    @classmethod
    def plan(cls, tokens: int, share_prompt: bool, compiled: bool) -> PackLimits:
        if compiled:
            return cls(tokens, share_prompt, COMPILED_QUANTUM, SMALLEST_COMPILED)
        return cls(tokens, share_prompt, EAGER_QUANTUM, EAGER_QUANTUM)

    def rows(self, used: int) -> int:
        """Rows of a pack whose content takes up `used` of them."""
        return min(max(_round_up(used, self.quantum), self.smallest), self.tokens)


def rows_of(example: TokenExample, share_prompt: bool) -> int:
    """Rows that an example takes up in a pack."""
    return example.unique_tokens if share_prompt else example.plain_tokens


def split_fitting(
    examples: Sequence[TokenExample], tokens: int, share_prompt: bool
) -> tuple[list[TokenExample], list[DroppedRow]]:
    """Part the examples into those that fit a pack of `tokens` rows and listed drops."""
    fitting, dropped = [], []
    for example in examples:
        rows = rows_of(example, share_prompt)
        if rows <= tokens:
            fitting.append(example)
        else:
            detail = f"needs {rows} rows, pack.tokens is {tokens}"
            dropped.append(DroppedRow(example.source.file, example.source.row, "larger than a pack", detail))
    return fitting, dropped


def pack(examples: Sequence[TokenExample], limits: PackLimits) -> list[tuple[int, list[TokenExample]]]:
    """Best-fit decreasing: each example, largest first, goes into the fullest bin that still holds it.

    Returns each bin's rows and its examples, in their given order. Deterministic; every example is in exactly one bin.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    rows = [rows_of(example, limits.share_prompt) for example in examples]
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (rows left, bin), sorted
    for index in sorted(range(len(examples)), key=lambda i: (-rows[i], i)):
        if rows[index] > limits.tokens:
            raise DataError(
                f"{examples[index].id}: needs {rows[index]} rows, but a pack has {limits.tokens}. "
                "Raise pack.tokens or lower data.max_length."
            )
        place = bisect_left(free, (rows[index], 0))
        left, chosen = free.pop(place) if place < len(free) else (limits.tokens, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(index)
        insort(free, (left - rows[index], chosen))
    return [(limits.rows(sum(rows[i] for i in members)), [examples[i] for i in sorted(members)]) for members in bins]


def pack_evenly(examples: Sequence[TokenExample], limits: PackLimits) -> list[tuple[int, list[TokenExample]]]:
    """As few packs as `pack` makes, and the largest of them as small as that allows.

    A small pack takes a GPU nearly as long as one of middle size, so what does not fit one pack is better halved than
    cut into a full pack and a rest.
    """
    bins = pack(examples, limits)
    if len(bins) < 2:
        return bins
    rows = [rows_of(example, limits.share_prompt) for example in examples]
    low, high = max(*rows, -(-sum(rows) // len(bins))), limits.tokens
    while low < high:
        middle = (low + high) // 2
        tried = pack(examples, replace(limits, tokens=middle))
        if len(tried) <= len(bins):
            bins, high = tried, middle
        else:
            low = middle + 1
    return [(limits.rows(sum(rows_of(e, limits.share_prompt) for e in members)), members) for _, members in bins]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
