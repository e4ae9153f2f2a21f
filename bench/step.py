"""tuningfork on the fixed workload (workload.py), one GPU: whole training steps at a named model shape, one JSON line.

Runs the trainer's own steps: packing, cached reference, step-0 check, AdamW with float32 weights, compiled blocks.
Rates divide the work of all steps after the first epoch, which compiles everything, by their wall time.

    python -m bench.step --model olmo2_1b --examples_per_step 16
    python -m bench.step --model m7c-125m --profile profile.txt   # of a recipe from nothing, by its name
    torchrun --nproc-per-node 2 -m bench.step --model olmo2_1b
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from argparse import BooleanOptionalAction
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from bench import nothing, shapes
from bench.device_time import DeviceProfile
from bench.gathers import gathers_of
from bench.output import device, emit, environment, parser, peak, rounded, table
from bench.timing import free_memory
from tuningfork.data.packing.loader import EpochOrder, PackLoader, build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.packing.tree import Share
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.world import ALONE, started_together, world
from tuningfork.models.config import ACTIVATION_MEMORY_FORMS
from tuningfork.models.flops import FlopCounter, by_itself
from tuningfork.models.hf.load import Loaded, hold_weights
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import TokenExample
from tuningfork.reference.build import fill
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.console import Console
from tuningfork.report.run.metrics import StepResult
from tuningfork.report.run.throughput import RunTotals
from tuningfork.train.config import TrainConfig
from tuningfork.train.evaluate import check_start
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.session import Session
from tuningfork.train.setup.device import DTYPES
from tuningfork.train.setup.model import choose_activations
from tuningfork.train.steps import training_steps

DEFAULTS = ParallelConfig()
PROFILED = 3  # steady steps, behind those that are timed

COLUMNS = {
    "model": "model",
    "examples_per_step": "pairs/step",
    "activation_memory": "activations",
    "pairs_s": "pairs/s",
    "tokens_s": "tokens/s",
    "mfu": "MFU",
    "hfu": "HFU",
    "median_step_s": "median step s",
    "p90_step_s": "p90 s",
    "pad_share": "padding",
    "peak_gib": "peak GiB",
    "recompiles_after_warmup": "recompiles",
    "step0_pairs_exact": "exact at 0",
}


def measure(
    model: str = "olmo2_1b",
    *,
    layers: int | None = None,
    workload: str = "short",
    pairs: int = 512,
    pack_tokens: int = 16384,
    share: Share = "tree",
    examples_per_step: int = 16,
    head_chunk_rows: int = 8192,
    epochs: int = 3,
    activation_memory: str = "none",
    weights: str = "float32",
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw",
    learning_rate: float = 1e-6,
    seed: int = 0,
    profile: Path | None = None,
    sharded: bool = False,
    parallel: ParallelConfig = DEFAULTS,
    ranks: Ranks = ONE_PROCESS,
) -> dict[str, Any]:
    """Train a random model of a named shape (shapes.py) on the yardstick, and return the result line.

    model_build_s       seconds to make the random weights on the device, and to spread them
    reference_s         to score all pairs with the starting model; compiles the forward pass
    check_s             to see that the first step's log-probs equal the cached ones to the bit (else it raises)
    first_epoch_s       of the first epoch's steps; compiles the rest
    step0_pairs_exact   pairs of that check
    steps               the timed ones: all after the first epoch
    median_step_s, p90_step_s   wall seconds of a step, waiting for data included
    pairs_s, tokens_s, unique_tokens_s, pad_share, peak_gib   see report/run/metrics.py; of the timed steps
    mfu                 model flops (models/flops.py) of the timed steps / their seconds / the card's bfloat16 peak
    activation_memory   the mode that was used: the one asked for, or what `auto` chose
    hfu                 mfu with the decoder blocks' second forward pass counted too, where they are recomputed; None
                        under an activation budget. Padding and repeated prompts count in neither
    data_share          share of the time that waited for data
    recompiles_after_warmup     graphs and kernels that were compiled or tuned in the timed steps; 0 or the timing is
                        not steady
    warmup_steps_left_out       timed steps that met a new pack shape, and are in no rate
    first_loss, last_loss       mean loss of the first and the last step, nats
    epoch_losses        mean loss of each epoch's steps, nats
    startup             seconds of each phase of the start, of the process for which it took longest: to make the model
                        whole on each device, to split, spread and set it up, to score and check as above, and the first
                        step, which compiles backward passes. `main` adds how long the processes took to meet
    gathers             of spread weights, in one more step behind those that are timed: how often each block was
                        gathered (`per_block`) and all else together (`of_the_rest`), and in how many packs each process
                        had its examples. Twice a pack is usual, or once a step without `reshard_after_forward`
    profile             where asked for: device and wall milliseconds of a step; the tables are in that file

    Each call compiles anew and leaves nothing behind, so several may follow each other in one process.

    Args:
        layers: blocks of the shape that the model has, if not all: for shapes too large for one card.
        epochs: the first one warms up; at least 2.
        profile: profile three more steps behind the timed ones, and write their device time to this file; that of
            other ranks beside it.
        sharded: spread the weights by FSDP2 over this one process, to see what that costs.
        ranks: the processes that share the steps, all of which must come here; `parallel` says how.
    """
    settings = {**locals(), "profile": None if profile is None else str(profile), "ranks": ranks.size}
    settings["parallel"] = asdict(parallel)
    if epochs < 2 or pairs < examples_per_step:
        raise ValueError("the first epoch warms up, so at least 2 epochs of at least one step each are needed.")
    torch._dynamo.reset()
    free_memory()
    fixed = shapes.WORKLOADS[workload]
    examples = shapes.yardstick(pairs, shapes.config(model).vocab_size, workload)
    train = TrainConfig(
        learning_rate=learning_rate,
        optimizer=optimizer,
        examples_per_step=examples_per_step,
        epochs=epochs,
        schedule="constant",
        activation_memory=activation_memory,
        seed=seed,
    )
    begun = time.perf_counter()
    limits = PackLimits.plan(pack_tokens, share, compiled=device().type == "cuda")
    longest = max(example.longest for example in examples)
    over = None if not sharded and ranks.size == 1 else Layout.plan(parallel, ranks)
    built = shapes.build(model, device(), seed, longest, layers)
    if device().type == "cuda":
        torch.cuda.synchronize()
    made_s = time.perf_counter() - begun
    processes: dict[str, Any] = {"ranks": ranks, "over": over, "parallel": parallel}
    session = ready(built, ObjectiveConfig(), train, head_chunk_rows, limits, DTYPES[weights], **processes)
    build_s = time.perf_counter() - begun
    print(f"{model}: weights made in {build_s:.1f} s; scoring the reference", file=sys.stderr, flush=True)

    order = EpochOrder.plan(pairs, examples_per_step, seed, epochs, None)
    last = order.total_steps
    spread = session.policy.spread
    behind = (PROFILED if profile is not None else 0) + (1 if spread is not None else 0)
    if behind:
        order = EpochOrder.plan(pairs, examples_per_step, seed, epochs, last + behind)
    loader = PackLoader(examples, order, limits, pin_memory=session.compiled)

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        store = ReferenceStore(Path(cache), {"bench": "step"})
        fill(store, build_packs(examples, limits), session.scorer.score)  # each rank all: the checks are its own
    reference_s = time.perf_counter() - begun
    begun = time.perf_counter()
    checked = check_start(session, loader.step(0), store)
    if spread is not None:
        spread.release()
    check_s = time.perf_counter() - begun
    print(f"scored in {reference_s:.1f} s, checked in {check_s:.1f} s; training", file=sys.stderr, flush=True)

    steps = training_steps(loader, session, build_optimizer(session.policy.model, train), store, train, 0)
    card = peak()
    peak_of_all = None if card is None else card * ranks.size
    timed = _Timed(RunTotals(peak_of_all), last_warmup=pairs // examples_per_step, last=last, epochs=epochs)
    timed.run(steps, DeviceProfile() if profile is not None else None)
    phases = {
        "model_build_s": made_s,
        "spread_s": build_s - made_s,
        "reference_s": reference_s,
        "check_s": check_s,
        "first_step_s": timed.first_s,
    }
    line = {
        "trainer": "tuningfork",
        "model": model,
        "examples_per_step": examples_per_step,
        "args": settings,
        **environment(),
        "parameters": sum(p.numel() for p in session.policy.model.parameters()),
        "stats": fixed.stats(fixed.pairs(pairs)),
        "model_build_s": round(build_s, 1),
        "reference_s": round(reference_s, 1),
        "check_s": round(check_s, 1),
        "startup": slowest(phases, ranks),
        "step0_pairs_exact": checked,
        "activation_memory": session.policy.activation_memory,
        **timed.summary(recomputed_share(session.policy.activation_memory, session.policy.flops(), examples)),
    }
    if spread is not None:
        line["gathers"] = gathers_of(steps, session.policy)
    if profile is not None and timed.profile is not None:
        line["profile"] = timed.profile.summary(PROFILED, timed.profiled_s)
        profile = profile if ranks.first else profile.with_stem(f"{profile.stem}-rank{ranks.rank}")
        profile.parent.mkdir(parents=True, exist_ok=True)
        profile.write_text(timed.profile.report(PROFILED, timed.profiled_s, environment()))
    return line


def slowest(phases: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Of each phase, the seconds of the process for which it took longest; all processes must come here."""
    of_all = ranks.all(dict(phases))
    return {name: round(max(found[name] for found in of_all), 3) for name in phases}


