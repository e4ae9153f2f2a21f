# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of the gated delta rule's backward pass; fast.py says how they work and launches them.

Inputs and what is made of chunks lie as in `_kernels.py`; gradients of what is made of chunks, and of a chunk's rows,
lie as what they are of. With dO of the rows that are a chunk's to write, P = Q K^T ⊙ D, the chunk's incoming state S
and the gradient dS+ of the one that it hands on:

    dv' = P^T dO + e^(γ of the last - γ) K dS+        dS = (e^γ Q)^T dO - w^T dv' + e^(γ of the last) dS+
    X = (I + A)^-T [dv' | -dv' S^T]                   dA = -X [u | w]^T, strictly lower

X is the gradient of [b V | b e^γ K].
"""

from __future__ import annotations

import triton
import triton.language as tl

from tuningfork.kernels.gated_delta._kernels import (
    chain_of,
    chunk_rows,
    columns_of,
    fading,
    put_tile,
    rows_of,
    state_places,
    tile_of,
)


@triton.jit
def _upstream(grad, at, kept, head, columns, HEADS: tl.constexpr, VALUE: tl.constexpr):
    """The gradient of the results that are a chunk's to write."""
    return rows_of(grad + head * VALUE, at, kept, HEADS * VALUE, columns, VALUE)


@triton.jit
def _state_on(states, keys, columns, KEY: tl.constexpr, VALUE: tl.constexpr):
    """Some columns of a state, transposed: [columns, keys]."""
    inside = (columns < VALUE)[:, None] & (keys < KEY)[None, :]
    return tl.load(states + keys[None, :] * VALUE + columns[:, None], mask=inside, other=0.0)


@triton.jit
def _fading_on(decays, places):
    """D transposed, [earlier, later]."""
    seen = places[None, :] >= places[:, None]
    return tl.exp(tl.where(seen, decays[None, :] - decays[:, None], float("-inf")))


