"""How alike ranks are when many share a step, and what planning costs the host: a simulation that needs no GPU.

The planner is the real one (tuningfork/distributed/plan.py), the lengths are those of real preference pairs
(lengths.py) and of the fixed workloads, drawn anew for each step. Only the device is a model: a pack takes

    seconds = --overhead_ms + flops of its content and of its padding / --tflops

which are stated, not measured; every line has them. What it says of ranks hardly depends on the rate. What it says of
the host is measured, on one processor. Steps of real processes, how often they gather weights and how long they take to
start: torchrun ... -m bench.step.

    ranks, pairs_per_rank   a step has ranks x pairs_per_rank pairs
    slowest     seconds of the slowest rank's packs / the mean of all ranks, mean over the steps
    bound       the same where no plan can do better: a rank cannot have less than the costliest pair alone
    over_bound  slowest rank / max(mean, a rank with the costliest pair alone), of the worst step
    together    the same as `slowest` when ranks wait for each other after each pack, as those that share weights do
    packs       that each rank runs in a step, mean over the steps
    empty       packs of padding alone in a step, of all ranks, mean over the steps
    least_packs that each rank would run if rows could be spread over ranks and packs at will
    as_drawn    `slowest` without a plan, by flops alone: pairs dealt out in their order
    portions_ms milliseconds of a processor to find a step's portions, median
    plan_ms     to ask what each costs, plan for all ranks and pack for one, likewise

    python -m bench.scaling
    python -m bench.scaling --data pairs.jsonl --tokenizer ./smollm2 --plot scaling.svg
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import shapes
from bench.lengths import QUANTILES, draw, examples_of
from bench.output import emit, environment, parser, table
from bench.packing import lengths_of, resampled
from tuningfork.data.packing.pack import Bin, PackLimits, portions_of
from tuningfork.data.packing.portions import Portion
from tuningfork.distributed.plan import plan_step
from tuningfork.models.flops import FlopCounter
from tuningfork.models.policy import Policy

POOL = 2048  # pairs of a fixed workload, from which steps are drawn
PAIRS = 4096  # of all steps of a line together, about

COLUMNS = {
    "lengths": "lengths",
    "pairs_per_rank": "pairs a rank",
    "ranks": "ranks",
    "steps": "steps",
    "slowest": "slowest/mean",
    "bound": "bound",
    "over_bound": "over bound",
    "together": "together",
    "as_drawn": "as drawn",
    "packs": "packs",
    "least_packs": "least",
    "empty": "empty",
    "portions_ms": "portions ms",
    "plan_ms": "plan ms",
}


@dataclass(frozen=True, slots=True)
class PackTime:
    """Seconds that a pack takes on a device, to train on."""

    flops: FlopCounter
    rate: float  # flops in a second
    overhead: float  # seconds of a pack beside its flops

    def __call__(self, content: int, padding: int) -> float:
        """`content`: flops of what is trained on. `padding`: rows, which pass the blocks and not the head."""
        return self.overhead + (content + 6 * self.flops.block_weights * padding) / self.rate


def simulate(
    drawn: Callable[[int, int], np.ndarray],
    ranks: int,
    pairs_per_rank: int,
    steps: int,
    limits: PackLimits,
    seconds: PackTime,
) -> dict[str, Any]:
    """The line of one number of ranks.

    Args:
        drawn: lengths of so many pairs for a seed, int64 [n, 3]: prompt, chosen, rejected.
    """
    found = [_step(drawn(ranks * pairs_per_rank, seed), ranks, limits, seconds) for seed in range(steps)]
    column = {key: [step[key] for step in found] for key in found[0]}
    means = {key: round(float(np.mean(column[key])), 4) for key in ("slowest", "bound", "together", "as_drawn")}
    return {
        "ranks": ranks,
        "pairs_per_rank": pairs_per_rank,
        "steps": steps,
        **means,
        "over_bound": round(max(column["over_bound"]), 4),
        **{key: round(float(np.mean(column[key])), 2) for key in ("packs", "least_packs", "empty")},
        **{key: round(1e3 * float(np.median(column[key])), 2) for key in ("portions_ms", "plan_ms")},
    }


def _step(lengths: np.ndarray, ranks: int, limits: PackLimits, seconds: PackTime) -> dict[str, float]:
    """The numbers of one step; its host times in seconds."""
    examples = examples_of(lengths)
    costs: dict[int, int] = {}  # by the row of a portion's one example

    def cost(portion: Portion) -> int:
        own = seconds.flops.training(portion.spans, portion.logit_rows)
        costs[portion.examples[0].source.row] = own
        return own

    begun = time.process_time()
    portions = portions_of(examples, limits)
    portioned = time.process_time()
    plan = plan_step(portions, limits, ranks, cost)
    own = plan.bins_of(0)
    planned = time.process_time()

    by_pack = _seconds([own, *map(plan.bins_of, range(1, ranks))], costs, seconds)
    packs = by_pack.shape[1]
    by_rank = by_pack.sum(axis=1)
    mean = by_rank.mean()
    costliest = max(seconds(costs[example.source.row], 0) for example in examples)
    bound = max(mean, costliest + (packs - 1) * seconds(0, limits.slots(0)))
    as_drawn = np.array([costs[row] for row in sorted(costs)]).reshape(ranks, -1).sum(axis=1)
    return {
        "slowest": by_rank.max() / mean,
        "bound": bound / mean,
        "over_bound": by_rank.max() / bound,
        "together": by_pack.max(axis=0).sum() / mean,
        "as_drawn": as_drawn.max() / as_drawn.mean(),
        "packs": packs,
        "least_packs": -(-sum(portion.rows for portion in portions) // (ranks * limits.tokens)),
        "empty": sum(not pack for own in plan.packs for pack in own),
        "portions_ms": portioned - begun,
        "plan_ms": planned - portioned,
    }


def _seconds(bins: Sequence[Sequence[Bin]], costs: Mapping[int, int], seconds: PackTime) -> np.ndarray:
    """float64 [ranks, packs]: how long each pack takes."""

    def of(pack: Bin) -> float:
        return seconds(sum(costs[example.source.row] for example in pack.examples), pack.slots - pack.forest.rows)

    return np.array([list(map(of, own)) for own in bins])


def workload(name: str) -> np.ndarray:
    """Lengths of the first pairs of a fixed workload, int64 [POOL, 3]."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return np.array([[len(pair[part]) for part in names] for pair in shapes.WORKLOADS[name].pairs(POOL)])


