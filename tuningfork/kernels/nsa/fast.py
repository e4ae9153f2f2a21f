# mypy: disable-error-code=no-untyped-def
"""Native sparse attention in Triton: rows, and compressed blocks, are read where they lie.

What the kernels know of a pack are tables (`_tables.py`). Of compressed attention (`_compressed_kernels.py`):

- forward, and the gradient of the queries: a tile of a segment's rows and one head reads the entries of its path in
  steps from the first on; which of them a row sees, its position says;
- the choice: from the log-sum-exp, the weights of all heads of a group again, added up by blocks, for so many rows at
  once that these scores have one size in a pack of any length; then the best of each row;
- the gradient of keys and values: a tile of entries reads the rows that see them, which lie side by side.

Of selected attention (`_selected_kernels.py`):

- forward, and the gradient of the queries: a row's heads of one group read the pieces of its list together;
- the gradient of keys and values: a piece, for one group, reads the rows that list it, in their order.

Where a tile of entries or a piece has many readers they are cut into parts. What the parts give a row, and what all
tiles or pieces do that have the row, is added up in one order (`_sum_kernels.py`): nothing is added up atomically, and
gradients repeat. What a row reads, it reads in the order of its path, by the same instructions whatever lies beside it:
outputs, choices and gradients of queries have the same bits in every pack that has the row's path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.nsa import _compressed_kernels as compressed_kernels
from tuningfork.kernels.nsa import _selected_kernels as selected_kernels
from tuningfork.kernels.nsa import _sum_kernels as sums
from tuningfork.kernels.nsa._blocks import Choice, Grid
from tuningfork.kernels.nsa._tables import TABLE_TILE, Entries, Pieces
from tuningfork.kernels.tables import spread
from tuningfork.records import ForkLayout

WIDEST_HEAD = 256
LOG2_E = 1.4426950408889634
TYPICALLY_SEEN = 512  # compressed blocks that a row sees
_SCORES = 1 << 24  # scores of blocks that are held at once, twice
_PART = 1024  # rows that a part of a piece's readers has at most


class TritonNsa(NamedTuple):
    """The tables of a pack of T rows with E compressed blocks, all on the GPU."""

    grid: Grid
    segments: Tensor  # as the next two and `position_of_row` of records.ForkLayout
    steps: Tensor
    seams: Tensor
    position_of_row: Tensor
    entries: Entries
    pieces: Pieces

    @classmethod
    def prepare(cls, layout: ForkLayout, grid: Grid) -> TritonNsa:
        """The tables of a layout, on its device, a GPU, made without waiting for it."""
        tables = layout.segments, layout.steps, layout.seams, layout.position_of_row
        return cls(grid, *tables, Entries.of(layout, grid), Pieces.of(layout, grid))

    @property
    def first_positions(self) -> Tensor:
        """int64 [E], where in its path each compressed block begins."""
        return self.entries.first_positions

    def blocks(self, rows: Tensor) -> Tensor:
        """As PlainNsa.blocks has it."""
        entries = self.entries
        return _take(entries.rows, entries.row_starts, entries.row_places, rows)

    def mean(self, rows: Tensor) -> Tensor:
        """As PlainNsa.mean has it."""
        entries = self.entries
        return _mean(entries.rows, entries.row_starts, entries.row_places, rows)

    def compressed(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, choice: Choice
    ) -> tuple[Tensor, Tensor]:
        """As PlainNsa.compressed has it, for query, keys and values of one dtype, float32, bfloat16 or float16, which
        the result has too; scores and sums are float32. dk and dv are at most WIDEST_HEAD, which `kernels.select`
        refuses to exceed: here nothing is checked."""
        tables = [self.segments, *self.entries]
        out, _, chosen = _compressed(tables, query, keys, values, scale, *self.grid, *choice)
        return out, chosen

    def selected(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, *, scale: float) -> Tensor:
        """As PlainNsa.selected has it, for the dtypes and widths of `compressed`."""
        tables = [self.segments, self.steps, self.seams, self.position_of_row, *self.pieces]
        out, _, _ = _selected(tables, query, key, value, chosen, scale)
        return out


class _SelectedTables(NamedTuple):
    """What selected attention is handed."""

    segments: Tensor
    steps: Tensor
    seams: Tensor
    position_of_row: Tensor
    pieces: Pieces

    @classmethod
    def of(cls, tables: Sequence[Tensor]) -> _SelectedTables:
        return cls(*tables[:4], Pieces(*tables[4:]))


def _lanes(width: int) -> int:
    """Columns of a head in registers: matrix units take powers of two, from 16 up."""
    return max(16, triton.next_power_of_2(width))


class _Config(NamedTuple):
    """How kernels are cut up. Fixed by dtype and widths, never tuned at run time: tuning would change the order of
    addition. Chosen by what fits a multiprocessor's registers and shared memory, not by measurement.

    tile: rows, or entries, of a program of compressed attention.
    step: entries, or rows, that it reads at once.
    lines: heads of rows that a piece reads at once.
    """

    tile: int
    step: int
    lines: int
    warps: int
    stages: int


def _config(q: Tensor, v: Tensor) -> _Config:
    wide = max(_lanes(q.shape[2]), _lanes(v.shape[2]))
    if q.dtype.itemsize == 4:  # 4 warps: with 8, products of 16 columns read beyond what they have
        return _Config(32, 16, 32, 4, 1) if wide > 128 else _Config(32, 32, 32, 4, 1)
    if wide > 128:
        return _Config(64, 32, 64, 8, 1)
    return _Config(64, 64, 64, 4, 2)


def _widths(q: Tensor, v: Tensor) -> dict[str, Any]:
    (_, _, key), value = q.shape, v.shape[2]
    return {
        "KEY": key,
        "KEY_LANES": _lanes(key),
        "VALUE": value,
        "VALUE_LANES": _lanes(value),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",  # three products: float32 but for its last bit
    }


def _strides(*tensors: Tensor) -> list[int]:
    """Of rows and heads."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _readable(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _empty_like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]


