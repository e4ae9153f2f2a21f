"""How long packing takes and how full packs are, and how alike the ranks of a step are; JSON lines. Needs no GPU.

Examples have the lengths of real preference data (`bench/lengths.py`), or are drawn from the rows of a file of yours.

    way         set: all examples at once, best-fit decreasing. stream: each pack chosen from a window of examples
    seconds     from examples to packs, in one process; tensors are not built
    cpu_seconds the processor's time for it: less than `seconds` on a machine that others use
    fill        slots with content / (packs x slots of a full pack), the last packs included
    left_out    examples that are larger than a pack

    pairs_per_rank, ranks   a step has pairs_per_rank x ranks examples; several steps are drawn
    imbalance   slowest rank's flops / the mean, mean over the steps; worst: of the worst step
    bound       the same where no plan can do better: a rank cannot have less than the costliest example
    as_drawn    the same without a plan: examples dealt out in their order

    python -m bench.packing
    python -m bench.packing --data pairs.jsonl --tokenizer ./smollm2
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from bench import shapes
from bench.lengths import QUANTILES, draw, examples_of
from bench.output import emit, environment, parser, table
from tuningfork.data.config import DataConfig
from tuningfork.data.packing.pack import (
    PackLimits,
    pack_examples,
    pack_stream,
    portions_of,
    slots_of_each,
    split_fitting,
)
from tuningfork.data.packing.tree import Share
from tuningfork.data.prepare import prepare_examples
from tuningfork.distributed.balance import balance_examples
from tuningfork.models.flops import FlopCounter, by_itself
from tuningfork.models.hf.load import load_tokenizer
from tuningfork.models.policy import Policy
from tuningfork.records import TokenExample

PACKING = {
    "lengths": "lengths",
    "tokens": "rows",
    "way": "way",
    "examples": "examples",
    "seconds": "seconds",
    "cpu_seconds": "CPU",
    "packs": "packs",
    "fill": "fill",
}
BALANCE = {
    "lengths": "lengths",
    "ranks": "ranks",
    "pairs_per_rank": "pairs a rank",
    "imbalance": "slowest/mean",
    "worst": "worst",
    "bound": "bound",
    "as_drawn": "as drawn",
    "seconds": "seconds",
}


def measure_packing(examples: Sequence[TokenExample], limits: PackLimits, way: str, window: int) -> dict[str, Any]:
    """The line of one way to pack examples, all of which fit."""
    start, own = time.perf_counter(), time.process_time()
    bins = (
        pack_examples(portions_of(examples, limits), limits)
        if way == "set"
        else list(pack_stream(examples, limits, window))
    )
    seconds, own = time.perf_counter() - start, time.process_time() - own
    used = int(slots_of_each(examples, limits.share).sum())
    return {
        "way": way,
        "examples": len(examples),
        "seconds": round(seconds, 4),
        "cpu_seconds": round(own, 4),
        "packs": len(bins),
        "fill": round(used / len(bins) / limits.tokens, 5),
    }


def measure_balance(steps: Iterable[list[int]], ranks: int) -> dict[str, Any]:
    """The line of one number of ranks. Each step is the costs of its examples, as many for each rank."""
    imbalances, bounds, as_drawn, seconds = [], [], [], []
    for costs in steps:
        start = time.perf_counter()
        shares = balance_examples(costs, ranks)
        seconds.append(time.perf_counter() - start)
        imbalances.append(shares.imbalance)
        bounds.append(shares.bound / shares.mean)
        as_drawn.append(np.reshape(costs, (ranks, -1)).sum(1).max() / shares.mean)
    return {
        "ranks": ranks,
        "imbalance": round(float(np.mean(imbalances)), 4),
        "worst": round(max(imbalances), 4),
        "bound": round(float(np.mean(bounds)), 4),
        "as_drawn": round(float(np.mean(as_drawn)), 4),
        "seconds": round(float(np.median(seconds)), 4),
    }


def lengths_of(data: str, tokenizer: str) -> np.ndarray:
    """Lengths of the usable pairs of a file, int64 [n, 3]: prompt, chosen, rejected."""
    loaded = load_tokenizer(tokenizer)
    examples, _ = prepare_examples(data, loaded, DataConfig(max_length=2**31), len(loaded))
    return np.array([[len(e.prompt_ids), *(len(a.ids) for a in e.answers)] for e in examples])


def resampled(lengths: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Any number of rows of `lengths`, drawn with replacement."""
    return lengths[np.random.default_rng(seed).integers(0, len(lengths), count)]


def cost(flops: FlopCounter, example: TokenExample, share: Share) -> int:
    """Flops to train on an example, with its prompt once, or before each of its answers."""
    parts = example.alone() if share == "none" else [example]
    return sum(flops.training(*by_itself(part)) for part in parts)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--data", help="a preference file to draw from, in place of the named lengths")
    options.add_argument("--tokenizer", help="a folder with the tokenizer for --data")
    options.add_argument("--examples", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    options.add_argument(
        "--tokens", type=int, nargs="*", default=[4096, 8192, 16384, 32768], help="tokens of a full pack"
    )
    options.add_argument("--window", type=int, default=1024, help="of a stream")
    options.add_argument("--ranks", type=int, nargs="*", default=[2**n for n in range(1, 11)])
    options.add_argument("--pairs_per_rank", type=int, nargs="*", default=[4, 8, 16, 32])
    options.add_argument("--steps", type=int, default=5, help="drawn for each number of ranks")
    options.add_argument("--model", default="olmo2_1b", choices=shapes.SHAPES, help="whose flops balance ranks")
    options.add_argument("--unshared", action="store_true", help="lay a prompt before each of its answers")
    args = options.parse_args(argv)
    if (args.data is None) != (args.tokenizer is None):
        options.error("--data and --tokenizer go together")
    share: Share = "none" if args.unshared else "prompt"
    sources: dict[str, Callable[[int, int], np.ndarray]] = {name: partial(draw, name) for name in QUANTILES}
    if args.data:
        sources = {args.data: partial(resampled, lengths_of(args.data, args.tokenizer))}
    about = {"bench": "packing", "share": share}

    lines: list[dict[str, Any]] = []
    for source, drawn in sources.items():
        for count in args.examples:
            whole = examples_of(drawn(count, 0))
            for tokens in args.tokens:
                examples, left_out = split_fitting(whole, tokens, share)
                for way in ("set", "stream"):
                    limits = PackLimits.plan(tokens, share, compiled=True)
                    found = measure_packing(examples, limits, way, args.window)
                    what = {"lengths": source, "tokens": tokens, "window": args.window if way == "stream" else None}
                    lines.append({**about, **what, **found, "left_out": len(left_out), **environment()})
                    emit(lines[-1], args.out)

    flops = Policy.plain(shapes.build(args.model, "meta"), torch.bfloat16).flops()

    shares: list[dict[str, Any]] = []
    for source, drawn in sources.items():
        for per_rank in args.pairs_per_rank:
            for ranks in args.ranks:
                batches = (examples_of(drawn(per_rank * ranks, seed)) for seed in range(args.steps))
                steps = ([cost(flops, example, share) for example in batch] for batch in batches)
                what = {"lengths": source, "model": args.model, "pairs_per_rank": per_rank}
                shares.append({**about, **what, **measure_balance(steps, ranks), **environment()})
                emit(shares[-1], args.out)
    if lines:
        print(table(lines, PACKING))
    if shares:
        print(table(shares, BALANCE))


if __name__ == "__main__":
    main()
