# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of CCGQA's rows before attention; fast.py says how they work and launches them.

x, the gradients d_y of what is brought to its length, and d_c of what the first convolution gives are [rows, channels],
contiguous, as are queries and keys. `taps` [W0, channels] and `matrices` [heads, W1, in, out] are the weights: tap
W - 1 - back is multiplied with the row so far before in the path. A program works on ROWS rows of one head, or of all
heads that share a key; LANES lanes hold the WIDTH channels of a head, of which products take INNER at once.

Sums are float32. A multiplication and an addition that a compiler may make one, or leave two, are written as one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(rows_total, ROWS: tl.constexpr):
    """The rows of a program, and which of them there are."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return rows, rows < rows_total


@triton.jit
def _source(sources, rows, live, BACK: tl.constexpr, REACH: tl.constexpr):
    """The rows so far before some in their paths, -1 where there are none."""
    source = rows
    if BACK > 0:
        source = tl.load(sources + rows * REACH + (BACK - 1), mask=live, other=-1)
    return tl.where(live, source, -1)


@triton.jit
def _gathered(base, channels, rows, there, columns, inside):
    """Rows of a tensor, float32 [rows, columns], zero where there are none."""
    places = rows.to(tl.int64)[:, None] * channels + columns[None, :]
    return tl.load(base + places, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(base, channels, rows, live, columns, inside, values):
    places = rows.to(tl.int64)[:, None] * channels + columns[None, :]
    tl.store(base + places, values.to(base.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _vector(base, columns, inside):
    return tl.load(base + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _by_channel(
    x, taps, bias, sources, rows, live, channels, columns, inside,
    BACK: tl.constexpr, W0: tl.constexpr, REACH: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What the first convolution gives for the rows so far back, in the dtype of x; its bias where there are none."""
    total = tl.zeros([ROWS, LANES], tl.float32)
    if HAS_BIAS:
        total += _vector(bias, columns, inside)[None, :]
    for tap in tl.static_range(W0):
        source = _source(sources, rows, live, BACK + W0 - 1 - tap, REACH)
        taken = _gathered(x, channels, source, source >= 0, columns, inside)
        weights = tl.broadcast_to(_vector(taps + tap * channels, columns, inside)[None, :], taken.shape)
        total = tl.fma(taken, weights, total)
    return total.to(x.dtype.element_ty)


