"""The checkpoints of a run in the course of it: the last ones, and the best by the held-out examples."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tuningfork.errors import NonFiniteError
from tuningfork.train import checkpoint
from tuningfork.train.checkpoint import Progress
from tuningfork.train.held_out import HeldOut
from tuningfork.train.session import Session


class Checkpointer:
    """Saves what a run has come to, and keeps the last `keep_last` checkpoints and the best one."""

    def __init__(
        self, folder: Path, keep_last: int, session: Session, optimizer: torch.optim.Optimizer, held_out: HeldOut
    ) -> None:
        self.folder, self.keep_last = folder, keep_last
        self.policy, self.ranks, self.optimizer = session.policy, session.ranks, optimizer
        self.held_out = held_out

    @property
    def best(self) -> int | None:
        """The best step by the held-out examples, of those that have a checkpoint."""
        return None if self.held_out.best is None else self.held_out.best.step

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the weights as they are. All ranks must ask together.

        Raises:
            NonFiniteError: a weight is no number, on this rank.
            RunFolderError: the disk refuses, on this rank.
            SaidElsewhere: one of these, on another rank.
        """
        model = self.policy.model
        if self.policy.spread is not None:
            self.policy.spread.release()  # to save is not to gather
        with self.ranks.agreeing():
            _check_weights(model, progress.step)
        checkpoint.save(self.folder, progress, model, self.optimizer, self.keep_last, self.best, self.ranks)

    def prune(self) -> None:
        """Remove the checkpoints that are neither among the last nor the best."""
        checkpoint.prune(self.folder, self.keep_last, self.best, self.ranks)


def _check_weights(model: torch.nn.Module, step: int) -> None:
    """Weights that are no numbers are never saved: what was saved before stays the newest. Of spread weights, those of
    this rank."""
    for name, weight in model.named_parameters():
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        if not torch.isfinite(own).all():
            raise NonFiniteError(f"step {step}: the step moved {name} to nan or infinity. Lower train.learning_rate.")
