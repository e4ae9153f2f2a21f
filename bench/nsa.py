"""Native sparse attention alone, beside attention to every row, on one document; and the step from blocks to rows.

The attention part of a layer, without its projections: compression by the mean, compressed attention and the choice by
it, selected attention, the window, and the gates. Of dense attention the kernel of this package, PyTorch's flash
attention and FlexAttention, for the same heads; values are padded where a kernel wants one width.

    forward_ms      milliseconds on the device
    train_ms        forward and backward
    transient_gb    the most memory that forward and backward hold beyond inputs, in 1e9 bytes
    ratio           train_ms of the fastest dense kernel / that of native sparse attention
    target          the ratio that we ask of ourselves; of the index step, times
    memory_x        transient_gb / that of the fastest dense kernel; at 65,536 rows we ask for 2 at most
    mean_ms, compressed_ms, selected_ms, window_ms   train_ms of these alone
    kernels         of one training step by kernel, the longest first: ms, beside the time of its flops and bytes at the
                    card's stated speeds, see nsa_roofline.py; printed as a table of their own

Many documents in one pack, `--documents`, beside one of as many rows:

    pairs           keys that queries read in the three branches, over all rows
    pairs_x         the pack's pairs / the one document's
    of_pairs        the pack's train_ms / the one document's, over pairs_x; we ask for 1.1 at most

The step from blocks to rows: nsa_index.py.

    python -m bench.nsa
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.device_time import DeviceProfile
from bench.nsa_index import INDEX_STEPS, index_line
from bench.nsa_roofline import Pairs, beside, works
from bench.output import device, emit, environment, failure, parser, peak, peak_bytes, table
from bench.shapes import random_pairs
from bench.timing import free_memory, timed, transient_bytes
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.tree import grow
from tuningfork.kernels.nsa.plain import Choice, Grid
from tuningfork.kernels.select import Kernels, select
from tuningfork.records import ForkLayout

GRID, CHOICE, WINDOW = Grid(32, 16, 64), Choice(16, 1, 2), 512
PAPER = {8192: 1.0, 16384: 1.8, 32768: 3.0, 65536: 5.0}
TARGETS = {
    "64x4x128x128": PAPER,
    "64x4x192x128": PAPER,
    "12x2x64x64": {8192: 0.7, 16384: 1.3, 32768: 2.2, 65536: 4.0},
}
"""Ratios that we ask of ourselves on an H100 or H200, by shape and rows of the document."""
OF_PAIRS_MOST = 1.1
KERNELS_SHOWN = 24
COLUMNS = {
    "kernel": "kernel",
    "heads": "heads",
    "rows": "rows",
    "forward_ms": "forward ms",
    "train_ms": "train ms",
    "ratio": "ratio",
    "target": "target",
    "transient_gb": "GB",
    "memory_x": "GB x",
    **{f"{part}_ms": f"{part} ms" for part in ("mean", "compressed", "selected", "window", "lists", "readers", "loop")},
    "times": "times",
    "reported": "reported",
    "equal_sets": "equal sets",
    "pairs_x": "pairs x",
    "of_pairs": "of pairs",
    "note": "note",
}
OF_KERNELS = {
    "heads": "heads",
    "rows": "rows",
    "kernel": "kernel",
    "ms": "ms",
    "flops_ms": "flops ms",
    "bytes_ms": "bytes ms",
    "bound": "bound",
    "of_bound": "of bound",
    "cache_tb_s": "cache TB/s",
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


def pack(documents: int, rows: int, where: torch.device) -> ForkLayout:
    """So many documents of so many rows each."""
    examples = [example.alone()[0] for example in random_pairs([(0, rows, 1)] * documents, vocabulary=1000)]
    forest = grow(examples, "none").of(range(documents))
    return lay(examples, forest, documents * rows).to(where).layout


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


def kernels_of(shape: Shape, where: torch.device) -> Kernels:
    asked = {
        "nsa": {"key_width": shape.key_width, "value_width": shape.value_width},
        "attention": {"head_width": max(shape.key_width, shape.value_width)},
    }
    return select(asked, where, torch.bfloat16)


def roofline(shape: Shape, documents: list[int], milliseconds: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Of kernels of a training step on such documents, what nsa_roofline.beside says."""
    pairs = Pairs.of(documents, GRID, CHOICE, WINDOW)
    return beside(milliseconds, works(pairs, *shape, GRID, CHOICE), peak(), peak_bytes())


