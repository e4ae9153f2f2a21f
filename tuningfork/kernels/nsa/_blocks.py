"""The compressed blocks of a pack's paths: which rows each has, and which block ends where.

Block i has positions [i d, i d + l) of a path, so its rows, and all before them, are the path of its last row. Paths
share a block if it has the same last row in both; one that a cut crosses belongs to each path that goes on from there.
With l = 4, d = 2, a prompt of 5 rows and answers of 3 and 2:

    rows  0 .. 4   prompt         block   last row   rows           first position
          5 .. 7   answer A         0        3       0, 1, 2, 3           0
          8, 9     answer B         1        5       2, 3, 4, 5           2
                                    2        7       4, 5, 6, 7           4
                                    3        8       2, 3, 4, 8           2

Blocks lie in the order of their last rows. So those of a segment lie side by side, behind its ancestors' and before its
descendants', as rows do; and the blocks of a path are those that end at its rows of positions l - 1, l - 1 + d, ...
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tuningfork.kernels.tables import rows_at
from tuningfork.records import ForkLayout

_QUANTUM = 64  # blocks, so that products over them take the same way through a library for few of them as for many


class Grid(NamedTuple):
    """Where blocks lie, in positions of a path. The stride divides both lengths, and no block is longer than `select`.

    length: of compressed blocks, l.
    stride: from one of them to the next, d.
    select: of the blocks that are chosen, l'. These do not overlap.
    """

    length: int
    stride: int
    select: int


class Choice(NamedTuple):
    """Which blocks a row of position t reads whole, of the J = t // l' + 1 up to its own.

    count: how many, n; all of them where there are no more.
    initial: the first ones, which are always among them.
    local: the last ones, its own among them, which are, too. Both together are at most `count`.
    """

    count: int  # type: ignore[assignment]  # not tuple's method
    initial: int
    local: int


class Blocks(NamedTuple):
    """Room for E compressed blocks, an upper bound; those that are not there are at the end."""

    rows: Tensor  # int64 [E, l], T where there is no block
    first_positions: Tensor  # int64 [E], 0 where there is no block
    ended: Tensor  # int64 [T], blocks whose last rows are up to a row, itself included: the last of them, plus one

    @classmethod
    def of(cls, layout: ForkLayout, grid: Grid) -> Blocks:
        """Those of a layout of T rows in S segments, on its device, made without waiting for it: E is T // d + S, up to
        a multiple of 64."""
        position = layout.position_of_row
        total, device = len(position), position.device
        before_end = position + 1 - grid.length
        ended = ((before_end >= 0) & (before_end % grid.stride == 0)).cumsum(0)
        room = -(-(total // grid.stride + len(layout.segments)) // _QUANTUM) * _QUANTUM
        last = torch.searchsorted(ended, torch.arange(1, room + 1, device=device))  # T where there are no more
        there = last < total
        end = layout.segments[:, 1].long().contiguous()
        segment = torch.searchsorted(end, last, right=True).clamp(max=len(end) - 1)
        first = torch.where(there, before_end[last.clamp(max=total - 1)], 0)
        rows = rows_at(layout, segment, first[:, None] + torch.arange(grid.length, device=device))
        return cls(torch.where(there[:, None], rows, total), first, ended)
