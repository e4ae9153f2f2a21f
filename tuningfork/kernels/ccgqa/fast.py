# mypy: disable-error-code=no-untyped-def
"""CCGQA's rows before attention in Triton: rows are read where they lie, and each result is written once.

Forward, one program makes some rows of all heads that share a key (`_ccgqa_kernels.py`): it gathers what the first
convolution reads, for as many rows back as the second does, and goes on through products, means and norms in registers.
What lies before a path needs no case of its own: there the first convolution reads nothing, and gives its bias.

Backward there are four kernels: through norms and temperature, which needs the forward pass again; the gradient of the
second convolution's matrices, summed over so many rows; that of what the first convolution gave, with sums for its
weights; and that of latent rows, through the first convolution and the means.

Nothing is added up atomically. A gradient is added up in the order of the rows that read a row: the one right behind,
then the first rows of segments that begin elsewhere, of which there is a list, by tiles of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.causal_conv.plain import PlainCausalConv
from tuningfork.kernels.ccgqa import _ccgqa_kernels as kernels
from tuningfork.kernels.ccgqa.plain import Filters, QueryHeads
from tuningfork.kernels.tables import rows_read
from tuningfork.records import ForkLayout

WIDEST = 4  # taps of each convolution; the tables grow with them
WIDEST_HEAD = 256
_REACH = 2 * (WIDEST - 1)

# How programs are cut up is fixed, since tuning at run time would change the order of addition.
_TILE = 64  # rows of a tile of the list, and of a program that only moves values; others have as many or fewer
_AHEAD = 64 * 1024  # bytes that a program at most loads ahead
_CHUNK = 1024  # rows whose parts of a matrix's gradient are added up by one program
_LANES = 64  # channels of a program that only moves values


class TritonCcgqa(NamedTuple):
    """Who reads whom in a pack of T rows and S segments, all on the GPU."""

    sources: Tensor  # int32 [T, _REACH], the rows at a distance of 1, 2, ... before each; -1 for none
    extras: Tensor  # int32 [S * 6, 3]: a row, one that reads it from elsewhere than right behind, and how far back
    bounds: Tensor  # int32 [tiles + 1], where the entries of each _TILE rows begin in `extras`

    @classmethod
    def prepare(cls, layout: ForkLayout) -> TritonCcgqa:
        """The tables of a layout, on its device, made without waiting for it."""
        previous = PlainCausalConv.prepare(layout).previous
        rows, device = len(previous) - 1, previous.device
        read = rows_read(previous, _REACH + 1).flip(1)
        sources = torch.where(read < rows, read, -1)[:, 1:]

        # Only the first rows of a segment read what does not lie right before them, each so far back as it takes.
        start, end = layout.segments.long().unbind(1)[:2]
        offset, back = torch.triu_indices(WIDEST - 1, WIDEST - 1, device=device)
        back = back + 1
        reader = start[:, None] + offset
        source = read[reader.clamp(max=rows - 1), back]
        counts = (reader < end[:, None]) & (source < rows) & (source != reader - back)
        source, order = torch.where(counts, source, rows).flatten().sort(stable=True)
        extras = torch.stack([source, reader.flatten()[order], back.expand(reader.shape).flatten()[order]], 1)
        tiles = torch.arange(0, -(-rows // _TILE) + 1, device=device) * _TILE
        bounds = torch.searchsorted(source, tiles.clamp(max=rows))
        return cls(*(t.int().contiguous() for t in (sources, extras, bounds)))

    def query_key(self, x: Tensor, filters: Filters, temperature: Tensor, heads: QueryHeads) -> tuple[Tensor, Tensor]:
        """As PlainCcgqa.query_key has it, on the GPU of the layout, for rows in float32, bfloat16 or float16.

        Filters are at most WIDEST wide and heads WIDEST_HEAD, which `kernels.select` refuses to exceed: here nothing is
        checked.
        """
        query, key = _query_key(*self, x, *filters[:2], temperature, *filters[2:], *heads)
        return query, key

    def values(self, x: Tensor, now: int) -> Tensor:
        """As PlainCcgqa.values has it, on the GPU of the layout."""
        return _shift(*self, x, now)


class _Tiles(NamedTuple):
    """How the kernels with products are cut up: by what fits a multiprocessor's registers and shared memory."""

    lanes: int  # for the channels of a head: products have 16 columns at least, and powers of two
    rows: int  # of a program
    inner: int  # channels that a product adds up at once
    side: int  # of a square of a matrix's gradient
    warps: int
    stages: int

    @classmethod
    def of(cls, width: int, taps: int, itemsize: int) -> _Tiles:
        """For heads of a width, so many taps of the second convolution, and operands of so many bytes.

        Shared memory, of which there are 99 KB on the smallest cards in use, holds both operands of a product,

            itemsize (rows inner + inner lanes)          float32: 34 KB at most, for 256 lanes; else 24 KB, for 128

        those of a square of a matrix's gradient or, behind these and in their place, the square itself,

            max(2 itemsize rows side, 4 side^2)          float32: 16 KB; else 64 KB

        and, where loads for the next head are under way while one is computed, what the next is made of, twice: of each
        tap its rows and its matrix, and the numbers of those rows, some KB,

            2 taps itemsize (rows lanes + lanes^2)       64 KB for 64 lanes and 2 taps, no more than that

        Registers hold some tiles of rows by lanes, float32, and what was loaded of the products' operands.
        """
        lanes = max(16, triton.next_power_of_2(width))
        warps = 4 if lanes <= 64 else 8
        if itemsize == 4:  # products by single multiplications, all of them written out
            return cls(lanes, min(32, 4096 // lanes), min(lanes, 32), min(lanes, 64), warps, 1)
        if lanes > 64:
            return cls(lanes, 8192 // lanes, 8192 // lanes, 128, warps, 1)
        if 2 * taps * itemsize * (64 * lanes + lanes**2) <= _AHEAD:
            return cls(lanes, 64, lanes, lanes, warps, 3)
        return cls(lanes, 64, min(lanes, 32), lanes, warps, 1)


class _Weights(NamedTuple):
    """Filters as the kernels take them, and how these are cut up."""

    taps: Tensor  # [W0, C]
    matrices: Tensor  # [H, W1, in, out], in the dtype of the rows
    tiles: _Tiles
    constants: dict[str, int | bool]

    @classmethod
    def of(cls, x, depthwise, grouped, bias0, bias1, width) -> _Weights:
        matrices = grouped.to(x.dtype).unflatten(0, (-1, width)).permute(0, 3, 2, 1).contiguous()
        tiles = _Tiles.of(width, grouped.shape[2], x.dtype.itemsize)
        sizes = {"W0": depthwise.shape[1], "W1": grouped.shape[2], "WIDTH": width, "REACH": _REACH, "ROWS": tiles.rows}
        biases = {"HAS_BIAS0": bias0 is not None, "HAS_BIAS1": bias1 is not None}
        inner = {"LANES": tiles.lanes, "INNER": tiles.inner}
        return cls(depthwise.t().contiguous(), matrices, tiles, {**sizes, **biases, **inner})

    def some(self, *names: str) -> dict[str, int | bool]:
        """What each kernel takes, and constants of these names."""
        constants = {name: self.constants[name] for name in ("W0", "REACH", "WIDTH", "ROWS", *names)}
        return {**constants, "num_warps": self.tiles.warps, "num_stages": self.tiles.stages}

    def all(self) -> dict[str, int | bool]:
        return self.some(*self.constants)


def _scales(x: Tensor, width: int) -> tuple[float, float]:
    return width**0.5, torch.finfo(x.dtype).eps


@torch.library.custom_op("tuningfork::ccgqa", mutates_args=())
def _query_key(
    sources: Tensor, extras: Tensor, bounds: Tensor,
    x: Tensor, depthwise: Tensor, grouped: Tensor, temperature: Tensor, bias0: Tensor | None, bias1: Tensor | None,
    queries: int, keys: int, width: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, C] -> query [T, queries, width] and key [T, keys, width]."""
    x, weights = x.contiguous(), _Weights.of(x, depthwise, grouped, bias0, bias1, width)
    query, key = x.new_empty((len(x), queries, width)), x.new_empty((len(x), keys, width))
    none = weights.taps
    kernels.query_key_forward[(triton.cdiv(len(x), weights.tiles.rows), keys)](
        x, weights.taps, weights.matrices, none if bias0 is None else bias0, none if bias1 is None else bias1,
        temperature, sources, query, key, len(x), x.shape[1], *_scales(x, width),
        QUERIES=queries, KEYS=keys, **weights.all(),
    )  # fmt: skip
    return query, key


@torch.library.custom_op("tuningfork::ccgqa_backward", mutates_args=())
def _query_key_backward(
    sources: Tensor, extras: Tensor, bounds: Tensor,
    x: Tensor, depthwise: Tensor, grouped: Tensor, temperature: Tensor, bias0: Tensor | None, bias1: Tensor | None,
    queries: int, keys: int, width: int, d_query: Tensor, d_key: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and float32 ones of both filters, of temperatures and of both biases."""
    x, weights = x.contiguous(), _Weights.of(x, depthwise, grouped, bias0, bias1, width)
    rows, channels = x.shape
    heads, taps = queries + keys, grouped.shape[2]
    tiles, chunks = triton.cdiv(rows, weights.tiles.rows), triton.cdiv(rows, _CHUNK)
    first, second = (weights.taps if bias is None else bias for bias in (bias0, bias1))
    wide: Any = {"dtype": torch.float32, "device": x.device}

    d_y, d_temperature = x.new_empty((rows, channels)), torch.empty(tiles, keys, **wide)
    kernels.query_key_gradient[(tiles, keys)](
        x, weights.taps, weights.matrices, first, second, temperature, sources, d_query.contiguous(),
        d_key.contiguous(), d_y, d_temperature, rows, channels, *_scales(x, width),
        QUERIES=queries, KEYS=keys, **weights.all(),
    )  # fmt: skip
    d_matrices = torch.empty(chunks, heads, taps, width, width, **wide)
    d_vectors = torch.empty(chunks, heads, taps, width, **wide)
    side = weights.tiles.side
    sides = weights.tiles.lanes // side
    kernels.gradient_of_matrices[(chunks, heads * taps, sides**2)](
        x, weights.taps, first, sources, d_y, d_matrices, d_vectors, rows, channels,
        **weights.some("W1", "HAS_BIAS0"), SIDE=side, SIDES=sides, CHUNK=_CHUNK,
    )  # fmt: skip
    d_c, sums = x.new_empty((rows, channels)), torch.empty(tiles, depthwise.shape[1] + 1, channels, **wide)
    turned = weights.matrices.mT.contiguous()
    kernels.gradient_of_first[(tiles, heads)](
        x, turned, sources, extras, bounds, d_y, d_c, sums, rows, channels,
        **weights.some("W1", "LANES", "INNER"), TILE=_TILE,
    )  # fmt: skip
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.gradient_of_latent[(tiles, keys)](
        weights.taps, sources, extras, bounds, d_y, d_c, d_x, rows, channels,
        QUERIES=queries, KEYS=keys, **weights.some("LANES"), TILE=_TILE,
    )  # fmt: skip

    vectors, sums = d_vectors.sum(0), sums.sum(0)
    # What the second convolution read before a path was the first one's bias. The last tap reads the row itself.
    before = (weights.matrices[:, :-1].float() @ vectors[:, :-1, :, None]).sum((1, 3)).flatten()
    d_grouped = d_matrices.sum(0).permute(0, 3, 2, 1).reshape(grouped.shape)
    d_bias1 = vectors[:, -1].reshape(channels).clone()
    return d_x, sums[:-1].t().contiguous(), d_grouped, d_temperature.sum(0), sums[-1] + before, d_bias1


@_query_key.register_fake
def _(sources, extras, bounds, x, depthwise, grouped, temperature, bias0, bias1, queries, keys, width):
    rows = x.shape[0]  # of its length tracing would make a constant
    return x.new_empty((rows, queries, width)), x.new_empty((rows, keys, width))


@_query_key_backward.register_fake
def _(sources, extras, bounds, x, depthwise, grouped, temperature, bias0, bias1, queries, keys, width, d_query, d_key):
    shapes = (depthwise.shape, grouped.shape, temperature.shape, x.shape[1:], x.shape[1:])
    return x.new_empty(x.shape), *(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _save(ctx, inputs, output):
    *tensors, ctx.queries, ctx.keys, ctx.width = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_query, d_key):
    *_, depthwise, grouped, temperature, bias0, bias1 = tensors = ctx.saved_tensors
    d_x, *others = _query_key_backward(*tensors, ctx.queries, ctx.keys, ctx.width, d_query, d_key)
    weights = (depthwise, grouped, temperature, bias0, bias1)
    gradients = (None if w is None else d.to(w.dtype) for w, d in zip(weights, others, strict=True))
    return (*(None for _ in TritonCcgqa._fields), d_x, *gradients, None, None, None)


_query_key.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.tuningfork.ccgqa)
def _(sources, extras, bounds, x, depthwise, grouped, *_, **__) -> int:
    """By this the compiler decides under an activation budget what is cheap to recompute."""
    return 2 * x[0] * x[1] * (depthwise[1] + grouped[1] * grouped[2])


@torch.library.custom_op("tuningfork::value_shift", mutates_args=())
def _shift(sources: Tensor, extras: Tensor, bounds: Tensor, x: Tensor, now: int) -> Tensor:
    x = x.contiguous()
    (rows, channels), out = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.shift_forward[(triton.cdiv(rows, _TILE), triton.cdiv(channels, _LANES))](
        x, sources, out, rows, channels, now, REACH=_REACH, ROWS=_TILE, LANES=_LANES
    )
    return out


@torch.library.custom_op("tuningfork::value_shift_backward", mutates_args=())
def _shift_backward(sources: Tensor, extras: Tensor, bounds: Tensor, d_out: Tensor, now: int) -> Tensor:
    d_out = d_out.contiguous()
    (rows, channels), d_x = d_out.shape, torch.empty(d_out.shape, dtype=d_out.dtype, device=d_out.device)
    kernels.shift_gradient[(triton.cdiv(rows, _TILE), triton.cdiv(channels, _LANES))](
        d_out, sources, extras, bounds, d_x, rows, channels, now,
        REACH=_REACH, ROWS=_TILE, LANES=_LANES, TILE=_TILE,
    )  # fmt: skip
    return d_x


@_shift.register_fake
@_shift_backward.register_fake
def _(sources, extras, bounds, x, now):
    return x.new_empty(x.shape)


def _save_shift(ctx, inputs, output):
    *tables, _, ctx.now = inputs
    ctx.save_for_backward(*tables)


def _backward_of_shift(ctx, d_out):
    return None, None, None, _shift_backward(*ctx.saved_tensors, d_out, ctx.now), None


_shift.register_autograd(_backward_of_shift, setup_context=_save_shift)
