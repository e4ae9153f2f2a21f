"""Does a cheaper precision learn as float32 weights do? Losses of whole runs, against the noise between float32 runs.

The same random model learns the same pairs for a few epochs, in several orders (--seeds), by each way of --ways:

    float32     float32 weights and moments, products in bfloat16: what a run does by default
    bfloat16    bfloat16 matrices, 8-bit AdamW with stochastic rounding (model.weights, train.optimizer)

One line a run, as bench.step prints it, and one line a way and epoch:

    loss        mean over the epoch's steps and the seeds, nats
    noise       standard deviation between the float32 runs of other seeds
    apart       mean over the seeds of (this way's loss - float32's with the same seed), nats
    in_noise    apart / noise; below 2 in size, two runs of float32 would differ as much

    python -m bench.learning
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench import shapes
from bench.output import device, emit, environment, parser, table
from bench.step import measure

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"weights": "bfloat16", "optimizer": "adamw_8bit"},
}
COLUMNS = {name: name for name in ("way", "epoch", "loss", "noise", "apart", "in_noise")}


def compare(losses: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """A line for each way and epoch; `losses` [seeds, epochs] by way, float32's among them."""
    truth = losses["float32"]
    noise = truth.std(axis=0, ddof=1)
    lines = []
    for way, found in losses.items():
        apart = (found - truth).mean(axis=0)
        for epoch in range(truth.shape[1]):
            numbers = {"loss": found[:, epoch].mean(), "noise": noise[epoch], "apart": apart[epoch]}
            numbers["in_noise"] = apart[epoch] / noise[epoch] if noise[epoch] else float("nan")
            lines.append({"way": way, "epoch": epoch + 1} | {key: float(f"{n:.4g}") for key, n in numbers.items()})
    return lines


def main(argv: list[str] | None = None) -> None:
    small = device().type == "cpu"
    options = parser(__doc__)
    options.add_argument("--model", default="tiny" if small else "olmo2_1b", choices=shapes.SHAPES)
    options.add_argument("--ways", nargs="+", default=["float32"] if small else list(WAYS), choices=WAYS)
    options.add_argument("--seeds", type=int, default=3, help="at least 2")
    options.add_argument("--pairs", type=int, default=8 if small else 128)
    options.add_argument("--epochs", type=int, default=2 if small else 4)
    options.add_argument("--examples_per_step", type=int, default=4 if small else 16)
    options.add_argument("--learning_rate", type=float, default=1e-6)
    args = options.parse_args(argv)
    if args.seeds < 2 or "float32" not in args.ways:
        options.error("noise is measured between float32 runs: name float32 among --ways, and at least 2 --seeds")
    shared = {name: getattr(args, name) for name in ("model", "pairs", "epochs", "examples_per_step", "learning_rate")}
    losses = {}
    for way in args.ways:
        runs = []
        for seed in range(args.seeds):
            line = measure(**shared, **WAYS[way], seed=seed)
            emit({"way": way, **line}, args.out)
            runs.append(line["epoch_losses"])
        losses[way] = np.array(runs)
    lines = compare(losses)
    for line in lines:
        emit({"bench": "learning", **line, **environment()}, args.out)
    print(table(lines, COLUMNS))


if __name__ == "__main__":
    main()
