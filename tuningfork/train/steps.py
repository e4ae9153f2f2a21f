"""Step after step: each batch is made while the one before is trained on, and each step is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch

from tuningfork.data.packing.loader import PackLoader, ahead
from tuningfork.distributed.plan import plan_step
from tuningfork.distributed.ranks import Ranks
from tuningfork.errors import NonFiniteError, enough_memory
from tuningfork.models.compilations import Compilations
from tuningfork.ranges import phase
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.metrics import Means, RanksResult, StepResult
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.loss_scale import LossScale
from tuningfork.train.optimizer import learning_rate, set_learning_rate
from tuningfork.train.session import Session
from tuningfork.train.step import train_step

Item = TypeVar("Item")


class OfRank(NamedTuple):
    """What a step was on one rank."""

    unique_tokens: float
    rows: float

    model_flops: float
    peak_memory_bytes: float
    data_seconds: float
    compilations: float
    computing: float  # seconds of its blocks' forward passes, as the next
    waiting: float  # for weights

    def of_all(self, ranks: Ranks) -> list[OfRank]:
        """That of every rank, on each of them."""
        own = torch.tensor(self, dtype=torch.float64)
        return [OfRank(*found.tolist()) for found in ranks.gather(own, [len(own)] * ranks.size)]


def _ranks(of_ranks: list[OfRank]) -> RanksResult:
    """How alike the ranks of a step were."""
    flops = [one.model_flops for one in of_ranks]
    paces = [one.computing / one.model_flops if one.model_flops else math.nan for one in of_ranks]
    passes = [one.waiting / (one.computing + one.waiting) for one in of_ranks if one.computing]
    mean = sum(flops) / len(flops)
    return RanksResult(len(of_ranks), max(flops) / mean if mean else 1.0, sum(passes) / max(len(passes), 1), paces)


def _waited_for(items: Iterator[Item]) -> Iterator[Item]:
    """The items, with a range around the time that is waited for each."""
    end = object()
    while True:
        with phase("data"):
            item = next(items, end)
        if item is end:
            return
        yield item  # type: ignore[misc]


def training_steps(
    loader: PackLoader,
    session: Session,
    optimizer: torch.optim.Optimizer,
    reference: ReferenceStore | None,
    config: TrainConfig,
    first: int,
    loss_scale: LossScale | None = None,
) -> Iterator[StepResult]:
    """Train step after step from step `first` (from 0), and measure each.

    `loss_scale`: where a run in float16 stands with it; None in another precision.
    """
    cuda, ranks = session.policy.device.type == "cuda", session.ranks
    flops = session.policy.flops()
    compilations = Compilations()

    def batches() -> Iterator[tuple[int, StepBatch, int]]:
        for step in range(first, loader.order.total_steps):
            examples = loader.examples_of(step)
            cost = lambda portion: flops.training(portion.spans, portion.logit_rows)  # noqa: E731
            plan = plan_step(loader.portions(examples), loader.limits, ranks.workers, cost)
            packs = loader.packs(plan.bins_of(ranks.worker))
            cached = None if reference is None else reference.lookup(examples)
            batch = StepBatch.shared_out(
                examples, plan.examples, packs, session.objective, cached, ranks, session.pin_memory
            )
            yield step, batch, sum(flops.training(pack.spans, len(pack.logit_rows)) for pack in packs)

    begun = waiting = time.perf_counter()
    for step, batch, model_flops in _waited_for(ahead(batches())):
        data_seconds = time.perf_counter() - waiting
        compilations.taken()  # between steps: an evaluation's
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        lr = learning_rate(config, step, loader.order.total_steps)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(config.seed * 2**32 + step)  # for stochastic rounding: a pure function of (seed, step)
        if session.policy.spread is not None:
            session.policy.spread.restart_clock()
        try:
            largest = max(len(pack.input_ids) for pack in batch.packs)
            with (
                enough_memory(f"step {step + 1}, with packs of up to {largest:,} tokens"),
                phase(f"step {step + 1}"),
            ):
                outcome = train_step(
                    session.scorer,
                    session.objective,
                    optimizer,
                    batch,
                    config.max_grad_norm,
                    starting=step == 0,
                    ranks=ranks,
                    loss_scale=None if loss_scale is None else loss_scale.scale,
                )
                behind = None if loss_scale is None else loss_scale.after(outcome.skipped)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {step + 1}: {error} The weights were not moved; the last checkpoint is whole. "
                "Lower train.learning_rate, or look at that example."
            ) from None
        # The device may still be moving the weights; it goes on from there to the next step without a pause.
        now = time.perf_counter()
        memory = torch.cuda.max_memory_allocated() if cuda else 0
        spread = session.policy.spread
        forward = (0.0, 0.0) if spread is None else spread.forward_seconds()
        compiled = compilations.taken()
        own = OfRank(
            batch.unique_tokens, batch.rows, model_flops / ranks.tensor, memory, data_seconds, len(compiled), *forward
        )
        of_ranks = own.of_all(ranks)
        unique_tokens, rows = (int(sum(counts)) for counts in list(zip(*of_ranks[:: ranks.tensor], strict=True))[:2])
        in_all = int(sum(one.compilations for one in of_ranks))
        sizes = ", ".join(f"{len(pack.input_ids):,}" for pack in batch.packs) if compiled else ""
        yield StepResult(
            step=step + 1,
            epoch=loader.order.epoch_after(step),
            lr=lr,
            grad_norm=outcome.grad_norm,
            examples=len(batch.examples),
            loss=outcome.loss,
            loss_size=session.objective.loss_size(batch.totals),
            tokens=batch.tokens,
            unique_tokens=unique_tokens,
            answer_tokens=batch.answer_tokens,
            rows=rows,
            pad_rows=rows - unique_tokens,
            seconds=now - begun,
            data_seconds=max(one.data_seconds for one in of_ranks),
            model_flops=sum(one.model_flops for one in of_ranks),
            statistics=Means.of(outcome.statistics),
            peak_memory_bytes=max(int(one.peak_memory_bytes) for one in of_ranks) if cuda else None,
            compiled=in_all > 0 or (session.compiled and step == first),
            compilations=in_all,
            compiled_here=tuple(f"{what}; packs of {sizes} tokens" for what in compiled),
            ranks=None if ranks.size == 1 else _ranks(of_ranks),
            loss_scale=None if loss_scale is None else loss_scale.scale,
            skipped=outcome.skipped,
        )
        loss_scale = behind
        begun, waiting = now, time.perf_counter()
