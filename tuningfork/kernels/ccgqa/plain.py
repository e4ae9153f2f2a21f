"""What CCGQA (Figliolia et al. 2025, arXiv:2510.04476) does to its latent rows before attention, in plain PyTorch.

It is exact, and runs in any dtype on any device.

Along the path of a row, u = [q0 | k0] goes through two causal convolutions: one by channel, then one that mixes the
channels of each head. To the result the means of q0 and k0 are added, each head is brought to a length of sqrt(d), and
those of keys are multiplied with a temperature:

    c_t = b0 + sum_j w0[j] u_{t-j}                  u is 0 before a path's first row, and so c there is b0
    e_t = b1 + sum_i W1[i] c_{t-i}                  each head by itself
    m_a = (q0_a + k0_{a div r}) / 2                 r query heads to a key head
    q_a = unit(e_a + m_a),  k_b = unit(e_b + mean of m_a over the r query heads of b) exp(tau_b)
    v   = [y_t | z_{t-1}]                           z is 0 before a path's first row

These are attention's queries, keys and values, the first two once they are rotated.

Every row gathers the rows before it in its path, so that its arithmetic is the same wherever its path is cut and
whatever lies beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tuningfork.kernels.causal_conv.plain import PlainCausalConv
from tuningfork.kernels.sums import LINE, add_by_place
from tuningfork.kernels.tables import rows_read
from tuningfork.records import ForkLayout

_BLOCK = 64  # rows of one matrix product: its shape, and so its order of addition, is the same for every row


class QueryHeads(NamedTuple):
    """How channels [query | key] are cut into heads, all of one width."""

    queries: int
    keys: int
    width: int


class Filters(NamedTuple):
    """The two convolutions; of each the last tap is multiplied with the row itself, the first with the one furthest
    back."""

    depthwise: Tensor  # [C, W0]
    grouped: Tensor  # [C, d, W1]: output channel, input channel of the same head, tap
    depthwise_bias: Tensor | None = None  # [C]
    grouped_bias: Tensor | None = None  # [C]


class PlainCcgqa(NamedTuple):
    """Who comes before whom in a pack."""

    convolution: PlainCausalConv

    @classmethod
    def prepare(cls, layout: ForkLayout) -> PlainCcgqa:
        """The rows before those of a layout, on its device, made without waiting for it."""
        return cls(PlainCausalConv.prepare(layout))

    def query_key(self, x: Tensor, filters: Filters, temperature: Tensor, heads: QueryHeads) -> tuple[Tensor, Tensor]:
        """Both convolutions, means, norms and temperature.

        Operands of products have the dtype of x, the result of the first convolution too; sums, means and norms are in
        float32 at least. A norm counts as no less than the epsilon of the dtype of x, so that zeros stay zeros.

        Args:
            x: [T, C], latent queries and keys, q0 and k0.
            temperature: [keys], tau, in float32 at least.

        Returns:
            query [T, queries, d] and key [T, keys, d] in the dtype of x, not yet rotated.
        """
        by_channel = self.convolution.conv(x, filters.depthwise, filters.depthwise_bias, silu=False)
        sources = rows_read(self.convolution.previous, filters.grouped.shape[2])
        return _query_key(sources, x, by_channel, filters, temperature, heads)

    def values(self, x: Tensor, now: int) -> Tensor:
        """The value shift: [T, C] with the first `now` channels as they are, and the others of the row before in the
        path; 0 where there is none."""
        return self.convolution.conv(x, _shift(x, now), silu=False)


def _query_key(
    sources: Tensor, x: Tensor, by_channel: Tensor, filters: Filters, temperature: Tensor, heads: QueryHeads
) -> tuple[Tensor, Tensor]:
    """What is behind the first convolution, whose result is `by_channel`; sources [T, W1], T for none."""
    wide = torch.promote_types(x.dtype, torch.float32)
    before = filters.depthwise_bias
    before = x.new_zeros(x.shape[1]) if before is None else before.to(x.dtype)
    bias = None if filters.grouped_bias is None else filters.grouped_bias.to(wide)
    mixed = _Mix.apply(sources, by_channel, filters.grouped.to(x.dtype), bias, before)
    query, key = (_heads(part, heads) for part in _split(mixed, heads))
    query_mean, key_mean = _means(*(_heads(part.to(wide), heads) for part in _split(x, heads)))
    least = torch.finfo(x.dtype).eps
    query, key = _unit(query + query_mean, least), _unit(key + key_mean, least)
    return query.to(x.dtype), (key * temperature.to(wide).exp()[:, None]).to(x.dtype)


def _shift(x: Tensor, now: int) -> Tensor:
    """[C, 2]: the value shift as a convolution by channel."""
    taps = x.new_zeros(x.shape[1], 2)
    taps[:now, 1] = 1
    taps[now:, 0] = 1
    return taps


def _means(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """[T, queries, d] and [T, keys, d] -> what is added to each behind the convolutions, of the same shapes."""
    group = query.shape[1] // key.shape[1]
    of_queries = (query + key.repeat_interleave(group, dim=1)) / 2
    return of_queries, of_queries.unflatten(1, (-1, group)).mean(2)


def _unit(heads: Tensor, least: float) -> Tensor:
    """[T, H, d], each head brought to a length of sqrt(d); one shorter than `least` is multiplied as if it had that."""
    norm = torch.linalg.vector_norm(heads, dim=-1, keepdim=True).clamp(min=least)
    return heads * (heads.shape[-1] ** 0.5 / norm)


def _split(x: Tensor, heads: QueryHeads) -> tuple[Tensor, ...]:
    return x.split([heads.queries * heads.width, heads.keys * heads.width], dim=1)


def _heads(x: Tensor, heads: QueryHeads) -> Tensor:
    return x.unflatten(1, (-1, heads.width))


class _Mix(torch.autograd.Function):
    """The second convolution: x [T, C], weight [C, d, W] and before [C] of one dtype, bias [C] of a dtype at least as
    wide as float32, with sources [T, W] -> [T, C] in that. `before` is x where there is no row."""

    @staticmethod
    def forward(ctx: Any, sources: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
        ctx.save_for_backward(sources, x, weight, before)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            product = _taken(sources, x, before, weight).to(wide) @ _matrices(weight).to(wide)
        out = _rows(product[..., : weight.shape[1]], x.shape[0])
        return out if bias is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """A row's gradient is a sum over the rows that read it, in their order."""
        sources, x, weight, before = ctx.saved_tensors
        wide, (channels, width, taps) = grad.dtype, weight.shape
        rounded = grad.to(x.dtype).to(wide)  # an operand of products
        blocks = _blocks(rounded, width)
        taken = _taken(sources, x, before, weight).to(wide)
        with torch.autocast(x.device.type, enabled=False):
            d_taken = _rows(blocks @ _matrices(weight)[..., :width].to(wide).mT.contiguous(), x.shape[0])
            d_matrices = (taken.mT.contiguous() @ blocks).sum(0)
        d_taken = d_taken.unflatten(1, (channels // width, -1))[..., : taps * width]
        d_taken = d_taken.unflatten(2, (taps, width)).transpose(1, 2).reshape(-1, channels)
        d_x = add_by_place(grad.new_zeros(x.shape[0] + 1, channels), sources.flatten(), d_taken)
        d_matrices = d_matrices[:, : taps * width].unflatten(1, (taps, width))
        d_weight = d_matrices.permute(0, 3, 2, 1).reshape(weight.shape)
        d_bias = blocks.sum(2).sum(0).flatten() if ctx.needs_input_grad[3] else None
        return None, d_x[:-1].to(x.dtype), d_weight.to(weight.dtype), d_bias, d_x[-1].to(before.dtype)


def _taken(sources: Tensor, x: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    """What each tap of each row reads, [blocks, H, _BLOCK, W * d] and zeros behind it."""
    taken = torch.cat([x, before[None]])[sources]  # [T, W, C]
    by_head = taken.unflatten(2, (-1, weight.shape[1])).transpose(1, 2).flatten(2)  # [T, H, W * d]
    filled = pad(by_head, (0, -by_head.shape[2] % LINE))
    return _blocks(filled.flatten(1), filled.shape[2])


def _matrices(weight: Tensor) -> Tensor:
    """[C, d, W] -> what a head's rows are multiplied with, [H, W * d, d], and zeros around it."""
    matrices = weight.unflatten(0, (-1, weight.shape[1])).permute(0, 3, 2, 1).flatten(1, 2)
    return pad(matrices, (0, -matrices.shape[2] % LINE, 0, -matrices.shape[1] % LINE)).contiguous()


def _blocks(rows: Tensor, width: int) -> Tensor:
    """[T, H * width] -> [blocks, H, _BLOCK, width], filled up with zeros. Contiguous: of views the library multiplies
    one block by another path than many."""
    padded = pad(rows, (0, 0, 0, -rows.shape[0] % _BLOCK))
    return padded.view(-1, _BLOCK, rows.shape[1] // width, width).transpose(1, 2).contiguous()


def _rows(blocks: Tensor, rows: int) -> Tensor:
    """[blocks, H, _BLOCK, width] -> [rows, H * width]."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)[:rows]
