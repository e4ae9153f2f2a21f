"""The scan of the gated delta rule alone: its kernels on packs of the yardstick's pairs; JSON lines.

Layouts: a pack of whole pairs, each prompt laid once (shared); the same pairs with each prompt laid before every answer
(unshared); and one document as long as the shared pack, which has the fewest programs and the longest way through each.

    rows            of the layout, padding included; `scanned` are those of its chunks
    prepare_ms      milliseconds to prepare a pack, once for all layers, host work included
    forward_ms      milliseconds of one layer's scan on the device
    train_ms        forward and backward
    transient_gb    the most memory that forward and backward hold beyond inputs, in 1e9 bytes
    tflops          forward flops, each row once, / forward_ms, in 1e12 per second
    error           of the result; error_gradient: the largest of any gradient. Of the first key head and its value
                    heads, as norm of the difference from float64 / norm

Where flash-linear-attention can be imported its scan of the unshared layout is timed, too, as a yardstick: sequences
side by side, nothing gathered. It refuses Hopper with Triton 3.4 to 3.7.0, where one of its kernels may be wrong for
some configurations. That refusal is switched off here: the errors in the same line say how right it was.

    python -m bench.gated_delta
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.attention import Layouts
from bench.output import device, emit, environment, failure, parser, table
from bench.shapes import random_pairs, yardstick
from bench.timing import free_memory, median_ms, transient_bytes
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.tree import grow
from tuningfork.kernels.gated_delta._chunks import CHUNK, Chunks
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.kernels.select import select
from tuningfork.records import ROOT, ForkLayout, PackedBatch, Segment

Scan = Callable[..., Tensor]
COLUMNS = {
    "kernel": "kernel",
    "heads": "heads",
    "layout": "layout",
    "rows": "rows",
    "scanned": "scanned",
    **{f"{what}_ms": f"{what} ms" for what in ("prepare", "forward", "train")},
    "transient_gb": "GB",
    "tflops": "TFLOP/s",
    "error": "error",
    "error_gradient": "of a gradient",
    "note": "note",
}


class Shape(NamedTuple):
    """Key heads, value heads, and the width of each."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return "x".join(map(str, self))

    def flops(self, rows: int) -> int:
        """Of a forward pass: products of whole chunks, the inverse as what it costs at most."""
        dk, dv = self.key_width, self.value_width
        return rows * self.value_heads * (6 * dk * dv + CHUNK * (6 * dk + 4 * dv) + 2 * CHUNK**2 // 3)


def random_rows(rows: int, shape: Shape, where: torch.device) -> list[Tensor]:
    """Inputs of a scan as a layer with negative eigenvalues makes them, and the gradient of its result."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    query, key = (torch.randn(rows, shape.key_heads, shape.key_width, device=where) for _ in range(2))
    query, key = (t / t.square().sum(-1, keepdim=True).sqrt() for t in (query, key))
    value, gradient = (torch.randn(rows, shape.value_heads, shape.value_width, device=where) for _ in range(2))
    decay, beta = (torch.randn(rows, shape.value_heads, device=where) for _ in range(2))
    decay = -8 * torch.rand(shape.value_heads, device=where) * torch.nn.functional.softplus(decay - 4)
    leaves = [(query * shape.key_width**-0.5).to(dtype), key.to(dtype), value.to(dtype), decay, 2 * beta.sigmoid()]
    return [*(t.requires_grad_() for t in leaves), gradient.to(dtype)]


def errors(layout: ForkLayout, scan: Scan, given: Sequence[Tensor], shape: Shape) -> dict[str, float]:
    """Of a result and its gradients to those of the plain form in float64, for the first key head."""
    *leaves, gradient = given
    group = shape.value_heads // shape.key_heads
    counts = (1, 1, group, group, group, group)
    found = scan(*leaves)
    ours = [found.detach(), *torch.autograd.grad(found, leaves, gradient)]
    exact = [t.detach()[:, :n].double().requires_grad_() for t, n in zip(given, counts, strict=True)]
    true = PlainGatedDelta.prepare(layout).scan(*exact[:-1])
    truths = [true.detach(), *torch.autograd.grad(true, exact[:-1], exact[-1])]
    lost = [float((o[:, : t.shape[1]].double() - t).norm() / t.norm()) for o, t in zip(ours, truths, strict=True)]
    return {"error": lost[0], "error_gradient": max(lost[1:])}


def measure(
    layout: ForkLayout, prepare: Callable[[], Scan], given: Sequence[Tensor], shape: Shape, repeats: int
) -> dict[str, float]:
    """Times and errors of one kernel on one layout; their meaning stands at the top of this file."""
    where, scan = given[0].device, prepare()
    *leaves, gradient = given

    def train() -> None:
        torch.autograd.grad(scan(*leaves), leaves, gradient)

    found = errors(layout, scan, given, shape)
    free_memory()
    found["prepare_ms"] = median_ms(prepare, where, repeats)
    found["forward_ms"] = median_ms(lambda: scan(*leaves), where, repeats, device_only=True)
    found["train_ms"] = median_ms(train, where, repeats, device_only=True)
    found["tflops"] = shape.flops(len(leaves[0])) / found["forward_ms"] / 1e9
    held = transient_bytes(train, where)
    if held is not None:
        found["transient_gb"] = held / 1e9
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def fla_scan(layout: ForkLayout, shape: Shape) -> Scan:
    """Flash-linear-attention's scan of a layout in which nothing is shared.

    Raises:
        ImportError: it is not installed.
    """
    theirs = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    vars(importlib.import_module("fla.ops.common.chunk_o"))["TRITON_ABOVE_3_7_1"] = True  # the refusal; its only use
    segments = [Segment(*numbers) for numbers in layout.segments.tolist()]
    assert all(segment.parent == ROOT for segment in segments)
    ends = [0, *(segment.end for segment in segments if segment.end > segment.start)]
    borders = torch.tensor(ends, dtype=torch.int32, device=layout.segments.device)
    group = shape.value_heads // shape.key_heads

    def scan(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        query, key = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (query, key))
        rows = [t[None] for t in (query, key, value, decay, beta)]
        return theirs(*rows, scale=1.0, cu_seqlens=borders)[0][0]

    return scan


def runs(layout: ForkLayout, shape: Shape, forked: bool) -> dict[str, Callable[[], Scan]]:
    """By name, what prepares a layout: the chosen kernel, and the yardstick's if nothing is shared."""
    asked = {"gated_delta": {"key_width": shape.key_width, "value_width": shape.value_width}}
    where = layout.position_of_row.device
    chosen = select(asked, where, torch.bfloat16)

    def prepare() -> Scan:
        scan: Scan = chosen["gated_delta"].prepare(layout).scan
        return scan

    found: dict[str, Callable[[], Scan]] = {chosen.names["gated_delta"]: prepare}
    if where.type == "cuda" and not forked:
        found["fla"] = partial(fla_scan, layout, shape)
    return found


def batches(tokens: int, pairs: int) -> dict[str, PackedBatch]:
    """A pack by its layout, as the top of this file says, chosen from so many pairs of the yardstick."""
    packs = Layouts.of(yardstick(pairs), tokens)
    document = [example.alone()[0] for example in random_pairs([(0, tokens, 1)], vocabulary=1000)]
    alone = lay(document, grow(document, "none").of([0]), tokens)
    return {"shared": packs.shared, "unshared": packs.unshared, "document": alone}


def main(argv: list[str] | None = None) -> None:
    where = device()
    small = where.type == "cpu"
    options = parser(__doc__)
    shapes = ["2x2x16x24"] if small else ["30x30x96x192", "16x16x128x128", "16x32x128x128"]
    options.add_argument("--shapes", nargs="+", help="key heads x value heads x their widths", default=shapes)
    options.add_argument("--tokens", type=int, default=2048 if small else 16384, help="rows of a shared pack")
    options.add_argument("--pairs", type=int, default=16 if small else 512, help="of the yardstick, to choose from")
    options.add_argument("--repeats", type=int, default=1 if small else 20)
    args = options.parse_args(argv)

    packs = batches(args.tokens, args.pairs)
    lines: list[dict[str, Any]] = []
    for shape in map(Shape.parse, args.shapes):
        for name, batch in packs.items():
            layout = batch.to(where).layout
            given = random_rows(len(batch.input_ids), shape, where)
            scanned = CHUNK * int((Chunks.of(layout).number >= 0).sum())
            for kernel, prepare in runs(layout, shape, name == "shared").items():
                line: dict[str, Any] = {"bench": "gated_delta", "kernel": kernel, "heads": str(shape), "layout": name}
                line |= {"rows": len(batch.input_ids), "scanned": scanned}
                try:
                    line |= measure(layout, prepare, given, shape, args.repeats)
                except Exception as error:  # what a kernel cannot do is a result
                    line["note"] = failure(error)
                free_memory()
                emit({**line, **environment("fla-core")}, args.out)
                lines.append(line)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
