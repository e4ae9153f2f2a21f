# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of fork attention; fork.py says how they work and launches them.

`segments` is the table of records.ForkLayout, and `tiles` has fork.py's tiles. Rows, keys and positions are int32; q, k
and v are [rows, heads, WIDTH] with any row and head stride; out, its gradient and the gradients of q, k and v are
contiguous; lse and delta are float32 [heads, rows].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tuningfork.records import Segment

_LOG2_E = tl.constexpr(1.4426950408889634)
_COLUMNS = tl.constexpr(len(Segment._fields))


@triton.jit
def _rows(base, rows, live, stride, lanes, WIDTH: tl.constexpr):
    """Some rows of one head, [rows, lanes]; zero where a row is not live."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + lanes[None, :]
    return tl.load(pointers, mask=live[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@triton.jit
def _scores(raw, scale, softcap, HAS_CAP: tl.constexpr):
    """Scores to the base of 2, and what soft-capping multiplies their gradient with."""
    z = raw * scale
    slope = 1.0
    if HAS_CAP:
        ratio = libdevice.tanh(z / softcap)
        slope = 1.0 - ratio * ratio
        z = softcap * ratio
    return z * _LOG2_E, slope


@triton.jit
def _visible(rows, row_positions, keys, key_positions, last_key, window, OWN: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """[rows, keys]: which keys a row sees. Own keys lie in the row's segment, others in its ancestors."""
    seen = (keys < last_key)[None, :] & (rows >= 0)[:, None]  # the second half only gives the shape
    if OWN:
        seen = seen & (rows[:, None] >= keys[None, :])
    if HAS_WINDOW:
        seen = seen & (row_positions[:, None] - key_positions[None, :] < window)
    return seen


