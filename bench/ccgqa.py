"""One CCGQA layer with its projections beside our layer of multi-head attention, on one document; JSON lines.

Shapes: hidden size / query heads x key heads x head width / taps of both convolutions. The layer beside it has as many
hidden channels in heads of 128, each with keys and values of its own. Both are compiled as in training, with bfloat16
products on a GPU; attention is the same kernel.

    forward_ms, train_ms            milliseconds of the layer on the device: forward; forward and backward
    mha_forward_ms, mha_train_ms    the same of multi-head attention, measured right after
    forward_x, train_x, backward_x  how many times faster the layer is; backward is train - forward
    reported_forward_x, reported_backward_x   what a public report says, of the paper's kernel: 1.7 and 1.3, where it
                                    does, at 16,384 rows of width 2,048 and C1 = C2 = 4. The paper (arXiv:2510.04476)
                                    itself: forward 1.3 to 1.6 with a causal mask, 1.7 without one; backward 1.1 to 1.3,
                                    without
    target_train_x                  what we ask of train_x there: 2.2, and 1.5 at C1 = 2, C2 = 8
    mix_ms                          forward and backward of convolutions, means, norms and value shift alone
    mix_share                       of train_ms; to be at most 0.15
    flops_x                         flops of multi-head attention over those of the layer: no kernel reaches more where
                                    products bound both
    error_results, error_gradients  largest |x - x64| / largest |x64| of the mixing's results, and of its gradients,
                                    where x64 comes of the plain form in float64 on the same numbers

    python -m bench.ccgqa
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench.output import device, emit, environment, failure, parser, table
from bench.timing import free_memory, median_ms
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.ccgqa.plain import Filters, PlainCcgqa, QueryHeads
from tuningfork.kernels.select import select
from tuningfork.models import compiler
from tuningfork.models.ccgqa.modeling_ccgqa import CcgqaAttention, CcgqaConfig, rotated, rotation_of
from tuningfork.models.hf import ccgqa
from tuningfork.models.mixers.attention import visible_pairs
from tuningfork.models.mixers.ccgqa import CcgqaLayer
from tuningfork.records import ForkLayout, Source, Span, TokenAnswer, TokenExample

MHA_WIDTH = 128
ASKED_AT = 2048, 16384  # width and rows of what a report says, and of what we ask of ourselves
REPORTED = {(4, 4): {"reported_forward_x": 1.7, "reported_backward_x": 1.3}}  # by C1 and C2
TARGETS = {(4, 4): {"target_train_x": 2.2}, (2, 8): {"target_train_x": 1.5}}
COLUMNS = {
    "shape": "shape",
    "rows": "rows",
    **{name: name.replace("_", " ") for name in ("forward_ms", "mha_forward_ms", "train_ms", "mha_train_ms")},
    **{"forward_x": "forward x", "reported_forward_x": "reported", "backward_x": "backward x"},
    **{"reported_backward_x": "reported", "train_x": "train x", "target_train_x": "target"},
    **{"flops_x": "flops x", "mix_ms": "mix ms"},
    **{"mix_share": "mix share", "error_results": "error: results", "error_gradients": "error: gradients"},
    "note": "note",
}


class Shape(NamedTuple):
    hidden: int
    heads: QueryHeads
    taps: tuple[int, int]

    @classmethod
    def parse(cls, text: str) -> Shape:
        hidden, heads, taps = text.split("/")
        first, second = map(int, taps.split("x"))
        return cls(int(hidden), QueryHeads(*map(int, heads.split("x"))), (first, second))

    def __str__(self) -> str:
        return f"{self.hidden}/{'x'.join(map(str, self.heads))}/{'x'.join(map(str, self.taps))}"

    def layer(self) -> CcgqaAttention:
        torch.manual_seed(0)
        config = CcgqaConfig(
            hidden_size=self.hidden,
            num_attention_heads=self.heads.queries,
            num_key_value_heads=self.heads.keys,
            head_dim=self.heads.width,
            value_shift="channels",
            depthwise_kernel_size=self.taps[0],
            grouped_kernel_size=self.taps[1],
        )
        layer = CcgqaAttention(config)
        with torch.no_grad():
            for weight in (layer.depthwise_weight, layer.grouped_weight):
                weight.uniform_(-1, 1).mul_(weight[0].numel() ** -0.5)
        return layer

    def asked(self, rows: int) -> dict[str, float]:
        """What a report says of such a layer, and what we ask of it."""
        if (self.hidden, rows) != ASKED_AT:
            return {}
        queries, keys, width = self.heads
        compression = self.hidden // (queries * width), self.hidden // (keys * width)
        return {**REPORTED.get(compression, {}), **TARGETS.get(compression, {})}

    def flops_x(self, rows: int) -> float:
        """Flops of multi-head attention over those of the layer, both with their projections, on one document."""
        (queries, keys, width), hidden = self.heads, self.hidden
        pairs = visible_pairs([Span(0, rows)], None)
        latent, values = queries * width, keys * width
        ours = 2 * hidden * (2 * latent + 2 * values) + CcgqaLayer(self.heads, *self.taps).flops
        return (8 * hidden**2 * rows + 4 * hidden * pairs) / (ours * rows + 4 * latent * pairs)


class MultiHead(nn.Module):
    """Attention in full width: products, rotation, attention, product."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = min(MHA_WIDTH, hidden)
        self.qkv_proj = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden_states: Tensor, rotation: tuple[Tensor, Tensor], fork: Any) -> Tensor:
        parts = self.qkv_proj(hidden_states[0]).chunk(3, dim=-1)
        query, key, value = (part.unflatten(1, (-1, self.width)) for part in parts)
        query, key = (rotated(t, *(part[0] for part in rotation)).to(value.dtype) for t in (query, key))
        out = fork.attend(query, key, value, scale=self.width**-0.5, window=None, softcap=None)
        return self.o_proj(out.flatten(1))[None]  # type: ignore[no-any-return]