def recomputed_share(activation_memory: str, flops: FlopCounter, examples: list[TokenExample]) -> float | None:
    """What is computed twice / all model flops of training: nothing, or the decoder blocks' forward pass.

    The head recomputes nothing. None under a budget: only the compiler knows.
    """
    if activation_memory == "none":
        return 0.0
    if activation_memory.startswith("budget"):
        return None
    blocks = replace(flops, head_weights=0)
    alone = [by_itself(example) for example in examples]
    return sum(blocks.forward(*example) for example in alone) / sum(flops.training(*example) for example in alone)


@dataclass
class _Timed:
    """The steps of a run, sorted into warm-up, timed and profiled ones."""

    totals: RunTotals
    last_warmup: int
    last: int
    epochs: int
    first_s: float = 0.0
    warmup_s: float = 0.0
    profiled_s: float = 0.0
    recompiles: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    profile: DeviceProfile | None = None

    def run(self, steps: Iterator[StepResult], profile: DeviceProfile | None) -> None:
        """Those that the numbers are of, and those that are profiled; what is behind them is left."""
        for step in islice(steps, self.last):
            self.losses.append(step.loss)
            if step.step == 1:
                self.first_s = step.seconds
            if step.step <= self.last_warmup:
                self.warmup_s += step.seconds
                if step.step == 1 or step.step == self.last_warmup:
                    print(f"step {step.step}: {self.warmup_s:.1f} s of training", file=sys.stderr, flush=True)
            else:
                self.totals.add(step)
                self.seconds.append(step.seconds)
                self.recompiles += step.compilations
        if profile is not None:
            profile.start()
            self.profiled_s = sum(step.seconds for step in islice(steps, PROFILED))
            profile.stop()
            self.profile = profile

    def summary(self, recomputed: float | None) -> dict[str, Any]:
        rates, everything = self.totals.summary(), self.totals.all
        mfu = rates["mfu"]
        return {
            "first_epoch_s": round(self.warmup_s, 1),
            "recompiles_after_warmup": self.recompiles,
            "steps": everything.steps,
            "median_step_s": round(float(np.median(self.seconds)), 4),
            "p90_step_s": round(float(np.quantile(self.seconds, 0.9)), 4),
            "pairs_s": rounded(rates["examples_per_s"]),
            "tokens_s": rounded(rates["tokens_per_s"]),
            "unique_tokens_s": rounded(rates["unique_tokens_per_s"]),
            "mfu": rounded(mfu, 4),
            "hfu": rounded(None if mfu is None or recomputed is None else mfu * (1 + recomputed), 4),
            "pad_share": rounded(rates["pad_share"], 4),
            "data_share": round(everything.data_seconds / everything.seconds, 4),
            "warmup_steps_left_out": rates["warmup_steps"],
            "peak_gib": rounded(rates["peak_memory_gib"], 1),
            **{key: rounded(value, 4) for key, value in everything.of_ranks().items()},
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            "epoch_losses": [float(np.mean(part)) for part in np.array_split(self.losses, self.epochs)],
        }


