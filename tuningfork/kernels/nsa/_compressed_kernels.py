# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of compressed attention, and of the choice of blocks; fast.py says how they work.

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
def _complete(positions, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Blocks that are complete at some positions."""
    behind = positions + 1 - LENGTH
    return tl.where(behind >= 0, behind // STRIDE + 1, 0)


@triton.jit
def _tile(tiles, segments, entry_segments, program, TILE: tl.constexpr, TABLE_TILE: tl.constexpr):
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
    first, end, position, own, above, steps_start = _tile(
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
    visible = _complete(position + tl.arange(0, TILE), LENGTH, STRIDE)
    most = _complete(position + tl.minimum(TILE, end - first) - 1, LENGTH, STRIDE)
    level = _complete(position, LENGTH, STRIDE) // STEP * STEP  # from here on a row may not see all
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
    first, end, position, own, above, steps_start = _tile(
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
    visible = _complete(position + tl.arange(0, TILE), LENGTH, STRIDE)
    most = _complete(position + tl.minimum(TILE, end - first) - 1, LENGTH, STRIDE)
    level = _complete(position, LENGTH, STRIDE) // STEP * STEP
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
    last_rows = tl.load(entry_rows + entries * LENGTH + (LENGTH - 1), mask=live, other=2147483647)
    acc_k = tl.zeros([TILE, KEY_LANES], tl.float32)
    acc_v = tl.zeros([TILE, VALUE_LANES], tl.float32)
    stride_grad = groups * GROUP * VALUE
    for member in range(GROUP):
        head = group * GROUP + member
        q_head = q + head * head_q
        grad_head = grad + head * VALUE
        lse_head = lse + head * rows_total
        delta_head = delta + head * rows_total
        for row in range(begin, end, STEP):
            rows = row + tl.arange(0, STEP)
            reads = rows < end
            query = load_rows(q_head, rows, reads, stride_q, keys, KEY)
            d_out = load_rows(grad_head, rows, reads, stride_grad, values, VALUE)
            top = tl.load(lse_head + rows, mask=reads, other=0.0)
            weighted = tl.load(delta_head + rows, mask=reads, other=0.0)
            products = tl.dot(key, tl.trans(query), input_precision=PRECISION)  # transposed, as all here
            weights = tl.exp2(tl.fma(products, unit, -top[None, :]))
            weights = tl.where(reads[None, :] & (rows[None, :] >= last_rows[:, None]), weights, 0.0)
            acc_v = tl.dot(weights.to(d_out.dtype), d_out, acc_v, input_precision=PRECISION)
            d_weights = tl.dot(value, tl.trans(d_out), input_precision=PRECISION)
            d_scores = weights * (d_weights - weighted[None, :])
            acc_k = tl.dot(d_scores.to(query.dtype), query, acc_k, input_precision=PRECISION)
    slots = (number.to(tl.int64) * groups + group) * TABLE_TILE + offset + tl.arange(0, TILE)
    tl.store(partial_k + slots[:, None] * KEY + keys[None, :], acc_k * scale, mask=(keys < KEY)[None, :])
    tl.store(partial_v + slots[:, None] * VALUE + values[None, :], acc_v, mask=(values < VALUE)[None, :])


# --- the choice of blocks ---------------------------------------------------------------------------------------------


@triton.jit
def _times(place, STRIDES: tl.constexpr, PER_BLOCK: tl.constexpr):
    """How many strides of an entry lie in a block, `place` entries behind whose first the entry is."""
    most = tl.minimum(place + STRIDES, PER_BLOCK - place)
    return tl.maximum(tl.minimum(most, STRIDES if STRIDES < PER_BLOCK else PER_BLOCK), 0).to(tl.float32)


@triton.jit(do_not_specialize=["rows_total", "first_tile", "row_scores"])
def nsa_scores(
    q, k, lse, scores, carried, tiles, segments, entry_segments, steps, seams,
    stride_q, head_q, stride_k, head_k, rows_total, unit, first_tile, row_scores,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr,
    KEY: tl.constexpr, KEY_LANES: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
    PRECISION: tl.constexpr, TABLE_TILE: tl.constexpr,
):  # fmt: skip
    """How much weight some blocks have from the entries that begin in them, by group; the heads' in order.

    Of an entry some strides may lie in the next block: these are `carried` there. Both are float32 [rows of the chunk's
    tiles, groups, row_scores]. Nothing is written for tiles in which no row has a choice, nor for blocks that are yet
    to come.
    """
    block = tl.program_id(0) * BLOCKS
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    program = tl.program_id(2)
    first, end, position, own, above, steps_start = _tile(
        tiles + 2 * first_tile, segments, entry_segments, program, TILE, TABLE_TILE
    )
    latest = position + tl.minimum(TILE, end - first) - 1
    if (first >= end) | (latest // SELECT < COUNT) | (block > latest // SELECT):
        return
    PER_BLOCK: tl.constexpr = SELECT // STRIDE
    keys = tl.arange(0, KEY_LANES)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    lanes = tl.arange(0, BLOCKS * PLACES)
    numbers = (block + lanes // PLACES) * PER_BLOCK + lanes % PLACES
    visible = _complete(position + tl.arange(0, TILE), LENGTH, STRIDE)
    there = (lanes % PLACES < PER_BLOCK) & (numbers < _complete(latest, LENGTH, STRIDE))
    seen = there[None, :] & (numbers[None, :] < visible[:, None])
    entries = path_places(steps + steps_start, seams, own, above, tl.where(there, numbers, 0))
    key = load_rows(k + group * head_k, entries, there, stride_k, keys, KEY)
    weights = tl.zeros([TILE, BLOCKS * PLACES], tl.float32)
    for member in range(GROUP):
        head = group * GROUP + member
        query = load_rows(q + head * head_q, rows, live, stride_q, keys, KEY)
        top = tl.load(lse + head * rows_total + rows, mask=live, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weights += tl.where(seen, tl.exp2(tl.fma(products, unit, -top[:, None])), 0.0)
    of_blocks = tl.reshape(weights, [TILE, BLOCKS, PLACES])
    place = tl.arange(0, PLACES)
    own_times = tl.where(place < PER_BLOCK, _times(place, LENGTH // STRIDE, PER_BLOCK), 0.0)
    next_times = tl.where(place < PER_BLOCK, _times(place - PER_BLOCK, LENGTH // STRIDE, PER_BLOCK), 0.0)
    own_sum = tl.sum(of_blocks * own_times[None, None, :], 2)
    next_sum = tl.sum(of_blocks * next_times[None, None, :], 2)
    slots = (program * TILE + tl.arange(0, TILE)).to(tl.int64) * groups + group
    blocks = block + tl.arange(0, BLOCKS)
    places = slots[:, None] * row_scores + blocks[None, :]
    inside = live[:, None] & (blocks < row_scores)[None, :]
    tl.store(scores + places, own_sum, mask=inside)
    tl.store(carried + places + 1, next_sum, mask=inside & (blocks + 1 < row_scores)[None, :])


@triton.jit
def _choose(
    scores, carried, chosen, own,
    COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best COUNT of blocks 0 .. own, more than COUNT, from low to high.

    A block's key is its score's bits, which are in order since no score is negative, then its number from behind: no
    two are equal, and of two with the same score the lower one is the larger.
    """
    block = tl.arange(0, LANES)
    there = block <= own
    score = tl.load(scores + block, mask=there, other=0.0)
    score += tl.load(carried + block, mask=there & (block > 0), other=0.0)
    forced = (block < INITIAL) | (block > own - LOCAL)
    score = tl.where(forced, float("inf"), score)
    key = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (2147483647 - block)
    key = tl.where(there, key, -1)
    least = tl.full([1], 9223372036854775807, tl.int64)
    for _ in range(COUNT):
        least = tl.max(tl.where(key < least, key, -1), 0, keep_dims=True)
    best = key >= least
    tl.store(chosen + tl.cumsum(best.to(tl.int32), 0) - 1, block, mask=best)


@triton.jit(do_not_specialize=["first_tile", "row_scores"])
def nsa_choose(
    scores, carried, chosen, tiles, segments, first_tile, row_scores,
    SELECT: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, LANES: tl.constexpr,
    COUNT_LANES: tl.constexpr, TABLE_TILE: tl.constexpr,
):  # fmt: skip
    """The blocks that a row chooses for one group. LANES is at least the number of a pack's blocks; a row that has few
    is looked through in fewer lanes, which decides nothing."""
    program = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    tile = tiles + 2 * (first_tile + program // TABLE_TILE)
    segment = segments + _COLUMNS * tl.load(tile)
    row = tl.load(tile + 1) + program % TABLE_TILE
    if row >= tl.load(segment + 1):
        return
    own = (row - tl.load(segment) + tl.load(segment + 3)) // SELECT
    slot = program.to(tl.int64) * groups + group
    scores += slot * row_scores
    carried += slot * row_scores
    chosen += (row.to(tl.int64) * groups + group) * COUNT
    if own < COUNT:
        number = tl.arange(0, COUNT_LANES)
        tl.store(chosen + number, tl.where(number <= own, number, -1), mask=number < COUNT)
    elif own < 128:
        _choose(scores, carried, chosen, own, COUNT, INITIAL, LOCAL, LANES if LANES < 128 else 128)
    elif own < 512:
        _choose(scores, carried, chosen, own, COUNT, INITIAL, LOCAL, LANES if LANES < 512 else 512)
    else:
        _choose(scores, carried, chosen, own, COUNT, INITIAL, LOCAL, LANES)
