"""Matrix products of one decoder block at several row counts, on a card as hot as in training; JSON lines.

A line is one product for M rows, x [M, in], and a weight [out, in], which several of a block's layers may have:

    kind        forward          x · weightᵀ
                input_gradient   dy · weight
                weight_gradient  dyᵀ · x, in bfloat16
                weight_gradient_32   the same, summed and given in float32 (torch.mm with out_dtype)
    number      bfloat16 (float32 on a CPU), or float8: e4m3 with a scale for each row of both factors, already cast and
                laid as torch._scaled_mm wants them; fast accumulation, output bfloat16
    layers      what has this product: single layers (q, k, v, o, gate, up, down), or a joined one (q+k+v, gate+up)
    ms, tflops  median milliseconds, and 2·M·in·out / that time in 1e12 per second
    peak_share  of the card's dense bfloat16 peak, for float8 too

The second table adds them up for all products of a block, three for each layer, as `block_ms` and `block_tflops`:

    separate    every layer alone, weight gradients in bfloat16
    joined      q, k, v as one product, gate and up as one; that it saves adding their input gradients up is not counted
    separate_32, joined_32   the same with weight gradients in float32
    float8      every layer alone, all three products in float8

The card first multiplies for --warm_s seconds; then each product runs for half of --each_s before the other half
counts, since clocks follow the power drawn. Numbers are normally distributed, as weights and activations nearly are:
zeros or constants would draw less power and run faster. Row counts of one product follow each other, so they compare.

    python -m bench.products
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.output import device, emit, environment, failure, parser, peak, table
from bench.shapes import SHAPES, config
from bench.timing import free_memory, median_ms
from tuningfork.models.policy import head_dim

ROWS = [8192, 12288, 13312, 13824, 13952, 14336, 16384]
SINGLE = ("q", "k", "v", "o", "gate", "up", "down")
JOINED = ("q+k+v", "o", "gate+up", "down")
KINDS = ("forward", "input_gradient", "weight_gradient", "weight_gradient_32")
# block -> (layers, kinds, number)
BLOCKS = {
    "separate": (SINGLE, KINDS[:3], "bfloat16"),
    "joined": (JOINED, KINDS[:3], "bfloat16"),
    "separate_32": (SINGLE, (*KINDS[:2], KINDS[3]), "bfloat16"),
    "joined_32": (JOINED, (*KINDS[:2], KINDS[3]), "bfloat16"),
    "float8": (SINGLE, KINDS[:3], "float8"),
}
COLUMNS = {
    "layers": "layers",
    "out": "out",
    "in": "in",
    "kind": "kind",
    "number": "number",
    "rows": "M",
    "ms": "ms",
    "tflops": "TFLOP/s",
    "peak_share": "of bf16 peak",
    "note": "note",
}
BLOCK_COLUMNS = {"block": "block", "rows": "M", "block_ms": "ms", "block_tflops": "TFLOP/s"}


@dataclass(frozen=True)
class Layer:
    """The weight [out, in] that one or more layers of a block have."""

    layers: tuple[str, ...]
    out: int
    into: int


def layers(shape: str) -> list[Layer]:
    """The layers of a block, those of one size together, and the joined ones."""
    model = config(shape)
    hidden, inner, width = model.hidden_size, model.intermediate_size, head_dim(model)
    heads, key_heads = model.num_attention_heads * width, model.num_key_value_heads * width
    sizes = {
        **{"q": (heads, hidden), "k": (key_heads, hidden), "v": (key_heads, hidden), "o": (hidden, heads)},
        **{"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)},
        **{"q+k+v": (heads + 2 * key_heads, hidden), "gate+up": (2 * inner, hidden)},
    }
    distinct = dict.fromkeys(sizes.values())
    return [Layer(tuple(name for name in sizes if sizes[name] == size), *size) for size in distinct]


def product(layer: Layer, kind: str, number: str, rows: int, where: torch.device) -> Callable[[], Tensor]:
    """One product on random factors of its own."""
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, dtype=dtype, device=where) * scale

    x, dy = random(rows, layer.into), random(rows, layer.out)
    weight = random(layer.out, layer.into, scale=layer.into**-0.5)
    left, right = {"forward": (x, weight.t()), "input_gradient": (dy, weight)}.get(kind, (dy.t(), x))
    if number == "float8":
        return float8(left, right)
    if kind == "weight_gradient_32":
        return lambda: torch.mm(left, right, out_dtype=torch.float32)
    return lambda: torch.mm(left, right)


def float8(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """The product in float8, with a scale for each row of the left factor and each column of the right."""
    (a, scale_a), (b, scale_b) = scaled(left), scaled(right.t())
    options: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b.t(), "out_dtype": torch.bfloat16}
    return lambda: torch._scaled_mm(a, b.t(), **options, use_fast_accum=True)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values, row by row in memory, and what each row was divided by."""
    scale = x.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).contiguous(), scale


