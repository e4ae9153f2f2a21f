"""What tables of work are made with on the device that has the layout, without asking it how much work there is."""

from __future__ import annotations

import torch
from torch import Tensor


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
