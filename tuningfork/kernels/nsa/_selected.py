# mypy: disable-error-code=no-untyped-def
"""Selected attention row by row as an op of a GPU: launches `_selected_kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.nsa import _selected_kernels as kernels
from tuningfork.kernels.nsa._launch import (
    LOG2_E,
    Config,
    config_of,
    empty_like,
    lanes_of,
    readable,
    strides,
    sum_parts,
    widths,
)
from tuningfork.kernels.nsa._readers import Readers
from tuningfork.kernels.nsa._tables import Pieces

_PART = 1024  # rows that a part of a piece's readers has at most


class SelectedTables(NamedTuple):
    """What selected attention is handed."""

    segments: Tensor
    steps: Tensor
    seams: Tensor
    position_of_row: Tensor
    pieces: Pieces

    @classmethod
    def of(cls, tables: Sequence[Tensor]) -> SelectedTables:
        segments, steps, seams, position_of_row, *pieces = tables
        return cls(segments, steps, seams, position_of_row, Pieces(*pieces))


def _of_pieces(q: Tensor, k: Tensor, v: Tensor, select: int, count: int) -> dict[str, Any]:
    """A piece is taken so many rows at a time as a step has."""
    config = config_of(q, v)
    return {
        "SELECT": select,
        "COUNT": count,
        "GROUP": q.shape[1] // k.shape[1],
        "KEYS": min(config.step, max(16, triton.next_power_of_2(select))),
        "num_warps": config.warps,
        "num_stages": config.stages,
        **widths(q, v),
    }


def _by_row(config: Config, constants: dict[str, Any]) -> dict[str, Any]:
    """Of kernels whose programs have one row each."""
    return {
        **constants,
        "COUNT_LANES": triton.next_power_of_2(constants["COUNT"]),
        "HEADS": lanes_of(constants["GROUP"]),
        "PARTS": triton.cdiv(constants["SELECT"], constants["KEYS"]),
        "num_warps": 4,
        "num_stages": config.row_stages,
    }


def lists_of(tables: Sequence[Tensor], chosen: Tensor) -> Tensor:
    """Which pieces the chosen blocks [T, G, n] are, int32 [T, G, n]; see `_selected_kernels.py`."""
    of = SelectedTables.of(tables)
    pieces = of.pieces
    chosen = chosen.contiguous()
    _, groups, count = chosen.shape
    lists = torch.empty_like(chosen)
    kernels.nsa_lists[(triton.cdiv(chosen.numel(), 256),)](
        chosen, lists, of.position_of_row, pieces.segment_of_row, pieces.piece_of_row, of.segments, of.steps, of.seams,
        chosen.numel(), len(pieces.rows) * groups, SELECT=pieces.rows.shape[1], GROUPS=groups, COUNT=count, PAIRS=256,
    )  # fmt: skip
    return lists


@torch.library.custom_op("tuningfork::nsa_selected", mutates_args=())
def attend_selected(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, dk]; k, v [T, G, dk or dv]; chosen int32 [T, G, n] -> out [T, H, dv], base-2 log-sum-exp float32 [T, H],
    and the lists of pieces int32 [T, G, n], see `_selected_kernels.py`.

    Args:
        tables: the layout's segments, steps, seams and position_of_row, then Pieces.
    """
    of = SelectedTables.of(tables)
    pieces = of.pieces
    q, k, v = readable(q, k, v)
    (rows, heads, _), (_, groups, count) = q.shape, chosen.shape
    none, select = len(pieces.rows) * groups, pieces.rows.shape[1]
    lists = lists_of(tables, chosen)
    out = q.new_empty(rows, heads, v.shape[2])
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    kernels.nsa_selected_forward[(rows, groups)](
        q, k, v, out, lse, lists, of.position_of_row, pieces.table, pieces.rows, *strides(q, k, v), rows, none,
        scale * LOG2_E, **_by_row(config_of(q, v), _of_pieces(q, k, v, select, count)),
    )  # fmt: skip
    return out, lse, lists


@torch.library.custom_op("tuningfork::nsa_selected_backward", mutates_args=())
def _selected_backward(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: Tensor, grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    of = SelectedTables.of(tables)
    pieces = of.pieces
    q, k, v = readable(q, k, v)
    out, grad = out.contiguous(), grad.contiguous()
    rows, (_, groups, count) = len(q), lists.shape
    none, select, unit = len(pieces.rows) * groups, pieces.rows.shape[1], scale * LOG2_E
    constants = _of_pieces(q, k, v, select, count)
    delta = torch.empty_like(lse)
    d_q, d_k, d_v = empty_like(q, k, v)
    where = of.position_of_row, pieces.table, pieces.rows
    kernels.nsa_selected_query_gradient[(rows, groups)](
        q, k, v, out, grad, lse, delta, d_q, lists, *where, *strides(q, k, v), rows, none, unit, scale,
        **_by_row(config_of(q, v), constants),
    )  # fmt: skip
    readers = Readers.of(lists, len(pieces.rows), rows, _PART)
    parts = readers.parts
    partial = [q.new_empty(len(parts), select, t.shape[2], dtype=torch.float32) for t in (k, v)]
    lines = max(config_of(q, v).lines, triton.next_power_of_2(constants["GROUP"]))
    kernels.nsa_selected_key_gradient[(len(parts), triton.cdiv(select, constants["KEYS"]))](
        q, k, v, grad, lse, delta, *partial, parts, readers.order, *where, *strides(q, k, v), rows, groups, unit, scale,
        LINES=lines, **constants,
    )  # fmt: skip
    for parts_of, total in zip(partial, (d_k, d_v), strict=True):
        sum_parts(parts_of, total, pieces.starts, pieces.places, readers.slot_starts, select, True)
    return d_q, d_k, d_v


@attend_selected.register_fake
def _(tables, q, k, v, chosen, scale):
    rows, heads = q.shape[:2]
    out = q.new_empty(rows, heads, v.shape[2])
    return out, q.new_empty(rows, heads, dtype=torch.float32), chosen.new_empty(chosen.shape)


@_selected_backward.register_fake
def _(tables, q, k, v, out, lse, lists, grad, scale):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _save_selected(ctx, inputs, output):
    tables, q, k, v, _, ctx.scale = inputs
    out, lse, lists = output
    ctx.mark_non_differentiable(lse, lists)
    ctx.save_for_backward(*tables, q, k, v, out, lse, lists)


def _backward_selected(ctx, grad, *_):
    *tables, q, k, v, out, lse, lists = ctx.saved_tensors
    gradients = _selected_backward(tables, q, k, v, out, lse, lists, grad, ctx.scale)
    return ([None] * len(tables), *gradients, None, None)


attend_selected.register_autograd(_backward_selected, setup_context=_save_selected)


def selected_flops(tables, q, k, v, chosen, *_, **__) -> int:
    """From shapes alone, as if each row read all of its blocks whole."""
    rows, heads, width = q
    select = tables[4 + Pieces._fields.index("rows")][1]
    return 2 * rows * min(rows, chosen[2] * select) * heads * (width + v[2])


register_flop_formula(torch.ops.tuningfork.nsa_selected)(selected_flops)
