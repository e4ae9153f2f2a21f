"""What it costs to tune kernels for each length of a pack, beside kernels whose configuration is fixed.

One layer's norms and convolutions, forward and backward, at a few numbers of rows, one after the other, as packs come:

- `fla`: flash-linear-attention's l2 norm, gated norm and short convolutions, where it can be imported. Version 0.4.1
  tunes the norms anew for each ⌈rows · heads / 2,048⌉ and the convolutions for each ⌈rows / 1,024⌉, 0.6.0 the norms for
  each ⌈rows · heads / 65,536⌉.
- `stand-in`: without fla, kernels with the keys and as many configurations as its norms of version 0.4.1.
- ours: the kernels that a run chooses, all that goes along a pack in such a layer: convolution with the l2 norm in it,
  and the scan.

    first, again    seconds of the first call at that many rows, and of the second
    tunings         kernels that were tuned in the first; `timed`: their configurations
    compiled        kernels and graphs that were compiled in it

Nothing is cached from before: Triton's cache is an empty folder. The last row of the table is of whole training steps
of ours on packs of random lengths (bench.hybrid_lengths): the longest behind the third, the median, and what was tuned
or compiled in any of these.

    python -m bench.tuning_storm
    python -m bench.tuning_storm --rows 5000 5050 5100 5000 9000
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import hybrid_lengths, shapes
from bench.gated_delta import Shape
from bench.output import device, emit, environment, failure, parser, table
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.causal_conv.plain import Heads
from tuningfork.kernels.select import select
from tuningfork.models.compilations import Compilations

Run = Callable[[int], None]
COLUMNS = {"kernels": "kernels", "rows": "rows", "first": "first s", "again": "again s", "tunings": "tunings",
           "timed": "configurations", "compiled": "compiled", "note": "note"}  # fmt: skip


def ours(shape: Shape, where: torch.device) -> Run:
    """Convolution and scan of one layer, forward and backward, as the device gets them."""
    asked = {
        "causal_conv": {"width": 4},
        "gated_delta": {"key_width": shape.key_width, "value_width": shape.value_width},
    }
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    chosen = select(asked, where, dtype)
    heads = Heads(shape.key_heads, shape.key_width, shape.value_heads, shape.value_width)
    channels = 2 * heads.keys * heads.key_width + heads.values * heads.value_width
    weight = torch.randn(channels, 4, device=where, requires_grad=True)

    def run(rows: int) -> None:
        third = (rows - 1) // 3
        batch = build_pack(shapes.random_pairs([(rows - 2 * third, third, third)], vocabulary=1000), rows, "prompt")
        layout = batch.to(where).layout
        x = torch.randn(rows, channels, device=where, dtype=dtype, requires_grad=True)
        gates = [torch.rand(rows, heads.values, device=where).requires_grad_() for _ in range(2)]
        query, key, value = chosen["causal_conv"].prepare(layout).query_key_value(x, weight, heads)
        out: Tensor = chosen["gated_delta"].prepare(layout).scan(query, key, value, -gates[0], gates[1])
        torch.autograd.grad(out.float().sum(), [x, weight, *gates])

    return run


def fla_norms(shape: Shape, where: torch.device) -> Run:
    """The l2 norm of keys and the gated norm of the output."""
    l2norm = importlib.import_module("fla.modules.l2norm").l2norm
    gated = importlib.import_module("fla.modules").FusedRMSNormGated(
        shape.value_width, eps=1e-5, device=where, dtype=torch.bfloat16
    )

    def run(rows: int) -> None:
        key = torch.randn(1, rows, shape.key_heads, shape.key_width, device=where, dtype=torch.bfloat16)
        value, gate = torch.randn(2, rows * shape.value_heads, shape.value_width, device=where, dtype=torch.bfloat16)
        leaves = [t.requires_grad_() for t in (key, value, gate)]
        total = l2norm(leaves[0]).float().sum() + gated(leaves[1], leaves[2]).float().sum()
        torch.autograd.grad(total, leaves)

    return run


def fla_convolutions(shape: Shape, where: torch.device) -> Run:
    """The short convolutions of keys and of values."""
    kind = importlib.import_module("fla.modules").ShortConvolution
    widths = (shape.key_heads * shape.key_width, shape.value_heads * shape.value_width)
    layers = [
        kind(hidden_size=width, kernel_size=4, activation="silu", device=where, dtype=torch.bfloat16)
        for width in widths
    ]

    def run(rows: int) -> None:
        leaves = [torch.randn(1, rows, width, device=where, dtype=torch.bfloat16).requires_grad_() for width in widths]
        total = sum(layer(x)[0].float().sum() for layer, x in zip(layers, leaves, strict=True))
        torch.autograd.grad(total, leaves)

    return run


def stand_in(shape: Shape, where: torch.device) -> Run:
    """Norms with the keys of fla-core 0.4.1."""
    norms = importlib.import_module("bench._tuned_norms")
    return lambda rows: norms.run(rows, shape.key_heads, shape.key_width, shape.value_width, where)


def runs(shape: Shape, where: torch.device) -> dict[str, Callable[[], Run]]:
    """By name, what makes ready the kernels that are compared: ours alone without a GPU, where nothing can be tuned."""
    found: dict[str, Callable[[], Run]] = {"ours": lambda: ours(shape, where)}
    if where.type == "cuda" and importlib.util.find_spec("fla") is not None:
        found |= {
            "fla norms": lambda: fla_norms(shape, where),
            "fla convolutions": lambda: fla_convolutions(shape, where),
        }
    elif where.type == "cuda":
        found["stand-in norms"] = lambda: stand_in(shape, where)
    return found


def measure(run: Run, rows: int, where: torch.device) -> dict[str, Any]:
    """The numbers of the docstring for one call and the one after it."""
    seen = Compilations()

    def timed() -> float:
        begun = time.perf_counter()
        run(rows)
        if where.type == "cuda":
            torch.cuda.synchronize()
        return round(time.perf_counter() - begun, 3)

    first, found = timed(), seen.taken()
    tuned = [what.configurations for what in found if what.configurations]
    return {
        "rows": rows,
        "first": first,
        "again": timed(),
        "tunings": len(tuned),
        "timed": sum(tuned),
        "compiled": len(found) - len(tuned),
    }


def of_kernels(make: Callable[[], Run], rows: Sequence[int], where: torch.device) -> Iterator[dict[str, Any]]:
    """A line for each number of rows; what kernels cannot do is a result, too."""
    try:
        run = make()
        for count in rows:
            yield measure(run, count, where)
    except Exception as error:
        yield {"note": failure(error)}


def whole_steps(model: str, packs: int, small: bool) -> dict[str, Any]:
    """The row of training steps, in which every pack has a number of rows of its own."""
    line = hybrid_lengths.measure(model, None, packs, 256 if small else 16384)
    return {
        **line,
        "bench": "tuning_storm",
        "kernels": f"ours, whole steps of {model}",
        "rows": f"{line['shortest']:,} to {line['longest']:,}, {line['lengths']} lengths",
        "first": line["step_s"]["1.0"],
        "again": line["step_s"]["0.5"],
        "tunings": None,
        "compiled": line["late"],
    }


def main(argv: list[str] | None = None) -> None:
    where = device()
    small = where.type == "cpu"
    options = parser(__doc__)
    default = "2x2x8x12" if small else "30x30x96x192"
    options.add_argument("--shape", help="key heads x value heads x their widths", default=default)
    lengths = [100, 150, 100] if small else [5000, 5050, 5100, 5000, 9000]
    options.add_argument("--model", default="tiny_hybrid" if small else "olmo_hybrid_1b", choices=shapes.SHAPES)
    options.add_argument("--packs", type=int, default=6 if small else 200, help="training steps of ours; 0 is none")
    options.add_argument(
        "--rows", nargs="+", type=int, default=lengths, help="of packs, in the order in which they come"
    )
    args = options.parse_args(argv)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        if where.type == "cuda":
            torch.zeros(1, device=where)
        for name, make in runs(Shape.parse(args.shape), where).items():
            for line in of_kernels(make, args.rows, where):
                lines.append({"bench": "tuning_storm", "kernels": name, "shape": args.shape, **line})
                emit({**lines[-1], **environment("fla-core")}, args.out)
        if args.packs:
            lines.append(whole_steps(args.model, args.packs, small))
            emit(lines[-1], args.out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
