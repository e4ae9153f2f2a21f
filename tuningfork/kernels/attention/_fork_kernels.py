# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of fork attention; fork.py says how they work and launches them.

`segments`, `steps` and `seams` are the tables of records.ForkLayout; `tiles`, `parts` and `merges` are fork.py's.
Rows, keys and positions are int32; q, k and v are [rows, heads, WIDTH] with any row and head stride; out, its gradient
and the gradients of q, k and v are contiguous; lse and delta are float32 [heads, rows].

A product of a query and a key becomes a score to the base of 2 by `unit`; where scores are capped, tanh(product *
squeeze) stands for the product. A multiplication and an addition that a compiler may make one, or leave two, are
written as one: which it chooses may depend on what stands around them, such as a mask, and must decide no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tuningfork.records import GRID, Segment

_LOG2_E = tl.constexpr(1.4426950408889634)
_COLUMNS = tl.constexpr(len(Segment._fields))
_GRID = tl.constexpr(GRID)


@triton.jit
def _rows(base, rows, live, stride, lanes, WIDTH: tl.constexpr):
    """Some rows of one head, [rows, lanes]; zero where a row is not live."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + lanes[None, :]
    return tl.load(pointers, mask=live[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@triton.jit
def _segment(segments, entry):
    """Its first row, end, first position, end of its subtree, and where its ancestors' steps begin."""
    segment = segments + _COLUMNS * entry
    return tl.load(segment), tl.load(segment + 1), tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5)


@triton.jit
def _path_rows(steps, seams, start, first_position, position, STEP: tl.constexpr):
    """The rows of a path at STEP positions from `position` on, int32 [STEP].

    Args:
        steps: of the ancestors of the path's last segment; `start` is its first row, at `first_position`.
    """
    step = position // _GRID
    above = step < tl.cdiv(first_position, _GRID)
    base = tl.where(above, tl.load(steps + step, mask=above, other=0), start + step * _GRID - first_position)
    places = position - step * _GRID + tl.arange(0, STEP)
    gathered = tl.load(seams + (-1 - base) * _GRID + places, mask=base + tl.zeros([STEP], tl.int32) < 0, other=0)
    return tl.where(base < 0, gathered, base + places)


@triton.jit
def _first_in_window(position, window, STEP: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first position worth reading for rows from `position` on: whole steps before its window are left out."""
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0) // STEP * STEP
    return begin


@triton.jit
def _capped(products, squeeze, HAS_CAP: tl.constexpr):
    """Products as the scores have them, and what soft-capping multiplies their gradient with."""
    slope = 1.0
    if HAS_CAP:
        products = libdevice.tanh(products * squeeze)
        slope = tl.fma(-products, products, 1.0)
    return products, slope


@triton.jit
def _visible(positions, key_positions, window, HAS_WINDOW: tl.constexpr):
    """[rows, keys]: which keys of its path a row sees."""
    distance = positions[:, None] - key_positions[None, :]
    seen = distance >= 0
    if HAS_WINDOW:
        seen = seen & (distance < window)
    return seen


@triton.jit
def _attend_keys(
    state, query, k, v, steps, seams, start, first_position, positions, begin, stop, latest,
    stride_k, stride_v, lanes, squeeze, unit, window,
    CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys of positions begin .. stop into the running softmax.

    Its state is (accumulator, greatest product, sum, rows of the next step). A step of which a row sees nothing leaves
    that row's bits as they are. The rows of a step are looked up a step ahead: its keys need not wait for them.
    """
    acc, top, total, rows = state
    for position in range(begin, stop, STEP):
        following = _path_rows(steps, seams, start, first_position, position + STEP, STEP)
        key_positions = position + tl.arange(0, STEP)
        live = key_positions <= latest
        key = _rows(k, rows, live, stride_k, lanes, WIDTH)
        products, _ = _capped(tl.dot(query, tl.trans(key), input_precision=PRECISION), squeeze, HAS_CAP)
        if CAUSAL or HAS_WINDOW:
            products = tl.where(_visible(positions, key_positions, window, HAS_WINDOW), products, float("-inf"))
        new_top = tl.maximum(top, tl.max(products, 1))
        # A row that has seen nothing yet has top -inf, and -inf - -inf would be nan.
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(products, unit, (-safe * unit)[:, None]))
        shrink = tl.exp2((top - safe) * unit)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        value = _rows(v, rows, live, stride_v, lanes, WIDTH)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
        rows = following
    return acc, top, total, rows