@triton.jit(do_not_specialize=["total"])
def delta_fresh_gradient(
    q, k, gamma, grad, d_fresh, rows, kept_from, total, stride_q, head_q, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_fresh = P^T dO: what of the gradient of v' comes from within the chunk."""
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
    weights = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    weights *= _fading_on(decays, places)
    for begin in range(0, VALUE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        d_out = _upstream(grad, at, kept, head, columns, HEADS, VALUE)
        products = tl.dot(weights.to(d_out.dtype), d_out, input_precision=PRECISION)
        put_tile(d_fresh + entry * CHUNK * VALUE, places, columns, products, VALUE)


@triton.jit(do_not_specialize=["total"])
def delta_state_gradients(
    q, k, w, gamma, grad, d_states, d_fresh, handed, rows, kept_from, chains, trees, total,
    stride_q, head_q, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the states' gradients, back through all chains of a tree: dS+ of each chunk, and all of dv'.

    Of several chains that go on from a state the last writes its gradient to `handed`, and those before add theirs,
    backwards: one order, whatever else is in the pack.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    tree = trees + 2 * tl.program_id(2)
    first_chain = tl.load(tree)
    last_chain = tl.load(tree + 1) - 1
    keys = tl.arange(0, KEY_LANES)
    places = tl.arange(0, CHUNK)
    state_at, inside = state_places(keys, columns, KEY, VALUE)
    q += (head // GROUP) * head_q
    k += (head // GROUP) * head_k
    for chain in range(0, last_chain + 1 - first_chain):
        begin, end, source, target, is_last = chain_of(chains, last_chain - chain)
        gradient = tl.zeros([KEY_LANES, COLUMNS], tl.float32)
        if target >= 0:
            gradient = tl.load(handed + (target * HEADS + head) * KEY * VALUE + state_at, mask=inside, other=0.0)
        for back in range(0, end - begin):
            chunk = end - 1 - back
            entry = chunk * HEADS + head.to(tl.int64)
            rounded = gradient.to(d_states.dtype.element_ty)
            tl.store(d_states + entry * KEY * VALUE + state_at, rounded, mask=inside)
            at, live = chunk_rows(rows, chunk, total, CHUNK)
            kept = live & (at >= tl.load(kept_from + chunk))
            decays = tl.load(gamma + entry * CHUNK + places)
            whole = tl.load(gamma + entry * CHUNK + CHUNK - 1)
            key = rows_of(k, at, live, stride_k, keys, KEY)
            key = (key * tl.exp(whole - decays)[:, None]).to(key.dtype)
            own = tile_of(d_fresh + entry * CHUNK * VALUE, places, columns, VALUE).to(tl.float32)
            own = tl.dot(key, rounded, own, input_precision=PRECISION)
            put_tile(d_fresh + entry * CHUNK * VALUE, places, columns, own, VALUE)
            query = columns_of(q, at, live, stride_q, keys, KEY)
            query = (query * tl.exp(decays)[None, :]).to(query.dtype)
            d_out = _upstream(grad, at, kept, head, columns, HEADS, VALUE)
            removed = columns_of(w + entry * CHUNK * KEY, places, live, KEY, keys, KEY)
            gradient = tl.dot(query, d_out, gradient * tl.exp(whole), input_precision=PRECISION)
            gradient -= tl.dot(removed, own.to(removed.dtype), input_precision=PRECISION)
        if source >= 0:
            handed_back = handed + (source * HEADS + head) * KEY * VALUE + state_at
            if is_last == 0:
                gradient += tl.load(handed_back, mask=inside, other=0.0)
                tl.debug_barrier()
            tl.store(handed_back, gradient, mask=inside)
            tl.debug_barrier()  # all threads of this program see it


@triton.jit(do_not_specialize=["total"])
def delta_solve_gradient(
    k, v, beta, gamma, inverse, u, w, states, d_fresh, x_u, x_w, d_mixing, d_beta, d_gamma, rows, total,
    stride_k, head_k, stride_v, head_v,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X, what the rates and decays have of it, and -X [u | w]^T, float32 [N, HEADS, CHUNK, CHUNK], in `d_mixing`.

    `x_u` is the gradient of bV, `x_w` that of be^γK.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(rows + chunk * CHUNK) >= total:
        return
    entry = chunk * HEADS + head.to(tl.int64)
    at, live = chunk_rows(rows, chunk, total, CHUNK)
    places = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEY_LANES)
    solved = columns_of(inverse + entry * CHUNK * CHUNK, places, places >= 0, CHUNK, places, CHUNK)
    d_w = tl.zeros([CHUNK, KEY_LANES], tl.float32)
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    of_beta = tl.zeros([CHUNK], tl.float32)
    of_values = entry * CHUNK * VALUE
    for begin in range(0, VALUE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        own = tile_of(d_fresh + of_values, places, columns, VALUE)
        state = _state_on(states + entry * KEY * VALUE, keys, columns, KEY, VALUE)
        d_w += tl.dot(own, state, input_precision=PRECISION)
        x = tl.dot(solved, own, input_precision=PRECISION)
        put_tile(x_u + of_values, places, columns, x, VALUE)
        added = tile_of(u + of_values, places, columns, VALUE)
        products += tl.dot(x.to(added.dtype), tl.trans(added), input_precision=PRECISION)
        of_beta += tl.sum(x * rows_of(v + head * head_v, at, live, stride_v, columns, VALUE), 1)
    x = -tl.dot(solved, d_w.to(solved.dtype), input_precision=PRECISION)
    put_tile(x_w + entry * CHUNK * KEY, places, keys, x, KEY)
    removed = tile_of(w + entry * CHUNK * KEY, places, keys, KEY)
    products += tl.dot(x.to(removed.dtype), tl.trans(removed), input_precision=PRECISION)
    put_tile(d_mixing + entry * CHUNK * CHUNK, places, places, -products, CHUNK)
    kept = tl.exp(tl.load(gamma + entry * CHUNK + places))
    of_kept = tl.sum(x * rows_of(k + (head // GROUP) * head_k, at, live, stride_k, keys, KEY), 1) * kept
    rates = tl.load(beta + at.to(tl.int64) * HEADS + head, mask=live, other=0.0)
    tl.store(d_beta + entry * CHUNK + places, of_beta + of_kept)
    tl.store(d_gamma + entry * CHUNK + places, of_kept * rates)


@triton.jit(do_not_specialize=["total"])
def delta_query_gradient(
    q, k, gamma, states, fresh, grad, d_q, d_gamma, rows, kept_from, total, stride_q, head_q, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, [rows, HEADS, KEY], and what the decays have of results; it is added to d_gamma."""
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    if tl.load(rows + chunk * CHUNK) >= total:
        return
    entry = chunk * HEADS + head.to(tl.int64)
    at, live = chunk_rows(rows, chunk, total, CHUNK)
    kept = live & (at >= tl.load(kept_from + chunk))
    places = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEY_LANES)
    d_weights = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_query = tl.zeros([CHUNK, KEY_LANES], tl.float32)
    for begin in range(0, VALUE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        d_out = _upstream(grad, at, kept, head, columns, HEADS, VALUE)
        own = columns_of(fresh + entry * CHUNK * VALUE, places, live, VALUE, columns, VALUE)
        d_weights += tl.dot(d_out, own, input_precision=PRECISION)
        state = _state_on(states + entry * KEY * VALUE, keys, columns, KEY, VALUE)
        d_query += tl.dot(d_out, state, input_precision=PRECISION)
    decays = tl.load(gamma + entry * CHUNK + places)
    query = rows_of(q + (head // GROUP) * head_q, at, live, stride_q, keys, KEY)
    key = rows_of(k + (head // GROUP) * head_k, at, live, stride_k, keys, KEY)
    d_query *= tl.exp(decays)[:, None]
    of_decays = tl.sum(d_query * query, 1)
    d_weights *= fading(decays, decays, places[:, None] >= places[None, :])
    d_query = tl.dot(d_weights.to(key.dtype), key, d_query, input_precision=PRECISION)
    shares = d_weights * tl.dot(query, tl.trans(key), input_precision=PRECISION)
    of_decays += tl.sum(shares, 1) - tl.sum(shares, 0)
    pointers = d_q + (at.to(tl.int64)[:, None] * HEADS + head) * KEY + keys[None, :]
    tl.store(pointers, d_query.to(d_q.dtype.element_ty), mask=kept[:, None] & (keys < KEY)[None, :])
    sums = d_gamma + entry * CHUNK + places
    tl.store(sums, tl.load(sums) + of_decays)


@triton.jit(do_not_specialize=["total"])
def delta_key_gradient(
    q, k, beta, gamma, x_w, d_mixing, states, d_states, fresh, grad, d_k, d_beta, d_gamma, rows, kept_from, total,
    stride_q, head_q, stride_k, head_k,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_LANES: tl.constexpr, VALUE: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk's keys, and the rest of that of its rates and decays: d_gamma becomes that of g."""
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
    whole = tl.load(gamma + entry * CHUNK + CHUNK - 1)
    rates = tl.load(beta + at.to(tl.int64) * HEADS + head, mask=live, other=0.0)
    query = rows_of(q + (head // GROUP) * head_q, at, live, stride_q, keys, KEY)
    key = rows_of(k + (head // GROUP) * head_k, at, live, stride_k, keys, KEY)
    fading_on = _fading_on(decays, places)

    # Of results, and of the state that is handed on.
    d_weights_on = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_key = tl.zeros([CHUNK, KEY_LANES], tl.float32)
    of_state = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, VALUE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        added = tile_of(fresh + entry * CHUNK * VALUE, places, columns, VALUE)
        d_out = _upstream(grad, at, kept, head, columns, HEADS, VALUE)
        d_weights_on += tl.dot(added, tl.trans(d_out), input_precision=PRECISION)
        d_state = _state_on(d_states + entry * KEY * VALUE, keys, columns, KEY, VALUE)
        state = _state_on(states + entry * KEY * VALUE, keys, columns, KEY, VALUE)
        d_key += tl.dot(added, d_state, input_precision=PRECISION)
        of_state += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
    d_key *= tl.exp(whole - decays)[:, None]
    of_handed = tl.sum(d_key * key, 1)
    d_key = tl.dot((d_weights_on * fading_on).to(query.dtype), query, d_key, input_precision=PRECISION)

    # Of A, whose gradient is needed transposed, too.
    x = tile_of(x_w + entry * CHUNK * KEY, places, keys, KEY)
    d_key += x * (rates * tl.exp(decays))[:, None]
    d_mixing += entry * CHUNK * CHUNK
    of_mixing = tile_of(d_mixing, places, places, CHUNK)
    of_mixing_on = columns_of(d_mixing, places, places >= 0, CHUNK, places, CHUNK)
    of_mixing *= fading(decays, decays, places[:, None] > places[None, :])
    shares = of_mixing * tl.dot(key, tl.trans(key), input_precision=PRECISION)
    of_beta = tl.sum(shares, 1)
    shares *= rates[:, None]
    of_decays = tl.sum(shares, 1) - tl.sum(shares, 0) - of_handed
    d_key = tl.dot((of_mixing * rates[:, None]).to(key.dtype), key, d_key, input_precision=PRECISION)
    of_mixing_on = tl.where(places[None, :] > places[:, None], of_mixing_on * fading_on * rates[None, :], 0.0)
    d_key = tl.dot(of_mixing_on.to(key.dtype), key, d_key, input_precision=PRECISION)
    put_tile(d_k + entry * CHUNK * KEY, places, keys, d_key, KEY)

    sums = d_beta + entry * CHUNK + places
    tl.store(sums, tl.load(sums) + of_beta)
    of_whole = tl.sum(of_handed) + tl.sum(of_state) * tl.exp(whole)
    sums = d_gamma + entry * CHUNK + places
    of_decays += tl.load(sums) + tl.where(places == CHUNK - 1, of_whole, 0.0)
    tl.store(sums, tl.cumsum(of_decays, 0, reverse=True))


@triton.jit(do_not_specialize=["total"])
def delta_sum_places(
    parts, scale, out, starts, places, total,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_SCALE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [total, HEADS, WIDTH] = scale x the sum of a row's places in parts [N, HEADS x GROUP, CHUNK, WIDTH], in their
    order, and over a group's heads."""
    head = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = rows < total
    begin = tl.load(starts + rows, mask=there, other=0)
    count = tl.load(starts + rows + 1, mask=there, other=0) - begin
    lanes = tl.arange(0, LANES)
    found = tl.zeros([ROWS, LANES], tl.float32)
    for number in range(0, tl.max(count, 0)):
        live = number < count
        place = tl.load(places + begin + number, mask=live, other=0).to(tl.int64)
        for member in range(GROUP):
            entry = place // CHUNK * (HEADS * GROUP) + head * GROUP + member
            found += rows_of(parts, entry * CHUNK + place % CHUNK, live, WIDTH, lanes, WIDTH)
    if HAS_SCALE:
        found *= tl.load(scale + rows * HEADS + head, mask=there, other=0.0)[:, None]
    pointers = out + (rows.to(tl.int64)[:, None] * HEADS + head) * WIDTH + lanes[None, :]
    tl.store(pointers, found.to(out.dtype.element_ty), mask=there[:, None] & (lanes < WIDTH)[None, :])
