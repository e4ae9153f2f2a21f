# mypy: disable-error-code=no-untyped-def
"""Fork attention in Triton: rows that several segments see are read where they lie, never gathered.

A tile is up to TILE consecutive rows of one segment (records.ForkLayout), and one program works on one tile of one head
(`_fork_kernels.py`):

- forward, and the gradient of the queries: the tile's queries read all keys of the segment's ancestors, which are one
  run of rows, then the segment's own keys up to themselves;
- the gradient of keys and values: the tile's keys read the queries of every row that sees them, which lie side by side:
  the rest of the segment and its descendants, to the end of its subtree.

The arithmetic of a tile's outputs depends on its segment and ancestors alone, so an answer has the same bits in every
pack, at every place in its example, with its prompt shared or repeated. Nothing is added up atomically: gradients
repeat, too.

The softmax is FlashAttention-2's (Dao 2023, arXiv:2307.08691): online, its log-sum-exp kept for the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.attention import _fork_kernels as kernels
from tuningfork.records import ForkLayout

WIDEST_HEAD = 512
TYPICALLY_SEEN = 512  # rows that a row attends to
LOG2_E = 1.4426950408889634
TABLE_TILE = 64  # rows of a tile in the table; programs whose registers hold fewer take a part of one


class ForkAttention(NamedTuple):
    """Segments and tiles of a pack, all on the GPU; tiles with the most work come first, so that none is left alone at
    the end."""

    segments: Tensor  # int32 [S, 6], see records.ForkLayout
    query_tiles: Tensor  # int32 [tiles, 2]: segment, first row
    key_tiles: Tensor  # the same tiles in another order
    position_of_row: Tensor

    @classmethod
    def prepare(cls, layout: ForkLayout) -> ForkAttention:
        """The tiles of a pack's segments, on the device of its layout, made without waiting for it.

        Args:
            layout: of T rows in S segments, on a GPU. There is room for T // 64 + S tiles; where fewer are needed,
                what is over lies beyond the end of its segment, and no row is read or written for it.
        """
        segments = layout.segments
        start, end, _, ancestors_start, ancestors_end, subtree_end = segments.unbind(1)
        ends = ((end - start + TABLE_TILE - 1) // TABLE_TILE).cumsum(0)  # tiles up to and with each segment
        # As many places as there can be tiles: the count is then known without asking the device.
        place = torch.arange(len(layout.position_of_row) // TABLE_TILE + len(segments), device=segments.device)
        segment = torch.searchsorted(ends, place, right=True).clamp(max=len(segments) - 1)
        before = torch.where(segment > 0, ends[segment - 1], 0)
        first = start[segment] + (place - before) * TABLE_TILE  # beyond its segment's end where there is no tile
        tiles = torch.stack([segment, first], 1).int()
        there = place < ends[-1]
        above = ancestors_end - ancestors_start
        keys_read = torch.where(there, above[segment] + first - start[segment], -1)
        queries_read = torch.where(there, subtree_end[segment] - first, -1)
        query_tiles, key_tiles = (tiles[cost.argsort(descending=True)] for cost in (keys_read, queries_read))
        return cls(segments, query_tiles, key_tiles, layout.position_of_row)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Query [T, H, d], key [T, H_kv, d] and value [T, H_kv, d'] -> [T, H, d'], as PlainAttention.attend has it.

        All on the GPU of the layout, of one dtype, float32 or bfloat16, which the result has too; scores and
        sums are float32. H is a multiple of H_kv, d and d' are at most WIDEST_HEAD, which `kernels.select` refuses
        to exceed: here nothing is checked. Gradients flow to query, key, value and sinks, in their dtypes.

        Args:
            scale: of the products of queries and keys.
            window: keys that a row sees at most, itself included; None sees the whole sequence.
            softcap: of the scores: s -> softcap tanh(s / softcap); None has none.
            sinks: [H], of either dtype, see PlainAttention.attend.
        """
        width, value_width = query.shape[-1], value.shape[-1]
        if width < value_width:  # one width for all in the kernels; zeros change no score
            query, key = (pad(t, (0, value_width - width)) for t in (query, key))
        elif value_width < width:
            value = pad(value, (0, width - value_width))
        out, _ = _attend(*self, query, key, value, sinks, scale, window or 0, softcap or 0.0)
        return out[..., :value_width]


class _Config(NamedTuple):
    """How a kernel is cut up: rows of a tile, rows of a step through the others, warps, pipeline stages."""

    tile: int
    step: int
    warps: int
    stages: int


