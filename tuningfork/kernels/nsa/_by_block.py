# mypy: disable-error-code=no-untyped-def
"""Selected attention by blocks as an op of a GPU: launches `_block_kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.nsa import _block_kernels as kernels
from tuningfork.kernels.nsa._launch import LOG2_E, empty_like, lanes_of, readable, strides, sum_parts, widths
from tuningfork.kernels.nsa._readers import Readers, chunks_of, most_parts
from tuningfork.kernels.nsa._selected import SelectedTables, lists_of, selected_flops

_HELD = 1 << 29  # bytes that the slots of a launch's rows take
_PART = 512  # readers that a part of a piece's has at most
_MERGED = 16  # lines of a program that joins slots


class BlockConfig(NamedTuple):
    """How kernels by block are cut up, fixed as `_launch.Config` is. See `_block_kernels.py`.

    keys: rows of a piece at once.
    lines, warps, stages: of the forward kernel.
    gradient_lines, gradient_warps, gradient_stages: of the kernel of gradients, which holds four times as much.
    """

    keys: int
    lines: int
    warps: int
    stages: int
    gradient_lines: int
    gradient_warps: int
    gradient_stages: int


def block_config_of(q: Tensor, v: Tensor) -> BlockConfig:
    width = max(lanes_of(q.shape[2]), lanes_of(v.shape[2]))
    if q.dtype.itemsize == 4:
        return BlockConfig(16, 16, 4, 1, 16, 4, 1) if width > 128 else BlockConfig(32, 32, 4, 1, 32, 4, 1)
    if width > 128:
        return BlockConfig(32, 64, 4, 1, 32, 4, 1)
    return BlockConfig(64, 64, 4, 2, 64, 8, 2) if width > 64 else BlockConfig(64, 128, 4, 2, 64, 4, 1)


class _Work(NamedTuple):
    """How a call is cut up."""

    rows: int
    groups: int
    group: int  # query heads of one
    listed: int  # blocks of a row
    pieces: int
    select: int
    keys: int
    slices: int
    chunk: int  # rows of a launch

    @classmethod
    def of(cls, q: Tensor, v: Tensor, lists: Tensor, piece_rows: Tensor) -> _Work:
        """By sizes that all packs of a model have in common, but for `rows` and `pieces`."""
        (rows, *of_query), (pieces, select) = q.shape, piece_rows.shape
        heads, key, value, groups, count, select = map(int, (*of_query, v.shape[2], *lists.shape[1:], select))
        # As many keys as ever for shorter blocks too: Triton 3.6 gets keys' gradients wrong on an H200 for 16 and 32
        # keys, where 4 warps and no pipelining are fastest for 64.
        keys = block_config_of(q, v).keys
        group, slices = heads // groups, triton.cdiv(select, keys)
        of_a_row = group * count * slices * 4 * (max(key, value) + 2)
        chunk = max(64, triton.next_power_of_2(_HELD // of_a_row + 1) // 2)  # packs mostly have a power of two
        return cls(rows, groups, group, count, pieces, select, keys, slices, chunk)

    @property
    def none(self) -> int:
        return self.pieces * self.groups

    @property
    def room(self) -> tuple[int, ...]:
        """Of slots."""
        return min(self.chunk, self.rows), self.group, self.listed * self.slices

    def launches(self) -> Iterator[tuple[int, int, int, int]]:
        """Number, group, first row and end of each."""
        for number in range(chunks_of(self.rows, self.chunk) * self.groups):
            first = number // self.groups * self.chunk
            yield number, number % self.groups, first, min(first + self.chunk, self.rows)

    def programs(self, rows: int) -> tuple[int, int]:
        """Of a launch of so many rows."""
        return most_parts(self.pieces, 1, rows * self.listed, _PART), self.slices

    def merging(self, rows: int) -> tuple[int]:
        return (triton.cdiv(rows * self.group, _MERGED),)

    def slots(self) -> dict[str, Any]:
        return {"COUNT": self.listed, "GROUP": self.group, "SLICES": self.slices}

    def parts(self, lines: int, warps: int, stages: int) -> dict[str, Any]:
        return {
            **self.slots(),
            "SELECT": self.select,
            "KEYS": self.keys,
            "LINES": max(lines, triton.next_power_of_2(self.group)),
            "num_warps": warps,
            "num_stages": stages,
        }


@torch.library.custom_op("tuningfork::nsa_selected_by_block", mutates_args=())
def attend_by_block(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_selected.attend_selected`, and behind the lists their Readers."""
    of = SelectedTables.of(tables)
    pieces = of.pieces
    q, k, v = readable(q, k, v)
    (rows, heads, _), value = q.shape, v.shape[2]
    lists = lists_of(tables, chosen)
    work, config, unit = _Work.of(q, v, lists, pieces.rows), block_config_of(q, v), scale * LOG2_E
    readers = Readers.of(lists, work.pieces, work.chunk, _PART)
    out, lse = q.new_empty(rows, heads, value), q.new_empty(rows, heads, dtype=torch.float32)
    partial = q.new_empty(*work.room, value, dtype=torch.float32)
    tops, sums = (q.new_empty(work.room, dtype=torch.float32) for _ in range(2))
    merged = {"LINES": _MERGED, "SLOT_LANES": triton.next_power_of_2(work.room[2]), **work.slots()}
    for number, group, first, end in work.launches():
        kernels.nsa_block_forward[work.programs(end - first)](
            q, k, v, partial, tops, sums, readers.parts, readers.launches, readers.order, of.position_of_row,
            pieces.table, pieces.rows, *strides(q, k, v), rows, work.groups, number, first, unit,
            **work.parts(config.lines, config.warps, config.stages), **widths(q, v),
        )  # fmt: skip
        kernels.nsa_block_merge[work.merging(end - first)](
            partial, tops, sums, lists, out, lse, work.none, work.groups, group, first, end, unit,
            VALUE=value, VALUE_LANES=lanes_of(value), **merged,
        )  # fmt: skip
    return out, lse, lists, *readers


