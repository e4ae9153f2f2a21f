"""A run made ready for its next step: what its folder has of it, the reference, the first scores, the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tuningfork.data.packing.loader import Order, PackLoader
from tuningfork.data.token_table import Subset
from tuningfork.distributed.alike import check_alike
from tuningfork.files import clear_abandoned
from tuningfork.recipe.run_config import RunConfig
from tuningfork.reference.code import scoring_digest
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.console import Console
from tuningfork.report.run.metrics import Evaluation
from tuningfork.train import checkpoint
from tuningfork.train.average import averaged
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.evaluate import check_start
from tuningfork.train.extend import check_length
from tuningfork.train.held_out import score_held_out
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.order import doubts, order_of_run
from tuningfork.train.run_folder import CHECKPOINTS
from tuningfork.train.same_run import at_its_beginning, check_same_run
from tuningfork.train.session import Data, Session
from tuningfork.train.setup.reference import open_reference, starting_weights
from tuningfork.train.stall import StallWatch
from tuningfork.wording import counted


@dataclass(frozen=True)
class PreparedRun:
    """A run before its next step, which is its first one or the one behind its last checkpoint."""

    folder: Path
    session: Session
    data: Data
    console: Console
    loader: PackLoader
    reference: ReferenceStore | None
    optimizer: torch.optim.Optimizer
    progress: Progress  # where it stands; its `before` is the starting model on the held-out examples
    checked: int | None  # examples, by the step-0 check; None without a reference
    keeps_evaluations: bool  # those before the last checkpoint were on the held-out examples that it has now
    stall: StallWatch

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def total_steps(self) -> int:
        return self.loader.order.total_steps

    def score_held_out(self, name: str, stop_asked: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """The policy as it is now on the held-out examples, see `held_out.score_held_out`; of its weights the average,
        where one is kept."""
        with averaged(self.optimizer, self.session.policy.spread):
            return score_held_out(self.session, self.data, self.reference, self.console, name, self.stall, stop_asked)


def prepare(
    config: RunConfig, session: Session, data: Data, console: Console, before: TrainConfig | None, stall: StallWatch
) -> PreparedRun:
    """Make a run ready, from its first step or from where it stopped. `before`: the settings it has in its folder.
    `stall`, which is running, watches its evaluations.

    Raises:
        ReferenceMismatch: the reference is not that of the starting model.
        RunFolderError: the checkpoint is damaged, or belongs to another run, or to a longer one.
    """
    folder, ranks = Path(config.output.dir), session.ranks
    if ranks.first:
        clear_abandoned(folder, held=True)
    last = checkpoint.newest(folder / CHECKPOINTS, ranks)
    saved = None if last is None else checkpoint.progress(last)
    weights = starting_weights(session.policy, console, session.ranks)
    begun = at_its_beginning(session, data, weights)
    alike = {"examples of data.train": begun.data_digest, "examples of data.eval": begun.held_out_digest}
    model = {"starting model": begun.start_model, "dtype": begun.dtype, "code": scoring_digest()}
    check_alike(ranks, {**alike, **model}, "Give every machine the same files; those of the first are the run's.")
    if last is not None and saved is not None:
        check_same_run(last, saved, begun, config.train)  # another model has another reference: not worth scoring
    order = _order(config, data, saved, before, console)
    loader = PackLoader(data.train, order, data.limits, pin_memory=session.pin_memory)

    # Whatever compares with the starting model happens before a checkpoint is loaded into it.
    reference = checked = None
    if session.objective.needs_reference:
        used = Subset([data.train], order.used_indices())
        reference = open_reference(config, session, used, data.limits, console, data.held_out, weights)
        checked = _step_0_check(session, loader, reference, console)
    known = None if saved is None or saved.held_out_digest != begun.held_out_digest else saved.before
    start = known or _evaluate_start(session, data, reference, console, stall, continued=saved is not None)

    if session.policy.spread is not None:
        session.policy.spread.release()  # what scoring gathered is not what is moved, saved and loaded
    optimizer = build_optimizer(session.policy.model, config.train)
    progress = replace(begun, before=start)
    if last is not None:
        with console.stage("checkpoint", f"reading {last}"):
            restored = checkpoint.restore(last, session.policy.model, optimizer, ranks)
        progress = replace(progress, step=restored.step, examples=restored.examples, loss_scale=restored.loss_scale)
        console.print(f"continuing from {last}")
        if restored.layout != begun.layout:
            console.print(
                f"! the checkpoint is of another layout ({restored.layout}; now {begun.layout}): gradients add up "
                "in another order, so that the steps from here on equal those of an unbroken run up to rounding"
            )
    return PreparedRun(
        folder=folder,
        session=session,
        data=data,
        console=console,
        loader=loader,
        reference=reference,
        optimizer=optimizer,
        progress=progress,
        checked=checked,
        keeps_evaluations=known is not None,
        stall=stall,
    )


def _order(
    config: RunConfig, data: Data, saved: Progress | None, before: TrainConfig | None, console: Console
) -> Order:
    """The order of the examples to the run's end, with a word on a run that is made longer, or has few examples."""
    train, examples = config.train, len(data.train)
    order = order_of_run(data.train, train, saved, data.stages)
    if order.groups is not None:
        console.print(f"order: {order.groups}")
    if before is not None:
        longer = check_length(Path(config.output.dir), data.train, before, train, saved, data.stages)
        if longer is not None:
            console.print(longer)
    if train.tokens_per_step is None and train.examples_per_step > examples:
        so = "a step has some more than once" if order.total_examples > examples else "the run is one step"
        in_all = counted(examples, "example")
        console.print(f"! train.examples_per_step is {train.examples_per_step:,}, but {in_all} are all: {so}")
    for doubt in doubts(data.train, train, order.total_steps, config.pack.share):
        console.print(f"! {doubt}")
    return order


def _step_0_check(session: Session, loader: PackLoader, reference: ReferenceStore, console: Console) -> int:
    """Compare the first step's log-probs with the reference; the number of its examples. Raises ReferenceMismatch."""
    with console.stage("step-0 check", "checking that margins are exactly 0 before the first step"):
        examples = loader.examples_of(0)
        checked = session.ranks.total(check_start(session, session.packs(examples, loader.limits), reference))
    unit = session.objective.unit
    console.print(f"step-0 check: margin exactly 0 for {checked} of {checked} {unit}")
    return checked


def _evaluate_start(
    session: Session,
    data: Data,
    reference: ReferenceStore | None,
    console: Console,
    stall: StallWatch,
    continued: bool,
) -> Evaluation | None:
    """The starting model on the held-out examples. A run that is `continued` comes here where these are others now."""
    if continued and data.held_out:
        console.print(
            "data.eval holds other rows than when the run began; the starting model is evaluated on these, and "
            "what was found on the others is forgotten"
        )
    with console.startup.time("evaluation"):
        return score_held_out(session, data, reference, console, "evaluating the starting model", stall)