def _config(q: Tensor) -> _Config:
    """Fixed by dtype and head width, never tuned at run time: tuning would change the order of addition.

    Answers are short, so small tiles waste least; on an H100 this was the fastest of eleven for all three kernels.
    """
    wide = q.shape[2] > 128
    if q.shape[2] > 256:  # what fits a multiprocessor's registers and shared memory; chosen by no measurement
        return _Config(16, 16, 8, 1) if q.dtype.itemsize == 4 else _Config(32, 16, 8, 1)
    if q.dtype.itemsize == 4:
        return _Config(32, 16, 4, 1) if wide else _Config(64, 32, 4, 1)
    return _Config(64, 32, 4, 2 if wide else 3)


def _lanes(width: int) -> int:
    """Columns of a head in registers: matrix units take powers of two, from 16 up."""
    return max(16, triton.next_power_of_2(width))


def _constants(q: Tensor, k: Tensor, window: int, softcap: float) -> dict[str, object]:
    config = _config(q)
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HAS_CAP": softcap > 0,
        "HAS_WINDOW": window > 0,
        "WIDTH": q.shape[2],
        "LANES": _lanes(q.shape[2]),
        "TILE": config.tile,
        "STEP": config.step,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "TABLE_TILE": TABLE_TILE,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))


def _programs(tiles: Tensor, q: Tensor) -> int:
    return len(tiles) * (TABLE_TILE // _config(q).tile)


@torch.library.custom_op("tuningfork::fork_attention", mutates_args=())
def _attend(
    segments: Tensor, query_tiles: Tensor, key_tiles: Tensor, position_of_row: Tensor,
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, d]; k, v [T, H_kv, d]; sinks [H] -> (out [T, H, d], base-2 log-sum-exp float32 [H, T], sinks included).

    A window or a softcap of 0 is none.
    """
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    kernels.fork_forward[(heads, _programs(query_tiles, q))](
        q, k, v, q if sinks is None else sinks.contiguous(), out, lse, query_tiles, segments, *_strides(q, k, v), rows,
        scale, softcap, window, HAS_SINKS=sinks is not None, **_constants(q, k, window, softcap),
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("tuningfork::fork_attention_backward", mutates_args=())
def _attend_backward(
    segments: Tensor, query_tiles: Tensor, key_tiles: Tensor, position_of_row: Tensor,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, and what the softmax takes off every score's gradient, float32 [H, T]."""
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    out, grad = out.contiguous(), grad.contiguous()
    rows, heads, width = q.shape
    delta = torch.empty_like(lse)
    d_q, d_k, d_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    kernels.fork_weighted_gradient[(heads, triton.cdiv(rows, 64))](
        out, grad, delta, rows, WIDTH=width, LANES=_lanes(width), ROWS=64
    )
    sizes = (*_strides(q, k, v), rows, scale, softcap, window)
    constants = _constants(q, k, window, softcap)
    kernels.fork_query_gradient[(heads, _programs(query_tiles, q))](
        q, k, v, grad, lse, delta, d_q, query_tiles, segments, *sizes, **constants
    )
    kernels.fork_key_gradient[(k.shape[1], _programs(key_tiles, q))](
        q, k, v, grad, lse, delta, d_k, d_v, key_tiles, segments, position_of_row, *sizes, **constants
    )
    return d_q, d_k, d_v, delta


@_attend.register_fake
def _(segments, query_tiles, key_tiles, position_of_row, q, k, v, sinks, scale, window, softcap):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_attend_backward.register_fake
def _(segments, query_tiles, key_tiles, position_of_row, q, k, v, out, lse, grad, scale, window, softcap):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, lse))


def _save(ctx, inputs, output):
    *tensors, sinks, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(sinks, *tensors, *output)


def _backward(ctx, grad, _):
    sinks, *tensors, out, lse = ctx.saved_tensors
    *gradients, delta = _attend_backward(*tensors, out, lse, grad, ctx.scale, ctx.window, ctx.softcap)
    d_sinks = None
    if sinks is not None:  # a sink's weight is that of a key whose value is zero
        weight = torch.exp2(sinks.float()[:, None] * LOG2_E - lse)
        d_sinks = -(weight * delta).sum(1).to(sinks.dtype)
    return (None, None, None, None, *gradients, d_sinks, None, None, None)


_attend.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.tuningfork.fork_attention)
def _(segments, query_tiles, key_tiles, position_of_row, q, k, v, *_, **__) -> int:
    """About what it costs, from shapes alone, as if each row saw TYPICALLY_SEEN others: by this the compiler decides
    under an activation budget what is cheap to recompute. Without it, it takes attention for free."""
    rows, heads, width = q
    return 4 * rows * min(rows, TYPICALLY_SEEN) * heads * width
