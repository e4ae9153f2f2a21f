"""The causal convolution alone, on a pack of the yardstick's pairs: each form's times, bytes and errors; JSON lines.

Shapes: keys x key width x values x value width / taps, of layers with heads, that is convolution, SiLU and l2 norm in
one pass; or channels / taps, of a convolution alone (LFM2).

    prepare_ms       milliseconds to prepare a pack, once for all layers, host work included
    forward_ms       milliseconds of one layer's call on the device, as a training step makes it
    train_ms         forward and backward
    forward_gb_s     bytes that must move at least once / that time, in 1e9 per second: the rows are read, and written;
    train_gb_s       and in the backward pass rows and gradient are read, and a gradient is written: five times in all
    error_results    largest |x - x64| / largest |x64|, where x64 comes of the plain form in float64 on the same
    error_rows       numbers: the worst of the results; of the gradient of the rows;
    error_weight     of the gradient of the weights, which are float32
    transient_mb     the most memory that forward and backward hold at once beyond what is held before, in 1e6 bytes

    python -m bench.causal_conv
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.output import device, emit, environment, failure, parser, table
from bench.shapes import yardstick
from bench.timing import free_memory, median_ms, transient_bytes
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import PackLimits, pack_examples, portions_of
from tuningfork.data.packing.tree import grow
from tuningfork.kernels.causal_conv.plain import Heads, PlainCausalConv
from tuningfork.records import PackedBatch

PASSES = 5  # over the rows' bytes, forward and backward
COLUMNS = {
    "form": "form",
    "shape": "shape",
    "rows": "rows",
    **{f"{what}_ms": f"{what} ms" for what in ("prepare", "forward", "train")},
    **{f"{what}_gb_s": f"{what} GB/s" for what in ("forward", "train")},
    **{f"error_{what}": f"error: {what}" for what in ("results", "rows", "weight")},
    "transient_mb": "transient MB",
    "note": "note",
}


class Shape(NamedTuple):
    """Channels and taps, and how channels are cut into heads, if they are."""

    channels: int
    taps: int
    heads: Heads | None = None

    @classmethod
    def parse(cls, text: str) -> Shape:
        sizes, taps = text.split("/")
        if "x" not in sizes:
            return cls(int(sizes), int(taps))
        heads = Heads(*map(int, sizes.split("x")))
        return cls(2 * heads.keys * heads.key_width + heads.values * heads.value_width, int(taps), heads)

    def __str__(self) -> str:
        return f"{self.channels if self.heads is None else 'x'.join(map(str, self.heads))}/{self.taps}"

    def call(self, prepared: Any, x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        if self.heads is None:
            return [prepared.conv(x, weight, silu=False)]
        found: Sequence[Tensor] = prepared.query_key_value(x, weight, self.heads)
        return found


def forms(where: torch.device) -> dict[str, Any]:
    if where.type == "cpu":
        return {"plain": PlainCausalConv}
    from tuningfork.kernels.causal_conv.fast import TritonCausalConv

    return {"plain": PlainCausalConv, "triton": TritonCausalConv}


def fullest_pack(pairs: int, tokens: int) -> PackedBatch:
    """The fullest pack of the yardstick's pairs, with shared prompts."""
    examples = yardstick(pairs)
    limits = PackLimits.plan(tokens, "prompt", compiled=True)
    chosen = max(pack_examples(portions_of(examples, limits), limits), key=lambda found: found.forest.rows).examples
    return lay(chosen, grow(chosen, "prompt").of(range(len(chosen))), tokens)


class Run:
    """One form on one pack, with inputs of its own."""

    def __init__(self, form: Any, batch: PackedBatch, shape: Shape, dtype: torch.dtype, rounded: torch.dtype) -> None:
        self.form, self.layout, self.shape = form, batch.layout, shape
        where = batch.layout.position_of_row.device
        torch.manual_seed(0)
        self.x = torch.randn(len(batch.input_ids), shape.channels, device=where).to(rounded).to(dtype).requires_grad_()
        weights = torch.promote_types(dtype, torch.float32)
        self.weight = (torch.randn(shape.channels, shape.taps, device=where) * 0.5).to(weights).requires_grad_()
        self.prepared = form.prepare(batch.layout)
        self.gradients = [torch.randn_like(t, dtype=torch.float32).to(rounded).to(dtype) for t in self.forward()]

    def prepare(self) -> None:
        self.form.prepare(self.layout)

    def forward(self) -> Sequence[Tensor]:
        return self.shape.call(self.prepared, self.x, self.weight)

    def train(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), [self.x, self.weight], self.gradients)


def errors(found: Run, exact: Run) -> dict[str, float]:
    """Largest errors beside the largest number of each kind."""
    results = max(map(_error, found.forward(), exact.forward()))
    rows, weight = map(_error, found.train(), exact.train())
    return {"error_results": results, "error_rows": rows, "error_weight": weight}


def _error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach()
    return float(f"{float((found - exact).abs().max() / exact.abs().max()):.2e}")


def measure(form: Any, batch: PackedBatch, shape: Shape, repeats: int) -> dict[str, Any]:
    """The numbers of one form; their meaning stands at the top of this file."""
    where = batch.layout.position_of_row.device
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    run = Run(form, batch, shape, dtype, dtype)
    line: dict[str, Any] = {"prepare_ms": median_ms(run.prepare, where, repeats)}
    # One layer alone is shorter than its launch from Python takes; within a model the launches run ahead.
    line["forward_ms"] = median_ms(run.forward, where, repeats, device_only=True)
    line["train_ms"] = median_ms(run.train, where, repeats, device_only=True)
    once = run.x.numel() * run.x.element_size()
    line["forward_gb_s"] = round(2 * once / line["forward_ms"] / 1e6, 1)
    line["train_gb_s"] = round(PASSES * once / line["train_ms"] / 1e6, 1)
    held = transient_bytes(run.train, where)
    line["transient_mb"] = None if held is None else round(held / 1e6, 1)
    free_memory()
    exact = Run(PlainCausalConv, batch, shape, torch.float64, dtype)
    return {**{k: round(v, 4) if k.endswith("_ms") else v for k, v in line.items()}, **errors(run, exact)}


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", default=["2x16x2x32/4", "64/3"] if small
                         else ["30x96x30x192/4", "16x128x32x128/4", "2048/3"])  # fmt: skip
    options.add_argument("--tokens", type=int, default=4096 if small else 16384, help="rows of the pack")
    options.add_argument("--pairs", type=int, default=16 if small else 512, help="of the yardstick, to choose from")
    options.add_argument("--repeats", type=int, default=1 if small else 20)
    args = options.parse_args(argv)

    batch = fullest_pack(args.pairs, args.tokens).to(device())
    lines = []
    for shape in map(Shape.parse, args.shapes):
        for name, form in forms(device()).items():
            line: dict[str, Any] = {"bench": "causal_conv", "form": name, "shape": str(shape), "rows": args.tokens}
            try:
                line |= measure(form, batch, shape, args.repeats)
            except Exception as error:  # what a form cannot do is a result
                line["note"] = failure(error)
            free_memory()
            emit({**line, **environment()}, args.out)
            lines.append(line)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
