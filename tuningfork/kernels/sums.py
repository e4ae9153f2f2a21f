"""Sums that have the same bits every time.

A GPU's threads come by in whatever order they like, and in floating point the order of addition decides the last bits.
So either the order does not matter, since what is added up is integers, or it is held to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LINE = 16  # a CPU's matrices are filled up with zeros, which change no sum, to a multiple of so many rows and columns:
# what fills no vector register the library adds up by another path, depending on where it lies

_FIXED_POINT = 2.0**34  # steps of 6e-11; room for 50,000 tokens at a log-prob of -10,000
_LARGEST = 5.3e8  # nats that 64 bits hold at these steps; more is no log-prob of any model, and becomes NaN


def sum_by_answer(token_logps: Tensor, answer_of_token: Tensor, answers: int) -> Tensor:
    """Sum tokens into answers, float64 [answers], independent of the order of addition. NaN where one is no number."""
    usable = torch.isfinite(token_logps) & (token_logps.abs() < _LARGEST)
    exact = torch.where(usable, token_logps, 0).double()
    zeros = torch.zeros(answers, dtype=torch.float64, device=token_logps.device)
    size = zeros.index_add(0, answer_of_token, exact.abs())
    broken = zeros.index_add(0, answer_of_token, (~usable).double()) + (size > _LARGEST)
    fixed = (exact * _FIXED_POINT).round().long()
    sums = zeros.long().index_add_(0, answer_of_token, fixed)
    return torch.where(broken > 0, torch.nan, sums.double() / _FIXED_POINT)


def sum_by_place(values: Tensor, places: Tensor, size: int) -> Tensor:
    """Sum values [n, ...] by their places [n], [size, ...] in their dtype. 0 where there is none.

    What has one place is added up in an order that depends on nothing but how many there are.
    """
    return add_by_place(values.new_zeros(size, *values.shape[1:]), places, values)


def add_by_place(total: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Add values [n, ...] to a total [size, ...] of their dtype at places [n], and give it. See `sum_by_place`."""
    if total.is_cuda:
        return total.index_put_((places,), values, accumulate=True)  # sorts places, and no two threads write to one
    return total.index_add_(0, places, values)  # one after the other


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Rows [n, ...] at places int64 [m], [m, ...]. One may be taken more than once; its gradients are then added up in
    one order, in float32 at least. PyTorch's own gradient adds them up in whatever order a GPU's threads come by."""
    taken: Tensor = _Take.apply(rows, places)
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return sum_by_place(wide, places, ctx.size).to(gradient.dtype), None
