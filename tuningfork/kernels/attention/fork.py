# mypy: disable-error-code=no-untyped-def
"""Fork attention in Triton: rows that several segments see are read where they lie, never gathered.

A tile is up to TILE consecutive rows of one segment (records.ForkLayout), and one program works on one tile of one head
(`_fork_kernels.py`):

- forward, and the gradient of the queries: the tile's queries read the keys of their path in the layout's steps, from
  its first position, or from the step in which the window of the tile's first row begins;
- the gradient of keys and values: the tile's keys read the queries of every row that sees them, which lie side by side:
  the rest of the segment and its descendants, to the end of its subtree. Where these are so many that few programs
  would work long after all others, they are cut into parts, whose sums are added in their order.

A step is the same instructions on the same positions whatever the path is cut into, and what a row does not see of it
leaves the row's bits as they are. So a row's output, and the gradient of its query, have the same bits in every pack
that has its path. The gradients of keys and values are sums over a subtree's rows in their order. Nothing is added up
atomically: gradients repeat, too.

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
from tuningfork.kernels.tables import spread
from tuningfork.records import ForkLayout

WIDEST_HEAD = 512
WIDEST_WINDOW = 1 << 30  # wider than any pack, and a row's number and a window still add up in int32
TYPICALLY_SEEN = 512  # rows that a row attends to
LOG2_E = 1.4426950408889634
TABLE_TILE = 64  # rows of a tile in the table; programs whose registers hold fewer take a part of one
SMALLEST_PART = 2048  # rows that a part of a tile's readers has at least
MORE_PARTS = 64  # there are at most so many parts more than tiles: none has more than a 64th of a pack's work


class ForkAttention(NamedTuple):
    """Segments and tiles of a pack, all on the GPU; tiles with the most work come first, so that none is left alone at
    the end."""

    segments: Tensor  # int32 [S, 6], as the next two of records.ForkLayout
    steps: Tensor
    seams: Tensor
    query_tiles: Tensor  # int32 [tiles, 2]: segment, first row
    key_parts: Tensor  # int32 [tiles + MORE_PARTS, 5]: segment, first row, readers' first row and end, slot or -1
    merges: Tensor  # int32 [MORE_PARTS, 4], of tiles with several parts: first row, segment's end, first slot, parts
    position_of_row: Tensor

    @classmethod
    def prepare(cls, layout: ForkLayout) -> ForkAttention:
        """The tiles of a pack's segments, on the device of its layout, made without waiting for it.

        Args:
            layout: of T rows in S segments, on a GPU. There is room for T // 64 + S tiles; where fewer are needed,
                what is over lies beyond the end of its segment, and no row is read or written for it.
        """
        segments = layout.segments
        start, end, _, first_position, subtree_end, _ = segments.unbind(1)
        rows = len(layout.position_of_row)
        places = rows // TABLE_TILE + len(segments)
        segment, number, there = spread((end - start + TABLE_TILE - 1) // TABLE_TILE, places)
        first = start[segment] + number * TABLE_TILE  # beyond its segment's end where there is no tile
        keys_read = torch.where(there, first_position[segment] + first - start[segment], -1)
        query_tiles = torch.stack([segment, first], 1)[keys_read.argsort(descending=True)]

        readers = torch.where(there, subtree_end[segment] - first, 0)
        length = _round_up(_round_up(readers.sum(), MORE_PARTS) // MORE_PARTS, TABLE_TILE).clamp(min=SMALLEST_PART)
        count = (readers + length - 1) // length
        slots = torch.where(count > 1, count, 0)
        first_slot = slots.cumsum(0) - slots
        tile, number, there = spread(count, places + MORE_PARTS)
        begin = first[tile] + number * length
        stop = torch.minimum(begin + length, subtree_end[segment[tile]])
        slot = torch.where(count[tile] > 1, first_slot[tile] + number, -1)
        its_first = torch.where(there, first[tile], rows)
        parts = torch.stack([segment[tile], its_first, begin, stop, slot], 1)
        parts = parts[torch.where(there, stop - begin, -1).argsort(descending=True)]

        tile, _, there = spread((count > 1).long(), MORE_PARTS)
        its_end = torch.where(there, end[segment[tile]], 0)
        merges = torch.stack([first[tile], its_end, first_slot[tile], count[tile]], 1)
        return cls(
            segments=segments,
            steps=layout.steps,
            seams=layout.seams,
            query_tiles=query_tiles.int(),
            key_parts=parts.int(),
            merges=merges.int(),
            position_of_row=layout.position_of_row,
        )

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
            scale: of the products of queries and keys, positive.
            window: keys that a row sees at most, itself included; None sees the whole sequence.
            softcap: of the scores: s -> softcap tanh(s / softcap); None has none.
            sinks: [H], of either dtype, see PlainAttention.attend.
        """
        width, value_width = query.shape[-1], value.shape[-1]
        if width < value_width:  # one width for all in the kernels; zeros change no score
            query, key = (pad(t, (0, value_width - width)) for t in (query, key))
        elif value_width < width:
            value = pad(value, (0, width - value_width))
        out, _ = _attend(*self, query, key, value, sinks, scale, min(window or 0, WIDEST_WINDOW), softcap or 0.0)
        return out[..., :value_width]


