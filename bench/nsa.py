"""Native sparse attention alone, beside attention to every row, on one document; and the step from blocks to rows.

The attention part of a layer, without its projections: compression by the mean, compressed attention and the choice by
it, selected attention, the window, and the gates. Of dense attention the kernel of this package, PyTorch's flash
attention and FlexAttention, for the same heads; values are padded where a kernel wants one width.

    forward_ms      milliseconds on the device
    train_ms        forward and backward
    transient_gb    the most memory that forward and backward hold beyond inputs, in 1e9 bytes
    ratio           train_ms of the fastest dense kernel / that of native sparse attention
    mean_ms, compressed_ms, selected_ms, window_ms   train_ms of these alone
    kernels         of one training step, ms by kernel, the longest first

The step from blocks to rows: a loop in Python over sequences, rows and groups that sorts a row's blocks and joins them
to ranges of positions (`ranges`), on a CPU; and what stands for it here: `lists_ms` turns blocks into what attention
reads, and `readers_ms` turns these about: which rows read a block.

    loop_ms         of the loop
    times           loop_ms / lists_ms

    python -m bench.nsa
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.device_time import DeviceProfile
from bench.output import device, emit, environment, failure, parser, table
from bench.shapes import random_pairs
from bench.timing import free_memory, median_ms, transient_bytes
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.tree import grow
from tuningfork.kernels.nsa.plain import Choice, Grid
from tuningfork.kernels.select import Kernels, select
from tuningfork.records import ForkLayout

GRID, CHOICE, WINDOW = Grid(32, 16, 64), Choice(16, 1, 2), 512
INDEX_STEPS = {"report": (2, 256, 4, 32, 8), "m7c": (2, 2048, 2, 16, 64)}  # sequences, rows, groups, blocks a row, l'
KERNELS_SHOWN = 16
COLUMNS = {
    "kernel": "kernel",
    "heads": "heads",
    "rows": "rows",
    "forward_ms": "forward ms",
    "train_ms": "train ms",
    "ratio": "ratio",
    "transient_gb": "GB",
    **{f"{part}_ms": f"{part} ms" for part in ("mean", "compressed", "selected", "window", "lists", "readers", "loop")},
    "times": "times",
    "note": "note",
}
Run = Callable[[], Any]


class Shape(NamedTuple):
    """Query heads, groups, and the widths of keys and values."""

    heads: int
    groups: int
    key_width: int
    value_width: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Inputs(NamedTuple):
    """Of a layer on T rows: the gates' logits, a query, and a key and a value for each branch; and of its result the
    gradient."""

    gates: Tensor  # [T, H, 3]
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    gradient: Tensor

    @classmethod
    def random(cls, rows: int, shape: Shape, where: torch.device) -> Inputs:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32

        def draw(heads: int, width: int) -> Tensor:
            return torch.randn(rows, heads, width, device=where).to(dtype).requires_grad_()

        heads, groups, dk, dv = shape
        keys, values = ([draw(groups, width) for _ in range(3)] for width in (dk, dv))
        return cls(draw(heads, 3), draw(heads, dk), keys, values, draw(heads, dv).detach())


def document(tokens: int, where: torch.device) -> ForkLayout:
    """One of so many rows."""
    [example] = [example.alone()[0] for example in random_pairs([(0, tokens, 1)], vocabulary=1000)]
    return lay([example], grow([example], "none").of([0]), tokens).to(where).layout


def gated(gates: Tensor, compressed: Tensor, selected: Tensor, window: Tensor) -> Tensor:
    """What a layer hands on."""
    weights = gates.sigmoid()[..., None]
    return weights[:, :, 0] * compressed + weights[:, :, 1] * selected + weights[:, :, 2] * window


def sparse(kernels: Kernels, layout: ForkLayout, given: Inputs, compiled: bool) -> tuple[Run, dict[str, Run]]:
    """The attention part of a layer, and each of its parts."""
    op, window = kernels["nsa"].prepare(layout, GRID), kernels["attention"].prepare(layout)
    scale = given.query.shape[2] ** -0.5
    combine = torch.compile(gated) if compiled else gated
    (ck, sk, wk), (cv, sv, wv) = given.keys, given.values

    def mean() -> Tensor:
        return op.mean(ck)

    def compressed() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = op.compressed(given.query, mean(), op.mean(cv), scale=scale, choice=CHOICE)
        return found

    def local() -> Tensor:
        found: Tensor = window.attend(given.query, wk, wv, scale=scale, window=WINDOW, softcap=None)
        return found

    def whole() -> Tensor:
        out, chosen = compressed()
        return combine(given.gates, out, op.selected(given.query, sk, sv, chosen, scale=scale), local())

    with torch.no_grad():
        chosen = compressed()[1]
    parts: dict[str, Run] = {
        "mean": mean,
        "compressed": lambda: compressed()[0],
        "selected": lambda: op.selected(given.query, sk, sv, chosen, scale=scale),
        "window": local,
    }
    return whole, parts


def dense(kernels: Kernels, layout: ForkLayout, given: Inputs) -> dict[str, Run]:
    """Attention to every row, by each kernel that there is on the device."""
    query, key, value = given.query, given.keys[0], given.values[0]
    scale, rows = query.shape[2] ** -0.5, len(query)
    own = kernels["attention"].prepare(layout)
    found: dict[str, Run] = {
        kernels.names["attention"]: lambda: own.attend(query, key, value, scale=scale, window=None, softcap=None)
    }
    if query.device.type != "cuda":
        return found
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def by_head(t: Tensor) -> Tensor:
        return F.pad(t, (0, query.shape[2] - t.shape[2])).transpose(0, 1)[None]

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = map(by_head, (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)[..., : value.shape[2]]

    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, rows, rows, device="cuda")
    compiled = torch.compile(flex_attention)

    def flex() -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out: Tensor = compiled(q, k, v, block_mask=causal, scale=scale, enable_gqa=True)  # type: ignore[assignment]
        return out[0].transpose(0, 1)

    return {**found, "flash": flash, "flex": flex}


def trained(run: Run, given: Inputs) -> Run:
    """Forward and backward of something that some of the inputs go into."""
    leaves = [given.gates, given.query, *given.keys, *given.values]

    def train() -> None:
        out = run()
        torch.autograd.grad(out, leaves, _like(out, given), allow_unused=True)

    return train


def _like(out: Tensor, given: Inputs) -> Tensor:
    """A gradient of a result: of compressed keys some of a query's."""
    return given.gradient if out.shape == given.gradient.shape else out.detach()