def attempted(line: dict[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A line with what is found; or why nothing is: what a kernel cannot do is a result."""
    try:
        line |= find()
    except Exception as error:
        line["note"] = failure(error)
    free_memory()
    return line


def attention_lines(shape: Shape, rows: int, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Of every dense kernel, then of native sparse attention."""
    where = device()
    kernels = kernels_of(shape, where)
    layout, given = pack(1, rows, where), Inputs.random(rows, shape, where)
    about = {"bench": "nsa", "heads": str(shape), "rows": rows}
    lines = [
        attempted({**about, "kernel": name}, lambda run=run: measure(run, given, repeats, seconds))  # type: ignore[misc]
        for name, run in dense(kernels, layout, given).items()
    ]
    measured = [line for line in lines if "train_ms" in line]
    fastest = min(measured, key=lambda line: line["train_ms"], default=None)

    def ours() -> dict[str, Any]:
        whole, parts = sparse(kernels, layout, given, compiled=where.type == "cuda")
        line = measure(whole, given, repeats, seconds)
        line |= {f"{name}_ms": timed(trained(part, given), where, repeats, seconds) for name, part in parts.items()}
        if where.type == "cuda":
            line["kernels"] = roofline(shape, [rows], by_kernel(trained(whole, given)))
        return {**line, **against(line, fastest, str(shape), rows)}

    return [*lines, attempted({**about, "kernel": f"nsa {kernels.names['nsa']}"}, ours)]


def against(line: Mapping[str, Any], fastest: Mapping[str, Any] | None, shape: str, rows: int) -> dict[str, Any]:
    """A line of native sparse attention beside that of the fastest dense kernel, and what is asked of it."""
    found: dict[str, Any] = {"target": TARGETS.get(shape, {}).get(rows)}
    if fastest is None:
        return found
    found["ratio"] = round(fastest["train_ms"] / line["train_ms"], 3)
    if fastest.get("transient_gb") and "transient_gb" in line:
        found["memory_x"] = round(line["transient_gb"] / fastest["transient_gb"], 2)
    return found


def pack_lines(shape: Shape, documents: int, rows: int, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Of native sparse attention on one document of documents * rows rows, and on a pack of so many."""
    where, total = device(), documents * rows
    kernels, given = kernels_of(shape, where), Inputs.random(total, shape, where)
    lines: list[dict[str, Any]] = []
    for many, of in ((1, total), (documents, rows)):
        pairs = Pairs.of([of] * many, GRID, CHOICE, WINDOW).read
        about = {"bench": "nsa", "heads": str(shape), "rows": total, "documents": many, "pairs": pairs}

        def find(many: int = many, of: int = of) -> dict[str, Any]:
            whole, _ = sparse(kernels, pack(many, of, where), given, compiled=where.type == "cuda")
            line = measure(whole, given, repeats, seconds)
            if where.type == "cuda":
                line["kernels"] = roofline(shape, [of] * many, by_kernel(trained(whole, given)))
            return line

        lines.append(attempted({**about, "kernel": f"nsa, {many} x {of:,}"}, find))
    one, all_of_them = lines
    if "train_ms" in one and "train_ms" in all_of_them:
        pairs_x = all_of_them["pairs"] / one["pairs"]
        of_pairs = all_of_them["train_ms"] / one["train_ms"] / pairs_x
        all_of_them |= {"pairs_x": round(pairs_x, 4), "of_pairs": round(of_pairs, 3), "of_pairs_most": OF_PAIRS_MOST}
    return lines


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    shapes = ["2x1x16x24"] if small else ["12x2x64x64", "64x4x128x128", "64x4x192x128"]
    options.add_argument("--shapes", nargs="*", help="heads x groups x widths of keys and values", default=shapes)
    lengths = [256] if small else [8192, 16384, 32768, 65536]
    options.add_argument("--rows", type=int, nargs="+", help="of the document", default=lengths)
    packs = ["2x128"] if small else ["64x1024"]
    options.add_argument("--documents", nargs="*", help="of a pack: how many, x rows of each", default=packs)
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
        for text in args.documents:
            documents, rows = map(int, text.split("x"))
            for line in pack_lines(shape, documents, rows, args.repeats, args.seconds):
                keep(line)
    print(table(lines, COLUMNS))
    of_kernels = [
        {"heads": line["heads"], "rows": line["rows"], "kernel": name, **found}
        for line in lines
        for name, found in line.get("kernels", {}).items()
    ]
    if of_kernels:
        print("\n" + table(of_kernels, OF_KERNELS))


if __name__ == "__main__":
    main()