# --- compressed blocks ------------------------------------------------------------------------------------------------


def _sum_places(values: Tensor, starts: Tensor, places: Tensor, per_value: int, scale: float) -> Tensor:
    """[n, G, w] -> [T, G, w]."""
    rows, (groups, width) = len(starts) - 1, values.shape[1:]
    out = values.new_empty(rows, groups, width)
    lanes = min(256, triton.next_power_of_2(groups * width))
    sums.nsa_sum_places[(triton.cdiv(rows, 16), triton.cdiv(groups * width, lanes))](
        values, out, starts, places, rows, scale, PER_VALUE=per_value, ROWS=16, WIDTH=groups * width, LANES=lanes
    )
    return out


@torch.library.custom_op("tuningfork::nsa_take", mutates_args=())
def _take(table: Tensor, starts: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Rows [T, G, w] at the table's places [E, l]: [E, l, G, w], zero for T."""
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return padded.index_select(0, table.flatten()).unflatten(0, table.shape)


@torch.library.custom_op("tuningfork::nsa_take_backward", mutates_args=())
def _take_backward(starts: Tensor, places: Tensor, grad: Tensor) -> Tensor:
    return _sum_places(grad.contiguous().flatten(0, 1), starts, places, 1, 1.0)


@torch.library.custom_op("tuningfork::nsa_mean", mutates_args=())
def _mean(table: Tensor, starts: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """The mean of rows [T, G, w] at the places of each line of the table [E, l]: [E, G, w]."""
    rows = rows.contiguous()
    (total, *shape), (blocks, length) = rows.shape, table.shape
    width = shape[0] * shape[1]
    lanes = min(256, triton.next_power_of_2(width))
    out = rows.new_empty(blocks, *shape)
    sums.nsa_mean[(triton.cdiv(blocks, 8), triton.cdiv(width, lanes))](
        rows, out, table, blocks, total, width, LENGTH=length, BLOCKS=8, WIDTH=width, LANES=lanes
    )
    return out


@torch.library.custom_op("tuningfork::nsa_mean_backward", mutates_args=())
def _mean_backward(starts: Tensor, places: Tensor, grad: Tensor, length: int) -> Tensor:
    return _sum_places(grad.contiguous(), starts, places, length, 1 / length)


@_take.register_fake
def _(table, starts, places, rows):
    return rows.new_empty(*table.shape, *rows.shape[1:])


@_take_backward.register_fake
def _(starts, places, grad):
    return grad.new_empty(starts.shape[0] - 1, *grad.shape[2:])


@_mean.register_fake
def _(table, starts, places, rows):
    return rows.new_empty(table.shape[0], *rows.shape[1:])


@_mean_backward.register_fake
def _(starts, places, grad, length):
    return grad.new_empty(starts.shape[0] - 1, *grad.shape[1:])


def _save_places(ctx, inputs, output):
    table, starts, places, _ = inputs
    ctx.length = table.shape[1]
    ctx.save_for_backward(starts, places)


_take.register_autograd(
    lambda ctx, grad: (None, None, None, _take_backward(*ctx.saved_tensors, grad)), setup_context=_save_places
)
_mean.register_autograd(
    lambda ctx, grad: (None, None, None, _mean_backward(*ctx.saved_tensors, grad, ctx.length)),
    setup_context=_save_places,
)


# --- compressed attention ---------------------------------------------------------------------------------------------


def _of_entries(config: _Config, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "TILE": config.tile,
        "STEP": config.step,
        "TABLE_TILE": TABLE_TILE,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **_widths(q, v),
    }


@torch.library.custom_op("tuningfork::nsa_compressed", mutates_args=())
def _compressed(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float,
    length: int, stride: int, select: int, count: int, initial: int, local: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [T, H, dk]; k [E, G, dk]; v [E, G, dv] -> out [T, H, dv], base-2 log-sum-exp float32 [H, T], and the chosen
    blocks, int32 [T, G, count].

    Args:
        tables: the layout's segments, then Entries.
    """
    segments, entries = tables[0], Entries(*tables[1:])
    q, k, v = _readable(q, k, v)
    (rows, heads, _), groups = q.shape, k.shape[1]
    config, unit = _config(q, v), scale * LOG2_E
    out = q.new_empty(rows, heads, v.shape[2])
    lse = q.new_empty(heads, rows, dtype=torch.float32)
    chosen = q.new_empty(rows, groups, count, dtype=torch.int32)
    parts = TABLE_TILE // config.tile
    where = entries.query_tiles, segments, entries.segments, entries.steps, entries.seams
    constants = _of_entries(config, q, k, v)
    compressed_kernels.nsa_compressed_forward[(heads, len(entries.query_tiles) * parts)](
        q, k, v, out, lse, *where, *_strides(q, k, v), rows, unit, LENGTH=length, STRIDE=stride, **constants
    )

    row_scores = (rows - 1) // select + 1  # of the longest path that there may be
    at_once = max(1, min(len(entries.query_tiles), _SCORES // (TABLE_TILE * groups * row_scores)))
    room = at_once * TABLE_TILE, groups, row_scores
    scores, carried = (q.new_empty(room, dtype=torch.float32) for _ in range(2))
    places = triton.next_power_of_2(select // stride)
    blocks = max(1, 2 * config.tile // 2 // places)
    choosing = {"SELECT": select, "COUNT": count, "TABLE_TILE": TABLE_TILE}
    scoring = {name: constants[name] for name in ("GROUP", "KEY", "KEY_LANES", "TILE", "PRECISION")}
    lanes = triton.next_power_of_2(row_scores)
    for first in range(0, len(entries.query_tiles), at_once):
        tiles = min(at_once, len(entries.query_tiles) - first)
        compressed_kernels.nsa_scores[(triton.cdiv(row_scores, blocks), groups, tiles * parts)](
            q, k, lse, scores, carried, *where, *_strides(q, k), rows, unit, first, row_scores,
            LENGTH=length, STRIDE=stride, BLOCKS=blocks, PLACES=places, **scoring, **choosing, num_warps=4,
        )  # fmt: skip
        compressed_kernels.nsa_choose[(groups, tiles * TABLE_TILE)](
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
    q, k, v = _readable(q, k, v)
    out, grad = out.contiguous(), grad.contiguous()
    (rows, heads, _), groups = q.shape, k.shape[1]
    config, unit = _config(q, v), scale * LOG2_E
    parts = TABLE_TILE // config.tile
    delta = torch.empty_like(lse)
    d_q, d_k, d_v = _empty_like(q, k, v)
    constants = _of_entries(config, q, k, v)
    compressed_kernels.nsa_compressed_query_gradient[(heads, len(entries.query_tiles) * parts)](
        q, k, v, out, grad, lse, delta, d_q, entries.query_tiles, segments, entries.segments, entries.steps,
        entries.seams, *_strides(q, k, v), rows, unit, scale, LENGTH=length, STRIDE=stride, **constants,
    )  # fmt: skip
    room = len(entries.parts), groups, TABLE_TILE
    partial = [q.new_empty(*room, t.shape[2], dtype=torch.float32) for t in (k, v)]
    compressed_kernels.nsa_compressed_key_gradient[(groups, len(entries.parts) * parts)](
        q, k, v, grad, lse, delta, *partial, entries.parts, entries.rows, *_strides(q, k, v), rows, unit, scale,
        LENGTH=length, **constants,
    )  # fmt: skip
    for parts_of, of in zip(partial, (d_k, d_v), strict=True):
        _sum_parts(parts_of, of, entries.starts, entries.places, entries.part_starts, TABLE_TILE, False)
    return d_q, d_k, d_v


def _sum_parts(
    partial: Tensor, out: Tensor, starts: Tensor, places: Tensor, part_starts: Tensor, length: int, by_group: bool
) -> None:
    rows, groups, width = out.shape
    sums.nsa_sum_parts[(triton.cdiv(rows, 16), groups)](
        partial, out, starts, places, part_starts, rows,
        LENGTH=length, BY_GROUP=by_group, ROWS=16, WIDTH=width, LANES=triton.next_power_of_2(width),
    )  # fmt: skip


@_compressed.register_fake
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


_compressed.register_autograd(_backward_compressed, setup_context=_save_compressed)


@register_flop_formula(torch.ops.tuningfork.nsa_compressed)
def _(tables, q, k, v, *_, **__) -> int:
    """From shapes alone, as if each row saw TYPICALLY_SEEN blocks, and chose among them: by this the compiler decides
    under an activation budget what is cheap to recompute."""
    rows, heads, width = q
    return 2 * rows * min(k[0], TYPICALLY_SEEN) * heads * (2 * width + v[2])


# --- selected attention -----------------------------------------------------------------------------------------------


def _of_pieces(q: Tensor, k: Tensor, v: Tensor, select: int, count: int) -> dict[str, Any]:
    """A piece is taken so many rows at a time as a step has."""
    config = _config(q, v)
    most = 32 if config.stages == 1 and q.dtype.itemsize == 4 else 64
    return {
        "SELECT": select,
        "COUNT": count,
        "GROUP": q.shape[1] // k.shape[1],
        "KEYS": min(most, max(16, triton.next_power_of_2(select))),
        "num_warps": 4,
        "num_stages": config.stages,
        **_widths(q, v),
    }


def _by_row(constants: dict[str, Any]) -> dict[str, Any]:
    """Of kernels whose programs have one row each."""
    return {
        **constants,
        "COUNT_LANES": triton.next_power_of_2(constants["COUNT"]),
        "HEADS": _lanes(constants["GROUP"]),
        "PARTS": triton.cdiv(constants["SELECT"], constants["KEYS"]),
    }


@torch.library.custom_op("tuningfork::nsa_selected", mutates_args=())
def _selected(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, dk]; k, v [T, G, dk or dv]; chosen int32 [T, G, n] -> out [T, H, dv], base-2 log-sum-exp float32 [T, H],
    and the lists of pieces int32 [T, G, n], see `_selected_kernels.py`.

    Args:
        tables: the layout's segments, steps, seams and position_of_row, then Pieces.
    """
    of, pieces = _SelectedTables.of(tables), _SelectedTables.of(tables).pieces
    q, k, v = _readable(q, k, v)
    chosen = chosen.contiguous()
    (rows, heads, _), (_, groups, count) = q.shape, chosen.shape
    none, select = len(pieces.rows) * groups, pieces.rows.shape[1]
    lists = torch.empty_like(chosen)
    selected_kernels.nsa_lists[(triton.cdiv(chosen.numel(), 256),)](
        chosen, lists, of.position_of_row, pieces.segment_of_row, pieces.piece_of_row, of.segments, of.steps, of.seams,
        chosen.numel(), none, SELECT=select, GROUPS=groups, COUNT=count, PAIRS=256,
    )  # fmt: skip
    out = q.new_empty(rows, heads, v.shape[2])
    lse = q.new_empty(rows, heads, dtype=torch.float32)
    selected_kernels.nsa_selected_forward[(rows, groups)](
        q, k, v, out, lse, lists, of.position_of_row, pieces.table, pieces.rows, *_strides(q, k, v), rows, none,
        scale * LOG2_E, **_by_row(_of_pieces(q, k, v, select, count)),
    )  # fmt: skip
    return out, lse, lists


@torch.library.custom_op("tuningfork::nsa_selected_backward", mutates_args=())
def _selected_backward(
    tables: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: Tensor, grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    of, pieces = _SelectedTables.of(tables), _SelectedTables.of(tables).pieces
    q, k, v = _readable(q, k, v)
    out, grad = out.contiguous(), grad.contiguous()
    rows, (_, groups, count) = len(q), lists.shape
    none, select, unit = len(pieces.rows) * groups, pieces.rows.shape[1], scale * LOG2_E
    constants = _of_pieces(q, k, v, select, count)
    delta = torch.empty_like(lse)
    d_q, d_k, d_v = _empty_like(q, k, v)
    where = of.position_of_row, pieces.table, pieces.rows
    selected_kernels.nsa_selected_query_gradient[(rows, groups)](
        q, k, v, out, grad, lse, delta, d_q, lists, *where, *_strides(q, k, v), rows, none, unit, scale,
        **_by_row(constants),
    )  # fmt: skip
    parts, part_starts, order = _readers(lists, none)
    partial = [q.new_empty(len(parts), select, t.shape[2], dtype=torch.float32) for t in (k, v)]
    lines = max(_config(q, v).lines, triton.next_power_of_2(constants["GROUP"]))
    selected_kernels.nsa_selected_key_gradient[(len(parts), triton.cdiv(select, constants["KEYS"]))](
        q, k, v, grad, lse, delta, *partial, parts, order, *where, *_strides(q, k, v), rows, groups, unit, scale,
        LINES=lines, **constants,
    )  # fmt: skip
    for parts_of, total in zip(partial, (d_k, d_v), strict=True):
        _sum_parts(parts_of, total, pieces.starts, pieces.places, part_starts, select, True)
    return d_q, d_k, d_v


def _readers(lists: Tensor, none: int) -> tuple[Tensor, Tensor, Tensor]:
    """Who reads each of `none` lists of readers, one for each piece and group.

    Returns:
        int32 [P, 3], parts of these lists: which, begin and end in the third; int32 [none + 1], where the parts of each
        begin; int64, the places of `lists`, those of one piece together and in order.
    """
    listed, order = lists.flatten().sort(stable=True)
    starts = torch.searchsorted(listed, torch.arange(none + 1, device=lists.device, dtype=lists.dtype))
    readers = starts.diff()
    counts = (readers + _PART - 1) // _PART
    which, number, there = spread(counts, none + lists.numel() // _PART)
    begin = starts[which] + number * _PART
    end = torch.where(there, torch.minimum(begin + _PART, starts[which + 1]), 0)
    part_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.stack([which, begin, end], 1).int(), part_starts.int(), order


@_selected.register_fake
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


_selected.register_autograd(_backward_selected, setup_context=_save_selected)


@register_flop_formula(torch.ops.tuningfork.nsa_selected)
def _(tables, q, k, v, chosen, *_, **__) -> int:
    """From shapes alone, as if each row read all of its blocks whole."""
    rows, heads, width = q
    select = tables[4 + Pieces._fields.index("rows")][1]
    return 2 * rows * min(rows, chosen[2] * select) * heads * (width + v[2])
