"""What every number of metrics.jsonl means, and the one accumulator that makes a line of them.

A line covers all steps since the line before it. Every rate divides by the wall time of exactly those steps, so
tokens/s does not depend on how often lines are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from tuningfork.records import PerToken

_TRAINING: dict[str, str] = {
    "step": "The last optimizer step that the line covers, counted from 1.",
    "epoch": "Passes over the training data after that step; 0.5 is half of the first.",
    "loss": "Mean loss over the examples of the line, or over their answer_tokens where objective.mean_over says so, "
    "the SFT term included; nats, or nats squared of a squared loss.",
    "lr": "Learning rate of the last step.",
    "grad_norm": "Global gradient norm before clipping, mean over the steps of the line.",
    "examples": "Examples trained on in this line.",
    "tokens": "Their tokens as a plain trainer counts them: the prompt once per answer.",
    "unique_tokens": "Their tokens as they were computed: what answers of a pack share once, as pack.share has it.",
    "answer_tokens": "Tokens whose log-prob counts in the loss, those of each answer of each example.",
    "pad_share": "Padding / all token slots of the packs.",
}
_SPEED: dict[str, str] = {
    "step_s": "Mean wall seconds from one step's numbers to the next: data, logging and checkpoints included.",
    "data_s": "Mean seconds of a step spent waiting for data.",
    "examples_per_s": "examples / wall seconds of the steps of the line.",
    "tokens_per_s": "tokens / the same seconds.",
    "unique_tokens_per_s": "unique_tokens / the same seconds.",
    "mfu": "Model flops of the line, of each row that is laid once / the same seconds / peak flops of all devices; "
    "null where the peak is unknown.",
    "peak_memory_gib": "Most device memory held at once during the line, GiB; null on a CPU.",
    "late_compilations": "Graphs and kernels that were compiled or tuned behind the first three steps of this process, "
    "or behind its first evaluation between steps, on all ranks, so far. Each is warned of; 0 is right.",
}
EVAL = "eval/"  # leads the names of held-out numbers

Definitions = Mapping[str, str]
"""Key of a number -> what it is, with its unit."""

OF_RANKS: Definitions = {
    "ranks": "Processes that share the run, one a device.",
    "tokens_per_s_per_rank": "tokens_per_s / ranks.",
    "imbalance": "Most model flops of a rank in a step / mean over ranks, mean over the steps of the line: how much "
    "longer a step takes than if all had as much to do.",
    "slowest_pace": "Slowest rank's seconds for the same work / the median rank's (of two, the faster's), mean over "
    "the steps of the line.",
    "gather_wait": "Share of the blocks' forward passes in which they waited for weights, mean over ranks.",
}
"""What a line of training steps has besides, where several ranks share the run."""

OF_FLOAT16: Definitions = {
    "loss_scale": "What gradients of the last step were multiplied by on their way, see model.dtype.",
    "skipped_steps": "Steps of the line that did not move the weights, for a gradient that was not finite; grad_norm "
    "is the mean over the others, null where there is none.",
}
"""What a line has besides in a run that computes in float16."""


OF_NSA: Definitions = {
    "nsa/gate_cmp": "Gate of the compressed branch of native sparse attention, 0 to 1, mean over tokens, heads and "
    "layers; tokens that a pack shares count once.",
    "nsa/gate_slc": "The same of the branch of chosen blocks.",
    "nsa/gate_win": "The same of the window.",
    "nsa/gate_entropy": "Entropy of the three gates' shares of their sum, nats, mean alike: ln 3 where all are as "
    "large, 0 where one branch has everything.",
    "nsa/keys_read": "Keys that a query reads in all three branches, mean over tokens and layers: compressed blocks, "
    "rows of chosen ones, and of the window.",
}
"""What a line of training steps has besides, behind the objective's, for a model with native sparse attention."""


def training_definitions(statistics: Definitions) -> dict[str, str]:
    """The numbers of a line of training steps in the order in which it has them; `statistics` are the objective's, and
    those of the model's layers."""
    return {**_TRAINING, **statistics, **_SPEED}


