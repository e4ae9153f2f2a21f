"""How the Triton kernels of native sparse attention are cut up and launched."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tuningfork.kernels.nsa import _sum_kernels as kernels

LOG2_E = 1.4426950408889634


def lanes_of(width: int) -> int:
    """Columns of a head in registers: matrix units take powers of two, from 16 up."""
    return max(16, triton.next_power_of_2(width))


class Config(NamedTuple):
    """How kernels are cut up. Fixed by dtype and widths, never tuned at run time: tuning would change the order of
    addition. Readers of entries are taken by the fastest of twelve ways on an H200, and all that is done with heads
    of 192 by the fastest of ten; the others were chosen by what fits a multiprocessor's registers and shared memory.

    tile: rows, or entries, of a program of compressed attention.
    step: entries that rows read at once, and rows of a piece.
    readers: rows that entries read at once; their programs have `reader_warps`.
    lines: heads of rows that a piece reads at once.
    warps, stages: of all others.
    row_stages: of a program that has one row; its warps are 4.
    """

    tile: int
    step: int
    readers: int
    lines: int
    warps: int
    stages: int
    row_stages: int
    reader_warps: int


def config_of(q: Tensor, v: Tensor) -> Config:
    width = max(lanes_of(q.shape[2]), lanes_of(v.shape[2]))
    wide = width > 128
    if q.dtype.itemsize == 4:  # 4 warps: with 8, products of 16 columns read beyond what they have
        return Config(32, 16, 16, 16, 4, 1, 1, 4) if wide else Config(32, 32, 32, 32, 4, 1, 1, 4)
    if wide:
        return Config(64, 64, 128, 16, 4, 1, 2, 8)
    return Config(64, 64, 64, 32, 4, 2, 3, 4) if width > 64 else Config(64, 64, 64, 64, 4, 2, 3, 4)


def widths(q: Tensor, v: Tensor) -> dict[str, Any]:
    (_, _, key), value = q.shape, v.shape[2]
    return {
        "KEY": key,
        "KEY_LANES": lanes_of(key),
        "VALUE": value,
        "VALUE_LANES": lanes_of(value),
        "PRECISION": precision(q),
    }


def precision(like: Tensor) -> str:
    """Of products: of float32 three each, which are as exact but for its last bit."""
    return "tf32x3" if like.dtype == torch.float32 else "tf32"


def strides(*tensors: Tensor) -> list[int]:
    """Of rows and heads."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def readable(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def empty_like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]


def sum_parts(
    partial: Tensor, out: Tensor, starts: Tensor, places: Tensor, part_starts: Tensor, length: int, by_group: bool
) -> None:
    rows, groups, width = out.shape
    kernels.nsa_sum_parts[(triton.cdiv(rows, 16), groups)](
        partial, out, starts, places, part_starts, rows,
        LENGTH=length, BY_GROUP=by_group, ROWS=16, WIDTH=width, LANES=triton.next_power_of_2(width),
    )  # fmt: skip
