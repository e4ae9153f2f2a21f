"""How the Triton kernels of the gated delta rule are cut up: tiles, warps, pipeline stages."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor


class Cut(NamedTuple):
    """How a kernel is cut up: columns of values that it works on at a time, warps of a program, pipeline stages."""

    columns: int
    warps: int
    stages: int


# Columns of a tile of bfloat16, at least: narrower ones, in loops that are not pipelined (of one stage, or one round),
# Triton 3.6 computes wrongly on Hopper (docs/log.md).
_NARROWEST = 64

# Of bfloat16, by measurement on an H200 in heads of 128 by 128 (python -m bench.gated_delta_cuts): the fastest or
# nearly so, of loops with two stages at least; the gradients of states with one long document in mind. Fixed, never
# tuned at run time: tuning would change the order of addition.
CUTS = {
    "delta_solve": Cut(64, 1, 1),
    "delta_apply_inverse": Cut(64, 4, 3),
    "delta_states": Cut(64, 4, 2),
    "delta_read": Cut(64, 4, 2),
    "delta_fresh_gradient": Cut(64, 4, 2),
    "delta_state_gradients": Cut(64, 8, 3),
    "delta_solve_gradient": Cut(64, 4, 3),
    "delta_query_gradient": Cut(64, 4, 3),
    "delta_key_gradient": Cut(64, 4, 3),
}


def cut_of(kernel: str, key: Tensor, value: Tensor) -> Cut:
    """How a kernel is cut up for keys and values of these widths and dtype."""
    columns, key_lanes = tile(value), tile(key)
    if value.dtype == torch.float32:  # what fits registers and shared memory
        # Triton 3.6 lets 8 warps read outside shared memory where a float32 product is 16 columns wide.
        wide = min(columns, key_lanes) > 16 and kernel != "delta_solve"
        return Cut(min(columns, 32), 8 if wide else 4, 1)
    cut = CUTS[kernel]
    if key_lanes <= 64:  # half the registers, so half the warps have room for them
        cut = cut._replace(warps=min(cut.warps, 4))
    return cut._replace(columns=min(columns, cut.columns))


def tile(rows: Tensor) -> int:
    """Columns of a head in registers where they are multiplied."""
    return lanes(rows.shape[2], least=16 if rows.dtype == torch.float32 else _NARROWEST)


def lanes(width: int, least: int = 16) -> int:
    """A power of two, which tiles are."""
    return max(least, triton.next_power_of_2(width))
