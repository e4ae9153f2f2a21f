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
def _convolved(
    x, stride, taps, stride_taps, bias, sources, rows, live, columns, inside,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, REACH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([ROWS, LANES], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = _source(sources, rows, live, WIDTH - 1 - tap, REACH)
        taken = _gathered(x, stride, source, source >= 0, columns, inside)
        factor = tl.load(taps + tap * stride_taps + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(taken, factor[None, :], total)
    return total


@triton.jit
def _inverse_norm(heads, eps):
    """[rows, lanes] -> [rows]. Lanes that are no channels are 0."""
    return tl.div_rn(tl.full([heads.shape[0]], 1.0, tl.float32), tl.sqrt_rn(tl.sum(heads * heads, 1) + eps))


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
    result = _convolved(
        x, stride, taps, stride_taps, bias, sources, rows, live, columns, inside, HAS_BIAS, WIDTH, REACH, ROWS, LANES
    )
    if SILU:
        result = result * tl.sigmoid(result)
    if NORMED:
        result = result * (_inverse_norm(result, eps) * scale)[:, None]
    places = rows.to(tl.int64)[:, None] * channels + columns[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows_total"])
def conv_gradient(
    x, taps, bias, sources, grad, d_convolved, sums, rows_total, stride, stride_taps, stride_d, stride_sums, channels,
    scale, eps,
    SILU: tl.constexpr, NORMED: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, REACH: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """From the gradient [rows, channels] of a result, d_convolved, unless it is the same; and the sums over these rows
    of its products with what each tap reads, and of itself: float32 [programs, WIDTH + 1, ...], of stride_sums a line.
    """
    columns, inside = _columns(channels, SPAN, LANES)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = rows < rows_total
    d = _gathered(grad, channels, rows, live, columns, inside)
    if SILU:
        convolved = _convolved(
            x,
            stride,
            taps,
            stride_taps,
            bias,
            sources,
            rows,
            live,
            columns,
            inside,
            HAS_BIAS,
            WIDTH,
            REACH,
            ROWS,
            LANES,
        )
        gate = tl.sigmoid(convolved)
        result = convolved * gate
        if NORMED:
            inverse = _inverse_norm(result, eps)
            along = tl.sum(d * result, 1) * inverse * inverse
            d = tl.fma(-result, along[:, None], d) * (inverse * scale)[:, None]
        d = d * tl.fma(result, 1.0 - gate, gate)
        places = rows.to(tl.int64)[:, None] * stride_d + columns[None, :]
        tl.store(d_convolved + places, d.to(d_convolved.dtype.element_ty), mask=live[:, None] & inside[None, :])
    lines = sums + tl.program_id(1).to(tl.int64) * (WIDTH + 1) * stride_sums + columns
    for tap in tl.static_range(WIDTH):
        source = _source(sources, rows, live, WIDTH - 1 - tap, REACH)
        taken = _gathered(x, stride, source, source >= 0, columns, inside)
        tl.store(lines + tap * stride_sums, tl.sum(d * taken, 0), mask=inside)
    tl.store(lines + WIDTH * stride_sums, tl.sum(d, 0), mask=inside)


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
    columns, inside = _columns(channels, LANES, LANES)
    edge = edges + 3 * tl.program_id(1)
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