def start(
    model: str,
    layers: int | None,
    positions: int,
    train: TrainConfig,
    head_chunk_rows: int,
    limits: PackLimits,
    weights: torch.dtype,
) -> Session:
    """A starting model of a named shape in one process, as a run has it; see `ready`."""
    built = shapes.build(model, device(), train.seed, positions, layers)
    return ready(built, ObjectiveConfig(), train, head_chunk_rows, limits, weights)


def ready(
    built: PreTrainedModel,
    objective: ObjectiveConfig,
    train: TrainConfig,
    head_chunk_rows: int,
    limits: PackLimits,
    weights: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
    ranks: Ranks = ONE_PROCESS,
    over: Layout | None = None,
    parallel: ParallelConfig = DEFAULTS,
) -> Session:
    """A model on this device as a run has it: on a GPU bfloat16 over float32 weights, compiled; on a CPU plain float32.

    `dtype`: another precision to compute in.
    """
    compiled = device().type == "cuda"
    hold_weights(built, weights)
    policy = Policy.fast(built, dtype or (torch.bfloat16 if compiled else torch.float32))
    parallelize(
        policy, "none", compiled, over or Layout(), DTYPES[parallel.reduce_dtype], over is not None,
        parallel.reshard_after_forward,
    )  # fmt: skip
    if compiled:
        torch.cuda.synchronize()
    session = Session(Scorer.of(policy, head_chunk_rows), objective.build(), Loaded(built, torch.float32), ranks=ranks)
    if train.activation_memory != "auto":
        policy.keep_activations(train.activation_memory)
    choose_activations(session, train, limits, None, Console())
    return session


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="olmo2_1b", choices=(*shapes.SHAPES, *nothing.RECIPES))
    options.add_argument("--layers", type=int, help="blocks of the shape that the model has; all where it is not given")
    options.add_argument("--workload", default="short", choices=shapes.WORKLOADS, help="prompts of 120 or 6,000 tokens")
    options.add_argument("--pairs", type=int, default=512)
    options.add_argument("--pack_tokens", type=int, default=16384)
    options.add_argument("--share", choices=("none", "prompt", "tree"), default="tree")
    options.add_argument("--examples_per_step", type=int, default=16)
    options.add_argument("--head_chunk_rows", type=int, default=8192)
    options.add_argument("--epochs", type=int, default=3, help="the first one warms up")
    options.add_argument("--activation_memory", default="none", help=ACTIVATION_MEMORY_FORMS)
    options.add_argument("--weights", default="float32", choices=("float32", "bfloat16"), help="model.weights")
    options.add_argument("--optimizer", default="adamw", choices=("adamw", "adamw_8bit"))
    options.add_argument("--learning_rate", type=float, default=1e-6)
    options.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the pairs")
    options.add_argument("--sharded", action="store_true", help="by FSDP2 over one process; several always do")
    options.add_argument("--replicate", type=int, help="parallel.replicate, under torchrun")
    options.add_argument("--shard", type=int, help="parallel.shard")
    options.add_argument("--tensor", type=int, default=1, help="parallel.tensor")
    options.add_argument(
        "--reduce_dtype", default="float32", choices=("float32", "bfloat16"), help="parallel.reduce_dtype"
    )
    options.add_argument("--profile", type=Path, help="write where the device time of three more steps goes")
    options.add_argument(
        "--reshard_after_forward", default=True, action=BooleanOptionalAction, help="parallel.reshard_after_forward"
    )
    settings = vars(options.parse_args(argv))
    out = settings.pop("out")
    names = ("replicate", "shard", "tensor", "reduce_dtype", "reshard_after_forward")
    parallel = ParallelConfig(**{name: settings.pop(name) for name in names})
    if settings["sharded"] and not started_together():
        os.environ.update(ALONE)
    begun = time.perf_counter()
    with world(parallel, device().type == "cuda", always=settings["sharded"]) as ranks:
        met_s = time.perf_counter() - begun
        line = measure(**settings, parallel=parallel, ranks=ranks)
        line["startup"] = {**slowest({"process_group_s": met_s}, ranks), **line["startup"]}
        if ranks.first:
            emit(line, out)
            print(table([line], COLUMNS))


if __name__ == "__main__":
    main()
