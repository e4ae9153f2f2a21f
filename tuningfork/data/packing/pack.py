"""Which examples share a pack: a step's in packs of like size, a long row of them in full packs.

A pack is always whole examples, and a step always whole packs, so the batch size is exact. A pack has as many rows as
its content, rounded up a little: an exact batch does not mean padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tuningfork.data.packing.bin_packing import best_fit, even_fit, members_of, stream_fit
from tuningfork.errors import DataError
from tuningfork.records import DroppedRow, TokenExample, column, taken

COMPILED_QUANTUM = 128  # rows; matrix products of such sizes keep their kernels, and so a row's bits
SMALLEST_COMPILED = 1024  # below, a compiled graph may add up rows in another order
EAGER_QUANTUM = 64

Bin = tuple[int, Sequence[TokenExample]]
"""A pack's rows and its examples, in their given order."""


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


def rows_of_each(examples: Sequence[TokenExample], share_prompt: bool) -> np.ndarray:
    """int64 [n]: what `TokenExample.rows` says of each example."""
    return column(examples, "unique_tokens" if share_prompt else "plain_tokens")


def split_fitting(
    examples: Sequence[TokenExample], tokens: int, share_prompt: bool
) -> tuple[Sequence[TokenExample], list[DroppedRow]]:
    """Part the examples into those that fit a pack of `tokens` rows and listed drops."""
    rows = rows_of_each(examples, share_prompt)
    dropped = []
    for place in np.flatnonzero(rows > tokens).tolist():
        source, detail = examples[place].source, f"needs {rows[place]} rows, pack.tokens is {tokens}"
        dropped.append(DroppedRow(source.file, source.row, "larger than a pack", detail))
    return taken(examples, np.flatnonzero(rows <= tokens)), dropped


def pack(examples: Sequence[TokenExample], limits: PackLimits) -> list[Bin]:
    """Best-fit decreasing: each example, largest first, goes into the fullest bin that still holds it.

    Deterministic; every example is in exactly one bin.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    rows = _fitting_rows(examples, limits)
    return [_bin(examples, rows, members, limits) for members in members_of(best_fit(rows, limits.tokens))]


def pack_evenly(examples: Sequence[TokenExample], limits: PackLimits) -> list[Bin]:
    """As few packs as `pack` makes, and the largest of them as small as that allows. Raises DataError as it does.

    A small pack takes a GPU nearly as long as one of middle size, so what does not fit one pack is better halved than
    cut into a full pack and a rest.
    """
    rows = _fitting_rows(examples, limits)
    return [_bin(examples, rows, members, limits) for members in members_of(even_fit(rows, limits.tokens))]


def pack_stream(examples: Sequence[TokenExample], limits: PackLimits, window: int) -> Iterator[Bin]:
    """Packs of many examples, one by one and nearly all of them full: see `stream_fit`. Raises DataError as `pack`.

    An example shares a pack with some of the `window` examples behind it; the last `window` lie in packs of like size.
    """
    rows = _fitting_rows(examples, limits)
    return (_bin(examples, rows, members, limits) for members in stream_fit(rows, limits.tokens, window))


def _fitting_rows(examples: Sequence[TokenExample], limits: PackLimits) -> list[int]:
    rows = rows_of_each(examples, limits.share_prompt)
    for place in np.flatnonzero(rows > limits.tokens)[:1].tolist():
        raise DataError(
            f"{examples[place].id}: needs {rows[place]} rows, but a pack has {limits.tokens}. "
            "Raise pack.tokens or lower data.max_length."
        )
    return rows.tolist()


def _bin(examples: Sequence[TokenExample], rows: list[int], members: list[int], limits: PackLimits) -> Bin:
    return limits.rows(sum(map(rows.__getitem__, members))), taken(examples, np.array(members))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
