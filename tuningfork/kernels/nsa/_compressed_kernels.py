# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of compressed attention; fast.py says how they work.

The tables are `_tables.Entries`; `segments` those of records.ForkLayout, `entry_segments` and `steps`, `seams` the ones
of entries. q, k and v are [rows or entries, heads, width] with any stride of both; out, its gradient and that of q are
contiguous; lse and delta are float32 [heads, rows]. `unit` makes a product a score to the base of 2.

Entry i of a path, by its place there, has positions [i STRIDE, i STRIDE + LENGTH).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tuningfork.records import GRID, Segment

_COLUMNS = tl.constexpr(len(Segment._fields))
_GRID = tl.constexpr(GRID)


@triton.jit
def load_rows(base, rows, live, stride, lanes, WIDTH: tl.constexpr):
    """Some rows of one head, [rows, lanes]; zero where a row is not live."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + lanes[None, :]
    return tl.load(pointers, mask=live[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@triton.jit
def path_places(steps, seams, start, above, places):
    """Where some places of a path lie, int32.

    Args:
        steps: of the ancestors of the path's last segment; `start` is where its own begin, behind `above` of theirs.
    """
    step = places // _GRID
    listed = step * _GRID < above
    base = tl.where(listed, tl.load(steps + step, mask=listed, other=0), start + step * _GRID - above)
    offset = places - step * _GRID
    gathered = tl.load(seams + (-1 - base) * _GRID + offset, mask=base < 0, other=0)
    return tl.where(base < 0, gathered, base + offset)


@triton.jit
def complete(positions, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Blocks that are complete at some positions."""
    behind = positions + 1 - LENGTH
    return tl.where(behind >= 0, behind // STRIDE + 1, 0)


@triton.jit
def tile_of(tiles, segments, entry_segments, program, TILE: tl.constexpr, TABLE_TILE: tl.constexpr):
    """A tile of queries: its first row, its segment's end, the first row's position; and of the segment's entries the
    first, how many its ancestors have, and where their steps begin."""
    tile = tiles + 2 * (program // (TABLE_TILE // TILE))
    entry = tl.load(tile)
    first = tl.load(tile + 1) + program % (TABLE_TILE // TILE) * TILE
    segment = segments + _COLUMNS * entry
    position = first - tl.load(segment) + tl.load(segment + 3)
    own = tl.load(entry_segments + 2 * entry)
    above = tl.load(entry_segments + 2 * entry + 1)
    return first, tl.load(segment + 1), position, own, above, tl.load(segment + 5)


@triton.jit
def _read_entries(
    state, query, k, v, steps, seams, own, above, visible, begin, stop, most, stride_k, stride_v, unit, keys, values,
    MASKED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take entries begin .. stop of a path into the running softmax. A step of which a row sees nothing leaves that
    row's bits as they are. Where entries lie is looked up a step ahead: keys need not wait for it."""
    acc, top, total, entries = state
    for place in range(begin, stop, STEP):
        following = path_places(steps, seams, own, above, place + STEP + tl.arange(0, STEP))
        numbers = place + tl.arange(0, STEP)
        live = numbers < most
        key = load_rows(k, entries, live, stride_k, keys, KEY)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            products = tl.where(numbers[None, :] < visible[:, None], products, float("-inf"))
        new_top = tl.maximum(top, tl.max(products, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(products, unit, (-safe * unit)[:, None]))
        shrink = tl.exp2((top - safe) * unit)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        value = load_rows(v, entries, live, stride_v, values, VALUE)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
        entries = following
    return acc, top, total, entries


@triton.jit(do_not_specialize=["rows_total"])
def nsa_compressed_forward(
    q, k, v, out, lse, tiles, segments, entry_segments, steps, seams,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, unit,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr,
    VALUE: tl.constexpr, VALUE_LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one head. A row that sees nothing has zeros, and a log-sum-exp of 0."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    first, end, position, own, above, steps_start = tile_of(
        tiles, segments, entry_segments, tl.program_id(1), TILE, TABLE_TILE
    )
    if first >= end:
        return
    keys = tl.arange(0, KEY_LANES)
    values = tl.arange(0, VALUE_LANES)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    query = load_rows(q + head * head_q, rows, live, stride_q, keys, KEY)
    k += (head // GROUP) * head_k
    v += (head // GROUP) * head_v
    steps += steps_start
    visible = complete(position + tl.arange(0, TILE), LENGTH, STRIDE)
    most = complete(position + tl.minimum(TILE, end - first) - 1, LENGTH, STRIDE)
    level = complete(position, LENGTH, STRIDE) // STEP * STEP  # from here on a row may not see all
    acc = tl.zeros([TILE, VALUE_LANES], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    state = acc, top, total, path_places(steps, seams, own, above, tl.arange(0, STEP))
    state = _read_entries(
        state, query, k, v, steps, seams, own, above, visible, 0, level, most, stride_k, stride_v, unit, keys, values,
        False, KEY, VALUE, STEP, PRECISION,
    )  # fmt: skip
    acc, top, total, _ = _read_entries(
        state, query, k, v, steps, seams, own, above, visible, level, most, most, stride_k, stride_v, unit, keys,
        values, True, KEY, VALUE, STEP, PRECISION,
    )  # fmt: skip
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    places = (rows.to(tl.int64)[:, None] * heads + head) * VALUE + values[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, result, mask=live[:, None] & (values < VALUE)[None, :])
    level_of_row = tl.where(nothing, 0.0, tl.fma(top, unit, tl.log2(total)))
    tl.store(lse + head * rows_total + rows, level_of_row, mask=live)


@triton.jit
def _query_gradient_of_entries(
    state, query, grad, top, weighted, k, v, steps, seams, own, above, visible, begin, stop, most, stride_k, stride_v,
    unit, keys, values,
    MASKED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    acc, entries = state
    for place in range(begin, stop, STEP):
        following = path_places(steps, seams, own, above, place + STEP + tl.arange(0, STEP))
        numbers = place + tl.arange(0, STEP)
        live = numbers < most
        key = load_rows(k, entries, live, stride_k, keys, KEY)
        value = load_rows(v, entries, live, stride_v, values, VALUE)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights = tl.exp2(tl.fma(products, unit, -top[:, None]))
        if MASKED:
            weights = tl.where(numbers[None, :] < visible[:, None], weights, 0.0)
        d_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        d_scores = weights * (d_weights - weighted[:, None])
        acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=PRECISION)
        entries = following
    return acc, entries


@triton.jit(do_not_specialize=["rows_total"])
def nsa_compressed_query_gradient(
    q, k, v, out, grad, lse, delta, d_q, tiles, segments, entry_segments, steps, seams,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, unit, scale,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr,
    VALUE: tl.constexpr, VALUE_LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    """And delta, what the softmax takes off every score's gradient: the sum of out * grad over a head's width."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    first, end, position, own, above, steps_start = tile_of(
        tiles, segments, entry_segments, tl.program_id(1), TILE, TABLE_TILE
    )
    if first >= end:
        return
    keys = tl.arange(0, KEY_LANES)
    values = tl.arange(0, VALUE_LANES)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    query = load_rows(q + head * head_q, rows, live, stride_q, keys, KEY)
    d_out = load_rows(grad + head * VALUE, rows, live, heads * VALUE, values, VALUE)
    result = load_rows(out + head * VALUE, rows, live, heads * VALUE, values, VALUE)
    weighted = tl.sum(result.to(tl.float32) * d_out.to(tl.float32), 1)
    tl.store(delta + head * rows_total + rows, weighted, mask=live)
    top = tl.load(lse + head * rows_total + rows, mask=live, other=0.0)
    k += (head // GROUP) * head_k
    v += (head // GROUP) * head_v
    steps += steps_start
    visible = complete(position + tl.arange(0, TILE), LENGTH, STRIDE)
    most = complete(position + tl.minimum(TILE, end - first) - 1, LENGTH, STRIDE)
    level = complete(position, LENGTH, STRIDE) // STEP * STEP
    state = tl.zeros([TILE, KEY_LANES], tl.float32), path_places(steps, seams, own, above, tl.arange(0, STEP))
    state = _query_gradient_of_entries(
        state, query, d_out, top, weighted, k, v, steps, seams, own, above, visible, 0, level, most, stride_k, stride_v,
        unit, keys, values, False, KEY, VALUE, STEP, PRECISION,
    )  # fmt: skip
    acc, _ = _query_gradient_of_entries(
        state, query, d_out, top, weighted, k, v, steps, seams, own, above, visible, level, most, most, stride_k,
        stride_v, unit, keys, values, True, KEY, VALUE, STEP, PRECISION,
    )  # fmt: skip
    places = (rows.to(tl.int64)[:, None] * heads + head) * KEY + keys[None, :]
    tl.store(d_q + places, (acc * scale).to(d_q.dtype.element_ty), mask=live[:, None] & (keys < KEY)[None, :])


@triton.jit
def _key_gradient_of_readers(
    state, key, value, last_rows, q, grad, lse, delta, begin, stop, end, stride_q, stride_grad, unit, keys, values,
    MASKED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows begin .. stop of one head, of which those from `end` on are none: they give nothing, for all of theirs is
    zero. Not MASKED, the others see all entries."""
    acc_k, acc_v = state
    for row in range(begin, stop, STEP):
        rows = row + tl.arange(0, STEP)
        reads = rows < end
        query = load_rows(q, rows, reads, stride_q, keys, KEY)
        d_out = load_rows(grad, rows, reads, stride_grad, values, VALUE)
        top = tl.load(lse + rows, mask=reads, other=0.0)
        weighted = tl.load(delta + rows, mask=reads, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights = tl.exp2(tl.fma(products, unit, -top[:, None]))
        if MASKED:
            weights = tl.where(rows[:, None] >= last_rows[None, :], weights, 0.0)
        acc_v = tl.dot(tl.trans(d_out), weights.to(d_out.dtype), acc_v, input_precision=PRECISION)
        d_weights = tl.dot(d_out, tl.trans(value), input_precision=PRECISION)
        d_scores = weights * (d_weights - weighted[:, None])
        acc_k = tl.dot(tl.trans(query), d_scores.to(query.dtype), acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["rows_total"])
def nsa_compressed_key_gradient(
    q, k, v, grad, lse, delta, partial_k, partial_v, parts, entry_rows,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, unit, scale,
    LENGTH: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    VALUE_LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    """What a part of their readers gives a tile of entries: float32 [parts, groups, TABLE_TILE, width]."""
    group = tl.program_id(0)
    groups = tl.num_programs(0)
    number = tl.program_id(1) // (TABLE_TILE // TILE)
    offset = tl.program_id(1) % (TABLE_TILE // TILE) * TILE
    part = parts + 4 * number
    first = tl.load(part) + offset
    entries_end = tl.load(part + 1)
    begin = tl.load(part + 2)
    end = tl.load(part + 3)
    if (first >= entries_end) | (begin >= end):
        return
    keys = tl.arange(0, KEY_LANES)
    values = tl.arange(0, VALUE_LANES)
    entries = first + tl.arange(0, TILE)
    live = entries < entries_end
    key = load_rows(k + group * head_k, entries, live, stride_k, keys, KEY)
    value = load_rows(v + group * head_v, entries, live, stride_v, values, VALUE)
    last_rows = tl.load(entry_rows + entries * LENGTH + (LENGTH - 1), mask=live, other=0)
    unseen = tl.maximum(tl.max(last_rows, 0) - begin, 0)  # rows that do not see all entries
    level = tl.minimum(begin + (unseen + STEP - 1) // STEP * STEP, end)
    # Transposed, [width, TILE]: so only what was loaded is transposed in products, and a row has a line of them, where
    # its numbers cost few registers.
    state = tl.zeros([KEY_LANES, TILE], tl.float32), tl.zeros([VALUE_LANES, TILE], tl.float32)
    stride_grad = groups * GROUP * VALUE
    for member in range(GROUP):
        head = group * GROUP + member
        q_head = q + head * head_q
        grad_head = grad + head * VALUE
        lse_head = lse + head * rows_total
        delta_head = delta + head * rows_total
        state = _key_gradient_of_readers(
            state, key, value, last_rows, q_head, grad_head, lse_head, delta_head, begin, level, end, stride_q,
            stride_grad, unit, keys, values, True, KEY, VALUE, STEP, PRECISION,
        )  # fmt: skip
        state = _key_gradient_of_readers(
            state, key, value, last_rows, q_head, grad_head, lse_head, delta_head, level, end, end, stride_q,
            stride_grad, unit, keys, values, False, KEY, VALUE, STEP, PRECISION,
        )  # fmt: skip
    acc_k, acc_v = state
    slots = ((number.to(tl.int64) * groups + group) * TABLE_TILE + offset + tl.arange(0, TILE))[None, :]
    tl.store(partial_k + slots * KEY + keys[:, None], acc_k * scale, mask=(keys < KEY)[:, None])
    tl.store(partial_v + slots * VALUE + values[:, None], acc_v, mask=(values < VALUE)[:, None])
