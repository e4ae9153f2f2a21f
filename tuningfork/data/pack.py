"""Which examples share a pack: best-fit decreasing under static limits.

Every pack has one of a few static shapes (rungs), so that a compiled model meets no new shape after warm-up. A pack is
always whole examples, and a step always whole packs, so the batch size is exact; the step's last pack takes the
smallest rung that holds it, so an exact batch does not mean padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from tuningfork.errors import DataError
from tuningfork.records import DroppedRow, TokenExample


@dataclass(frozen=True, slots=True)
class Size:
    """What an example, or a bin of examples, takes up in a pack."""

    tokens: int = 0
    segments: int = 0
    keys: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.segments + other.segments, self.keys + other.keys)


def size_of(example: TokenExample, share_prompt: bool) -> Size:
    """Rows, attention segments and gathered keys of one example."""
    tokens = example.unique_tokens if share_prompt else example.plain_tokens
    return Size(tokens=tokens, segments=len(example.answers), keys=example.plain_tokens)


@dataclass(frozen=True, slots=True)
class Rung:
    """One static pack shape: T rows, S segments, K gathered keys, padding included."""

    tokens: int
    segments: int
    keys: int
    max_seqlen: int

    def padding_segments(self, size: Size) -> int | None:
        """Segments that padding needs beside a content of this size; None if the content does not fit."""
        pad_rows = self.tokens - size.tokens
        # Spare entries of the key gather must point at a padding row, so a pack keeps at least one.
        pad_keys = self.keys - size.keys - pad_rows
        if pad_rows < 1 or pad_keys < 0:
            return None
        count = ceil(pad_rows / self.max_seqlen) + ceil(pad_keys / self.max_seqlen)
        return count if size.segments + count <= self.segments else None

    def holds(self, size: Size) -> bool:
        return self.padding_segments(size) is not None


@dataclass(frozen=True, slots=True)
class PackLimits:
    """The static shapes of a run, smallest first, and whether prompts are shared."""

    rungs: tuple[Rung, ...]
    share_prompt: bool

    @property
    def full(self) -> Rung:
        return self.rungs[-1]

    def smallest_rung(self, size: Size) -> Rung:
        return next(rung for rung in self.rungs if rung.holds(size))


COMPILED_LADDER = (0.25, 0.5, 0.75, 1.0)  # each size is compiled once, the first time it is needed
SMALLEST_COMPILED = 1024  # below, the compiler adds up rows in another order, and a log-prob's last bits change
EAGER_QUANTUM = 64  # without a compiler any multiple of this is static enough, and keeps matmul kernels alike
SEGMENT_HEADROOM = 1.5  # packs of short examples hold more segments than the average pack
KEY_HEADROOM = 1.25


def plan_limits(examples: Sequence[TokenExample], tokens: int, share_prompt: bool, compiled: bool) -> PackLimits:
    """Derive the static shapes from the examples' lengths.

    `tokens` is the size of a full pack. Segment and key limits follow the data's averages with some headroom, since
    attention kernels launch work for every possible segment, present or not; the packer respects them like the rows.
    """
    sizes = [size_of(example, share_prompt) for example in examples]
    total = sum(sizes, Size())
    max_seqlen = _round_up(max(example.longest for example in examples), 128)
    full_keys = max(
        ceil(KEY_HEADROOM * tokens * total.keys / max(total.tokens, 1)),
        tokens + max(size.keys - size.tokens for size in sizes),
    )
    largest_k = max(size.segments for size in sizes)

    def rung(rows: int) -> Rung:
        keys = _round_up(max(ceil(full_keys * rows / tokens), rows), 64)
        padding = ceil(rows / max_seqlen) + ceil(keys / max_seqlen)
        density = ceil(SEGMENT_HEADROOM * rows * total.segments / max(total.tokens, 1))
        return Rung(rows, max(density, largest_k) + padding, keys, max_seqlen)

    if compiled:
        ladder = {_round_up(int(tokens * share), EAGER_QUANTUM) for share in COMPILED_LADDER}
        rows = sorted({size for size in ladder if SMALLEST_COMPILED <= size < tokens} | {tokens})
    else:
        rows = sorted({*range(EAGER_QUANTUM, tokens, EAGER_QUANTUM), tokens})
    return PackLimits(tuple(rung(r) for r in rows), share_prompt)


def split_fitting(
    examples: Sequence[TokenExample], tokens: int, share_prompt: bool
) -> tuple[list[TokenExample], list[DroppedRow]]:
    """Part the examples into those that fit a pack of `tokens` rows and listed drops."""
    fitting, dropped = [], []
    for example in examples:
        rows = size_of(example, share_prompt).tokens
        if rows < tokens:
            fitting.append(example)
        else:
            detail = f"needs {rows + 1} rows, pack.tokens is {tokens}"
            dropped.append(DroppedRow(example.source.file, example.source.row, "larger than a pack", detail))
    return fitting, dropped


def pack(examples: Sequence[TokenExample], limits: PackLimits) -> list[tuple[Rung, list[TokenExample]]]:
    """Best-fit decreasing: each example, largest first, goes into the fullest bin that still holds it.

    Returns the bins with the smallest rung that holds each. Deterministic; every example is in exactly one bin.

    Raises:
        DataError: an example does not fit a pack by itself.
    """
    sizes = [size_of(example, limits.share_prompt) for example in examples]
    bins: list[tuple[Size, list[int]]] = []
    for index in sorted(range(len(examples)), key=lambda i: (-sizes[i].tokens, i)):
        if not limits.full.holds(sizes[index]):
            raise DataError(
                f"{examples[index].id}: needs {sizes[index].tokens + 1} rows, but a pack has {limits.full.tokens}. "
                "Raise pack.tokens or lower data.max_length."
            )
        fits = [b for b, (used, _) in enumerate(bins) if limits.full.holds(used + sizes[index])]
        if fits:
            best = max(fits, key=lambda b: bins[b][0].tokens)
            bins[best] = (bins[best][0] + sizes[index], [*bins[best][1], index])
        else:
            bins.append((sizes[index], [index]))
    return [(limits.smallest_rung(used), [examples[i] for i in sorted(members)]) for used, members in bins]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
