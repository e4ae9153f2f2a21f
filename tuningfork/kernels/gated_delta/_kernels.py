# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of the gated delta rule's forward pass; fast.py says how they work and launches them.

Inputs are [rows, heads, width] with any row and head stride. `rows` [N, CHUNK] is the table of the chunks' rows, with
`total` where there is none. What is made of chunks is contiguous: gamma [N, Hv, CHUNK], the sums of decays; u, and
fresh, which is v', [N, Hv, CHUNK, VALUE]; w [N, Hv, CHUNK, KEY]; inverse [N, Hv, CHUNK, CHUNK]; states
[N, Hv, KEY, VALUE]. Letters are those of the package's docstring.

Columns beyond a width are lanes that hold zeros: matrix units take powers of two. Sums are float32. No product has the
form dot(trans(x), y) where x is a product itself, which Triton gets wrong on Hopper: what is needed transposed is read
transposed from memory, or made so.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BLOCK = tl.constexpr(16)  # rows that are solved one after the other


@triton.jit
def rows_of(base, rows, live, stride, lanes, WIDTH: tl.constexpr):
    """Some rows of one head, [rows, lanes]; zero where a row is not live."""
    pointers = base + rows.to(tl.int64)[:, None] * stride + lanes[None, :]
    return tl.load(pointers, mask=live[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@triton.jit
def columns_of(base, rows, live, stride, lanes, WIDTH: tl.constexpr):
    """The same, transposed: [lanes, rows]."""
    pointers = base + rows.to(tl.int64)[None, :] * stride + lanes[:, None]
    return tl.load(pointers, mask=live[None, :] & (lanes < WIDTH)[:, None], other=0.0)


@triton.jit
def tile_of(base, rows, lanes, WIDTH: tl.constexpr):
    """Rows of a contiguous matrix, [rows, lanes]."""
    return tl.load(base + rows[:, None] * WIDTH + lanes[None, :], mask=(lanes < WIDTH)[None, :], other=0.0)


@triton.jit
def put_tile(base, rows, lanes, values, WIDTH: tl.constexpr):
    places = base + rows[:, None] * WIDTH + lanes[None, :]
    tl.store(places, values.to(base.dtype.element_ty), mask=(lanes < WIDTH)[None, :])


@triton.jit
def state_places(keys, columns, KEY: tl.constexpr, VALUE: tl.constexpr):
    """Where a state has some of its columns, and which of them it has."""
    inside = (keys < KEY)[:, None] & (columns < VALUE)[None, :]
    return keys[:, None] * VALUE + columns[None, :], inside


@triton.jit
def fading(later, earlier, seen):
    """e^(later - earlier), [later, earlier]; 0 where not seen. Masked first: there the exponent has no bound."""
    return tl.exp(tl.where(seen, later[:, None] - earlier[None, :], float("-inf")))


@triton.jit
def chunk_rows(rows, chunk, total, CHUNK: tl.constexpr):
    """Rows of a chunk, and which are there."""
    found = tl.load(rows + chunk * CHUNK + tl.arange(0, CHUNK))
    return found, found < total


@triton.jit(do_not_specialize=["total"])
def sum_decays(decay, gamma, rows, total, HEADS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    at, live = chunk_rows(rows, chunk, total, CHUNK)
    heads = tl.arange(0, LANES)
    inside = heads < HEADS
    values = rows_of(decay, at, live, HEADS, heads, HEADS)
    places = (chunk * HEADS + heads)[None, :] * CHUNK + tl.arange(0, CHUNK)[:, None]
    tl.store(gamma + places, tl.cumsum(values, 0), mask=inside[None, :])


# --- (I + A)^-1 -------------------------------------------------------------------------------------------------------


@triton.jit
def _inverted(mixing):
    """(I + mixing)^-1 of a strictly lower triangle of _BLOCK rows, row by row."""
    places = tl.arange(0, _BLOCK)
    inverse = -mixing
    for row in range(2, _BLOCK):
        own = -tl.sum(tl.where(places[:, None] == row, mixing, 0.0), 0)
        own += tl.sum(own[:, None] * inverse, 0)
        inverse = tl.where(places[:, None] == row, own[None, :], inverse)
    return inverse + tl.where(places[:, None] == places[None, :], 1.0, 0.0)


@triton.jit
def _times(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _block_of(k, beta, gamma, rows, chunk, total, number, stride_k, lanes, KEY: tl.constexpr, HEADS: tl.constexpr,
              CHUNK: tl.constexpr):  # fmt: skip
    """Keys, rates and sums of decays of one of a chunk's blocks."""
    places = tl.arange(0, _BLOCK) + number * _BLOCK
    at = tl.load(rows + chunk * CHUNK + places)
    live = at < total
    rates = tl.load(beta + at.to(tl.int64) * HEADS, mask=live, other=0.0)
    return rows_of(k, at, live, stride_k, lanes, KEY), rates, tl.load(gamma + places)


@triton.jit
def _mixing(block, other, SAME: tl.constexpr, PRECISION: tl.constexpr):
    """A of one block's rows and another's, or, strictly below the diagonal, its own."""
    keys, rates, later = block
    others, _, earlier = other
    places = tl.arange(0, _BLOCK)
    seen = places[:, None] > places[None, :] if SAME else places[:, None] >= 0
    products = tl.dot(keys, tl.trans(others), input_precision=PRECISION)
    return products * rates[:, None] * fading(later, earlier, seen)


@triton.jit
def _put_block(inverse, row: tl.constexpr, column: tl.constexpr, values, CHUNK: tl.constexpr):
    places = tl.arange(0, _BLOCK)
    at = (places + row * _BLOCK)[:, None] * CHUNK + (places + column * _BLOCK)[None, :]
    tl.store(inverse + at, values.to(inverse.dtype.element_ty))


@triton.jit(do_not_specialize=["total"])
def solve(
    k, beta, gamma, inverse, rows, total, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """inverse = (I + A)^-1: its four diagonal blocks, then what lies below them, each from those above it."""
    tl.static_assert(CHUNK == 4 * _BLOCK)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(rows + chunk * CHUNK) >= total:
        return
    entry = chunk * HEADS + head.to(tl.int64)
    k += (head // GROUP) * head_k
    beta += head
    gamma += entry * CHUNK
    inverse += entry * CHUNK * CHUNK
    lanes = tl.arange(0, KEY_LANES)
    b0 = _block_of(k, beta, gamma, rows, chunk, total, 0, stride_k, lanes, KEY, HEADS, CHUNK)
    b1 = _block_of(k, beta, gamma, rows, chunk, total, 1, stride_k, lanes, KEY, HEADS, CHUNK)
    b2 = _block_of(k, beta, gamma, rows, chunk, total, 2, stride_k, lanes, KEY, HEADS, CHUNK)
    b3 = _block_of(k, beta, gamma, rows, chunk, total, 3, stride_k, lanes, KEY, HEADS, CHUNK)
    t00 = _inverted(_mixing(b0, b0, True, PRECISION))
    t11 = _inverted(_mixing(b1, b1, True, PRECISION))
    t22 = _inverted(_mixing(b2, b2, True, PRECISION))
    t33 = _inverted(_mixing(b3, b3, True, PRECISION))
    a10 = _mixing(b1, b0, False, PRECISION)
    a20 = _mixing(b2, b0, False, PRECISION)
    a21 = _mixing(b2, b1, False, PRECISION)
    a30 = _mixing(b3, b0, False, PRECISION)
    a31 = _mixing(b3, b1, False, PRECISION)
    a32 = _mixing(b3, b2, False, PRECISION)
    t10 = -_times(t11, _times(a10, t00))
    t21 = -_times(t22, _times(a21, t11))
    t32 = -_times(t33, _times(a32, t22))
    t20 = -_times(t22, _times(a20, t00) + _times(a21, t10))
    t31 = -_times(t33, _times(a31, t11) + _times(a32, t21))
    t30 = -_times(t33, _times(a30, t00) + _times(a31, t10) + _times(a32, t20))
    zero = tl.zeros([_BLOCK, _BLOCK], tl.float32)
    _put_block(inverse, 0, 0, t00, CHUNK)
    _put_block(inverse, 0, 1, zero, CHUNK)
    _put_block(inverse, 0, 2, zero, CHUNK)
    _put_block(inverse, 0, 3, zero, CHUNK)
    _put_block(inverse, 1, 0, t10, CHUNK)
    _put_block(inverse, 1, 1, t11, CHUNK)
    _put_block(inverse, 1, 2, zero, CHUNK)
    _put_block(inverse, 1, 3, zero, CHUNK)
    _put_block(inverse, 2, 0, t20, CHUNK)
    _put_block(inverse, 2, 1, t21, CHUNK)
    _put_block(inverse, 2, 2, t22, CHUNK)
    _put_block(inverse, 2, 3, zero, CHUNK)
    _put_block(inverse, 3, 0, t30, CHUNK)
    _put_block(inverse, 3, 1, t31, CHUNK)
    _put_block(inverse, 3, 2, t32, CHUNK)
    _put_block(inverse, 3, 3, t33, CHUNK)


@triton.jit(do_not_specialize=["total"])
def apply_inverse(
    k, v, beta, gamma, inverse, u, w, rows, total, stride_k, head_k, stride_v, head_v,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u and w of a chunk."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(rows + chunk * CHUNK) >= total:
        return
    entry = chunk * HEADS + head.to(tl.int64)
    at, live = chunk_rows(rows, chunk, total, CHUNK)
    places = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEY_LANES)
    rates = tl.load(beta + at.to(tl.int64) * HEADS + head, mask=live, other=0.0)
    kept = rates * tl.exp(tl.load(gamma + entry * CHUNK + places))
    solved = tile_of(inverse + entry * CHUNK * CHUNK, places, places, CHUNK)
    key = rows_of(k + (head // GROUP) * head_k, at, live, stride_k, keys, KEY)
    scaled = (key * kept[:, None]).to(key.dtype)
    put_tile(w + entry * CHUNK * KEY, places, keys, tl.dot(solved, scaled, input_precision=PRECISION), KEY)
    for begin in range(0, VALUE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        value = rows_of(v + head * head_v, at, live, stride_v, columns, VALUE)
        scaled = (value * rates[:, None]).to(value.dtype)
        products = tl.dot(solved, scaled, input_precision=PRECISION)
        put_tile(u + entry * CHUNK * VALUE, places, columns, products, VALUE)


# --- from chunk to chunk ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["total"])
def scan_states(
    k, u, w, gamma, states, fresh, handed, rows, parents, slots, trees, total, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's states, through all chunks of a tree: each chunk's incoming state, and v'.

    A state is handed over in registers to the chunk behind, and in `handed`, as exact, to any other.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    tree = trees + 2 * tl.program_id(2)
    keys = tl.arange(0, KEY_LANES)
    places = tl.arange(0, CHUNK)
    state_at, inside = state_places(keys, columns, KEY, VALUE)
    k += (head // GROUP) * head_k
    state = tl.zeros([KEY_LANES, COLUMNS], tl.float32)
    for chunk in range(tl.load(tree), tl.load(tree + 1)):
        entry = chunk * HEADS + head.to(tl.int64)
        parent = tl.load(parents + chunk)
        if (parent >= 0) & (parent != chunk - 1):
            slot = tl.load(slots + parent).to(tl.int64) * HEADS + head
            state = tl.load(handed + slot * KEY * VALUE + state_at, mask=inside, other=0.0)
        rounded = state.to(states.dtype.element_ty)
        tl.store(states + entry * KEY * VALUE + state_at, rounded, mask=inside)
        at, live = chunk_rows(rows, chunk, total, CHUNK)
        decays = tl.load(gamma + entry * CHUNK + places)
        whole = tl.load(gamma + entry * CHUNK + CHUNK - 1)
        own = tile_of(u + entry * CHUNK * VALUE, places, columns, VALUE).to(tl.float32)
        own -= tl.dot(tile_of(w + entry * CHUNK * KEY, places, keys, KEY), rounded, input_precision=PRECISION)
        put_tile(fresh + entry * CHUNK * VALUE, places, columns, own, VALUE)
        key = columns_of(k, at, live, stride_k, keys, KEY)
        key = (key * tl.exp(whole - decays)[None, :]).to(key.dtype)
        state = tl.dot(key, own.to(key.dtype), state * tl.exp(whole), input_precision=PRECISION)
        slot = tl.load(slots + chunk).to(tl.int64)
        if slot >= 0:
            tl.store(handed + (slot * HEADS + head) * KEY * VALUE + state_at, state, mask=inside)
            tl.debug_barrier()  # other threads of this program may read it


@triton.jit(do_not_specialize=["total"])
def read_states(
    q, k, gamma, states, fresh, out, rows, kept_from, total, stride_q, head_q, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The results of the rows that are a chunk's to write."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(rows + chunk * CHUNK) >= total:
        return
    entry = chunk * HEADS + head.to(tl.int64)
    at, live = chunk_rows(rows, chunk, total, CHUNK)
    kept = live & (at >= tl.load(kept_from + chunk))
    places = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEY_LANES)
    decays = tl.load(gamma + entry * CHUNK + places)
    query = rows_of(q + (head // GROUP) * head_q, at, live, stride_q, keys, KEY)
    key = rows_of(k + (head // GROUP) * head_k, at, live, stride_k, keys, KEY)
    weights = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    weights *= fading(decays, decays, places[:, None] >= places[None, :])
    query = (query * tl.exp(decays)[:, None]).to(query.dtype)
    for begin in range(0, VALUE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        state_at, inside = state_places(keys, columns, KEY, VALUE)
        state = tl.load(states + entry * KEY * VALUE + state_at, mask=inside, other=0.0)
        own = tile_of(fresh + entry * CHUNK * VALUE, places, columns, VALUE)
        result = tl.dot(query, state, input_precision=PRECISION)
        result = tl.dot(weights.to(own.dtype), own, result, input_precision=PRECISION)
        pointers = out + (at.to(tl.int64)[:, None] * HEADS + head) * VALUE + columns[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=kept[:, None] & (columns < VALUE)[None, :])
