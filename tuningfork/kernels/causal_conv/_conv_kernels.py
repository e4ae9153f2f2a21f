# mypy: disable-error-code=no-untyped-def
"""The Triton kernels of the causal convolution; fast.py says how they work and launches them.

x is [rows, channels] with any row stride, as `d_convolved` is: the gradient of what the taps add up to. `taps` [WIDTH,
channels] are the weights, of stride_taps a line; tap WIDTH - 1 - distance is multiplied with the row so far before in
the path. All else is contiguous: bias [channels], and the tables of fast.py. A program works on ROWS rows, or one edge,
and SPAN channels, in LANES lanes.

Sums are float32. A multiplication and an addition that a compiler may make one, or leave two, are written as one: which
it chooses may depend on what stands around them, and must decide no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _columns(channels, SPAN: tl.constexpr, LANES: tl.constexpr):
    """The channels of a program, and which of them there are."""
    lanes = tl.arange(0, LANES)
    columns = tl.program_id(0) * SPAN + lanes
    return columns, (lanes < SPAN) & (columns < channels)


@triton.jit
def _gathered(base, stride, rows, there, columns, inside):
    """Rows of a tensor, float32 [rows, columns], zero where there are none."""
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(base + places, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _source(sources, rows, live, DISTANCE: tl.constexpr, REACH: tl.constexpr):
    """The rows at a distance before some, -1 where there are none."""
    source = rows
    if DISTANCE > 0:
        source = tl.load(sources + rows * REACH + (DISTANCE - 1), mask=live, other=-1)
    return tl.where(live, source, -1)


@triton.jit
def _tap(x, stride, sources, rows, live, columns, inside, DISTANCE: tl.constexpr, REACH: tl.constexpr):
    """What is read at a distance before some rows."""
    source = _source(sources, rows, live, DISTANCE, REACH)
    return _gathered(x, stride, source, source >= 0, columns, inside)


@triton.jit
def _weighted(total, taken, taps, stride_taps, columns, inside, DISTANCE: tl.constexpr, WIDTH: tl.constexpr):
    """A sum, and what is read at a distance times its weights."""
    # As a whole tile, though its rows are one: a line of it would lie elsewhere than the tile's columns.
    places = tl.broadcast_to(columns[None, :], taken.shape) + (WIDTH - 1 - DISTANCE) * stride_taps
    weights = tl.load(taps + places, mask=tl.broadcast_to(inside[None, :], taken.shape), other=0.0).to(tl.float32)
    return tl.fma(taken, weights, total)


@triton.jit
def _start(bias, columns, inside, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """What the taps are added to."""
    total = tl.zeros([ROWS, LANES], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), off by few units in the last place of float32; a division would take twice as long."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -_LOG2_E))
    return root * root


@triton.jit
def _inverse_norm(heads, eps):
    """[rows, lanes] -> [rows]. Lanes that are no channels are 0."""
    return tl.rsqrt(tl.sum(heads * heads, 1) + eps)


@triton.jit(do_not_specialize=["rows_total"])
def conv_forward(
    x, taps, bias, sources, out, rows_total, stride, stride_taps, channels, scale, eps,
    SILU: tl.constexpr, NORMED: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, REACH: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out [rows, channels]."""
    columns, inside = _columns(channels, SPAN, LANES)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = rows < rows_total
    result = _start(bias, columns, inside, HAS_BIAS, ROWS, LANES)
    for tap in tl.static_range(WIDTH):
        taken = _tap(x, stride, sources, rows, live, columns, inside, WIDTH - 1 - tap, REACH)
        result = _weighted(result, taken, taps, stride_taps, columns, inside, WIDTH - 1 - tap, WIDTH)
    if SILU:
        result = result * _sigmoid(result)
    if NORMED:
        result = result * (_inverse_norm(result, eps) * scale)[:, None]
    places = rows.to(tl.int64)[:, None] * channels + columns[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows_total"])
def conv_gradient(
    x, taps, bias, sources, grad, d_convolved, sums, rows_total, stride, stride_taps, stride_d, stride_sums, channels,
    scale, eps,
    SILU: tl.constexpr, NORMED: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, REACH: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """From the gradient [rows, channels] of a result, d_convolved, unless it is the same; and sums over TILE rows.

    These are of its products with what each tap reads, and of itself: float32 [programs, WIDTH + 1, ...], stride_sums a
    line.
    """
    columns, inside = _columns(channels, SPAN, LANES)
    # Each tap has its own name, WIDTH being at most 4: it is read once, for the convolution and for its weights.
    sum_0 = tl.zeros([ROWS, LANES], tl.float32)
    sum_1, sum_2, sum_3, sum_bias = sum_0, sum_0, sum_0, sum_0
    for first in range(0, TILE, ROWS):
        rows = tl.program_id(1) * TILE + first + tl.arange(0, ROWS)
        live = rows < rows_total
        d = _gathered(grad, channels, rows, live, columns, inside)
        taken_0 = _tap(x, stride, sources, rows, live, columns, inside, 0, REACH)
        if WIDTH > 1:
            taken_1 = _tap(x, stride, sources, rows, live, columns, inside, 1, REACH)
        if WIDTH > 2:
            taken_2 = _tap(x, stride, sources, rows, live, columns, inside, 2, REACH)
        if WIDTH > 3:
            taken_3 = _tap(x, stride, sources, rows, live, columns, inside, 3, REACH)
        if SILU:
            convolved = _start(bias, columns, inside, HAS_BIAS, ROWS, LANES)
            if WIDTH > 3:
                convolved = _weighted(convolved, taken_3, taps, stride_taps, columns, inside, 3, WIDTH)
            if WIDTH > 2:
                convolved = _weighted(convolved, taken_2, taps, stride_taps, columns, inside, 2, WIDTH)
            if WIDTH > 1:
                convolved = _weighted(convolved, taken_1, taps, stride_taps, columns, inside, 1, WIDTH)
            convolved = _weighted(convolved, taken_0, taps, stride_taps, columns, inside, 0, WIDTH)
            gate = _sigmoid(convolved)
            result = convolved * gate
            if NORMED:
                inverse = _inverse_norm(result, eps)
                along = tl.sum(d * result, 1) * inverse * inverse
                d = tl.fma(-result, along[:, None], d) * (inverse * scale)[:, None]
            d = d * tl.fma(result, 1.0 - gate, gate)
            places = rows.to(tl.int64)[:, None] * stride_d + columns[None, :]
            tl.store(d_convolved + places, d.to(d_convolved.dtype.element_ty), mask=live[:, None] & inside[None, :])
        sum_0 = tl.fma(d, taken_0, sum_0)
        if WIDTH > 1:
            sum_1 = tl.fma(d, taken_1, sum_1)
        if WIDTH > 2:
            sum_2 = tl.fma(d, taken_2, sum_2)
        if WIDTH > 3:
            sum_3 = tl.fma(d, taken_3, sum_3)
        if HAS_BIAS:
            sum_bias += d
    lines = sums + tl.program_id(1).to(tl.int64) * (WIDTH + 1) * stride_sums + columns
    tl.store(lines + (WIDTH - 1) * stride_sums, tl.sum(sum_0, 0), mask=inside)
    if WIDTH > 1:
        tl.store(lines + (WIDTH - 2) * stride_sums, tl.sum(sum_1, 0), mask=inside)
    if WIDTH > 2:
        tl.store(lines + (WIDTH - 3) * stride_sums, tl.sum(sum_2, 0), mask=inside)
    if WIDTH > 3:
        tl.store(lines + (WIDTH - 4) * stride_sums, tl.sum(sum_3, 0), mask=inside)
    tl.store(lines + WIDTH * stride_sums, tl.sum(sum_bias, 0), mask=inside)


@triton.jit(do_not_specialize=["rows_total"])
def conv_gradient_of_rows(
    d_convolved, taps, sources, d_x, rows_total, stride, channels,
    WIDTH: tl.constexpr, REACH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """d_x [rows, channels]: of each row, from the rows right behind it that read it, in their order."""
    columns, inside = _columns(channels, LANES, LANES)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = rows < rows_total
    total = tl.zeros([ROWS, LANES], tl.float32)
    for distance in tl.static_range(WIDTH):
        reader = rows + distance
        reads = _source(sources, reader, reader < rows_total, distance, REACH) == rows
        d = _gathered(d_convolved, stride, reader, reads, columns, inside)
        factor = tl.load(taps + (WIDTH - 1 - distance) * channels + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(d, factor[None, :], total)
    places = rows.to(tl.int64)[:, None] * channels + columns[None, :]
    tl.store(d_x + places, total.to(d_x.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def conv_gradient_of_edges(
    d_convolved, taps, edges, readers, d_x, stride, channels,
    WIDTH: tl.constexpr, REACH: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """d_x [rows, channels], of an edge: from all rows that read it, in their order."""
    columns = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = columns < channels
    edge = edges + 3 * tl.program_id(0)
    row, begin, end = tl.load(edge), tl.load(edge + 1), tl.load(edge + 2)
    if begin >= end:
        return
    total = tl.zeros([LANES], tl.float32)
    for first in range(begin, end, AT_ONCE):
        for n in tl.static_range(AT_ONCE):  # their loads need not wait for each other
            entry = tl.load(readers + first + n, mask=first + n < end, other=-1)
            distance = entry % (REACH + 1)
            reads = (entry >= 0) & (distance < WIDTH) & inside
            at = (entry // (REACH + 1)).to(tl.int64) * stride + columns
            d = tl.load(d_convolved + at, mask=reads, other=0.0).to(tl.float32)
            factor = tl.load(taps + (WIDTH - 1 - distance) * channels + columns, mask=reads, other=0.0)
            total = tl.fma(d, factor.to(tl.float32), total)
    at = row.to(tl.int64) * channels + columns
    tl.store(d_x + at, total.to(d_x.dtype.element_ty), mask=inside)