@triton.jit
def _matrix(matrices, number, lines, columns, WIDTH: tl.constexpr):
    """Some lines and columns of one of the matrices [n, WIDTH, WIDTH], zero where it has none."""
    places = number * WIDTH * WIDTH + lines[:, None] * WIDTH + columns[None, :]
    return tl.load(matrices + places, mask=(lines < WIDTH)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _mixed(
    x, taps, matrices, bias0, bias1, sources, rows, live, channels, head, lanes, inside,
    W0: tl.constexpr, W1: tl.constexpr, REACH: tl.constexpr, HAS_BIAS0: tl.constexpr, HAS_BIAS1: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """What both convolutions give for a head, float32 [rows, lanes]."""
    total = tl.zeros([ROWS, LANES], tl.float32)
    if HAS_BIAS1:
        total += _vector(bias1, head * WIDTH + lanes, inside)[None, :]
    for tap in tl.static_range(W1):
        for first in range(0, LANES, INNER):
            read = first + tl.arange(0, INNER)
            c = _by_channel(
                x, taps, bias0, sources, rows, live, channels, head * WIDTH + read, read < WIDTH,
                W1 - 1 - tap, W0, REACH, HAS_BIAS0, ROWS, INNER,
            )  # fmt: skip
            matrix = _matrix(matrices, head * W1 + tap, read, lanes, WIDTH)
            total = tl.dot(c, matrix, total, input_precision="ieee")
    return total


@triton.jit
def _before_norm(
    x, taps, matrices, bias0, bias1, sources, rows, live, channels, shared, place, k0, total, least, lanes, inside,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, REACH: tl.constexpr,
    HAS_BIAS0: tl.constexpr, HAS_BIAS1: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """Of the head at a place among those that share a key, the key's itself last: its number, whether it is the key's,
    what is brought to its length, float32 [rows, lanes], its norm and that but no less than `least`; and `total` with
    its q0 added."""
    group: tl.constexpr = QUERIES // KEYS
    is_key = place == group
    head = tl.where(is_key, QUERIES + shared, shared * group + place)
    y = _mixed(
        x, taps, matrices, bias0, bias1, sources, rows, live, channels, head, lanes, inside,
        W0, W1, REACH, HAS_BIAS0, HAS_BIAS1, WIDTH, ROWS, LANES, INNER,
    )  # fmt: skip
    q0 = _gathered(x, channels, rows, live, head * WIDTH + lanes, inside)
    q0 = tl.where(is_key, total * (1.0 / group), q0)
    y += (q0 + k0) * 0.5
    norm = tl.sqrt_rn(tl.sum(y * y, 1))
    return head, is_key, y, norm, tl.maximum(norm, least), total + q0


@triton.jit(do_not_specialize=["rows_total"])
def query_key_forward(
    x, taps, matrices, bias0, bias1, temperature, sources, query, key, rows_total, channels, root, least,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, REACH: tl.constexpr,
    HAS_BIAS0: tl.constexpr, HAS_BIAS1: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """query [rows, QUERIES, WIDTH] and key [rows, KEYS, WIDTH]: the heads that share a key."""
    rows, live = _rows(rows_total, ROWS)
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    group: tl.constexpr = QUERIES // KEYS
    shared = tl.program_id(1)
    k0 = _gathered(x, channels, rows, live, (QUERIES + shared) * WIDTH + lanes, inside)
    total = tl.zeros([ROWS, LANES], tl.float32)
    for place in range(group + 1):
        head, is_key, y, _, length, total = _before_norm(
            x, taps, matrices, bias0, bias1, sources, rows, live, channels, shared, place, k0, total, least, lanes,
            inside, QUERIES, KEYS, W0, W1, REACH, HAS_BIAS0, HAS_BIAS1, WIDTH, ROWS, LANES, INNER,
        )  # fmt: skip
        y = y * (root / length)[:, None]
        if is_key:
            y = y * tl.exp(tl.load(temperature + shared).to(tl.float32))
            _store(key, KEYS * WIDTH, rows, live, shared * WIDTH + lanes, inside, y)
        else:
            _store(query, QUERIES * WIDTH, rows, live, head * WIDTH + lanes, inside, y)


@triton.jit(do_not_specialize=["rows_total"])
def query_key_gradient(
    x, taps, matrices, bias0, bias1, temperature, sources, d_query, d_key, d_y, d_temperature, rows_total, channels,
    root, least,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, REACH: tl.constexpr,
    HAS_BIAS0: tl.constexpr, HAS_BIAS1: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """d_y [rows, channels], through norms and temperature; and float32 d_temperature [tiles, KEYS] of these rows."""
    rows, live = _rows(rows_total, ROWS)
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    group: tl.constexpr = QUERIES // KEYS
    shared = tl.program_id(1)
    k0 = _gathered(x, channels, rows, live, (QUERIES + shared) * WIDTH + lanes, inside)
    total = tl.zeros([ROWS, LANES], tl.float32)
    for place in range(group + 1):
        head, is_key, y, norm, length, total = _before_norm(
            x, taps, matrices, bias0, bias1, sources, rows, live, channels, shared, place, k0, total, least, lanes,
            inside, QUERIES, KEYS, W0, W1, REACH, HAS_BIAS0, HAS_BIAS1, WIDTH, ROWS, LANES, INNER,
        )  # fmt: skip
        if is_key:
            d = _gathered(d_key, KEYS * WIDTH, rows, live, shared * WIDTH + lanes, inside)
            d = d * tl.exp(tl.load(temperature + shared).to(tl.float32))
            along = tl.sum(d * y, 1) * (root / length)
            tl.store(d_temperature + tl.program_id(0) * KEYS + shared, tl.sum(along, 0))
        else:
            d = _gathered(d_query, QUERIES * WIDTH, rows, live, head * WIDTH + lanes, inside)
        # Beneath the least norm a head is multiplied with a constant; above it, what lies along it changes nothing.
        inverse = 1.0 / length
        along = tl.where(norm >= least, tl.sum(d * y, 1) * inverse * inverse, 0.0)
        d = tl.fma(-y, tl.broadcast_to(along[:, None], y.shape), d) * (root * inverse)[:, None]
        _store(d_y, channels, rows, live, head * WIDTH + lanes, inside, d)


@triton.jit(do_not_specialize=["rows_total"])
def gradient_of_matrices(
    x, taps, bias0, sources, d_y, d_matrices, d_vectors, rows_total, channels,
    W0: tl.constexpr, W1: tl.constexpr, REACH: tl.constexpr, HAS_BIAS0: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr, SIDES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums over CHUNK rows, of one tap of one head: float32 d_matrices [chunks, heads, W1, in, out], of what it read
    with d_y; and d_vectors [chunks, heads, W1, out] of d_y, of the last tap all of it, of others where it read none.
    Of matrices a program makes one of SIDES x SIDES squares."""
    head, back = tl.program_id(1) // W1, tl.program_id(1) % W1
    side = tl.program_id(2) // SIDES
    read, written = side * SIDE + tl.arange(0, SIDE), tl.program_id(2) % SIDES * SIDE + tl.arange(0, SIDE)
    reads, writes = read < WIDTH, written < WIDTH
    columns = head * WIDTH + read
    products = tl.zeros([SIDE, SIDE], tl.float32)
    vector = tl.zeros([SIDE], tl.float32)
    for first in range(0, CHUNK, ROWS):
        rows = tl.program_id(0) * CHUNK + first + tl.arange(0, ROWS)
        live = rows < rows_total
        d = _gathered(d_y, channels, rows, live, head * WIDTH + written, writes)
        # Channels by rows: as it is multiplied, and not turned over.
        c = tl.zeros([SIDE, ROWS], tl.float32)
        if HAS_BIAS0:
            c += _vector(bias0, columns, reads)[:, None]
        for tap in tl.static_range(W0):
            far = back + W0 - 1 - tap
            source = tl.load(sources + rows * REACH + far - 1, mask=live & (far > 0), other=-1)
            source = tl.where(far > 0, source, rows)
            there = live & (source >= 0)
            places = source.to(tl.int64)[None, :] * channels + columns[:, None]
            taken = tl.load(x + places, mask=there[None, :] & reads[:, None], other=0.0).to(tl.float32)
            weights = tl.broadcast_to(_vector(taps + tap * channels, columns, reads)[:, None], taken.shape)
            c = tl.fma(taken, weights, c)
        c = tl.where(live[None, :], c, 0.0).to(x.dtype.element_ty)
        products = _plus_product(products, c, d.to(x.dtype.element_ty))
        source = tl.load(sources + rows * REACH + back - 1, mask=live & (back > 0), other=0)
        counts = live & ((back == 0) | (source < 0))
        vector += tl.sum(tl.where(counts[:, None], d, 0.0), 0)
    place = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head * W1 + (W1 - 1 - back)) * WIDTH
    square = reads[:, None] & writes[None, :]
    tl.store(d_matrices + place * WIDTH + read[:, None] * WIDTH + written[None, :], products, mask=square)
    tl.store(d_vectors + place + written, vector, mask=writes & (side == 0))


@triton.jit
def _plus_product(total, one, other):
    """total + one @ other. In float32 a product is added up by itself first: one chain of additions through all rows
    would lose more with each, as total grows. In narrower dtypes the rounding of operands hides it."""
    if one.dtype == tl.float32:
        product = tl.dot(one, other, input_precision="ieee")
        # As an addition the compiler would make it one chain again.
        total = tl.fma(product, tl.full(total.shape, 1.0, tl.float32), total)
    else:
        total = tl.dot(one, other, total)
    return total


@triton.jit
def _of_readers(
    d, sources, extras, bounds, rows, rows_total, channels, columns, inside,
    BACK: tl.constexpr, REACH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients [rows, columns] of all rows that read these so far before them, added up in their order.

    Nearly always it is the one row so far behind. The first rows of segments read elsewhere: those come from a list, by
    tiles of TILE rows.
    """
    reader = rows + BACK
    reads = _source(sources, reader, reader < rows_total, BACK, REACH) == rows
    total = _gathered(d, channels, reader, reads, columns, inside)
    if BACK > 0:
        tile = tl.program_id(0) * ROWS // TILE
        begin, end = tl.load(bounds + tile), tl.load(bounds + tile + 1)
        for entry in range(begin, end):
            row, other, back = (
                tl.load(extras + 3 * entry),
                tl.load(extras + 3 * entry + 1),
                tl.load(extras + 3 * entry + 2),
            )
            more = tl.load(d + other.to(tl.int64) * channels + columns, mask=inside & (back == BACK), other=0.0)
            total += tl.where(rows[:, None] == row, more.to(tl.float32)[None, :], 0.0)
    return total


@triton.jit(do_not_specialize=["rows_total"])
def gradient_of_first(
    x, turned, sources, extras, bounds, d_y, d_c, sums, rows_total, channels,
    W0: tl.constexpr, W1: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """d_c [rows, channels] of one head, with the matrices turned over [heads, W1, out, in]; and float32 sums
    [tiles, W0 + 1, channels] of these rows, of d_c with what each tap of the first convolution read, and of itself."""
    rows, live = _rows(rows_total, ROWS)
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    head = tl.program_id(1)
    columns = head * WIDTH + lanes
    total = tl.zeros([ROWS, LANES], tl.float32)
    for tap in tl.static_range(W1):
        for first in range(0, LANES, INNER):
            read = first + tl.arange(0, INNER)
            d = _of_readers(
                d_y, sources, extras, bounds, rows, rows_total, channels, head * WIDTH + read, read < WIDTH,
                W1 - 1 - tap, REACH, ROWS, TILE,
            )  # fmt: skip
            matrix = _matrix(turned, head * W1 + tap, read, lanes, WIDTH)
            total = tl.dot(d.to(x.dtype.element_ty), matrix, total, input_precision="ieee")
    rounded = total.to(d_c.dtype.element_ty)
    _store(d_c, channels, rows, live, columns, inside, rounded)
    d = tl.where(live[:, None], rounded.to(tl.float32), 0.0)
    line = sums + tl.program_id(0).to(tl.int64) * (W0 + 1) * channels + columns
    for tap in tl.static_range(W0):
        source = _source(sources, rows, live, W0 - 1 - tap, REACH)
        taken = _gathered(x, channels, source, source >= 0, columns, inside)
        tl.store(line + tap * channels, tl.sum(d * taken, 0), mask=inside)
    tl.store(line + W0 * channels, tl.sum(d, 0), mask=inside)


@triton.jit
def _of_latent(
    taps, sources, extras, bounds, d_c, rows, rows_total, channels, columns, inside,
    W0: tl.constexpr, REACH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient of latent rows through the first convolution."""
    total = tl.zeros([ROWS, LANES], tl.float32)
    for tap in tl.static_range(W0):
        d = _of_readers(
            d_c, sources, extras, bounds, rows, rows_total, channels, columns, inside, W0 - 1 - tap, REACH, ROWS, TILE
        )
        weights = tl.broadcast_to(_vector(taps + tap * channels, columns, inside)[None, :], d.shape)
        total = tl.fma(d, weights, total)
    return total


@triton.jit(do_not_specialize=["rows_total"])
def gradient_of_latent(
    taps, sources, extras, bounds, d_y, d_c, d_x, rows_total, channels,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, W0: tl.constexpr, REACH: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """d_x [rows, channels], of the heads that share a key: through the first convolution, and through the means."""
    rows, live = _rows(rows_total, ROWS)
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    group: tl.constexpr = QUERIES // KEYS
    shared = tl.program_id(1)
    key_columns = (QUERIES + shared) * WIDTH + lanes
    of_key = _gathered(d_y, channels, rows, live, key_columns, inside)
    total = of_key
    for place in range(group):
        columns = (shared * group + place) * WIDTH + lanes
        d = _of_latent(
            taps, sources, extras, bounds, d_c, rows, rows_total, channels, columns, inside,
            W0, REACH, ROWS, LANES, TILE,
        )  # fmt: skip
        of_query = _gathered(d_y, channels, rows, live, columns, inside)
        total += of_query
        _store(d_x, channels, rows, live, columns, inside, d + 0.5 * tl.fma(of_key, 1.0 / group, of_query))
    d = _of_latent(
        taps, sources, extras, bounds, d_c, rows, rows_total, channels, key_columns, inside,
        W0, REACH, ROWS, LANES, TILE,
    )  # fmt: skip
    _store(d_x, channels, rows, live, key_columns, inside, d + 0.5 * total)


@triton.jit(do_not_specialize=["rows_total"])
def shift_forward(
    x, sources, out, rows_total, channels, now, REACH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """out [rows, channels]: the first `now` channels as they are, the others of the row before; zero without one."""
    rows, live = _rows(rows_total, ROWS)
    columns = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = columns < channels
    before = _source(sources, rows, live, 1, REACH)
    source = tl.where((columns < now)[None, :], rows[:, None], before[:, None])
    there = live[:, None] & inside[None, :] & (source >= 0)
    values = tl.load(x + source.to(tl.int64) * channels + columns[None, :], mask=there, other=0.0)
    _store(out, channels, rows, live, columns, inside, values)


@triton.jit(do_not_specialize=["rows_total"])
def shift_gradient(
    d_out, sources, extras, bounds, d_x, rows_total, channels, now,
    REACH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """d_x [rows, channels]."""
    rows, live = _rows(rows_total, ROWS)
    columns = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = columns < channels
    own = _gathered(d_out, channels, rows, live, columns, inside & (columns < now))
    later = inside & (columns >= now)
    d = _of_readers(d_out, sources, extras, bounds, rows, rows_total, channels, columns, later, 1, REACH, ROWS, TILE)
    _store(d_x, channels, rows, live, columns, inside, own + d)