@torch.library.custom_op("tuningfork::nsa_selected_by_block_backward", mutates_args=())
def _backward_op(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: Tensor,
    readers: Sequence[Tensor], grad: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    of, by = SelectedTables.of(tables), Readers(*readers)
    pieces = of.pieces
    q, k, v = readable(q, k, v)
    out, grad = out.contiguous(), grad.contiguous()
    (rows, heads, key), value = q.shape, v.shape[2]
    work, config, unit = _Work.of(q, v, lists, pieces.rows), block_config_of(q, v), scale * LOG2_E
    delta = torch.empty_like(lse)
    kernels.nsa_block_delta[(triton.cdiv(rows * heads, 64),)](
        out, grad, delta, rows * heads, VALUE=value, VALUE_LANES=lanes_of(value), LINES=64
    )
    d_q, d_k, d_v = empty_like(q, k, v)
    partial = q.new_empty(*work.room, key, dtype=torch.float32)
    slots = most_parts(work.none, 1, lists.numel(), _PART)
    sums = [q.new_zeros(slots, work.select, t.shape[2], dtype=torch.float32) for t in (k, v)]
    for number, group, first, end in work.launches():
        kernels.nsa_block_gradients[work.programs(end - first)](
            q, k, v, grad, lse, delta, partial, *sums, by.parts, by.launches, by.order, of.position_of_row,
            pieces.table, pieces.rows, *strides(q, k, v), rows, work.groups, number, first, unit, scale,
            **work.parts(config.gradient_lines, config.gradient_warps, config.gradient_stages), **widths(q, v),
        )  # fmt: skip
        kernels.nsa_block_merge_gradient[work.merging(end - first)](
            partial, lists, d_q, work.none, work.groups, group, first, end, scale,
            KEY=key, KEY_LANES=lanes_of(key), LINES=_MERGED, **work.slots(),
        )  # fmt: skip
    for given, total in zip(sums, (d_k, d_v), strict=True):
        sum_parts(given, total, pieces.starts, pieces.places, by.slot_starts, work.select, True)
    return d_q, d_k, d_v


@attend_by_block.register_fake
def _(tables, q, k, v, chosen, scale):
    rows, heads = q.shape[:2]
    work = _Work.of(q, v, chosen, SelectedTables.of(tables).pieces.rows)
    chunks = chunks_of(rows, work.chunk)
    return (
        q.new_empty(rows, heads, v.shape[2]),
        q.new_empty(rows, heads, dtype=torch.float32),
        chosen.new_empty(chosen.shape),
        chosen.new_empty(chosen.numel()),
        chosen.new_empty(most_parts(work.none, chunks, chosen.numel(), _PART), 4),
        chosen.new_empty(chunks * work.groups + 1),
        chosen.new_empty(work.none + 1),
    )


@_backward_op.register_fake
def _(tables, q, k, v, out, lse, lists, readers, grad, scale):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _save(ctx, inputs, output):
    tables, q, k, v, _, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.tables = len(tables)
    ctx.save_for_backward(*tables, q, k, v, *output)


def _backward(ctx, grad, *_):
    tables, saved = ctx.saved_tensors[: ctx.tables], ctx.saved_tensors[ctx.tables :]
    q, k, v, out, lse, lists, *readers = saved
    gradients = _backward_op(tables, q, k, v, out, lse, lists, readers, grad, ctx.scale)
    return ([None] * ctx.tables, *gradients, None, None)


attend_by_block.register_autograd(_backward, setup_context=_save)
register_flop_formula(torch.ops.tuningfork.nsa_selected_by_block)(selected_flops)
