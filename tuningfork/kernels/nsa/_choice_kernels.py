# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of the choice of blocks; fast.py says how they work. Their arguments are those of
`_compressed_kernels.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from tuningfork.kernels.nsa._compressed_kernels import complete, load_rows, path_places, tile_of
from tuningfork.records import Segment

_COLUMNS = tl.constexpr(len(Segment._fields))


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
    first, end, position, own, above, steps_start = tile_of(
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
    visible = complete(position + tl.arange(0, TILE), LENGTH, STRIDE)
    there = (lanes % PLACES < PER_BLOCK) & (numbers < complete(latest, LENGTH, STRIDE))
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
