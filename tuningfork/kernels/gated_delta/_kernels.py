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

_BLOCK = tl.constexpr(16)  # rows of A that are solved one after the other


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
def delta_decays(decay, gamma, rows, total, HEADS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    at, live = chunk_rows(rows, chunk, total, CHUNK)
    heads = tl.arange(0, LANES)
    inside = heads < HEADS
    values = rows_of(decay, at, live, HEADS, heads, HEADS)
    places = (chunk * HEADS + heads)[None, :] * CHUNK + tl.arange(0, CHUNK)[:, None]
    tl.store(gamma + places, tl.cumsum(values, 0), mask=inside[None, :])


# --- (I + A)^-1 -------------------------------------------------------------------------------------------------------


@triton.jit
def _invert_blocks(work, CHUNK: tl.constexpr):
    """Replace the blocks on the diagonal of A by those of (I + A)^-1: row by row, all blocks at once."""
    inner = tl.arange(0, _BLOCK)
    blocks = tl.arange(0, CHUNK // _BLOCK) * (_BLOCK * (CHUNK + 1))
    at = work + blocks[:, None, None] + inner[None, :, None] * CHUNK + inner[None, None, :]
    mixing = tl.load(at)
    inverse = -mixing
    for row in range(2, _BLOCK):
        is_row = inner[None, :, None] == row
        own = -tl.sum(tl.where(is_row, mixing, 0.0), 1)
        own += tl.sum(own[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, own[:, None, :], inverse)
    inverse += tl.where(inner[None, :, None] == inner[None, None, :], 1.0, 0.0)
    tl.debug_barrier()
    tl.store(at, inverse)


@triton.jit
def _fill_below(work, first: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Replace what lies below two solved blocks, of SIZE rows each and from row `first` on."""
    inner = tl.arange(0, SIZE)
    at = work + first * (CHUNK + 1) + inner[:, None] * CHUNK + inner[None, :]
    products = tl.dot(tl.load(at + SIZE * CHUNK), tl.load(at), input_precision="ieee")
    products = -tl.dot(tl.load(at + SIZE * (CHUNK + 1)), products, input_precision="ieee")
    tl.debug_barrier()
    tl.store(at + SIZE * CHUNK, products)


@triton.jit(do_not_specialize=["total"])
def delta_solve(
    k, beta, gamma, work, inverse, rows, total, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """inverse = (I + A)^-1, made in `work`, float32 [N, HEADS, CHUNK, CHUNK], in blocks of 16, 32 and 64 rows.

    All threads of a program see what it has written once they have met at a barrier.
    """
    tl.static_assert(CHUNK == 4 * _BLOCK)
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(rows + chunk * CHUNK) >= total:
        return
    entry = chunk * HEADS + head.to(tl.int64)
    at, live = chunk_rows(rows, chunk, total, CHUNK)
    places = tl.arange(0, CHUNK)
    key = rows_of(k + (head // GROUP) * head_k, at, live, stride_k, tl.arange(0, KEY_LANES), KEY)
    rates = tl.load(beta + at.to(tl.int64) * HEADS + head, mask=live, other=0.0)
    decays = tl.load(gamma + entry * CHUNK + places)
    mixing = tl.dot(key, tl.trans(key), input_precision=PRECISION) * rates[:, None]
    mixing *= fading(decays, decays, places[:, None] > places[None, :])
    work += entry * CHUNK * CHUNK
    put_tile(work, places, places, mixing, CHUNK)
    tl.debug_barrier()
    _invert_blocks(work, CHUNK)
    tl.debug_barrier()
    _fill_below(work, 0, _BLOCK, CHUNK)
    _fill_below(work, 2 * _BLOCK, _BLOCK, CHUNK)
    tl.debug_barrier()
    _fill_below(work, 0, 2 * _BLOCK, CHUNK)
    tl.debug_barrier()
    put_tile(inverse + entry * CHUNK * CHUNK, places, places, tile_of(work, places, places, CHUNK), CHUNK)


@triton.jit(do_not_specialize=["total"])
def delta_apply_inverse(
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
    products = tl.dot(solved, (key * kept[:, None]).to(key.dtype), input_precision=PRECISION)
    put_tile(w + entry * CHUNK * KEY, places, keys, products, KEY)
    for begin in range(0, VALUE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        value = rows_of(v + head * head_v, at, live, stride_v, columns, VALUE)
        put_tile(
            u + entry * CHUNK * VALUE,
            places,
            columns,
            tl.dot(solved, (value * rates[:, None]).to(value.dtype), input_precision=PRECISION),
            VALUE,
        )


# --- from chunk to chunk ----------------------------------------------------------------------------------------------


@triton.jit
def chain_of(chains, number):
    """A line of _chunks.chains_of; slots are int64."""
    chain = chains + 5 * number
    source = tl.load(chain + 2).to(tl.int64)
    return tl.load(chain), tl.load(chain + 1), source, tl.load(chain + 3).to(tl.int64), tl.load(chain + 4)


@triton.jit(do_not_specialize=["total"])
def delta_states(
    k, u, w, gamma, states, fresh, handed, rows, chains, trees, total, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's states, through all chains of a tree: each chunk's incoming state, and v'.

    From chain to chain a state goes through `handed`, as exact as it is, within one through registers.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    tree = trees + 2 * tl.program_id(2)
    keys = tl.arange(0, KEY_LANES)
    places = tl.arange(0, CHUNK)
    state_at, inside = state_places(keys, columns, KEY, VALUE)
    k += (head // GROUP) * head_k
    for number in range(tl.load(tree), tl.load(tree + 1)):
        begin, end, source, target, _ = chain_of(chains, number)
        state = tl.zeros([KEY_LANES, COLUMNS], tl.float32)
        if source >= 0:
            state = tl.load(handed + (source * HEADS + head) * KEY * VALUE + state_at, mask=inside, other=0.0)
        for chunk in range(begin, end):
            entry = chunk * HEADS + head.to(tl.int64)
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
        if target >= 0:
            tl.store(handed + (target * HEADS + head) * KEY * VALUE + state_at, state, mask=inside)
            tl.debug_barrier()  # all threads of this program see it


@triton.jit(do_not_specialize=["total"])
def delta_read(
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