def fitting(drawn: Callable[[int, int], np.ndarray], tokens: int, count: int, seed: int) -> np.ndarray:
    """So many of the lengths drawn, and others in place of those that no pack holds."""
    lengths = drawn(count, seed)
    small = lengths[lengths.sum(axis=1) <= tokens]
    return lengths if len(small) == count else np.concatenate([small, resampled(small, count - len(small), seed)])


def svg(lines: Sequence[Mapping[str, Any]]) -> str:
    """Slowest / mean against the number of ranks, a panel for each kind of lengths, a line for each pairs a rank.

    The dashed line is what no plan can be below.
    """
    width, height, gap = 320, 200, 60
    kinds = list(dict.fromkeys(line["lengths"] for line in lines))
    per_rank = sorted({line["pairs_per_rank"] for line in lines})
    first, last = (np.log2(pick(line["ranks"] for line in lines)) for pick in (min, max))
    top = max(1.1, *(max(line["slowest"], line["bound"]) for line in lines))
    colours = ("#0b6e99", "#c2571a", "#4f7942", "#7a4ea3")
    drawn = []
    for panel, kind in enumerate(kinds):
        left, axis = gap + panel * (width + gap), height + gap / 2

        def place(ranks: int, value: float, left: float = left, axis: float = axis) -> str:
            along = (np.log2(ranks) - first) / max(last - first, 1)
            return f"{left + width * along:.1f},{axis - height * (value - 1) / (top - 1):.1f}"

        drawn.append(f'<text x="{left}" y="{gap / 3:.0f}">{kind}: slowest rank / mean</text>')
        drawn.append(f'<path d="M{left},{gap / 2} V{axis} H{left + width}" fill="none" stroke="#888"/>')
        drawn += (
            f'<text x="{left - 4}" y="{place(1, value).split(",")[1]}" text-anchor="end">{value:.2f}</text>'
            for value in np.linspace(1, top, 3)
        )
        own = sorted((line for line in lines if line["lengths"] == kind), key=lambda line: line["ranks"])
        for ranks in dict.fromkeys(line["ranks"] for line in own):
            x = place(ranks, 1).split(",")[0]
            drawn.append(f'<text x="{x}" y="{axis + 14:.0f}" text-anchor="middle">{ranks}</text>')
        for number, pairs in enumerate(per_rank):
            some, colour = [line for line in own if line["pairs_per_rank"] == pairs], colours[number % len(colours)]
            for key, dash in (("slowest", ""), ("bound", ' stroke-dasharray="4 3"')):
                points = " ".join(place(line["ranks"], line[key]) for line in some)
                drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}"{dash}/>')
            drawn.append(
                f'<text x="{left + 8}" y="{gap / 2 + 14 * (number + 1):.0f}" fill="{colour}">{pairs} a rank</text>'
            )
    size = f'width="{gap + len(kinds) * (width + gap)}" height="{height + gap}"'
    font = 'font-family="sans-serif" font-size="10"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{"".join(drawn)}</svg>\n'


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--data", help="a preference file to draw from, in place of the named lengths")
    options.add_argument("--tokenizer", help="a folder with the tokenizer for --data")
    options.add_argument("--ranks", type=int, nargs="+", default=[2**n for n in range(1, 13)])
    options.add_argument("--pairs_per_rank", type=int, nargs="+", default=[8, 16])
    options.add_argument(
        "--tokens", type=int, help="token slots of a full pack; else 16,384, and 32,768 for long pairs"
    )
    options.add_argument("--steps", type=int, help=f"of each line; else as many as have {PAIRS:,} pairs, but 3 to 20")
    options.add_argument("--model", default="olmo2_1b", choices=shapes.SHAPES, help="whose flops they are")
    options.add_argument("--tflops", type=float, default=500, help="10^12 flops of a rank in a second, stated")
    options.add_argument("--overhead_ms", type=float, default=5, help="of a pack beside its flops, stated")
    options.add_argument("--plot", type=Path, help="an .svg file that shows it")
    args = options.parse_args(argv)
    if (args.data is None) != (args.tokenizer is None):
        options.error("--data and --tokenizer go together")
    if args.plot is not None and args.plot.suffix != ".svg":
        options.error(f"--plot {args.plot}: plots are .svg files")
    torch.set_num_threads(1)
    flops = Policy.plain(shapes.build(args.model, "meta"), torch.bfloat16).flops()
    seconds = PackTime(flops, 1e12 * args.tflops, 1e-3 * args.overhead_ms)
    sources: dict[str, Callable[[int, int], np.ndarray]] = {name: partial(draw, name) for name in QUANTILES}
    sources |= {name: partial(resampled, workload(name)) for name in shapes.WORKLOADS}
    if args.data:
        sources = {args.data: partial(resampled, lengths_of(args.data, args.tokenizer))}

    lines: list[dict[str, Any]] = []
    for source, drawn in sources.items():
        tokens = args.tokens or (32_768 if source == "long" else 16_384)
        limits = PackLimits.plan(tokens, "prompt", compiled=True)
        stated = {"model": args.model, "tflops": args.tflops, "overhead_ms": args.overhead_ms}
        about = {"bench": "scaling", "simulated": True, "lengths": source, "tokens": tokens, **stated}
        for pairs_per_rank in args.pairs_per_rank:
            for ranks in args.ranks:
                steps = args.steps or min(max(PAIRS // (ranks * pairs_per_rank), 3), 20)
                line = simulate(partial(fitting, drawn, tokens), ranks, pairs_per_rank, steps, limits, seconds)
                lines.append({**about, **line, **environment("numpy")})
                emit(lines[-1], args.out)
    print(table(lines, COLUMNS))
    print(
        f"simulated: a pack takes {args.overhead_ms:g} ms and its flops at {args.tflops:g} TFLOP/s; host times are real"
    )
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_text(svg(lines))


if __name__ == "__main__":
    main()
