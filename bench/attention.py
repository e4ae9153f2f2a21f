"""Attention alone: every kernel on packs of the yardstick's pairs, and what sharing a prompt saves; JSON lines.

Layouts: a pack of whole pairs, each prompt laid once (shared), and the same pairs with each prompt laid before every
answer (unshared), in as many rows as that takes. First the yardstick's own pairs, then pairs of one prompt and two
answers whose prompt is `ratio` times as long as an answer (for the first of --shapes only).

    prepare_ms      milliseconds to prepare a pack, once for all layers, host work included
    forward_ms      milliseconds of one layer's attention on the device, as a training step calls it
    train_ms        forward and backward
    whole_ms        prepare and train_ms for every layer (--layers)
    tflops_forward, tflops_train   needed flops / that time, in 1e12 per second. Needed are 4·H·d for each visible
                    (query, key) pair with the prompt counted once, and 2.5 times as many backward: the usual count of
                    flash attention's five products for two. Padding and a repeated prompt count for nothing.
    saved           1 - whole_ms shared / unshared
    saved_tokens    1 - tokens shared / unshared: what the token count alone allows
    saved_pairs     1 - visible pairs shared / unshared

    python -m bench.attention
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.output import device, emit, environment, failure, parser, rounded, table
from bench.shapes import random_pairs, yardstick
from bench.timing import free_memory, median_ms
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import PackLimits, pack_examples, portions_of
from tuningfork.data.packing.tree import Share, grow
from tuningfork.kernels import attention as kernel_room
from tuningfork.models.flops import FlopCounter, by_itself
from tuningfork.models.mixers.attention import Attention, AttentionLayer
from tuningfork.records import ForkLayout, PackedBatch, TokenExample

BACKWARD = 2.5  # flops of the backward pass / those of the forward pass
RATIOS = (0.3, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0)
COLUMNS = {
    "kernel": "kernel",
    "heads": "heads",
    "pairs": "pairs",
    "ratio": "prompt/answer",
    "shared": "prompt",
    "rows": "rows",
    **{f"{what}_ms": f"{what} ms" for what in ("prepare", "forward", "train", "whole")},
    **{f"tflops_{what}": f"{what} TFLOP/s" for what in ("forward", "train")},
    **{f"saved{of}": f"saved{of.replace('_', ' of ')}" for of in ("", "_tokens", "_pairs")},
    "note": "note",
}


class Shape(NamedTuple):
    """Query heads, key heads and the width of each."""

    heads: int
    key_heads: int
    width: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return "x".join(map(str, self))


def visible_pairs(examples: Sequence[TokenExample]) -> tuple[int, int]:
    """(query, key) pairs that attention must see: with each prompt once, and with it before every answer."""
    one = AttentionLayer(width=1, window=None, head_width=1)
    count = FlopCounter(0, 0, (Attention((one,)),))  # attention of width 1 alone: 4 flops a pair
    repeats = [one for example in examples for one in example.alone()]
    once, repeated = (sum(count.forward(*by_itself(one)) for one in some) for some in (examples, repeats))
    return once // 4, repeated // 4


@dataclass(frozen=True)
class Layouts:
    """The same whole pairs, laid with shared and with repeated prompts."""

    examples: Sequence[TokenExample]
    shared: PackedBatch
    unshared: PackedBatch

    @classmethod
    def of(cls, examples: Sequence[TokenExample], tokens: int) -> Layouts:
        """The examples of the fullest shared pack of `tokens` rows; each layout takes as few rows as it can."""
        limits = PackLimits.plan(tokens, "prompt", compiled=True)
        fullest = max(pack_examples(portions_of(examples, limits), limits), key=lambda found: found.forest.rows)
        chosen = fullest.examples
        return cls(chosen, cls._lay(chosen, "prompt"), cls._lay(chosen, "none"))

    @staticmethod
    def _lay(chosen: Sequence[TokenExample], share: Share) -> PackedBatch:
        forest = grow(chosen, share).of(range(len(chosen)))
        return lay(chosen, forest, -(-forest.rows // 128) * 128)


def kernels(names: list[str] | None, where: torch.device) -> dict[str, Any]:
    """Attention kernels by the name of their module; the plain one alone on a CPU."""
    found = names or sorted(m.name for m in pkgutil.iter_modules(kernel_room.__path__) if m.name[0] != "_")
    if names is None:
        found = ["plain"] if where.type == "cpu" else [name for name in found if name != "plain"]
    classes = {}
    for name in found:
        module = importlib.import_module(f"{kernel_room.__name__}.{name}")
        here = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        classes[name] = next(c for c in here if hasattr(c, "prepare") and hasattr(c, "attend"))
    return classes


def measure(kernel: Any, layout: ForkLayout, shape: Shape, repeats: int, layers: int) -> dict[str, float]:
    """Times of one kernel on one layout; their meaning stands at the top of this file."""
    where, rows = layout.position_of_row.device, len(layout.position_of_row)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    torch.manual_seed(0)
    counts = (shape.heads, shape.key_heads, shape.key_heads)
    inputs = [torch.randn(rows, n, shape.width, device=where).to(dtype).requires_grad_() for n in counts]
    gradient = torch.randn(rows, shape.heads, shape.width, device=where).to(dtype)
    prepared = kernel.prepare(layout)

    def forward() -> Tensor:
        return prepared.attend(*inputs, scale=shape.width**-0.5, window=None, softcap=None)

    prepare_ms = median_ms(lambda: kernel.prepare(layout), where, repeats)
    # One layer alone is shorter than its launch from Python takes; within a model the launches run ahead.
    forward_ms = median_ms(forward, where, repeats, device_only=True)
    train_ms = median_ms(lambda: torch.autograd.grad(forward(), inputs, gradient), where, repeats, device_only=True)
    whole_ms = prepare_ms + layers * train_ms
    return {"prepare_ms": prepare_ms, "forward_ms": forward_ms, "train_ms": train_ms, "whole_ms": whole_ms}


def compare(layouts: Layouts, kernel: Any, shape: Shape, repeats: int, layers: int) -> list[dict[str, Any]]:
    """A line for the shared layout, with what it saves, and one for the unshared."""
    where = device()
    lines: dict[bool, dict[str, Any]] = {}
    pairs_once, pairs_repeated = visible_pairs(layouts.examples)
    needed = 4 * shape.heads * shape.width * pairs_once
    for shared, batch in ((True, layouts.shared), (False, layouts.unshared)):
        line: dict[str, Any] = {"shared": "shared" if shared else "unshared", "rows": len(batch.input_ids)}
        torch._dynamo.reset()  # a kernel that compiles for each layout would otherwise meet the limit of recompiles
        try:
            line |= measure(kernel, batch.to(where).layout, shape, repeats, layers)
            line["tflops_forward"] = round(needed / line["forward_ms"] / 1e9, 1)
            line["tflops_train"] = round((1 + BACKWARD) * needed / line["train_ms"] / 1e9, 1)
        except Exception as error:  # what a kernel cannot do is a result
            line["note"] = failure(error)
        free_memory()
        lines[shared] = line
    if all("whole_ms" in line for line in lines.values()):
        lines[True] |= {
            "saved": rounded(1 - lines[True]["whole_ms"] / lines[False]["whole_ms"], 3),
            "saved_tokens": rounded(1 - layouts.shared.used_slots / layouts.unshared.used_slots, 3),
            "saved_pairs": rounded(1 - pairs_once / pairs_repeated, 3),
        }
    return [{k: round(v, 4) if k.endswith("_ms") else v for k, v in line.items()} for line in lines.values()]


def pairs_of_ratio(ratio: float, answer: int, tokens: int) -> Sequence[TokenExample]:
    """Pairs of equal lengths, enough to fill a pack: a prompt of `ratio` answers' length, two answers."""
    lengths = (round(ratio * answer), answer, answer)
    return random_pairs([lengths] * max(1, (tokens - 1) // sum(lengths)), vocabulary=1000)


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--shapes", nargs="+", help="heads x key heads x width; ratios use the first",
                         default=["4x2x16"] if small else ["16x16x128", "32x32x128", "16x8x128"])  # fmt: skip
    options.add_argument("--kernels", nargs="+", help="by module name; all fast ones unless given")
    options.add_argument("--tokens", type=int, default=4096 if small else 16384, help="rows of a shared pack")
    options.add_argument("--pairs", type=int, default=16 if small else 512, help="of the yardstick, to choose from")
    options.add_argument("--answer", type=int, default=64 if small else 256, help="answer length for the ratios")
    options.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS), help="prompt / answer length")
    options.add_argument("--layers", type=int, default=16, help="layers that share what prepare made")
    options.add_argument("--repeats", type=int, default=1 if small else 20)
    args = options.parse_args(argv)

    yardsticks = Layouts.of(yardstick(args.pairs), args.tokens)
    swept = {r: Layouts.of(pairs_of_ratio(r, args.answer, args.tokens), args.tokens) for r in args.ratios}
    lines = []
    for number, shape in enumerate(map(Shape.parse, args.shapes)):
        cases = {None: yardsticks, **(swept if number == 0 else {})}
        for name, kernel in kernels(args.kernels, device()).items():
            for ratio, layouts in cases.items():
                about = {"bench": "attention", "kernel": name, "heads": str(shape), "layers": args.layers}
                about |= {"pairs": "yardstick" if ratio is None else "equal", "ratio": ratio}
                for line in compare(layouts, kernel, shape, args.repeats, args.layers):
                    emit({**about, "examples": len(layouts.examples), **line, **environment()}, args.out)
                    lines.append({**about, **line})
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
