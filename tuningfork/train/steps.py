"""Step after step: each batch is made while the one before is trained on, and each step is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from tuningfork.data.packing.loader import PackLoader, ahead
from tuningfork.errors import NonFiniteError, enough_memory
from tuningfork.models.policy import graphs_compiled
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.metrics import Means, StepResult
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import learning_rate, set_learning_rate
from tuningfork.train.session import Session
from tuningfork.train.step import train_step


def training_steps(
    loader: PackLoader,
    session: Session,
    optimizer: torch.optim.Optimizer,
    reference: ReferenceStore | None,
    config: TrainConfig,
    first: int,
) -> Iterator[StepResult]:
    """Train step after step from step `first` (from 0), and measure each."""
    cuda = session.policy.device.type == "cuda"
    flops = session.policy.flops()
    graphs = -1

    def batches() -> Iterator[tuple[int, StepBatch, int]]:
        for step in range(first, loader.order.total_steps):
            of_all_ranks = loader.examples_of(step)
            totals = session.objective.totals(of_all_ranks)
            portions = loader.portions(of_all_ranks)
            packs = loader.packs(session.ranks.mine(portions, lambda mine: flops.training(mine.spans, mine.logit_rows)))
            examples = [example for pack in packs for example in pack.examples]
            cached = None if reference is None else reference.lookup(examples)
            batch = StepBatch.of(packs, session.objective, cached, totals, session.pin_memory)
            yield step, batch, sum(flops.training(pack.spans, len(pack.logit_rows)) for pack in packs)

    begun = waiting = time.perf_counter()
    for step, batch, model_flops in ahead(batches()):
        data_seconds = time.perf_counter() - waiting
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        lr = learning_rate(config, step, loader.order.total_steps)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(config.seed * 2**32 + step)  # for stochastic rounding: a pure function of (seed, step)
        try:
            largest = max(len(pack.input_ids) for pack in batch.packs)
            with enough_memory(f"step {step + 1}, with packs of up to {largest:,} tokens"):
                outcome = train_step(
                    session.scorer,
                    session.objective,
                    optimizer,
                    batch,
                    config.max_grad_norm,
                    starting=step == 0,
                    ranks=session.ranks,
                )
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {step + 1}: {error} The weights were not moved; the last checkpoint is whole. "
                "Lower train.learning_rate, or look at that example."
            ) from None
        # The device may still be moving the weights; it goes on from there to the next step without a pause.
        now = time.perf_counter()
        yield StepResult(
            step=step + 1,
            epoch=loader.order.epoch_after(step),
            lr=lr,
            grad_norm=outcome.grad_norm,
            examples=len(batch.examples),
            loss=outcome.loss,
            loss_size=session.objective.loss_size(batch.totals),
            tokens=batch.tokens,
            unique_tokens=batch.unique_tokens,
            answer_tokens=batch.answer_tokens,
            rows=batch.rows,
            pad_rows=batch.rows - batch.unique_tokens,
            seconds=now - begun,
            data_seconds=data_seconds,
            model_flops=model_flops,
            statistics=Means.of(outcome.statistics),
            peak_memory_bytes=torch.cuda.max_memory_allocated() if cuda else None,
            compiled=session.compiled and graphs != graphs_compiled(),
        )
        graphs = graphs_compiled()
        begun, waiting = now, time.perf_counter()
