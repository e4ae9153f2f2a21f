"""What tables of work are made with on the device that has the layout, without asking it how much work there is."""

from __future__ import annotations

import torch
from torch import Tensor

from tuningfork.records import GRID, ForkLayout


def spread(counts: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hand out places: entry i gets the next counts[i] of them. The device need not be asked how many there are.

    Returns:
        For each place, int64 or bool [places]: the entry that has it, which of that entry's it is, and whether there is
        any; where there is none, the place goes to the last entry, behind its own.
    """
    ends = counts.cumsum(0)
    place = torch.arange(places, device=counts.device)
    entry = torch.searchsorted(ends, place, right=True).clamp(max=len(counts) - 1)
    return entry, place - (ends - counts)[entry], place < ends[-1]


def rows_at(layout: ForkLayout, segment: Tensor, positions: Tensor) -> Tensor:
    """Where the paths that some segments end have some positions, found by the layout's steps (records.py).

    Args:
        segment: int64 [N], entries of the layout.
        positions: int64 [N, P], of each one's path. What is behind its end is no row of it.

    Returns:
        int64 [N, P], rows.
    """
    start, _, _, first_position, _, steps_start = layout.segments.long().unbind(1)
    first = first_position[segment][:, None]
    step, offset = positions // GRID, positions % GRID
    in_steps = step * GRID < first
    listed = layout.steps.long()[torch.where(in_steps, steps_start[segment][:, None] + step, 0)]
    base = torch.where(in_steps, listed, start[segment][:, None] - first + step * GRID)
    seam = layout.seams.long().flatten()[torch.where(base < 0, (-1 - base) * GRID + offset, 0)]
    return torch.where(base < 0, seam, base + offset)


def rows_read(previous: Tensor, width: int) -> Tensor:
    """The rows that a causal convolution so wide reads along paths.

    Args:
        previous: int64 [T + 1], the row before each in its path; T where there is none, and for T itself.

    Returns:
        int64 [T, width], for each row the one width - 1 before it, and so on up to itself; T for none.
    """
    taps = [torch.arange(len(previous) - 1, device=previous.device)]
    for _ in range(width - 1):
        taps.insert(0, previous[taps[0]])
    return torch.stack(taps, 1)
