# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of selected attention by blocks; fast.py says how they work.

Tables, strides and what is contiguous are those of `_selected_kernels.py`, and `parts`, `launches` and `order` those of
`_readers.Readers`. A launch has the rows from `first_row` on of one chunk, and one group of heads.

A piece is taken KEYS rows at a time, SLICES of them, each by programs of its own. So a row has COUNT * SLICES *slots*,
one for what each slice of each piece of its list gives it: `partial` float32 [rows of the chunk, GROUP, slots, width].
A program takes LINES lines at a time: the heads of as many readers as fit there. What a line holds is never mixed with
another's, so what a row gets does not depend on who else reads the piece.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tuningfork.kernels.nsa._compressed_kernels import load_rows
from tuningfork.kernels.nsa._selected_kernels import slice_of_piece


@triton.jit
def _part_of(parts, launches, launch):
    """The part of a program: its place, and whether there is one."""
    number = tl.load(launches + launch) + tl.program_id(0)
    return parts + 4 * number, number < tl.load(launches + launch + 1)


@triton.jit(do_not_specialize=["rows_total", "launch", "first_row"])
def nsa_block_forward(
    q, k, v, partial, tops, sums, parts, launches, order, position_of_row, table, piece_rows,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, groups, launch, first_row, unit,
    SELECT: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr,
    VALUE: tl.constexpr, VALUE_LANES: tl.constexpr, KEYS: tl.constexpr, SLICES: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a piece gives those that read it: a softmax's largest product, its sum, and the sum of values by weight."""
    part, there = _part_of(parts, launches, launch)
    if not there:
        return
    listed = tl.load(part)
    begin = tl.load(part + 1)
    stop = tl.load(part + 2)
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
    member = lines % GROUP
    full = lines < ROWS * GROUP
    reader = begin + lines // GROUP
    place = tl.load(order + reader, mask=full & (reader < stop), other=0)
    for _ in range(begin, stop, ROWS):
        reads = full & (reader < stop)
        row = (place // (groups * COUNT)).to(tl.int64)
        slots = ((row - first_row) * GROUP + member) * (COUNT * SLICES) + place % COUNT * SLICES + slice
        reader += ROWS
        place = tl.load(order + reader, mask=full & (reader < stop), other=0)  # a step ahead: rows need not wait for it
        position = tl.load(position_of_row + row, mask=reads, other=-1).to(tl.int32)
        query = load_rows(q, row * stride_q + (group * GROUP + member) * head_q, reads, 1, keys, KEY)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        products = tl.where(live[None, :] & (positions[None, :] <= position[:, None]), products, float("-inf"))
        top = tl.max(products, 1)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(tl.fma(products, unit, (-safe * unit)[:, None]))
        tl.store(tops + slots, top, mask=reads)
        tl.store(sums + slots, tl.sum(weights, 1), mask=reads)
        given = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        inside = reads[:, None] & (values < VALUE)[None, :]
        tl.store(partial + slots[:, None] * VALUE + values[None, :], given, mask=inside)


@triton.jit
def _lines_of(first_row, end_row, groups, group, COUNT: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr):
    """Lines of a launch, one for each row and head of a group: their number there, their number among all heads of all
    rows, where their lists begin, and whether they are there."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    row = first_row + line // GROUP
    pair = row * groups + group
    return line, pair * GROUP + line % GROUP, pair * COUNT, row < end_row


@triton.jit(do_not_specialize=["none", "group", "first_row", "end_row"])
def nsa_block_merge(
    partial, tops, sums, lists, out, lse, none, groups, group, first_row, end_row, unit,
    COUNT: tl.constexpr, GROUP: tl.constexpr, SLICES: tl.constexpr, SLOT_LANES: tl.constexpr, VALUE: tl.constexpr,
    VALUE_LANES: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """One softmax of those of all slots, in their order."""
    SLOTS: tl.constexpr = COUNT * SLICES
    line, head, listed, live = _lines_of(first_row, end_row, groups, group, COUNT, GROUP, LINES)
    values = tl.arange(0, VALUE_LANES)
    number = tl.arange(0, SLOT_LANES)
    inside = live[:, None] & (number < SLOTS)[None, :]
    there = tl.load(lists + listed[:, None] + number[None, :] // SLICES, mask=inside, other=2147483647) < none
    of_slots = tl.load(tops + line[:, None] * SLOTS + number[None, :], mask=inside & there, other=float("-inf"))
    top = tl.max(of_slots, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([LINES, VALUE_LANES], tl.float32)
    total = tl.zeros([LINES], tl.float32)
    for slot in range(SLOTS):
        there_now = live & (tl.load(lists + listed + slot // SLICES, mask=live, other=2147483647) < none)
        at = line * SLOTS + slot
        weight = tl.exp2((tl.load(tops + at, mask=there_now, other=float("-inf")) - safe) * unit)
        total = tl.fma(tl.load(sums + at, mask=there_now, other=0.0), weight, total)
        pointers = partial + at[:, None] * VALUE + values[None, :]
        given = tl.load(pointers, mask=there_now[:, None] & (values < VALUE)[None, :], other=0.0)
        acc = tl.fma(given, weight[:, None], acc)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * VALUE + values[None, :], result, mask=live[:, None] & (values < VALUE)[None, :])
    tl.store(lse + head, tl.where(nothing, 0.0, tl.fma(top, unit, tl.log2(total))), mask=live)


@triton.jit(do_not_specialize=["lines_total"])
def nsa_block_delta(
    out, grad, delta, lines_total, VALUE: tl.constexpr, VALUE_LANES: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """What the softmax takes off every score's gradient: the sum of out * grad over a head's width."""
    lines = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    live = lines < lines_total
    values = tl.arange(0, VALUE_LANES)
    result = load_rows(out, lines, live, VALUE, values, VALUE).to(tl.float32)
    tl.store(delta + lines, tl.sum(result * load_rows(grad, lines, live, VALUE, values, VALUE).to(tl.float32), 1), live)


@triton.jit(do_not_specialize=["rows_total", "launch", "first_row"])
def nsa_block_gradients(
    q, k, v, grad, lse, delta, partial, partial_k, partial_v, parts, launches, order, position_of_row, table,
    piece_rows, stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, groups, launch, first_row, unit,
    scale,
    SELECT: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr,
    VALUE: tl.constexpr, VALUE_LANES: tl.constexpr, KEYS: tl.constexpr, SLICES: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a part of a piece's readers gives its keys and values, added to their slot's, float32 [slots, SELECT,
    width]; and what the piece gives the gradient of each reader's query."""
    part, there = _part_of(parts, launches, launch)
    if not there:
        return
    listed = tl.load(part)
    begin = tl.load(part + 1)
    stop = tl.load(part + 2)
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
    member = lines % GROUP
    heads = groups * GROUP
    # Sums over readers are transposed, [width, KEYS]: what is transposed in a product is what was loaded. Of a result
    # of a product Hopper's compiler gets dot(trans(result), y) wrong.
    acc_k = tl.zeros([KEY_LANES, KEYS], tl.float32)
    acc_v = tl.zeros([VALUE_LANES, KEYS], tl.float32)
    full = lines < ROWS * GROUP
    reader = begin + lines // GROUP
    place = tl.load(order + reader, mask=full & (reader < stop), other=0)
    for _ in range(begin, stop, ROWS):
        reads = full & (reader < stop)
        row = (place // (groups * COUNT)).to(tl.int64)
        slots = ((row - first_row) * GROUP + member) * (COUNT * SLICES) + place % COUNT * SLICES + slice
        reader += ROWS
        place = tl.load(order + reader, mask=full & (reader < stop), other=0)
        head = group * GROUP + member
        position = tl.load(position_of_row + row, mask=reads, other=-1).to(tl.int32)
        query = load_rows(q, row * stride_q + head * head_q, reads, 1, keys, KEY)
        d_out = load_rows(grad, row * heads + head, reads, VALUE, values, VALUE)
        top = tl.load(lse + row * heads + head, mask=reads, other=0.0)
        weighted = tl.load(delta + row * heads + head, mask=reads, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights = tl.exp2(tl.fma(products, unit, -top[:, None]))
        weights = tl.where(live[None, :] & (positions[None, :] <= position[:, None]), weights, 0.0)
        acc_v = tl.dot(tl.trans(d_out), weights.to(d_out.dtype), acc_v, input_precision=PRECISION)
        d_weights = tl.dot(d_out, tl.trans(value), input_precision=PRECISION)
        d_scores = (weights * (d_weights - weighted[:, None])).to(query.dtype)
        acc_k = tl.dot(tl.trans(query), d_scores, acc_k, input_precision=PRECISION)
        given = tl.dot(d_scores, key, input_precision=PRECISION)
        inside = reads[:, None] & (keys < KEY)[None, :]
        tl.store(partial + slots[:, None] * KEY + keys[None, :], given, mask=inside)
    number = slice * KEYS + tl.arange(0, KEYS)
    places = (tl.load(part + 3).to(tl.int64) * SELECT + number)[None, :]
    inside = (number < SELECT)[None, :]
    _add(partial_k + places * KEY + keys[:, None], acc_k * scale, inside & (keys < KEY)[:, None])
    _add(partial_v + places * VALUE + values[:, None], acc_v, inside & (values < VALUE)[:, None])


@triton.jit
def _add(pointers, more, mask):
    """To what no other program of the launch has."""
    tl.store(pointers, tl.load(pointers, mask=mask, other=0.0) + more, mask=mask)


@triton.jit(do_not_specialize=["none", "group", "first_row", "end_row"])
def nsa_block_merge_gradient(
    partial, lists, d_q, none, groups, group, first_row, end_row, scale,
    COUNT: tl.constexpr, GROUP: tl.constexpr, SLICES: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """The sum over slots, in their order."""
    SLOTS: tl.constexpr = COUNT * SLICES
    line, head, listed, live = _lines_of(first_row, end_row, groups, group, COUNT, GROUP, LINES)
    keys = tl.arange(0, KEY_LANES)
    acc = tl.zeros([LINES, KEY_LANES], tl.float32)
    for slot in range(SLOTS):
        there = live & (tl.load(lists + listed + slot // SLICES, mask=live, other=2147483647) < none)
        pointers = partial + (line * SLOTS + slot)[:, None] * KEY + keys[None, :]
        acc += tl.load(pointers, mask=there[:, None] & (keys < KEY)[None, :], other=0.0)
    inside = live[:, None] & (keys < KEY)[None, :]
    tl.store(d_q + head[:, None] * KEY + keys[None, :], (acc * scale).to(d_q.dtype.element_ty), mask=inside)