def document(rows: int) -> ForkLayout:
    """The layout of one document."""
    ids = np.zeros(rows, np.int32)
    answer = TokenAnswer(ids, np.ones(rows, bool))
    return build_pack([TokenExample(Source("document", 1), ids[:0], (answer,))], rows, "none").to(device()).layout


def precision() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device().type == "cuda" else nullcontext()


def times(
    layer: nn.Module, run: Callable[..., Tensor], width: int, hidden: int, rows: int, repeats: int, **told: Any
) -> list[float]:
    """[forward, forward and backward] milliseconds of a layer on one document."""
    where = device()
    layer.to(where)
    config = CcgqaConfig(head_dim=width)
    rotation = rotation_of(torch.arange(rows, device=where)[None], config, torch.float32)
    x = torch.randn(1, rows, hidden, device=where, requires_grad=True)
    d_out = torch.randn(1, rows, hidden, device=where)
    if where.type == "cuda":
        run = torch.compile(run, dynamic=True, options=compiler.options(where))

    def forward() -> Tensor:
        with precision():
            return run(x, rotation, **told)

    def train() -> tuple[Tensor, ...]:
        out = forward()
        return torch.autograd.grad(out, [x, *layer.parameters()], d_out.to(out.dtype))

    return [median_ms(work, where, repeats, device_only=True) for work in (forward, train)]