def _round_up(value: Tensor, multiple: int) -> Tensor:
    return (value + multiple - 1) // multiple * multiple


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


def _key_config(q: Tensor) -> _Config:
    """The same of the gradient of keys, whose programs hold two sums: of heads 192 wide, tiles of 32 rows take half the
    time of those of 64, on an H200."""
    config = _config(q)
    return config._replace(tile=32) if 128 < q.shape[2] <= 256 and q.dtype.itemsize == 2 else config


def _lanes(width: int) -> int:
    """Columns of a head in registers: matrix units take powers of two, from 16 up."""
    return max(16, triton.next_power_of_2(width))


def _constants(config: _Config, q: Tensor, k: Tensor, window: int, softcap: float) -> dict[str, object]:
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


def _units(scale: float, softcap: float) -> tuple[float, float]:
    """What the kernels call squeeze and unit."""
    return (scale / softcap, softcap * LOG2_E) if softcap else (1.0, scale * LOG2_E)


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))


def _programs(tiles: Tensor, config: _Config) -> int:
    return len(tiles) * (TABLE_TILE // config.tile)


@torch.library.custom_op("tuningfork::fork_attention", mutates_args=())
def _attend(
    segments: Tensor, steps: Tensor, seams: Tensor, query_tiles: Tensor, key_parts: Tensor, merges: Tensor,
    position_of_row: Tensor,
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, H, d]; k, v [T, H_kv, d]; sinks [H] -> (out [T, H, d], base-2 log-sum-exp float32 [H, T], sinks included).

    A window or a softcap of 0 is none.
    """
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    config = _config(q)
    kernels.fork_forward[(heads, _programs(query_tiles, config))](
        q, k, v, q if sinks is None else sinks.contiguous(), out, lse, query_tiles, segments, steps, seams,
        *_strides(q, k, v), rows, *_units(scale, softcap), window,
        HAS_SINKS=sinks is not None, **_constants(config, q, k, window, softcap),
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("tuningfork::fork_attention_backward", mutates_args=())
def _attend_backward(
    segments: Tensor, steps: Tensor, seams: Tensor, query_tiles: Tensor, key_parts: Tensor, merges: Tensor,
    position_of_row: Tensor,
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
    sizes = (*_strides(q, k, v), rows, *_units(scale, softcap), window, scale)
    config = _config(q)
    kernels.fork_query_gradient[(heads, _programs(query_tiles, config))](
        q, k, v, grad, lse, delta, d_q, query_tiles, segments, steps, seams, *sizes,
        **_constants(config, q, k, window, softcap),
    )  # fmt: skip
    # Of n tiles with several parts, no more than MORE_PARTS are parts beyond the first: n <= MORE_PARTS.
    slots = 2 * MORE_PARTS if rows > SMALLEST_PART else 0
    partial_k, partial_v = torch.empty(2, slots * TABLE_TILE, *k.shape[1:], dtype=torch.float32, device=q.device)
    config = _key_config(q)
    kernels.fork_key_gradient[(k.shape[1], _programs(key_parts, config))](
        q, k, v, grad, lse, delta, d_k, d_v, partial_k, partial_v, key_parts, segments, position_of_row,
        *sizes, **_constants(config, q, k, window, softcap),
    )  # fmt: skip
    if slots:
        kernels.fork_merge[(len(merges), TABLE_TILE)](
            partial_k, partial_v, d_k, d_v, merges, k.shape[1] * width, CHUNK=1024, TABLE_TILE=TABLE_TILE
        )
    return d_q, d_k, d_v, delta


@_attend.register_fake
def _(
    segments, steps, seams, query_tiles, key_parts, merges, position_of_row, q, k, v, sinks, scale, window, softcap
):  # fmt: skip
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_attend_backward.register_fake
def _(
    segments, steps, seams, query_tiles, key_parts, merges, position_of_row, q, k, v, out, lse, grad, scale, window,
    softcap,
):  # fmt: skip
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
    return (*(None for _ in ForkAttention._fields), *gradients, d_sinks, None, None, None)


_attend.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.tuningfork.fork_attention)
def _(segments, steps, seams, query_tiles, key_parts, merges, position_of_row, q, *_, **__) -> int:
    """About what it costs, from shapes alone, as if each row saw TYPICALLY_SEEN others: by this the compiler decides
    under an activation budget what is cheap to recompute. Without it, it takes attention for free."""
    rows, heads, width = q
    return 4 * rows * min(rows, TYPICALLY_SEEN) * heads * width