def timed(run: Run, where: torch.device, repeats: int, seconds: float) -> float:
    """Median milliseconds of so many repeats, or of as many as there are in so many seconds, 3 at least."""
    run()
    once = median_ms(run, where, 1, warmup=1)
    times = max(3 if repeats > 1 else 1, min(repeats, int(1e3 * seconds / max(once, 1e-3))))
    return float(f"{median_ms(run, where, times, warmup=0, device_only=True):.4g}")


def by_kernel(run: Run) -> dict[str, float]:
    """Milliseconds of one run by kernel."""
    watched = DeviceProfile()
    watched.start()
    run()
    torch.cuda.synchronize()
    watched.stop()
    longest = sorted(watched.microseconds.items(), key=lambda item: -item[1])[:KERNELS_SHOWN]
    return {name[:60]: round(spent / 1e3, 3) for name, spent in longest}


def measure(run: Run, given: Inputs, repeats: int, seconds: float) -> dict[str, Any]:
    """Times and memory of one kernel; their meaning stands at the top of this file."""
    where, train = given.query.device, trained(run, given)
    line: dict[str, Any] = {
        "forward_ms": timed(run, where, repeats, seconds),
        "train_ms": timed(train, where, repeats, seconds),
    }
    held = transient_bytes(train, where)
    return line if held is None else {**line, "transient_gb": round(held / 1e9, 3)}


