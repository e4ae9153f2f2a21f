"""Training steps on packs of random lengths: is any of them held up by something that compiles or is tuned anew?

Each step is one pack of four pairs, whose rows are a number drawn between 1,024 and `--pack_tokens`. A trainer whose
kernels are tuned, or whose graphs are compiled, for each length would stop in most of these steps (bench.tuning_storm
measures how long); here all of it is over after the third. One JSON line:

    lengths             numbers of rows that packs had, each counted once
    shortest, longest   of them
    first_steps_s       seconds of the first three steps, which compile
    late                graphs and kernels that were compiled or tuned behind these; `causes` says which
    step_s              quantiles of the steps behind these, by share: 0.5, 0.9, 0.99 and 1
    ms_per_1000_rows    the same of milliseconds a step / rows of its pack in thousands
    slowest_of_its_size longest step / what the least-squares line of seconds over rows foretells for it
    halves              median of ms_per_1000_rows, first half of the steps and second
    over_line_p99       step / foretold, the quantile 0.99

    python -m bench.hybrid_lengths                                                # 1,000 packs
    python -m bench.hybrid_lengths --model olmo_hybrid_7b --layers 4
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from bench import shapes
from bench.output import device, emit, environment, parser, rounded, table
from bench.step import start
from bench.timing import free_memory
from tuningfork.data.packing.loader import EpochOrder, PackLoader
from tuningfork.data.packing.pack import SMALLEST_COMPILED, PackLimits
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import TokenExample
from tuningfork.report.run.metrics import StepResult
from tuningfork.train.config import TrainConfig
from tuningfork.train.late import FIRST_STEPS
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.setup.device import DTYPES
from tuningfork.train.steps import training_steps

PAIRS = 4  # of a step
QUANTILES = (0.5, 0.9, 0.99, 1.0)
COLUMNS = {
    "model": "model",
    "steps": "steps",
    "lengths": "lengths",
    "late": "late",
    "p50": "median ms / 1,000 rows",
    "p99": "p99",
    "p100": "max",
    "slowest_of_its_size": "slowest of its size",
}


class InOrder(PackLoader):
    """Steps as they are given."""

    def __init__(self, steps: list[list[TokenExample]], limits: PackLimits, pin_memory: bool) -> None:
        examples = [example for step in steps for example in step]
        order = EpochOrder.plan(len(examples), len(steps[0]), seed=0, epochs=1, max_steps=None)
        super().__init__(examples, order, limits, pin_memory)
        self._steps = steps

    def examples_of(self, step: int) -> list[TokenExample]:
        return self._steps[step]


def random_steps(count: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[TokenExample]]:
    """Steps of four pairs that fill a pack of a random number of rows, prompts and answers of random shares of it."""
    rng = np.random.default_rng(seed)
    lengths: list[tuple[int, int, int]] = []
    for rows in rng.integers(shortest, longest, count, endpoint=True):
        shares = rng.dirichlet(np.full(3 * PAIRS, 2.0)) * (rows - 3 * PAIRS)
        lengths += [(p + 1, c + 1, r + 1) for p, c, r in shares.reshape(PAIRS, 3).astype(int).tolist()]
    examples = shapes.random_pairs(lengths, vocabulary, seed)
    return [examples[first : first + PAIRS] for first in range(0, len(examples), PAIRS)]


def summary(steps: list[StepResult]) -> dict[str, Any]:
    """The numbers of the docstring."""
    first, rest = steps[:FIRST_STEPS], steps[FIRST_STEPS:]
    seconds, rows = (np.array([getattr(step, name) for step in rest], dtype=float) for name in ("seconds", "rows"))
    rates = 1e6 * seconds / rows
    line = np.polynomial.Polynomial.fit(rows, seconds, min(1, len(set(rows)) - 1))
    over = seconds / np.maximum(line(rows), seconds.min())
    return {
        "steps": len(steps),
        "lengths": len({step.rows for step in steps}),
        "shortest": int(min(step.rows for step in steps)),
        "longest": int(max(step.rows for step in steps)),
        "first_steps_s": [round(step.seconds, 3) for step in first],
        "late": sum(step.compilations for step in rest),
        "causes": [cause for step in rest for cause in step.compiled_here][:20],
        "step_s": _quantiles(seconds),
        "ms_per_1000_rows": _quantiles(rates),
        "halves": [rounded(float(np.median(half)), 3) for half in np.array_split(rates, 2)],
        "slowest_of_its_size": rounded(float(over.max()), 3),
        "over_line_p99": rounded(float(np.quantile(over, 0.99)), 3),
    }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {str(share): round(float(np.quantile(values, share)), 5) for share in QUANTILES}


def measure(
    model: str,
    layers: int | None,
    packs: int,
    pack_tokens: int,
    weights: str = "float32",
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw",
    seed: int = 0,
) -> dict[str, Any]:
    """Train on so many packs. The objective needs no reference, whose scoring would compile before the first step."""
    settings = dict(locals())
    torch._dynamo.reset()
    free_memory()
    compiled = device().type == "cuda"
    limits = PackLimits.plan(pack_tokens, "tree", compiled)
    train = TrainConfig(learning_rate=1e-6, optimizer=optimizer, examples_per_step=PAIRS, schedule="constant")
    session = start(model, layers, pack_tokens, train, 8192, limits, DTYPES[weights])
    session = replace(session, objective=ObjectiveConfig("simpo").build())
    shortest = min(SMALLEST_COMPILED, pack_tokens // 4)
    steps = random_steps(packs, shortest, pack_tokens, shapes.config(model).vocab_size, seed)
    loader = InOrder(steps, limits, pin_memory=compiled)
    run = training_steps(loader, session, build_optimizer(session.policy.model, train), None, train, 0)
    return {"bench": "hybrid_lengths", "model": model, "args": settings, **environment(), **summary(list(run))}


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--model", default="tiny_hybrid" if small else "olmo_hybrid_1b", choices=shapes.SHAPES)
    options.add_argument("--layers", type=int, default=None, help="blocks of the shape; all where it is not given")
    options.add_argument("--packs", type=int, default=12 if small else 1000)
    options.add_argument("--pack_tokens", type=int, default=512 if small else 16384)
    options.add_argument("--weights", default="float32", choices=("float32", "bfloat16"))
    options.add_argument("--optimizer", default="adamw", choices=("adamw", "adamw_8bit"))
    args = vars(options.parse_args(argv))
    out = args.pop("out")
    line = measure(**args)
    emit(line, out)
    by_share = {f"p{round(100 * float(share))}": value for share, value in line["ms_per_1000_rows"].items()}
    print(table([line | by_share], COLUMNS))


if __name__ == "__main__":
    main()