def heat(seconds: float, where: torch.device) -> None:
    """Multiply without a pause for that long."""
    run = product(Layer((), 4096, 4096), "forward", "bfloat16", 8192, where)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            run()
        torch.cuda.synchronize()


def measure(run: Callable[[], Tensor], each_s: float, where: torch.device) -> float:
    """Median milliseconds of a product that runs for about `each_s` seconds, of which the first half does not count."""
    once = median_ms(run, where, repeats=3, warmup=2)
    repeats = min(max(3, round(500 * each_s / once)), 1000)
    return median_ms(run, where, repeats, warmup=repeats)


def compare(layer: Layer, kind: str, number: str, rows: int, each_s: float) -> dict[str, Any]:
    """The result line of one product. A product that fails says so in it."""
    where = device()
    line = {"layers": " ".join(layer.layers), "out": layer.out, "in": layer.into, "kind": kind}
    line |= {"number": number, "rows": rows, "note": ""}
    try:
        ms = measure(product(layer, kind, number, rows, where), each_s, where)
    except Exception as error:  # what a card or a version cannot do is a result
        return line | {"note": failure(error)}
    flops, most = 2 * rows * layer.out * layer.into, peak()
    share = None if most is None else round(flops / ms * 1e3 / most, 3)
    return line | {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1), "peak_share": share}


def blocks(lines: list[dict[str, Any]], rows: list[int]) -> list[dict[str, Any]]:
    """Sums over the products of a block, for each way to compute it that has all of them."""
    found = {}
    for line in lines:
        for layer in line["layers"].split():
            found[layer, line["kind"], line["number"], line["rows"]] = line
    sums = []
    for name, (names, kinds, number) in BLOCKS.items():
        for count in rows:
            of = [found.get((layer, kind, number, count), {}) for layer in names for kind in kinds]
            if all("ms" in line for line in of):
                ms = sum(line["ms"] for line in of)
                flops = sum(2 * count * line["out"] * line["in"] for line in of)
                rate = round(flops / ms / 1e9, 1)
                sums.append({"block": name, "rows": count, "block_ms": round(ms, 3), "block_tflops": rate})
    return sums


def run_all(shape: str, rows: list[int], warm_s: float, each_s: float, out: Path | None) -> list[dict[str, Any]]:
    about = {"bench": "products", "shape": shape}
    if device().type == "cuda":
        heat(warm_s, device())
    lines = []
    for layer in layers(shape):
        for kind, number in [*((kind, "bfloat16") for kind in KINDS), *((kind, "float8") for kind in KINDS[:3])]:
            for count in rows:
                lines.append(compare(layer, kind, number, count, each_s))
                emit({**about, **lines[-1], **environment()}, out)
        free_memory()
    return lines


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--shape", choices=list(SHAPES), default="tiny" if small else "olmo2_1b")
    options.add_argument("--rows", type=int, nargs="+", default=[64, 128] if small else ROWS)
    options.add_argument("--warm_s", type=float, default=2.0, help="seconds of products before the first counts")
    options.add_argument("--each_s", type=float, default=0.001 if small else 0.14, help="seconds for each product")
    args = options.parse_args(argv)
    lines = run_all(args.shape, args.rows, args.warm_s, args.each_s, args.out)
    sums = blocks(lines, args.rows)
    for line in sums:
        emit({"bench": "products", "shape": args.shape, **line, **environment()}, args.out)
    print(table(lines, COLUMNS), table(sums, BLOCK_COLUMNS), sep="\n\n")


if __name__ == "__main__":
    main()
