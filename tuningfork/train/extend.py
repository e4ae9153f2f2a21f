"""A run that is made longer when it is continued: where its data and its learning rate go on."""

from __future__ import annotations

from pathlib import Path

from tuningfork.data.packing.loader import EpochOrder
from tuningfork.errors import RunFolderError
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import learning_rate
from tuningfork.wording import counted


def plan(examples: int, config: TrainConfig, saved: Progress | None) -> EpochOrder:
    """The steps of a run over so many examples, shuffled, from where its checkpoint stands, if it has one."""
    done = (0, 0) if saved is None else (saved.step, saved.examples)
    return EpochOrder.plan(examples, config.examples_per_step, config.seed, config.epochs, config.max_steps, *done)


def check_length(
    folder: Path, examples: int, before: TrainConfig, now: TrainConfig, saved: Progress | None
) -> str | None:
    """What there is to say of a run in `folder` that had the settings `before` and goes on with those of `now`.

    The schedule of the new length holds from the next step on, so the learning rate jumps there, unless it is constant.

    Returns:
        None where neither train.epochs nor train.max_steps has changed.

    Raises:
        RunFolderError: they have, and the run does not become longer.
    """
    if (before.epochs, before.max_steps) == (now.epochs, now.max_steps):
        return None
    old, new = (plan(examples, config, saved).total_steps for config in (before, now))
    if new <= old:
        raise RunFolderError(
            f"{folder} is a run of {counted(old, 'step')}; train.epochs {now.epochs:g} and train.max_steps "
            f"{'null' if now.max_steps is None else now.max_steps} come to {new:,}. A continued run may become longer, "
            "and else keeps its length. Raise train.max_steps, or train.epochs if that is null; or set them back; or "
            "choose another output.dir."
        )
    done = 0 if saved is None else saved.step
    said = f"the run is extended from {old:,} to {counted(new, 'step')}"
    if done >= new:
        return said
    rate = f"{learning_rate(now, done, new):.4g}"
    after = f", after {learning_rate(before, done - 1, old):.4g} in step {done}" if done else ""
    return f"{said}; learning rate, {now.schedule} over all {new:,}: {rate} in step {done + 1}{after}"
