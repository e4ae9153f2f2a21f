# mypy: disable-error-code=no-untyped-def
"""Stand-ins for norms that are tuned by length: the keys and configurations of fla-core 0.4.1's l2 and gated norms.

There the tuners' key has ⌈rows · heads / 2,048⌉ in it, a constant of the kernel: 25 configurations forward and 25
backward of the l2 norm, nine and nine of the gated norm, compiled and timed again for each such number that has not
been met. What these kernels compute is as little as a norm does: a row's length, and its numbers divided by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_L2 = [triton.Config({"ROWS": rows}, num_warps=warps) for rows in (8, 16, 32, 64, 128) for warps in (1, 2, 4, 8, 16)]
_GATED = [triton.Config({"ROWS": rows}, num_warps=warps) for rows in (16, 32, 64) for warps in (4, 8, 16)]
_BLOCK = 2048


def _normed(x, out, total, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    places = rows[:, None] * WIDTH + lanes[None, :]
    there = (rows < total)[:, None] & (lanes < WIDTH)[None, :]
    values = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(values * values, 1) + 1e-6)
    tl.store(out + places, (values / length[:, None]).to(out.dtype.element_ty), mask=there)


def _tuned(configs: list[triton.Config]):
    return triton.autotune(configs, key=["WIDTH", "BLOCKS"])(triton.jit(_normed, do_not_specialize=["total"]))


_FORMS = {"l2": [_tuned(_L2), _tuned(_L2)], "gated": [_tuned(_GATED), _tuned(_GATED)]}  # forward, backward


def run(rows: int, heads: int, key_width: int, value_width: int, where: torch.device) -> None:
    """Both norms of a layer, forward and what costs as much as backward, over rows of these heads."""
    for kind, width in (("l2", key_width), ("gated", value_width)):
        x: Tensor = torch.ones(rows * heads, width, device=where, dtype=torch.bfloat16)
        out, total = torch.empty_like(x), rows * heads
        for kernel in _FORMS[kind]:
            kernel[lambda meta, total=total: (triton.cdiv(total, meta["ROWS"]),)](
                x, out, total, BLOCKS=triton.cdiv(total, _BLOCK), WIDTH=width, LANES=triton.next_power_of_2(width)
            )
