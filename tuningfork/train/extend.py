"""A run that is made longer when it is continued: where its data and its learning rate go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tuningfork.errors import RunFolderError
from tuningfork.records import TokenExample
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import learning_rate
from tuningfork.train.order import order_of_run
from tuningfork.wording import counted


def check_length(
    folder: Path,
    examples: Sequence[TokenExample],
    before: TrainConfig,
    now: TrainConfig,
    saved: Progress | None,
    stages: Sequence[int] = (),
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
    old, new = (order_of_run(examples, config, saved, stages).total_steps for config in (before, now))
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
