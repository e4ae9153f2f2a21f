# mypy: disable-error-code=no-untyped-def
"""The rows of compressed blocks, and their mean, as ops of a GPU. A row's gradient is added up in the order of the
blocks that have it."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tuningfork.kernels.nsa import _sum_kernels as kernels


def _sum_places(values: Tensor, starts: Tensor, places: Tensor, per_value: int, scale: float) -> Tensor:
    """[n, G, w] -> [T, G, w]."""
    rows, (groups, width) = len(starts) - 1, values.shape[1:]
    out = values.new_empty(rows, groups, width)
    lanes = min(256, triton.next_power_of_2(groups * width))
    kernels.nsa_sum_places[(triton.cdiv(rows, 16), triton.cdiv(groups * width, lanes))](
        values, out, starts, places, rows, scale, PER_VALUE=per_value, ROWS=16, WIDTH=groups * width, LANES=lanes
    )
    return out


@torch.library.custom_op("tuningfork::nsa_take", mutates_args=())
def take(table: Tensor, starts: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Rows [T, G, w] at the table's places [E, l]: [E, l, G, w], zero for T."""
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return padded.index_select(0, table.flatten()).unflatten(0, table.shape)


@torch.library.custom_op("tuningfork::nsa_take_backward", mutates_args=())
def _take_backward(starts: Tensor, places: Tensor, grad: Tensor) -> Tensor:
    return _sum_places(grad.contiguous().flatten(0, 1), starts, places, 1, 1.0)


@torch.library.custom_op("tuningfork::nsa_mean", mutates_args=())
def mean(table: Tensor, starts: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """The mean of rows [T, G, w] at the places of each line of the table [E, l]: [E, G, w]."""
    rows = rows.contiguous()
    (total, *shape), (blocks, length) = rows.shape, table.shape
    width = shape[0] * shape[1]
    lanes = min(256, triton.next_power_of_2(width))
    out = rows.new_empty(blocks, *shape)
    kernels.nsa_mean[(triton.cdiv(blocks, 8), triton.cdiv(width, lanes))](
        rows, out, table, blocks, total, width, LENGTH=length, BLOCKS=8, WIDTH=width, LANES=lanes
    )
    return out


@torch.library.custom_op("tuningfork::nsa_mean_backward", mutates_args=())
def _mean_backward(starts: Tensor, places: Tensor, grad: Tensor, length: int) -> Tensor:
    return _sum_places(grad.contiguous(), starts, places, length, 1 / length)


@take.register_fake
def _(table, starts, places, rows):
    return rows.new_empty(*table.shape, *rows.shape[1:])


@_take_backward.register_fake
def _(starts, places, grad):
    return grad.new_empty(starts.shape[0] - 1, *grad.shape[2:])


@mean.register_fake
def _(table, starts, places, rows):
    return rows.new_empty(table.shape[0], *rows.shape[1:])


@_mean_backward.register_fake
def _(starts, places, grad, length):
    return grad.new_empty(starts.shape[0] - 1, *grad.shape[1:])


def _save_places(ctx, inputs, output):
    table, starts, places, _ = inputs
    ctx.length = table.shape[1]
    ctx.save_for_backward(starts, places)


take.register_autograd(
    lambda ctx, grad: (None, None, None, _take_backward(*ctx.saved_tensors, grad)), setup_context=_save_places
)
mean.register_autograd(
    lambda ctx, grad: (None, None, None, _mean_backward(*ctx.saved_tensors, grad, ctx.length)),
    setup_context=_save_places,
)
