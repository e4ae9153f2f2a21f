"""Causal convolution along paths in plain PyTorch: exact, any dtype, any device.

Every row gathers the rows before it in its path, zeros where there are none, so that a row's arithmetic is the same
wherever its path is cut and whatever lies beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.functional import pad

from tuningfork.kernels.sums import add_by_place
from tuningfork.kernels.tables import rows_read
from tuningfork.records import ForkLayout

NORM_EPS = 1e-6  # beneath the root of an l2 norm
_STAGE = 64  # rows whose parts of a weight's gradient are added up first, before the sums of all are


class Heads(NamedTuple):
    """How channels [query | key | value] are cut into heads. Queries and keys have as many, of one width."""

    keys: int
    key_width: int
    values: int
    value_width: int


class PlainCausalConv(NamedTuple):
    """Who comes before whom in a pack of T rows."""

    previous: Tensor  # int64 [T + 1], the row before each in its path; T where there is none, and for T itself

    @classmethod
    def prepare(cls, layout: ForkLayout) -> PlainCausalConv:
        """The rows before those of a layout, on its device, made without waiting for it."""
        rows = len(layout.position_of_row)
        start, end, parent, *_ = layout.segments.long().unbind(1)
        previous = torch.arange(-1, rows, device=start.device)
        previous[start] = torch.where(parent < 0, rows, end[parent.clamp(min=0)] - 1)  # empty segments lie at T
        previous[rows:] = rows
        return cls(previous)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = True) -> Tensor:
        """Each channel's convolution along the paths of the rows, and SiLU.

        The sums, and their gradients', are in float32 at least; gradients flow to x, weight and bias, in their dtypes.

        Args:
            x: [T, C].
            weight: [C, W]; its last column is multiplied with the row itself, the first with the row W - 1 before.
            bias: [C].
            silu: whether the result goes through SiLU.

        Returns:
            [T, C], in the dtype of x.
        """
        return self._conv(x, weight, bias, silu).to(x.dtype)

    def query_key_value(self, x: Tensor, weight: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution of x with SiLU, cut into heads; those of queries and keys brought to an l2 norm of 1.

        A head h becomes h / sqrt(|h|^2 + NORM_EPS), and that of a query is multiplied with key_width^-0.5 besides.
        Between the convolution and the result nothing is rounded to less than float32.

        Args:
            x: [T, C], C channels as `heads` says.
            weight: [C, W], see `conv`.

        Returns:
            query and key [T, keys, key_width], and value [T, values, value_width], in the dtype of x.
        """
        keys = heads.keys * heads.key_width
        parts = self._conv(x, weight, None, silu=True).split([keys, keys, heads.values * heads.value_width], dim=1)
        query, key = (_normed(part.unflatten(1, (heads.keys, heads.key_width))) for part in parts[:2])
        value = parts[2].unflatten(1, (heads.values, heads.value_width))
        return (query * heads.key_width**-0.5).to(x.dtype), key.to(x.dtype), value.to(x.dtype)

    def _conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        sources = rows_read(self.previous, weight.shape[1])
        out: Tensor = _Convolve.apply(sources, x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
        return F.silu(out) if silu else out


class _Convolve(torch.autograd.Function):
    """x [T, C], weight [C, W] and bias [C], of one dtype, with sources [T, W] -> [T, C]."""

    @staticmethod
    def forward(ctx: Any, sources: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(sources, x, weight)
        x = _with_missing(x)
        out = torch.zeros_like(x[:-1]) if bias is None else bias.expand_as(x[:-1])
        for tap, rows in enumerate(sources.unbind(1)):
            out = out + x[rows] * weight[:, tap]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """A row's gradient is a sum over the rows that read it, in their order."""
        sources, x, weight = ctx.saved_tensors
        x = _with_missing(x)
        parts = grad[:, None] * weight.t()  # [T, W, C]
        d_x = add_by_place(torch.zeros_like(x), sources.flatten(), parts.flatten(0, 1))
        d_weight = torch.stack([_sum_over_rows(grad * x[rows]) for rows in sources.unbind(1)], 1)
        return None, d_x[:-1], d_weight, _sum_over_rows(grad) if ctx.needs_input_grad[3] else None


def _with_missing(rows: Tensor) -> Tensor:
    """Rows [T, C] with one of zeros behind them."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


def _sum_over_rows(parts: Tensor) -> Tensor:
    """[T, C] -> [C], in two stages that T alone decides."""
    return pad(parts, (0, 0, 0, -len(parts) % _STAGE)).unflatten(0, (-1, _STAGE)).sum(1).sum(0)


def _normed(heads: Tensor) -> Tensor:
    """[T, H, d], each head by its l2 norm."""
    return heads / (heads.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