class Mixing:
    """Convolutions, means, norms and value shift of a layer alone, with inputs of their own."""

    def __init__(self, form: Any, layout: ForkLayout, shape: Shape, dtype: torch.dtype, rounded: torch.dtype) -> None:
        layer, where = shape.layer().to(device()), device()
        self.prepared, self.heads, self.now = form.prepare(layout), shape.heads, layer.now
        torch.manual_seed(1)
        rows, widths = len(layout.position_of_row), (layer.qk_proj.out_features, layer.v_proj.out_features)
        x, values = (torch.randn(rows, width, device=where).to(rounded).to(dtype) for width in widths)
        wide = torch.promote_types(dtype, torch.float32)
        weights = (
            *(layer.depthwise_weight, layer.grouped_weight, layer.depthwise_bias, layer.grouped_bias),
            layer.temperature,
        )
        self.leaves = [t.requires_grad_() for t in (x, values)]
        self.leaves += [t.detach().to(wide).requires_grad_() for t in weights if t is not None]
        self.gradients = [torch.randn(t.shape, device=where).to(rounded).to(dtype) for t in self.results()]

    def results(self) -> Sequence[Tensor]:
        x, values, *filters, temperature = self.leaves
        query, key = self.prepared.query_key(x, Filters(*filters), temperature, self.heads)
        return query, key, self.prepared.values(values, self.now)

    def train(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.results(), self.leaves, self.gradients)


def worst(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, exact, strict=True)]
    return float(f"{max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs):.2e}")


def measure(shape: Shape, rows: int, repeats: int) -> dict[str, Any]:
    """The numbers of one shape; their meaning stands at the top of this file."""
    where, layout = device(), document(rows)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    layer = shape.layer()
    widths = shape.heads.width, MHA_WIDTH
    asked = CcgqaLayer(shape.heads, *shape.taps)
    ops = {
        "attention": {"head_width": max(widths)},
        "ccgqa": {"head_width": widths[0], "depthwise": asked.depthwise, "grouped": asked.grouped},
    }
    kernels = select(ops, where, dtype)
    fork, mixing = (kernels[op].prepare(layout) for op in ("attention", "ccgqa"))
    ccgqa.patch(layer)
    ours = times(layer, layer.forward, widths[0], shape.hidden, rows, repeats, fork=fork, ccgqa=mixing)
    beside = MultiHead(shape.hidden)
    theirs = times(beside, beside.forward, beside.width, shape.hidden, rows, repeats, fork=fork)
    alone = Mixing(kernels["ccgqa"], layout, shape, dtype, dtype)
    mix = median_ms(alone.train, where, repeats, device_only=True)
    free_memory()
    exact = Mixing(PlainCcgqa, layout, shape, torch.float64, dtype)
    line = {"forward_ms": ours[0], "train_ms": ours[1], "mha_forward_ms": theirs[0], "mha_train_ms": theirs[1]}
    line |= {"forward_x": theirs[0] / ours[0], "train_x": theirs[1] / ours[1], "flops_x": shape.flops_x(rows)}
    line |= {"backward_x": (theirs[1] - theirs[0]) / (ours[1] - ours[0])}
    line |= {"mix_ms": mix, "mix_share": mix / ours[1]}
    errors = {
        "error_results": worst(alone.results(), exact.results()),
        "error_gradients": worst(alone.train(), exact.train()),
    }
    return {**{name: round(value, 3) for name, value in line.items()}, **shape.asked(rows), **errors}


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", default=["128/4x2x8/2x2"] if small
                         else ["2048/8x8x64/2x2", "2048/4x4x128/2x2", "2048/32x32x16/2x2", "2048/16x4x64/2x2",
                               "2048/8x2x128/2x2", "768/12x3x16/3x3", "1280/20x5x16/3x3"])  # fmt: skip
    options.add_argument("--rows", type=int, nargs="+", default=[256] if small else [2048, 16384])
    options.add_argument("--repeats", type=int, default=1 if small else 20)
    args = options.parse_args(argv)

    lines = []
    for shape in map(Shape.parse, args.shapes):
        for rows in args.rows:
            line: dict[str, Any] = {"bench": "ccgqa", "shape": str(shape), "rows": rows}
            try:
                line |= measure(shape, rows, args.repeats)
            except Exception as error:  # what a shape cannot do is a result
                line["note"] = failure(error)
            free_memory()
            emit({**line, **environment()}, args.out)
            lines.append(line)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
