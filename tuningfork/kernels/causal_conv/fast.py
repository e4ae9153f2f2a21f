# mypy: disable-error-code=no-untyped-def
"""Causal convolution in Triton: rows are read where they lie, and each result is written once (`_conv_kernels.py`).

Forward, a program gathers the taps of its rows, adds them up and brings a head to its norm before it writes anything.
Backward there are three kernels:

- the gradient of what the taps add up to, which needs the convolution again; with it, sums over so many rows for the
  gradients of weight and bias, which are then added up by themselves;
- the gradient of x, from the rows behind each: nearly always it is these that read it;
- once more that of *edges*, the last rows of a segment that others continue: from a list of all rows that read them.

Nothing is added up atomically. A gradient of x is added up in the order of the rows that read it, by the same
instructions in both kernels, so that it has the same bits wherever these rows lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.causal_conv import _conv_kernels as kernels
from tuningfork.kernels.causal_conv.plain import NORM_EPS, Heads, PlainCausalConv
from tuningfork.records import ForkLayout

WIDEST = 4  # taps; the tables grow with them
WIDEST_HEAD = 512
_REACH = WIDEST - 1

# How programs are cut up is fixed, since tuning at run time would change the order of addition.
_LANES = 128  # channels of a program, where there are no heads
_ELEMENTS, _WARPS = 4096, 8  # of a program: its rows times its channels
_SUMMED, _SUMMED_WARPS = 1024, 4  # the same where a program goes on through a tile, for its sums stay in registers
_TILE = 128  # rows of that
_EDGE = {"LANES": 512, "AT_ONCE": 8}


class TritonCausalConv(NamedTuple):
    """Who reads whom in a pack of T rows and S segments, all on the GPU."""

    sources: Tensor  # int32 [T, _REACH], the rows at a distance of 1, 2, ... before each; -1 for none
    edges: Tensor  # int32 [S * _REACH, 3]: row, and where its readers begin and end; both 0 where there is none
    readers: Tensor  # int32 [T * WIDEST], WIDEST * row + distance to what it reads; in the order of that, then of rows

    @classmethod
    def prepare(cls, layout: ForkLayout) -> TritonCausalConv:
        """The tables of a layout, on its device, made without waiting for it."""
        previous = PlainCausalConv.prepare(layout).previous
        rows, device = len(previous) - 1, previous.device
        taps = [torch.arange(rows, device=device)]
        for _ in range(_REACH):
            taps.append(previous[taps[-1]])
        read = torch.stack(taps, 1)
        sources = torch.where(read < rows, read, -1)[:, 1:]
        by_read, readers = read.flatten().sort(stable=True)

        start, end, _, _, subtree_end, _ = layout.segments.long().unbind(1)
        edge = end[:, None] - 1 - torch.arange(_REACH, device=device)
        there = (subtree_end > end)[:, None] & (edge >= start[:, None])
        bounds = (torch.searchsorted(by_read, edge, right=right) for right in (False, True))
        edges = torch.stack([torch.where(there, t, 0) for t in (edge, *bounds)], -1).flatten(0, 1)
        return cls(*(t.int().contiguous() for t in (sources, edges, readers)))

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, silu: bool = True) -> Tensor:
        """As PlainCausalConv.conv has it, on the GPU of the layout.

        x is float32, bfloat16 or float16; weight and bias are of any of these. Weights are at most WIDEST wide, which
        `kernels.select` refuses to exceed: here nothing is checked.
        """
        _, _, out = _conv(*self, x, weight, bias, silu, 0, 0)
        return out

    def query_key_value(self, x: Tensor, weight: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """As PlainCausalConv.query_key_value has it, for tensors as `conv` takes; keys at most WIDEST_HEAD wide."""
        query, key, value = _conv(*self, x, weight, None, True, heads.keys, heads.key_width)
        return query, key, value.unflatten(1, (heads.values, heads.value_width))


class _Part(NamedTuple):
    """Channels that are treated alike: those of queries, those of keys, or the rest."""

    place: int  # among the results
    channels: slice
    scale: float
    constants: Mapping[str, Any]

    @property
    def size(self) -> int:
        return self.channels.stop - self.channels.start

    @property
    def blocks(self) -> int:
        """Programs beside each other."""
        return int(triton.cdiv(self.size, self.constants["SPAN"]))

    def rows(self, elements: int) -> int:
        """Of a program that has so many elements at once."""
        return min(_TILE, elements // self.constants["LANES"])


def _parts(channels: int, keys: int, key_width: int, silu: bool, has_bias: bool, width: int) -> list[_Part]:
    constants = {"SILU": silu, "HAS_BIAS": has_bias, "WIDTH": width, "REACH": _REACH}
    rest = {"NORMED": False, "SPAN": _LANES, "LANES": _LANES, **constants}
    head = {**rest, "NORMED": True, "SPAN": key_width, "LANES": triton.next_power_of_2(key_width)}
    own = keys * key_width
    normed = [_Part(0, slice(0, own), key_width**-0.5, head), _Part(1, slice(own, 2 * own), 1.0, head)] if keys else []
    return [*normed, _Part(2, slice(2 * own, channels), 1.0, rest)]


@torch.library.custom_op("tuningfork::causal_conv", mutates_args=())
def _conv(
    sources: Tensor, edges: Tensor, readers: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, keys: int, key_width: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [T, C] -> query and key [T, keys, key_width], and the channels behind theirs, [T, C - 2 * keys * key_width]."""
    x, taps = x if x.stride(1) == 1 else x.contiguous(), weight.t().contiguous()
    (rows, channels), width = x.shape, weight.shape[1]
    results = _results(x, keys, key_width)
    for part in _parts(channels, keys, key_width, silu, bias is not None, width):
        of, its_rows = part.channels, part.rows(_ELEMENTS)
        kernels.conv_forward[(part.blocks, triton.cdiv(rows, its_rows))](
            x[:, of], taps[:, of], taps if bias is None else bias[of], sources, results[part.place],
            rows, x.stride(0), channels, part.size, part.scale, NORM_EPS,
            **part.constants, ROWS=its_rows, num_warps=_WARPS,
        )  # fmt: skip
    return results


