"""Sums over a group of processes, by hand, of tensors however they lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.worlds import together
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.sums import Group

NUMBERS = torch.arange(12, dtype=torch.float32).view(4, 3)
LAID = {
    "whole": NUMBERS,
    "no multiple of the ranks": NUMBERS[:3].contiguous(),
    "turned": NUMBERS.t(),
    "one column": NUMBERS[:, 1],
    "one number for all": torch.tensor(2.0).expand(4, 3),
    "bfloat16": NUMBERS.bfloat16(),
    "none": NUMBERS[:0],
}


def found_by(ranks: Ranks) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each tensor, which both ranks have: its sum over them, and both."""
    group = Group.of(init_device_mesh("cpu", (ranks.size,)))
    return {name: (group.sum(part), group.all(part)) for name, part in LAID.items()}


def test_tensors_are_summed_however_they_lie() -> None:
    for found in together(2, found_by):
        for name, part in LAID.items():
            total, both = found[name]
            assert torch.equal(total, part + part) and total.dtype == part.dtype, name
            assert torch.equal(both, torch.stack([part, part])), name
