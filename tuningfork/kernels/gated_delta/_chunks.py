"""The chunks of a pack's paths: which rows each has, and which chunk it goes on from.

A path is cut at multiples of CHUNK of its positions, never where it is cut into segments, and its state goes from chunk
to chunk. The rows of a chunk, and all before it, are the path of its last row. So paths share a chunk if it has the
same last row in both, and a chunk with a cut inside belongs to each path that goes on from there. Where a prompt of 70
rows has two answers of 60 and 10:

    rows        0 .. 69   prompt      chunk  last row   rows                  parent
               70 .. 129  answer A        0        63    0 .. 63                ROOT
              130 .. 139  answer B        1       127   64 .. 127                  0
                                          2       129   128, 129                   1
                                          3       139   64 .. 69, 130 .. 139       0

The prompt's first 64 rows are scanned once; its last 6 are read by both answers, and their results are those of the
first. Chunks lie in the order of their last rows: depth first, as the rows themselves do. So a chunk's descendants are
right behind it, and the first of them is its child; and the first chunk whose last row is not before a row has it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tuningfork.kernels.tables import rows_at, spread
from tuningfork.records import ROOT, ForkLayout

CHUNK = 64  # positions; a multiple of records.GRID


class Chunks(NamedTuple):
    """Room for N chunks, an upper bound; those that are not there are at the end."""

    rows: Tensor  # int64 [N, CHUNK], T where there is no row
    parent: Tensor  # int64 [N], ROOT where it begins with a state of zero
    number: Tensor  # int64 [N], which of its path's chunks it is; -1 where there is none
    of_row: Tensor  # int64 [T], the chunk that has a row's result

    @classmethod
    def of(cls, layout: ForkLayout) -> Chunks:
        """Those of a layout of T rows in S segments, on its device, made without waiting for it: N = T // 64 + 2 S."""
        start, end, above, first, _, _ = layout.segments.long().unbind(1)
        total, device = len(layout.position_of_row), start.device
        path_end = first + end - start
        has_parent = (above != ROOT) & (end > start)
        is_parent = torch.zeros(len(start) + 1, dtype=torch.bool, device=device)
        is_parent.index_fill_(0, torch.where(has_parent, above, len(start)), True)
        ends_path = ~is_parent[:-1] & (path_end % CHUNK != 0)  # with a part of a chunk
        counts = torch.where(end > start, path_end // CHUNK - first // CHUNK + ends_path, 0)

        segment, place, there = spread(counts, total // CHUNK + 2 * len(start))
        number = first[segment] // CHUNK + place
        stop = torch.minimum((number + 1) * CHUNK, path_end[segment])
        last = torch.where(there, start[segment] + stop - 1 - first[segment], total)
        # Positions of the row before the chunk, and of its own.
        positions = number[:, None] * CHUNK + torch.arange(-1, CHUNK, device=device)
        rows = rows_at(layout, segment, positions.clamp(min=0))
        inside = there[:, None] & (positions < stop[:, None])
        return cls(
            rows=torch.where(inside, rows, total)[:, 1:].contiguous(),
            parent=torch.where(there & (number > 0), torch.searchsorted(last, rows[:, 0].contiguous()), ROOT),
            number=torch.where(there, number, -1),
            of_row=torch.searchsorted(last, torch.arange(total, device=device)),
        )


def chains_of(chunks: Chunks, most: int) -> tuple[Tensor, Tensor]:
    """Chunks that go on from the one before, and all but the last of which no other goes on from, make a chain.

    Args:
        most: S, how many paths there are at most. They part fewer times, and each time two chains begin, or one more.

    Returns:
        Of each chain, [2 S, 5]: its first chunk and its end; the slot of a state that it goes on from, and of the one
        that it leaves for others, -1 for none; and 1 if it is the last that goes on from its slot, else 0. Of each
        tree, [S, 2]: its first chain and its end, the largest first.
    """
    parent, number = chunks.parent, torch.arange(len(chunks.parent), device=chunks.parent.device)
    there, count = chunks.number >= 0, (chunks.number >= 0).sum()
    goes_elsewhere = (parent != ROOT) & (parent != number - 1)
    by_parent, child = torch.where(goes_elsewhere, parent, -1).sort(stable=True)
    place = torch.searchsorted(by_parent, number, right=True) - 1
    final = torch.where(by_parent[place] == number, child[place], -1)  # of those that are not right behind a chunk
    slot = torch.where(final >= 0, (final >= 0).cumsum(0) - 1, -1)
    source = torch.where(parent == ROOT, -1, slot[parent])

    begins = there & ((parent == ROOT) | (source >= 0))
    first = torch.where(begins, number, count).sort().values[: 2 * most]
    end = torch.cat([first[1:], count[None]])
    chunk = first.clamp(max=len(parent) - 1)
    is_last = (source[chunk] >= 0) & (final[parent[chunk]] == chunk)
    chains = torch.stack([first, end, source[chunk], slot[end - 1], is_last.long()], 1)

    is_root = (parent[chunk] == ROOT) & (first < count)
    place = torch.arange(len(first), device=first.device)
    root = torch.where(is_root, place, begins.sum()).sort().values[:most]
    tree_end = torch.cat([root[1:], begins.sum()[None]])
    chunk_of = torch.cat([first, count[None]])
    order = (chunk_of[tree_end] - chunk_of[root]).argsort(descending=True)
    return chains, torch.stack([root, tree_end], 1)[order]


def check_gates(value: Tensor, decay: Tensor, beta: Tensor) -> None:
    """Refuse decays and rates whose sums over a chunk would be rounded.

    Raises:
        TypeError: they are not float32, or, beside float64, float64.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    if decay.dtype != wide or beta.dtype != wide:
        raise TypeError(
            f"The gated delta rule sums the logs of decays over {CHUNK} rows. Beside values of {value.dtype}, decay "
            f"and beta have to be {wide}, and they are {decay.dtype} and {beta.dtype}."
        )