def attention_lines(shape: Shape, rows: int, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Of every dense kernel, then of native sparse attention."""
    where = device()
    asked = {
        "nsa": {"key_width": shape.key_width, "value_width": shape.value_width},
        "attention": {"head_width": max(shape.key_width, shape.value_width)},
    }
    kernels = select(asked, where, torch.bfloat16)
    layout, given = document(rows, where), Inputs.random(rows, shape, where)
    lines = []

    def add(name: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        line: dict[str, Any] = {"bench": "nsa", "kernel": name, "heads": str(shape), "rows": rows}
        try:
            line |= find()
        except Exception as error:  # what a kernel cannot do is a result
            line["note"] = failure(error)
        free_memory()
        lines.append(line)
        return line

    for name, run in dense(kernels, layout, given).items():
        add(name, lambda run=run: measure(run, given, repeats, seconds))  # type: ignore[misc]
    fastest = min((line["train_ms"] for line in lines if "train_ms" in line), default=None)

    def ours() -> dict[str, Any]:
        whole, parts = sparse(kernels, layout, given, compiled=where.type == "cuda")
        line = measure(whole, given, repeats, seconds)
        line |= {f"{name}_ms": timed(trained(part, given), where, repeats, seconds) for name, part in parts.items()}
        if where.type == "cuda":
            line["kernels"] = by_kernel(trained(whole, given))
        return line if fastest is None else {**line, "ratio": round(fastest / line["train_ms"], 3)}

    add(f"nsa {kernels.names['nsa']}", ours)
    return lines


# --- from blocks to rows ----------------------------------------------------------------------------------------------


def ranges(chosen: list[list[list[int]]], length: int, select: int) -> list[list[list[tuple[int, int]]]]:
    """The positions [begin, end) that rows of sequences of so many read for each group, by their chosen blocks: in
    order, each once, neighbours joined, none behind the row. Literally, one row and group after the other."""
    found = []
    for row, groups in enumerate(chosen):
        position = row % length
        of_row = []
        for blocks in groups:
            joined: list[tuple[int, int]] = []
            for block in sorted({block for block in blocks if block >= 0}):
                begin, end = block * select, min((block + 1) * select, position + 1)
                if joined and joined[-1][1] == begin:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((begin, end))
            of_row.append(joined)
        found.append(of_row)
    return found


def index_line(name: str, repeats: int) -> dict[str, Any]:
    """Of the step from blocks to rows."""
    where = device()
    sequences, length, groups, count, size = INDEX_STEPS[name]
    own = torch.arange(length) // size
    scores = torch.rand(sequences, length, groups, (length - 1) // size + 1, generator=torch.Generator().manual_seed(0))
    scores = scores.masked_fill(torch.arange(scores.shape[3]) > own[:, None, None], -1)
    best = scores.topk(min(count, scores.shape[3]), dim=-1)
    chosen = F.pad(best.indices.masked_fill(best.values < 0, -1), (0, max(0, count - scores.shape[3])), value=-1)
    chosen = chosen.flatten(0, 1).int()
    line: dict[str, Any] = {"bench": "nsa", "kernel": f"index step: {name}", "rows": len(chosen)}
    line |= {"groups": groups, "count": count}
    listed, begun = chosen.tolist(), time.perf_counter()
    ranges(listed, length, size)
    line["loop_ms"] = round(1e3 * (time.perf_counter() - begun), 3)
    if where.type != "cuda":
        return {**line, "note": "the rest needs a GPU"}
    from tuningfork.kernels.nsa._readers import Readers
    from tuningfork.kernels.nsa._selected import lists_of
    from tuningfork.kernels.nsa.fast import TritonNsa

    examples = [example.alone()[0] for example in random_pairs([(0, length, 1)] * sequences, vocabulary=1000)]
    forest = grow(examples, "none").of(range(sequences))
    op = TritonNsa.prepare(lay(examples, forest, len(chosen)).to(where).layout, Grid(size, size, size))
    tables = [op.segments, op.steps, op.seams, op.position_of_row, *op.pieces]
    chosen = chosen.to(where)
    lists, pieces = lists_of(tables, chosen), len(op.pieces.rows)
    line["lists_ms"] = timed(lambda: lists_of(tables, chosen), where, repeats, 1)
    line["readers_ms"] = timed(lambda: Readers.of(lists, pieces, len(lists), 1024), where, repeats, 1)
    return {**line, "times": round(line["loop_ms"] / line["lists_ms"], 1)}


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    shapes = ["2x1x16x24"] if small else ["12x2x64x64", "64x4x128x128", "64x4x192x128"]
    options.add_argument("--shapes", nargs="*", help="heads x groups x widths of keys and values", default=shapes)
    lengths = [256] if small else [8192, 16384, 32768, 65536]
    options.add_argument("--rows", type=int, nargs="+", help="of the document", default=lengths)
    options.add_argument("--repeats", type=int, default=1 if small else 20)
    options.add_argument("--seconds", type=float, default=2.0, help="that repeats of one measurement take at most")
    args = options.parse_args(argv)

    lines: list[Mapping[str, Any]] = []

    def keep(line: Mapping[str, Any]) -> None:
        emit({**line, **environment()}, args.out)
        lines.append(line)

    for name in INDEX_STEPS:
        keep(index_line(name, args.repeats))
    for shape in map(Shape.parse, args.shapes):
        for rows in args.rows:
            for line in attention_lines(shape, rows, args.repeats, args.seconds):
                keep(line)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