@torch.library.custom_op("tuningfork::causal_conv_backward", mutates_args=())
def _conv_backward(
    sources: Tensor, edges: Tensor, readers: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, keys: int, key_width: int,
    d_query: Tensor, d_key: Tensor, d_value: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and float32 [W + 1, C]: of each tap's weights, then of the bias."""
    x, taps = x if x.stride(1) == 1 else x.contiguous(), weight.t().contiguous()
    (rows, channels), width = x.shape, weight.shape[1]
    gradients = [t.contiguous() for t in (d_query, d_key, d_value)]
    tiles = triton.cdiv(rows, _TILE)
    sums = x.new_empty((tiles, width + 1, channels), dtype=torch.float32)
    d_convolved = x.new_empty(x.shape) if silu else gradients[2]  # without SiLU there are no heads, and it is the same
    for part in _parts(channels, keys, key_width, silu, bias is not None, width):
        of = part.channels
        kernels.conv_gradient[(part.blocks, tiles)](
            x[:, of], taps[:, of], taps if bias is None else bias[of], sources, gradients[part.place],
            d_convolved[:, of], sums[:, :, of],
            rows, x.stride(0), channels, channels, channels, part.size, part.scale, NORM_EPS,
            **part.constants, ROWS=part.rows(_SUMMED), TILE=_TILE, num_warps=_SUMMED_WARPS,
        )  # fmt: skip
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    its_rows = _ELEMENTS // _LANES
    kernels.conv_gradient_of_rows[(triton.cdiv(channels, _LANES), triton.cdiv(rows, its_rows))](
        d_convolved, taps, sources, d_x, rows, channels, channels,
        WIDTH=width, REACH=_REACH, LANES=_LANES, ROWS=its_rows, num_warps=_WARPS,
    )  # fmt: skip
    kernels.conv_gradient_of_edges[(len(edges), triton.cdiv(channels, _EDGE["LANES"]))](
        d_convolved, taps, edges, readers, d_x, channels, channels, WIDTH=width, REACH=_REACH, **_EDGE
    )  # fmt: skip
    return d_x, sums.sum(0)


def _results(x: Tensor, keys: int, key_width: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, channels = x.shape
    head = rows, keys, key_width
    return x.new_empty(head), x.new_empty(head), x.new_empty((rows, channels - 2 * keys * key_width))


@_conv.register_fake
def _(sources, edges, readers, x, weight, bias, silu, keys, key_width):
    return _results(x, keys, key_width)


@_conv_backward.register_fake
def _(sources, edges, readers, x, weight, bias, silu, keys, key_width, d_query, d_key, d_value):
    return x.new_empty(x.shape), x.new_empty((weight.shape[1] + 1, x.shape[1]), dtype=torch.float32)


def _save(ctx, inputs, output):
    *tensors, ctx.silu, ctx.keys, ctx.key_width = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *gradients):
    *_, weight, bias = tensors = ctx.saved_tensors
    d_x, sums = _conv_backward(*tensors, ctx.silu, ctx.keys, ctx.key_width, *gradients)
    d_weight = sums[:-1].t().to(weight.dtype)
    d_bias = None if bias is None else sums[-1].to(bias.dtype)
    return (*(None for _ in TritonCausalConv._fields), d_x, d_weight, d_bias, None, None, None)


_conv.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.tuningfork.causal_conv)
def _(sources, edges, readers, x, weight, *_, **__) -> int:
    """By this the compiler decides under an activation budget what is cheap to recompute, as the convolution is."""
    return 2 * x[0] * x[1] * weight[1]
