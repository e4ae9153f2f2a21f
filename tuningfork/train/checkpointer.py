"""The checkpoints of a run in the course of it: the last ones, and the best by the held-out examples."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tuningfork.errors import SAVING, NonFiniteError, enough_memory
from tuningfork.ranges import phase
from tuningfork.train import checkpoint
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import OutputConfig
from tuningfork.train.held_out import HeldOut
from tuningfork.train.session import Session
from tuningfork.train.staging import Beside, Staging


class Checkpointer:
    """Saves what a run has come to, and keeps the last checkpoints and the best one.

    It may write while the run goes on (`output.save_async`). Whatever asks it for something waits for what it writes,
    and is told where that failed; so does the end of the block that it is the context of.
    """

    def __init__(
        self,
        folder: Path,
        output: OutputConfig,
        session: Session,
        optimizer: torch.optim.Optimizer,
        held_out: HeldOut,
    ) -> None:
        self.folder, self.keep_last = folder, output.keep_last
        self.policy, self.ranks, self.optimizer = session.policy, session.ranks, optimizer
        self.held_out = held_out
        on = self.ranks.size > 1 if output.save_async is None else output.save_async
        self._staging = Staging() if on else None
        self._beside, self._ranks_beside = Beside(), self.ranks.apart() if on else self.ranks

    @property
    def best(self) -> int | None:
        """The best step by the held-out examples, of those that have a checkpoint."""
        return None if self.held_out.best is None else self.held_out.best.step

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written, which the next call says."""
        return self._beside.failed

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the weights as they are, and remove those that are neither among the last nor the best.
        All ranks must ask together.

        Raises:
            NonFiniteError: a weight is no number, on this rank.
            RunFolderError: the disk refuses, on this rank; or it refused the checkpoint before.
            SaidElsewhere: one of these, on another rank.
        """
        with phase("checkpoint"):
            self._save(progress)

    def _save(self, progress: Progress) -> None:
        self._beside.wait()
        model = self.policy.model
        if self.policy.spread is not None:
            self.policy.spread.release()  # to save is not to gather
        with self.ranks.agreeing():
            _check_weights(model, progress.step)
        what = (self.folder, progress, model, self.optimizer, self.keep_last, self.best)
        if self._staging is None:
            checkpoint.save(*what, self.ranks)
        else:
            with self.ranks.agreeing(), enough_memory(f"saving step {progress.step}", SAVING):
                work = checkpoint.saving(*what, self._ranks_beside, self._staging)
            self._beside.begin(work)

    def prune(self) -> None:
        """Remove the checkpoints that are neither among the last nor the best."""
        self._beside.wait()
        checkpoint.prune(self.folder, self.keep_last, self.best, self.ranks)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._beside.wait()
        elif kind is not KeyboardInterrupt:
            self._beside.let_end()


def _check_weights(model: torch.nn.Module, step: int) -> None:
    """Weights that are no numbers are never saved: what was saved before stays the newest. Of spread weights, those of
    this rank."""
    for name, weight in model.named_parameters():
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        if not torch.isfinite(own).all():
            raise NonFiniteError(f"step {step}: the step moved {name} to nan or infinity. Lower train.learning_rate.")
