"""The checkpoints of a run in the course of it: the last ones, and the best by the held-out examples."""

from __future__ import annotations

from pathlib import Path

import torch

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
        self.model, self.ranks, self.optimizer = session.policy.model, session.ranks, optimizer
        self.held_out = held_out

    @property
    def best(self) -> int | None:
        """The best step by the held-out examples, of those that have a checkpoint."""
        return None if self.held_out.best is None else self.held_out.best.step

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the weights as they are. Raises NonFiniteError, RunFolderError."""
        _check_weights(self.model, progress.step)
        checkpoint.save(self.folder, progress, self.model, self.optimizer, self.keep_last, self.best)

    def prune(self) -> None:
        """Remove the checkpoints that are neither among the last nor the best."""
        checkpoint.prune(self.folder, self.keep_last, self.best)


def _check_weights(model: torch.nn.Module, step: int) -> None:
    """Weights that are no numbers are never saved: what was saved before stays the newest."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise NonFiniteError(f"step {step}: the step moved {name} to nan or infinity. Lower train.learning_rate.")