def evaluation_definitions(unit: str, statistics: Definitions) -> dict[str, str]:
    """The numbers of a line of metrics.jsonl that stands for an evaluation. `unit`: what its examples are; `statistics`
    are the objective's, with what follows from them."""
    return {
        "step": f"Optimizer steps done when the held-out {unit} were scored; 0 is the starting model. With "
        "train.ema_decay the model behind a step is that of the average of the weights.",
        f"{EVAL}{unit}": f"Held-out {unit}.",
        f"{EVAL}loss": "Mean loss over all of them, or over all their counted tokens, as `loss`, without an SFT term.",
        **{f"{EVAL}{key}": statistics[key] for key in statistics},
        f"{EVAL}seconds": "Wall seconds that it took. They are no part of step_s and of the rates of training.",
    }


@dataclass(frozen=True, slots=True)
class Means:
    """Means that are still being taken: of each statistic the sum of its values, and how many items they are of."""

    sums: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, ArrayLike | PerToken]) -> Means:
        """The means of one batch, from the values of each statistic (lists or one-dimensional CPU tensors)."""
        sums, counts = {}, {}
        for key, given in values.items():
            array = np.ascontiguousarray(given.sums if isinstance(given, PerToken) else given, dtype=np.float64)
            sums[key] = float(array.sum())
            counts[key] = int(given.tokens.sum()) if isinstance(given, PerToken) else array.size
        return cls(sums, counts)

    def __add__(self, other: Means) -> Means:
        keys = [*self.sums, *(key for key in other.sums if key not in self.sums)]
        return Means(
            {key: self.sums.get(key, 0.0) + other.sums.get(key, 0.0) for key in keys},
            {key: self.counts.get(key, 0) + other.counts.get(key, 0) for key in keys},
        )

    def values(self) -> dict[str, float | None]:
        """The mean of each statistic; null where it has no value."""
        return {key: total / self.counts[key] if self.counts[key] else None for key, total in self.sums.items()}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out examples under the policy as it was."""

    examples: int
    unit: str  # what the objective calls them, in the plural
    loss: float  # the objective's mean over all of them, without an SFT term
    means: Means
    seconds: float = 0.0  # that it took
    derived: Mapping[str, float | None] = field(default_factory=dict)  # what follows from the means

    def as_dict(self) -> dict[str, float | int | None]:
        return {self.unit: self.examples, "loss": self.loss, **self.means.values(), **self.derived}


@dataclass(frozen=True, slots=True)
class RanksResult:
    """How alike several ranks were in a step."""

    count: int
    imbalance: float  # most model flops of a rank / mean
    waiting: float  # share of their blocks' forward passes in which they waited for weights, mean over ranks
    paces: list[float]  # of each rank: seconds of its blocks' forward passes / its model flops; NaN without work


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did, added up over its packs and over all ranks."""

    step: int  # counted from 1, over the whole run, resumed or not
    epoch: float
    lr: float
    grad_norm: float  # before clipping
    examples: int
    loss: float
    loss_size: int  # how many items that is a mean over: examples, or tokens
    tokens: int  # as a plain trainer counts them: the prompt once per answer
    unique_tokens: int
    answer_tokens: int
    rows: int  # of the packs, padding included
    pad_rows: int
    seconds: float  # wall time since the numbers of the step before were known; data, logging and checkpoints included
    data_seconds: float  # of these, waiting for data
    model_flops: float  # necessary work only, of each row that is laid once
    statistics: Means = Means()  # the objective's, and what the model's layers noted
    peak_memory_bytes: int | None = None  # of the fullest device during the step; None on a CPU
    compiled: bool = False  # something was compiled or tuned in this step, so its time says nothing about speed
    compilations: int = 0  # how much was, on all ranks
    compiled_here: tuple[str, ...] = ()  # what it was on this one
    late_compilations: int = 0  # of the process so far, see train/late.py
    ranks: RanksResult | None = None  # None where there is one
    loss_scale: float | None = None  # None but in float16
    skipped: bool = False  # the gradient was not finite, and the weights have not moved


