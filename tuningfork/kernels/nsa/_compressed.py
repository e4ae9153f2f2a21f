# mypy: disable-error-code=no-untyped-def
"""Compressed attention, and the choice of blocks, as an op of a GPU: launches
`_compressed_kernels.py` and `_choice_kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.nsa import _choice_kernels as choice_kernels
from tuningfork.kernels.nsa import _compressed_kernels as kernels
from tuningfork.kernels.nsa._launch import LOG2_E, Config, config_of, empty_like, readable, strides, sum_parts, widths
from tuningfork.kernels.nsa._tables import TABLE_TILE, Entries

TYPICALLY_SEEN = 512  # compressed blocks that a row sees
_SCORES = 1 << 24  # scores of blocks that are held at once, twice


def _of_entries(config: Config, step: int, warps: int, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "TILE": config.tile,
        "STEP": step,
        "TABLE_TILE": TABLE_TILE,
        "num_warps": warps,
        "num_stages": config.stages,
        **widths(q, v),
    }


@torch.library.custom_op("tuningfork::nsa_compressed", mutates_args=())
def attend_compressed(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float,
    length: int, stride: int, select: int, count: int, initial: int, local: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [T, H, dk]; k [E, G, dk]; v [E, G, dv] -> out [T, H, dv], base-2 log-sum-exp float32 [H, T], and the chosen
    blocks, int32 [T, G, count].

    Args:
        tables: the layout's segments, then Entries.
    """
    segments, entries = tables[0], Entries(*tables[1:])
    q, k, v = readable(q, k, v)
    (rows, heads, _), groups = q.shape, k.shape[1]
    config, unit = config_of(q, v), scale * LOG2_E
    out = q.new_empty(rows, heads, v.shape[2])
    lse = q.new_empty(heads, rows, dtype=torch.float32)
    chosen = q.new_empty(rows, groups, count, dtype=torch.int32)
    parts = TABLE_TILE // config.tile
    where = entries.query_tiles, segments, entries.segments, entries.steps, entries.seams
    constants = _of_entries(config, config.step, config.warps, q, k, v)
    kernels.nsa_compressed_forward[(heads, len(entries.query_tiles) * parts)](
        q, k, v, out, lse, *where, *strides(q, k, v), rows, unit, LENGTH=length, STRIDE=stride, **constants
    )

    row_scores = (rows - 1) // select + 1  # of the longest path that there may be
    at_once = max(1, min(len(entries.query_tiles), _SCORES // (TABLE_TILE * groups * row_scores)))
    room = at_once * TABLE_TILE, groups, row_scores
    scores, carried = (q.new_empty(room, dtype=torch.float32) for _ in range(2))
    places = triton.next_power_of_2(select // stride)
    blocks = max(1, config.tile // places)
    choosing = {"SELECT": select, "COUNT": count, "TABLE_TILE": TABLE_TILE}
    scoring = {name: constants[name] for name in ("GROUP", "KEY", "KEY_LANES", "TILE", "PRECISION")}
    lanes = triton.next_power_of_2(row_scores)
    for first in range(0, len(entries.query_tiles), at_once):
        tiles = min(at_once, len(entries.query_tiles) - first)
        choice_kernels.nsa_scores[(triton.cdiv(row_scores, blocks), groups, tiles * parts)](
            q, k, lse, scores, carried, *where, *strides(q, k), rows, unit, first, row_scores,
            LENGTH=length, STRIDE=stride, BLOCKS=blocks, PLACES=places, **scoring, **choosing,
            num_warps=config.warps, num_stages=max(2, config.stages),
        )  # fmt: skip
        choice_kernels.nsa_choose[(tiles * TABLE_TILE, groups)](
            scores, carried, chosen, *where[:2], first, row_scores, INITIAL=initial, LOCAL=local, LANES=lanes,
            COUNT_LANES=triton.next_power_of_2(count), **choosing, num_warps=1 if lanes <= 2048 else 4,
        )  # fmt: skip
    return out, lse, chosen


@torch.library.custom_op("tuningfork::nsa_compressed_backward", mutates_args=())
def _compressed_backward(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    length: int, stride: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    segments, entries = tables[0], Entries(*tables[1:])
    q, k, v = readable(q, k, v)
    out, grad = out.contiguous(), grad.contiguous()
    (rows, heads, _), groups = q.shape, k.shape[1]
    config, unit = config_of(q, v), scale * LOG2_E
    parts = TABLE_TILE // config.tile
    delta = torch.empty_like(lse)
    d_q, d_k, d_v = empty_like(q, k, v)
    constants = _of_entries(config, config.step, config.warps, q, k, v)
    kernels.nsa_compressed_query_gradient[(heads, len(entries.query_tiles) * parts)](
        q, k, v, out, grad, lse, delta, d_q, entries.query_tiles, segments, entries.segments, entries.steps,
        entries.seams, *strides(q, k, v), rows, unit, scale, LENGTH=length, STRIDE=stride, **constants,
    )  # fmt: skip
    room = len(entries.parts), groups, TABLE_TILE
    partial = [q.new_empty(*room, t.shape[2], dtype=torch.float32) for t in (k, v)]
    kernels.nsa_compressed_key_gradient[(groups, len(entries.parts) * parts)](
        q, k, v, grad, lse, delta, *partial, entries.parts, entries.rows, *strides(q, k, v), rows, unit, scale,
        LENGTH=length, **_of_entries(config, config.readers, config.reader_warps, q, k, v),
    )  # fmt: skip
    for parts_of, of in zip(partial, (d_k, d_v), strict=True):
        sum_parts(parts_of, of, entries.starts, entries.places, entries.part_starts, TABLE_TILE, False)
    return d_q, d_k, d_v


@attend_compressed.register_fake
def _(tables, q, k, v, scale, length, stride, select, count, initial, local):
    rows, heads = q.shape[:2]
    chosen = q.new_empty(rows, k.shape[1], count, dtype=torch.int32)
    return q.new_empty(rows, heads, v.shape[2]), q.new_empty(heads, rows, dtype=torch.float32), chosen


@_compressed_backward.register_fake
def _(tables, q, k, v, out, lse, grad, scale, length, stride):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _save_compressed(ctx, inputs, output):
    tables, q, k, v, ctx.scale, ctx.length, ctx.stride, *_ = inputs
    out, lse, chosen = output
    ctx.mark_non_differentiable(lse, chosen)
    ctx.save_for_backward(*tables, q, k, v, out, lse)


def _backward_compressed(ctx, grad, *_):
    *tables, q, k, v, out, lse = ctx.saved_tensors
    gradients = _compressed_backward(tables, q, k, v, out, lse, grad, ctx.scale, ctx.length, ctx.stride)
    return ([None] * len(tables), *gradients, *(None,) * 7)


attend_compressed.register_autograd(_backward_compressed, setup_context=_save_compressed)


@register_flop_formula(torch.ops.tuningfork.nsa_compressed)
def _(tables, q, k, v, *_, **__) -> int:
    """From shapes alone, as if each row saw TYPICALLY_SEEN blocks, and chose among them: by this the compiler decides
    under an activation budget what is cheap to recompute."""
    rows, heads, width = q
    return 2 * rows * min(k[0], TYPICALLY_SEEN) * heads * (2 * width + v[2])