@triton.jit
def _attend_keys(
    state, query, k, v, rows, row_positions, start, stop, last_key, first_position,
    stride_k, stride_v, lanes, scale, softcap, window,
    MASKED: tl.constexpr, OWN: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys of rows start .. stop into the running softmax (accumulator, maximum, sum)."""
    acc, top, total = state
    for first in range(start, stop, STEP):
        keys = first + tl.arange(0, STEP)
        live = keys < last_key
        key = _rows(k, keys, live, stride_k, lanes, WIDTH)
        z, _ = _scores(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, softcap, HAS_CAP)
        if MASKED or HAS_WINDOW:
            key_positions = first_position + keys
            z = tl.where(
                _visible(rows, row_positions, keys, key_positions, last_key, window, OWN, HAS_WINDOW), z, float("-inf")
            )
        new_top = tl.maximum(top, tl.max(z, 1))
        # A row that has seen nothing yet has top -inf; exp(-inf - -inf) would be nan.
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(z - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        value = _rows(v, keys, live, stride_v, lanes, WIDTH)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _tile(tiles, segments, program, TILE: tl.constexpr, TABLE_TILE: tl.constexpr):
    """A program's tile: its first row; its segment's start, end, start and end of the ancestors, end of the subtree."""
    parts: tl.constexpr = TABLE_TILE // TILE
    entry = tiles + 2 * (program // parts)
    first = tl.load(entry + 1) + program % parts * TILE
    segment = segments + _COLUMNS * tl.load(entry)
    start, end = tl.load(segment), tl.load(segment + 1)
    return first, start, end, tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5)


@triton.jit
def _first_in_window(start, first_position, row_position, window, STEP: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The first key worth reading: whole steps in front of the first row's window are left out."""
    if HAS_WINDOW:
        oldest = row_position - window + 1 - (first_position + start)
        start += tl.maximum(oldest, 0) // STEP * STEP
    return start


@triton.jit
def _last_in_window(last_key, end, subtree_end, window, HAS_WINDOW: tl.constexpr):
    """The end of the rows worth reading. Where the last key's window does not reach beyond its segment, which ends at
    `end`, none of the rows behind sees any of the keys; where it does, some rows of each child may."""
    if HAS_WINDOW:
        beyond = last_key + window
        subtree_end = tl.where(beyond <= end, beyond, subtree_end)
    return subtree_end


@triton.jit
def fork_forward(
    q, k, v, sinks, out, lse, tiles, segments, stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total,
    scale, softcap, window,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first, start, end, ancestors, ancestors_end, _ = _tile(tiles, segments, tl.program_id(1), TILE, TABLE_TILE)
    if first >= end:
        return
    lanes = tl.arange(0, LANES)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    query = _rows(q + head * head_q, rows, live, stride_q, lanes, WIDTH)
    k += (head // GROUP) * head_k
    v += (head // GROUP) * head_v
    above = ancestors_end - ancestors
    positions = rows - start + above
    acc = tl.zeros([TILE, LANES], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if HAS_SINKS:  # as if a key of zero value had been seen, whose score is the head's sink
        top = tl.zeros([TILE], tl.float32) + tl.load(sinks + head).to(tl.float32) * _LOG2_E
        total += 1.0
    state = acc, top, total
    begin = _first_in_window(ancestors, -ancestors, first - start + above, window, STEP, HAS_WINDOW)
    state = _attend_keys(
        state, query, k, v, rows, positions, begin, ancestors_end, ancestors_end, -ancestors,
        stride_k, stride_v, lanes, scale, softcap, window,
        True, False, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    begin = _first_in_window(start, above - start, first - start + above, window, STEP, HAS_WINDOW)
    state = _attend_keys(
        state, query, k, v, rows, positions, begin, first, end, above - start,
        stride_k, stride_v, lanes, scale, softcap, window,
        False, True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend_keys(
        state, query, k, v, rows, positions,
        tl.maximum(begin, first), tl.minimum(first + TILE, end), end, above - start,
        stride_k, stride_v, lanes, scale, softcap, window,
        True, True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    heads = tl.num_programs(0)
    places = (rows.to(tl.int64)[:, None] * heads + head) * WIDTH + lanes[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places, result, mask=live[:, None] & (lanes < WIDTH)[None, :])
    tl.store(lse + head * rows_total + rows, top + tl.log2(total), mask=live)


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
    acc, query, grad, top, delta, k, v, rows, row_positions, start, stop, last_key, first_position,
    stride_k, stride_v, lanes, scale, softcap, window,
    MASKED: tl.constexpr, OWN: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for first in range(start, stop, STEP):
        keys = first + tl.arange(0, STEP)
        live = keys < last_key
        key = _rows(k, keys, live, stride_k, lanes, WIDTH)
        value = _rows(v, keys, live, stride_v, lanes, WIDTH)
        z, slope = _scores(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale, softcap, HAS_CAP)
        weights = tl.exp2(z - top[:, None])
        if MASKED or HAS_WINDOW:
            key_positions = first_position + keys
            seen = _visible(rows, row_positions, keys, key_positions, last_key, window, OWN, HAS_WINDOW)
            weights = tl.where(seen, weights, 0.0)
        d_weights = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        d_scores = weights * (d_weights - delta[:, None]) * slope
        acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=PRECISION)
    return acc


@triton.jit
def fork_query_gradient(
    q, k, v, grad, lse, delta, d_q, tiles, segments, stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total,
    scale, softcap, window,
    GROUP: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    first, start, end, ancestors, ancestors_end, _ = _tile(tiles, segments, tl.program_id(1), TILE, TABLE_TILE)
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
    above = ancestors_end - ancestors
    positions = rows - start + above
    acc = tl.zeros([TILE, LANES], tl.float32)
    begin = _first_in_window(ancestors, -ancestors, first - start + above, window, STEP, HAS_WINDOW)
    acc = _query_gradient_of_keys(
        acc, query, d_out, top, weighted, k, v, rows, positions, begin, ancestors_end, ancestors_end, -ancestors,
        stride_k, stride_v, lanes, scale, softcap, window,
        True, False, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    begin = _first_in_window(start, above - start, first - start + above, window, STEP, HAS_WINDOW)
    acc = _query_gradient_of_keys(
        acc, query, d_out, top, weighted, k, v, rows, positions, begin, first, end, above - start,
        stride_k, stride_v, lanes, scale, softcap, window,
        False, True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    acc = _query_gradient_of_keys(
        acc, query, d_out, top, weighted, k, v, rows, positions,
        tl.maximum(begin, first), tl.minimum(first + TILE, end), end, above - start,
        stride_k, stride_v, lanes, scale, softcap, window,
        True, True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
    )  # fmt: skip
    places = (rows.to(tl.int64)[:, None] * heads + head) * WIDTH + lanes[None, :]
    tl.store(d_q + places, (acc * scale).to(d_q.dtype.element_ty), mask=live[:, None] & (lanes < WIDTH)[None, :])


@triton.jit
def _key_gradient_of_rows(
    acc_k, acc_v, key, value, q, grad, lse, delta, keys, key_positions, position_of_row, start, stop, last_row,
    stride_q, stride_grad, lanes, scale, softcap, window,
    DIAGONAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything here is transposed: [keys, rows]."""
    for first in range(start, stop, STEP):
        rows = first + tl.arange(0, STEP)
        live = rows < last_row
        query = _rows(q, rows, live, stride_q, lanes, WIDTH)
        d_out = _rows(grad, rows, live, stride_grad, lanes, WIDTH)
        top = tl.load(lse + rows, mask=live, other=0.0)
        weighted = tl.load(delta + rows, mask=live, other=0.0)
        z, slope = _scores(tl.dot(key, tl.trans(query), input_precision=PRECISION), scale, softcap, HAS_CAP)
        weights = tl.exp2(z - top[None, :])
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
    q, k, v, grad, lse, delta, d_k, d_v, tiles, segments, position_of_row,
    stride_q, head_q, stride_k, head_k, stride_v, head_v, rows_total, scale, softcap, window,
    GROUP: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    TABLE_TILE: tl.constexpr,
):  # fmt: skip
    key_head = tl.program_id(0)
    key_heads = tl.num_programs(0)
    program = tl.program_id(1)
    first, start, end, ancestors, ancestors_end, subtree_end = _tile(tiles, segments, program, TILE, TABLE_TILE)
    if first >= end:
        return
    lanes = tl.arange(0, LANES)
    keys = first + tl.arange(0, TILE)
    live = keys < end
    key = _rows(k + key_head * head_k, keys, live, stride_k, lanes, WIDTH)
    value = _rows(v + key_head * head_v, keys, live, stride_v, lanes, WIDTH)
    positions = keys - start + ancestors_end - ancestors
    acc_k = tl.zeros([TILE, LANES], tl.float32)
    acc_v = tl.zeros([TILE, LANES], tl.float32)
    stride_grad = key_heads * GROUP * WIDTH
    stop = _last_in_window(tl.minimum(first + TILE, end) - 1, end, subtree_end, window, HAS_WINDOW)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_head = q + head * head_q
        grad_head = grad + head * WIDTH
        lse_head = lse + head * rows_total
        delta_head = delta + head * rows_total
        acc_k, acc_v = _key_gradient_of_rows(
            acc_k, acc_v, key, value, q_head, grad_head, lse_head, delta_head, keys, positions, position_of_row,
            first, tl.minimum(first + TILE, subtree_end), subtree_end,
            stride_q, stride_grad, lanes, scale, softcap, window,
            True, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
        )  # fmt: skip
        acc_k, acc_v = _key_gradient_of_rows(
            acc_k, acc_v, key, value, q_head, grad_head, lse_head, delta_head, keys, positions, position_of_row,
            first + TILE, stop, subtree_end,
            stride_q, stride_grad, lanes, scale, softcap, window,
            False, HAS_CAP, HAS_WINDOW, WIDTH, STEP, PRECISION,
        )  # fmt: skip
    places = (keys.to(tl.int64)[:, None] * key_heads + key_head) * WIDTH + lanes[None, :]
    inside = live[:, None] & (lanes < WIDTH)[None, :]
    tl.store(d_k + places, (acc_k * scale).to(d_k.dtype.element_ty), mask=inside)
    tl.store(d_v + places, acc_v.to(d_v.dtype.element_ty), mask=inside)