@dataclass(slots=True)
class Sums:
    """What can be added up about some steps, and the rates that follow from it."""

    steps: int = 0
    loss_sum: float = 0.0
    loss_size: int = 0
    grad_norm: float = 0.0
    examples: int = 0
    tokens: int = 0
    unique_tokens: int = 0
    answer_tokens: int = 0
    rows: int = 0
    pad_rows: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    model_flops: float = 0.0
    statistics: Means = Means()
    peak_memory_bytes: int | None = None
    ranks: int = 1
    imbalance: float = 0.0
    slowest_pace: float = 0.0
    gather_wait: float = 0.0
    loss_scale: float | None = None
    skipped: int = 0

    def add(self, step: StepResult) -> None:
        self.steps += 1
        self.loss_sum += step.loss * step.loss_size
        self.loss_size += step.loss_size
        self.grad_norm += 0.0 if step.skipped else step.grad_norm
        self.loss_scale = step.loss_scale
        self.skipped += step.skipped
        self.examples += step.examples
        self.tokens += step.tokens
        self.unique_tokens += step.unique_tokens
        self.answer_tokens += step.answer_tokens
        self.rows += step.rows
        self.pad_rows += step.pad_rows
        self.seconds += step.seconds
        self.data_seconds += step.data_seconds
        self.model_flops += step.model_flops
        self.statistics += step.statistics
        if step.peak_memory_bytes is not None:
            self.peak_memory_bytes = max(step.peak_memory_bytes, self.peak_memory_bytes or 0)
        if step.ranks is not None:
            self.ranks = step.ranks.count
            self.imbalance += step.ranks.imbalance
            self.slowest_pace += _slowest(step.ranks.paces)
            self.gather_wait += step.ranks.waiting

    @property
    def pad_share(self) -> float | None:
        return self.pad_rows / self.rows if self.rows else None

    @property
    def peak_memory_gib(self) -> float | None:
        return None if self.peak_memory_bytes is None else self.peak_memory_bytes / 2**30

    def of_ranks(self) -> dict[str, float | int | None]:
        """What a line says of several ranks; nothing where there is one."""
        if self.ranks == 1:
            return {}
        return {
            "ranks": self.ranks,
            "tokens_per_s_per_rank": self.tokens / self.seconds / self.ranks if self.seconds else None,
            "imbalance": self.imbalance / self.steps,
            "slowest_pace": self.slowest_pace / self.steps,
            "gather_wait": self.gather_wait / self.steps,
        }

    def of_float16(self) -> dict[str, float | int | None]:
        """What a line says of loss scaling; nothing where there is none."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale, "skipped_steps": self.skipped}

    def rates(self, peak_flops: float | None) -> dict[str, float | None]:
        """The *_per_s and mfu of a line; null where no time was spent or the peak is unknown."""
        per_s = {
            "examples_per_s": self.examples,
            "tokens_per_s": self.tokens,
            "unique_tokens_per_s": self.unique_tokens,
            "mfu": self.model_flops / peak_flops if peak_flops else None,
        }
        return {key: amount / self.seconds if self.seconds and amount is not None else None
                for key, amount in per_s.items()}  # fmt: skip


def _slowest(paces: Sequence[float]) -> float:
    known = np.array([pace for pace in paces if np.isfinite(pace)])
    return float(known.max() / np.quantile(known, 0.5, method="lower")) if len(known) else 1.0


class Interval:
    """The steps since the last line of metrics.jsonl. `peak_flops` is that of all devices together, if known."""

    def __init__(self, peak_flops: float | None) -> None:
        self.peak_flops = peak_flops
        self.sums = Sums()
        self.last: StepResult | None = None

    def add(self, step: StepResult) -> None:
        self.sums.add(step)
        self.last = step

    def take(self) -> dict[str, float | int | None]:
        """One line, see `training_definitions`, and a fresh start. At least one step must have been added."""
        last, sums = self.last, self.sums
        assert last is not None, "no step since the last line"
        self.last, self.sums = None, Sums()
        return {
            "step": last.step,
            "epoch": last.epoch,
            "loss": sums.loss_sum / sums.loss_size,
            "lr": last.lr,
            "grad_norm": sums.grad_norm / (sums.steps - sums.skipped) if sums.steps > sums.skipped else None,
            "examples": sums.examples,
            "tokens": sums.tokens,
            "unique_tokens": sums.unique_tokens,
            "answer_tokens": sums.answer_tokens,
            "pad_share": sums.pad_share,
            **sums.statistics.values(),
            "step_s": sums.seconds / sums.steps,
            "data_s": sums.data_seconds / sums.steps,
            **sums.rates(self.peak_flops),
            "peak_memory_gib": sums.peak_memory_gib,
            "late_compilations": last.late_compilations,
            **sums.of_ranks(),
            **sums.of_float16(),
        }