@triton.jit
def fork_forward(
    q, k, v, sinks, out, lse, tiles, segments, steps, seams,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, squeeze, unit, window,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    program = tl.program_id(1)
    tile = tiles + 2 * (program // (TABLE_TILE // TILE))
    first = tl.load(tile + 1) + program % (TABLE_TILE // TILE) * TILE
    start, end, first_position, _, steps_start = _segment(segments, tl.load(tile))
    if first >= end:
        return
    lanes = tl.arange(0, LANES)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    query = _rows(q + head * head_q, rows, live, stride_q, lanes, WIDTH)
    k += (head // GROUP) * head_k
    v += (head // GROUP) * head_v
    steps += steps_start
    positions = rows - start + first_position
    earliest = first - start + first_position
    latest = tl.minimum(first + TILE, end) - 1 - start + first_position
    acc = tl.zeros([TILE, LANES], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if HAS_SINKS:  # as if a key of zero value had been seen, whose score is the head's sink
        top = tl.zeros([TILE], tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2_E / unit
        total += 1.0
    begin = _first_in_window(earliest, window, STEP, HAS_WINDOW)
    level = (earliest + 1) // STEP * STEP  # from this step on, keys may come after a row
    state = acc, top, total, _path_rows(steps, seams, start, first_position, begin, STEP)
    state = _attend_keys(
        state, query, k, v, steps, seams, start, first_position, positions, begin, level, latest,
        stride_k, stride_v, lanes, squeeze, unit, window,
        False, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    acc, top, total, _ = _attend_keys(
        state, query, k, v, steps, seams, start, first_position, positions, level, latest + 1, latest,
        stride_k, stride_v, lanes, squeeze, unit, window,
        True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    heads = tl.num_programs(0)
    places = (rows.to(tl.int64)[:, None] * heads + head) * WIDTH + lanes[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, result, mask=live[:, None] & (lanes < WIDTH)[None, :])
    tl.store(lse + head * rows_total + rows, tl.fma(top, unit, tl.log2(total)), mask=live)


@triton.jit
def fork_weighted_gradient(
    out, grad, delta, rows_total, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """delta = sum of out * d out over a head's width, for every row and head."""
    heads = tl.num_programs(0)
    head = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    live = rows < rows_total
    o = _rows(out + head * WIDTH, rows, live, heads * WIDTH, lanes, WIDTH).to(tl.float32)
    d = _rows(grad + head * WIDTH, rows, live, heads * WIDTH, lanes, WIDTH).to(tl.float32)
    tl.store(delta + head * rows_total + rows, tl.sum(o * d, 1), mask=live)


@triton.jit
def _query_gradient_of_keys(
    state, query, grad, top, delta, k, v, steps, seams, start, first_position, positions, begin, stop, latest,
    stride_k, stride_v, lanes, squeeze, unit, window,
    CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state is (accumulator, rows of the next step), as in _attend_keys."""
    acc, rows = state
    for position in range(begin, stop, STEP):
        following = _path_rows(steps, seams, start, first_position, position + STEP, STEP)
        key_positions = position + tl.arange(0, STEP)
        live = key_positions <= latest
        key = _rows(k, rows, live, stride_k, lanes, WIDTH)
        value = _rows(v, rows, live, stride_v, lanes, WIDTH)
        products, slope = _capped(tl.dot(query, tl.trans(key), input_precision=PRECISION), squeeze, HAS_CAP)
        weights = tl.exp2(tl.fma(products, unit, -top[:, None]))
        if CAUSAL or HAS_WINDOW:
            weights = tl.where(_visible(positions, key_positions, window, HAS_WINDOW), weights, 0.0)
        d_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[:, None]) * slope
        acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=PRECISION)
        rows = following
    return acc, rows


@triton.jit
def fork_query_gradient(
    q, k, v, grad, lse, delta, d_q, tiles, segments, steps, seams,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, squeeze, unit, window, scale,
    GROUP: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    program = tl.program_id(1)
    tile = tiles + 2 * (program // (TABLE_TILE // TILE))
    first = tl.load(tile + 1) + program % (TABLE_TILE // TILE) * TILE
    start, end, first_position, _, steps_start = _segment(segments, tl.load(tile))
    if first >= end:
        return
    lanes = tl.arange(0, LANES)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    query = _rows(q + head * head_q, rows, live, stride_q, lanes, WIDTH)
    d_out = _rows(grad + head * WIDTH, rows, live, heads * WIDTH, lanes, WIDTH)
    top = tl.load(lse + head * rows_total + rows, mask=live, other=0.0)
    weighted = tl.load(delta + head * rows_total + rows, mask=live, other=0.0)
    k += (head // GROUP) * head_k
    v += (head // GROUP) * head_v
    steps += steps_start
    positions = rows - start + first_position
    earliest = first - start + first_position
    latest = tl.minimum(first + TILE, end) - 1 - start + first_position
    begin = _first_in_window(earliest, window, STEP, HAS_WINDOW)
    level = (earliest + 1) // STEP * STEP
    state = tl.zeros([TILE, LANES], tl.float32), _path_rows(steps, seams, start, first_position, begin, STEP)
    state = _query_gradient_of_keys(
        state, query, d_out, top, weighted, k, v, steps, seams, start, first_position, positions, begin, level, latest,
        stride_k, stride_v, lanes, squeeze, unit, window,
        False, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    acc, _ = _query_gradient_of_keys(
        state, query, d_out, top, weighted, k, v, steps, seams, start, first_position, positions, level, latest + 1,
        latest, stride_k, stride_v, lanes, squeeze, unit, window,
        True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    places = (rows.to(tl.int64)[:, None] * heads + head) * WIDTH + lanes[None, :]
    tl.store(d_q + places, (acc * scale).to(d_q.dtype.element_ty), mask=live[:, None] & (lanes < WIDTH)[None, :])


@triton.jit
def _last_in_window(last_key, end, stop, window, HAS_WINDOW: tl.constexpr):
    """The end of the rows worth reading. Where the last key's window does not reach beyond its segment, which ends at
    `end`, none of the rows behind sees any of the keys; where it does, some rows of each child may."""
    if HAS_WINDOW:
        beyond = last_key + window
        stop = tl.where(beyond <= end, tl.minimum(beyond, stop), stop)
    return stop


@triton.jit
def _key_gradient_of_rows(
    acc_k, acc_v, key, value, q, grad, lse, delta, keys, key_positions, position_of_row, begin, stop,
    stride_q, stride_grad, lanes, squeeze, unit, window,
    DIAGONAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything here is transposed: [keys, rows]."""
    for first in range(begin, stop, STEP):
        rows = first + tl.arange(0, STEP)
        live = rows < stop
        query = _rows(q, rows, live, stride_q, lanes, WIDTH)
        d_out = _rows(grad, rows, live, stride_grad, lanes, WIDTH)
        top = tl.load(lse + rows, mask=live, other=0.0)
        weighted = tl.load(delta + rows, mask=live, other=0.0)
        products, slope = _capped(tl.dot(key, tl.trans(query), input_precision=PRECISION), squeeze, HAS_CAP)
        weights = tl.exp2(tl.fma(products, unit, -top[None, :]))
        seen = live[None, :]
        if DIAGONAL:
            seen = seen & (rows[None, :] >= keys[:, None])
        if HAS_WINDOW:
            row_positions = tl.load(position_of_row + rows, mask=live, other=0).to(tl.int32)
            seen = seen & (row_positions[None, :] - key_positions[:, None] < window)
        weights = tl.where(seen, weights, 0.0)
        acc_v = tl.dot(weights.to(d_out.dtype), d_out, acc_v, input_precision=PRECISION)
        d_weights = tl.dot(value, tl.trans(d_out), input_precision=PRECISION)
        d_scores = weights * (d_weights - weighted[None, :]) * slope
        acc_k = tl.dot(d_scores.to(query.dtype), query, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit
def fork_key_gradient(
    q, k, v, grad, lse, delta, d_k, d_v, partial_k, partial_v, parts, segments, position_of_row,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, squeeze, unit, window, scale,
    GROUP: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    """A tile that has one part writes its gradients; of more, each part writes a slot of `partial_k`, `partial_v`."""
    key_head = tl.program_id(0)
    key_heads = tl.num_programs(0)
    program = tl.program_id(1)
    part = parts + 5 * (program // (TABLE_TILE // TILE))
    offset = program % (TABLE_TILE // TILE) * TILE
    first = tl.load(part + 1) + offset
    start, end, first_position, _, _ = _segment(segments, tl.load(part))
    if first >= end:
        return
    lanes = tl.arange(0, LANES)
    keys = first + tl.arange(0, TILE)
    live = keys < end
    key = _rows(k + key_head * head_k, keys, live, stride_k, lanes, WIDTH)
    value = _rows(v + key_head * head_v, keys, live, stride_v, lanes, WIDTH)
    positions = keys - start + first_position
    acc_k = tl.zeros([TILE, LANES], tl.float32)
    acc_v = tl.zeros([TILE, LANES], tl.float32)
    stride_grad = key_heads * GROUP * WIDTH
    begin = tl.maximum(tl.load(part + 2), first)
    stop = _last_in_window(tl.minimum(first + TILE, end) - 1, end, tl.load(part + 3), window, HAS_WINDOW)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_head = q + head * head_q
        grad_head = grad + head * WIDTH
        lse_head = lse + head * rows_total
        delta_head = delta + head * rows_total
        acc_k, acc_v = _key_gradient_of_rows(
            acc_k, acc_v, key, value, q_head, grad_head, lse_head, delta_head, keys, positions, position_of_row,
            begin, tl.minimum(first + TILE, stop),
            stride_q, stride_grad, lanes, squeeze, unit, window,
            True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
        )  # fmt: skip
        acc_k, acc_v = _key_gradient_of_rows(
            acc_k, acc_v, key, value, q_head, grad_head, lse_head, delta_head, keys, positions, position_of_row,
            tl.maximum(begin, first + TILE), stop,
            stride_q, stride_grad, lanes, squeeze, unit, window,
            False, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
        )  # fmt: skip
    acc_k *= scale
    inside = live[:, None] & (lanes < WIDTH)[None, :]
    slot = tl.load(part + 4)
    if slot < 0:
        places = (keys.to(tl.int64)[:, None] * key_heads + key_head) * WIDTH + lanes[None, :]
        tl.store(d_k + places, acc_k.to(d_k.dtype.element_ty), mask=inside)
        tl.store(d_v + places, acc_v.to(d_v.dtype.element_ty), mask=inside)
    else:
        rows = slot.to(tl.int64) * TABLE_TILE + offset + tl.arange(0, TILE)
        places = (rows[:, None] * key_heads + key_head) * WIDTH + lanes[None, :]
        tl.store(partial_k + places, acc_k, mask=inside)
        tl.store(partial_v + places, acc_v, mask=inside)


@triton.jit
def fork_merge(
    partial_k, partial_v, d_k, d_v, merges, size, CHUNK: tl.constexpr, TABLE_TILE: tl.constexpr
):  # fmt: skip
    """Add up the parts of one row of a tile, in their order; `size` numbers a row, of all key heads."""
    merge = merges + 4 * tl.program_id(0)
    row = tl.load(merge) + tl.program_id(1)
    if row >= tl.load(merge + 1):
        return
    slot = tl.load(merge + 2).to(tl.int64)
    count = tl.load(merge + 3)
    for chunk in range(0, size, CHUNK):
        places = chunk + tl.arange(0, CHUNK)
        live = places < size
        sum_k = tl.zeros([CHUNK], tl.float32)
        sum_v = tl.zeros([CHUNK], tl.float32)
        for part in range(count):
            at = ((slot + part) * TABLE_TILE + tl.program_id(1)) * size + places
            sum_k += tl.load(partial_k + at, mask=live, other=0.0)
            sum_v += tl.load(partial_v + at, mask=live, other=0.0)
        at = row.to(tl.int64) * size + places
        tl.store(d_k + at, sum_k.to(d_k.dtype.element_ty), mask=live)
        tl.store(d_v + at, sum_v.to(d_v.dtype.element_ty), mask=live)
