# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of selected attention row by row; fast.py says how they work.

The tables are `_tables.Pieces`. q, k and v are [rows, heads, width] with any stride of both; out, its gradient and that
of q are contiguous; lse and delta are float32 [rows, heads]. `unit` makes a product a score to the base of 2.

`lists` int32 [rows, groups, COUNT] says which pieces a row reads for a group, as groups * piece + group; what is not
there is behind all of these. SELECT rows of a piece are taken KEYS at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tuningfork.kernels.nsa._compressed_kernels import load_rows, path_places
from tuningfork.records import Segment

_COLUMNS = tl.constexpr(len(Segment._fields))


@triton.jit(do_not_specialize=["pairs", "none"])
def nsa_lists(
    chosen, lists, position_of_row, segment_of_row, piece_of_row, segments, steps, seams, pairs, none,
    SELECT: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Which pieces the chosen blocks are: of each the one that has the block's last position, or the row itself."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    block = tl.load(chosen + pair, mask=inside, other=-1)
    there = block >= 0
    row = pair // (GROUPS * COUNT)
    position = tl.load(position_of_row + row, mask=there, other=0).to(tl.int32)
    segment = segments + _COLUMNS * tl.load(segment_of_row + row, mask=there, other=0)
    start = tl.load(segment, mask=there, other=0)
    above = tl.load(segment + 3, mask=there, other=0)
    first_step = tl.load(segment + 5, mask=there, other=0)
    last = tl.where(there, tl.minimum(block * SELECT + SELECT - 1, position), 0)
    last_row = path_places(steps + first_step, seams, start, above, last)
    piece = tl.load(piece_of_row + last_row, mask=there, other=0)
    group = pair // COUNT % GROUPS
    tl.store(lists + pair, tl.where(there, piece * GROUPS + group, none), mask=inside)


@triton.jit
def _listed(lists, none, COUNT: tl.constexpr, COUNT_LANES: tl.constexpr):
    """How many places of a list need a look: up to the last that has a piece."""
    number = tl.arange(0, COUNT_LANES)
    piece = tl.load(lists + number, mask=number < COUNT, other=2147483647)
    return tl.max(tl.where(piece < none, number + 1, 0), 0)


@triton.jit
def piece_rows_of(table, rows, piece, part, there, rows_total, SELECT: tl.constexpr, KEYS: tl.constexpr):
    """Rows and positions of a part of a piece; rows_total where there is no row."""
    number = part * KEYS + tl.arange(0, KEYS)
    first = tl.load(table + 2 * piece)
    base = tl.load(table + 2 * piece + 1)
    inside = (number < SELECT) & there
    found = tl.load(rows + piece * SELECT + number, mask=inside & (base < 0), other=rows_total)
    found = tl.where((base >= 0) & inside, base + number, found)
    return found, first + number


@triton.jit
def slice_of_piece(
    k, v, table, rows, piece, group, slice, stride_k, head_k, stride_v, head_v, rows_total, keys, values,
    SELECT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Of KEYS of a piece's rows their positions, which of them are there, and their keys and values for a group."""
    found, positions = piece_rows_of(table, rows, piece, slice, True, rows_total, SELECT, KEYS)
    live = found < rows_total
    key = load_rows(k + group * head_k, found, live, stride_k, keys, KEY)
    value = load_rows(v + group * head_v, found, live, stride_v, values, VALUE)
    return positions, live, key, value


@triton.jit
def _piece_of_list(
    lists, table, rows, step, count, none, rows_total, group, groups,
    SELECT: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The rows and positions of one step through a list."""
    place = step // PARTS
    listed = tl.load(lists + place, mask=place < count, other=2147483647)
    there = listed < none
    piece = tl.where(there, (listed - group) // groups, 0)
    return piece_rows_of(table, rows, piece, step % PARTS, there, rows_total, SELECT, KEYS)


@triton.jit(do_not_specialize=["rows_total", "none"])
def nsa_selected_forward(
    q, k, v, out, lse, lists, position_of_row, table, piece_rows,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, none, unit,
    SELECT: tl.constexpr, COUNT: tl.constexpr, COUNT_LANES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr, VALUE_LANES: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row and group: the group's heads, in HEADS lines, read the same keys."""
    row = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    keys = tl.arange(0, KEY_LANES)
    values = tl.arange(0, VALUE_LANES)
    heads = tl.arange(0, HEADS)
    live = heads < GROUP
    at = row.to(tl.int64)
    query = load_rows(q + at * stride_q + group * GROUP * head_q, heads, live, head_q, keys, KEY)
    position = tl.load(position_of_row + row).to(tl.int32)
    lists += (at * groups + group) * COUNT
    count = _listed(lists, none, COUNT, COUNT_LANES)
    k += group * head_k
    v += group * head_v
    acc = tl.zeros([HEADS, VALUE_LANES], tl.float32)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    rows, positions = _piece_of_list(
        lists, table, piece_rows, 0, count, none, rows_total, group, groups, SELECT, KEYS, PARTS
    )
    for step in range(0, count * PARTS):
        next_rows, next_positions = _piece_of_list(
            lists, table, piece_rows, step + 1, count, none, rows_total, group, groups, SELECT, KEYS, PARTS
        )
        seen = (rows < rows_total) & (positions <= position)
        key = load_rows(k, rows, seen, stride_k, keys, KEY)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        products = tl.where(seen[None, :], products, float("-inf"))
        new_top = tl.maximum(top, tl.max(products, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(products, unit, (-safe * unit)[:, None]))
        shrink = tl.exp2((top - safe) * unit)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        value = load_rows(v, rows, seen, stride_v, values, VALUE)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
        rows = next_rows
        positions = next_positions
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    first = (at * groups + group) * GROUP
    places = (first + heads)[:, None] * VALUE + values[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, result, mask=live[:, None] & (values < VALUE)[None, :])
    tl.store(lse + first + heads, tl.where(nothing, 0.0, tl.fma(top, unit, tl.log2(total))), mask=live)


@triton.jit(do_not_specialize=["rows_total", "none"])
def nsa_selected_query_gradient(
    q, k, v, out, grad, lse, delta, d_q, lists, position_of_row, table, piece_rows,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, none, unit, scale,
    SELECT: tl.constexpr, COUNT: tl.constexpr, COUNT_LANES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr, VALUE_LANES: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As the forward kernel goes; and delta, what the softmax takes off every score's gradient."""
    row = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    keys = tl.arange(0, KEY_LANES)
    values = tl.arange(0, VALUE_LANES)
    heads = tl.arange(0, HEADS)
    live = heads < GROUP
    at = row.to(tl.int64)
    first = (at * groups + group) * GROUP
    query = load_rows(q + at * stride_q + group * GROUP * head_q, heads, live, head_q, keys, KEY)
    d_out = load_rows(grad + first * VALUE, heads, live, VALUE, values, VALUE)
    result = load_rows(out + first * VALUE, heads, live, VALUE, values, VALUE)
    weighted = tl.sum(result.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(delta + first + heads, weighted, mask=live)
    top = tl.load(lse + first + heads, mask=live, other=0.0)
    position = tl.load(position_of_row + row).to(tl.int32)
    lists += (at * groups + group) * COUNT
    count = _listed(lists, none, COUNT, COUNT_LANES)
    k += group * head_k
    v += group * head_v
    acc = tl.zeros([HEADS, KEY_LANES], tl.float32)
    rows, positions = _piece_of_list(
        lists, table, piece_rows, 0, count, none, rows_total, group, groups, SELECT, KEYS, PARTS
    )
    for step in range(0, count * PARTS):
        next_rows, next_positions = _piece_of_list(
            lists, table, piece_rows, step + 1, count, none, rows_total, group, groups, SELECT, KEYS, PARTS
        )
        seen = (rows < rows_total) & (positions <= position)
        key = load_rows(k, rows, seen, stride_k, keys, KEY)
        value = load_rows(v, rows, seen, stride_v, values, VALUE)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights = tl.where(seen[None, :], tl.exp2(tl.fma(products, unit, -top[:, None])), 0.0)
        d_weights = tl.dot(d_out, tl.trans(value), input_precision=PRECISION)
        d_scores = weights * (d_weights - weighted[:, None])
        acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=PRECISION)
        rows = next_rows
        positions = next_positions
    places = (first + heads)[:, None] * KEY + keys[None, :]
    tl.store(d_q + places, (acc * scale).to(d_q.dtype.element_ty), mask=live[:, None] & (keys < KEY)[None, :])


@triton.jit(do_not_specialize=["rows_total"])
def nsa_selected_key_gradient(
    q, k, v, grad, lse, delta, partial_k, partial_v, parts, order, position_of_row, table, piece_rows,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, groups, unit, scale,
    SELECT: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr,
    VALUE: tl.constexpr, VALUE_LANES: tl.constexpr, KEYS: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a part of the rows that read a piece for a group gives its keys: its slot's, float32 [slots, SELECT, width].

    A row's heads lie in GROUP of LINES lines, and as many rows at once as fit there. `parts` and `order` are those of
    `_readers.Readers`.
    """
    part = parts + 4 * tl.program_id(0)
    listed = tl.load(part)
    begin = tl.load(part + 1)
    stop = tl.load(part + 2)
    if begin >= stop:
        return
    group = listed % groups
    slice = tl.program_id(1)
    keys = tl.arange(0, KEY_LANES)
    values = tl.arange(0, VALUE_LANES)
    positions, live, key, value = slice_of_piece(
        k, v, table, piece_rows, listed // groups, group, slice, stride_k, head_k, stride_v, head_v, rows_total, keys,
        values, SELECT, KEY, VALUE, KEYS,
    )  # fmt: skip
    ROWS: tl.constexpr = LINES // GROUP
    lines = tl.arange(0, LINES)
    head = group * GROUP + lines % GROUP
    heads = groups * GROUP
    acc_k = tl.zeros([KEYS, KEY_LANES], tl.float32)
    acc_v = tl.zeros([KEYS, VALUE_LANES], tl.float32)
    full = lines < ROWS * GROUP
    reader = begin + lines // GROUP
    place = tl.load(order + reader, mask=full & (reader < stop), other=0)
    for _ in range(begin, stop, ROWS):
        reads = full & (reader < stop)
        row = place.to(tl.int64) // (groups * COUNT)
        reader += ROWS
        place = tl.load(order + reader, mask=full & (reader < stop), other=0)  # a step ahead: rows need not wait for it
        position = tl.load(position_of_row + row, mask=reads, other=-1).to(tl.int32)
        query = load_rows(q, row * stride_q + head * head_q, reads, 1, keys, KEY)
        d_out = load_rows(grad, row * heads + head, reads, VALUE, values, VALUE)
        top = tl.load(lse + row * heads + head, mask=reads, other=0.0)
        weighted = tl.load(delta + row * heads + head, mask=reads, other=0.0)
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        weights = tl.exp2(tl.fma(products, unit, -top[None, :]))
        weights = tl.where(live[:, None] & (positions[:, None] <= position[None, :]), weights, 0.0)
        acc_v = tl.dot(weights.to(d_out.dtype), d_out, acc_v, input_precision=PRECISION)
        d_weights = tl.dot(value, tl.trans(d_out), input_precision=PRECISION)
        d_scores = weights * (d_weights - weighted[None, :])
        acc_k = tl.dot(d_scores.to(query.dtype), query, acc_k, input_precision=PRECISION)
    number = slice * KEYS + tl.arange(0, KEYS)
    slots = tl.load(part + 3).to(tl.int64) * SELECT + number
    inside = (number < SELECT)[:, None]
    tl.store(partial_k + slots[:, None] * KEY + keys[None, :], acc_k * scale, mask=inside & (keys < KEY)[None, :])
    tl.store(partial_v + slots[:, None] * VALUE + values[None, :], acc_v, mask=inside & (values < VALUE)[None, :])
