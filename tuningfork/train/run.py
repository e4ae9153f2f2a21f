"""A training run, from its first step or from where it stopped, to the exported model."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch

from tuningfork.data.packing.loader import PackLoader
from tuningfork.data.prepare import dataset_digest, report_dict
from tuningfork.data.token_table import Subset
from tuningfork.errors import NonFiniteError, RunFolderError
from tuningfork.files import clear_abandoned
from tuningfork.objective.base import Objective
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.files import write_json, write_text
from tuningfork.report.run.console import Console
from tuningfork.report.run.metrics import Evaluation, Interval, StepResult
from tuningfork.report.run.throughput import RunTotals, peak_flops
from tuningfork.report.run.writer import RunWriter, Scores
from tuningfork.report.sinks import open_sinks
from tuningfork.run_config import RunConfig
from tuningfork.train import checkpoint
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.evaluate import check_start
from tuningfork.train.exported import export_model
from tuningfork.train.extend import check_length, plan
from tuningfork.train.held_out import Best, HeldOut, score_held_out
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.run_folder import CONFIG, ROWS, to_go_on, with_checksum
from tuningfork.train.session import Data, Session
from tuningfork.train.setup.device import dtype_name
from tuningfork.train.setup.reference import model_digest, open_reference, starting_weights
from tuningfork.train.steps import training_steps
from tuningfork.wording import counted


@dataclass
class RunResult:
    """What a run ended with."""

    folder: Path
    finished: bool  # false after Ctrl-C or SIGTERM: the folder can be resumed
    steps_done: int
    total_steps: int
    ends: tuple[Scores, ...] = ()  # the first and the last line of training steps in metrics.jsonl
    checked: int | None = None  # examples, by the step-0 check; None without a reference
    before: Evaluation | None = None
    after: Evaluation | None = None
    best: Best | None = None  # of the steps that have a checkpoint; None without train.eval_every
    no_gain: bool = False  # no step that was looked at is better than the starting model, by train.best_by
    exported_step: int | None = None
    throughput: dict[str, float | int | None] = field(default_factory=dict)


def run(
    config: RunConfig, session: Session, data: Data, console: Console, kept: str, before: TrainConfig | None = None
) -> RunResult:
    """Train, or continue training, in the run folder `output.dir`, which the caller holds (files.exclusive).

    Args:
        kept: all settings as the folder's config.yaml keeps them; what came from the hub has its name there.
        before: the settings that the run in the folder has so far; a continued run may become longer.

    Raises:
        ReferenceMismatch: the reference is not that of the starting model.
        NonFiniteError: a number is not finite; the last checkpoint is whole.
        RunFolderError: the disk refuses, or the checkpoint belongs to another run, or to a longer one.
    """
    train = config.train
    output = config.output
    folder = Path(output.dir)
    checkpoints = folder / "checkpoints"
    clear_abandoned(folder, held=True)
    last = checkpoint.newest(checkpoints)
    saved = None if last is None else checkpoint.progress(last)

    weights = starting_weights(session.policy, console)
    begun = _at_its_beginning(session, data, weights)
    if last is not None and saved is not None:
        _check_same_run(last, saved, begun, train)  # another model has another reference, which is not worth scoring
    order = plan(len(data.train), train, saved)
    if before is not None and (longer := check_length(folder, len(data.train), before, train, saved)) is not None:
        console.print(longer)
    if train.examples_per_step > len(data.train):
        so = "a step has some more than once" if order.total_examples > len(data.train) else "the run is one step"
        examples_in_all = counted(len(data.train), "example")
        console.print(f"! train.examples_per_step is {train.examples_per_step:,}, but {examples_in_all} are all: {so}")
    loader = PackLoader(data.train, order, data.limits, pin_memory=session.pin_memory)

    # Whatever compares with the starting model happens before a checkpoint is loaded into it.
    result = RunResult(folder, False, 0, order.total_steps)
    reference = None
    if session.objective.needs_reference:
        used = Subset([data.train], order.used_indices())
        reference = open_reference(config, session, used, data.limits, console, data.held_out, weights)
        with console.stage("step-0 check", "checking that margins are exactly 0 before the first step"):
            result.checked = check_start(session, loader.step(0), reference)
        unit = session.objective.unit
        console.print(f"step-0 check: margin exactly 0 for {result.checked} of {result.checked} {unit}")
    evaluated = saved is not None and saved.before is not None and saved.held_out_digest == begun.held_out_digest
    if not evaluated:
        if saved is not None and data.held_out:
            console.print(
                "data.eval holds other pairs than when the run began; the starting model is evaluated on these, and "
                "what was found on the others is forgotten"
            )
        with console.startup.time("evaluation"):
            result.before = score_held_out(session, data, reference, console, "evaluating the starting model")

    optimizer = build_optimizer(session.policy.model, train)
    if last is not None:
        with console.stage("checkpoint", f"reading {last}"):
            saved = checkpoint.restore(last, session.policy.model, optimizer)
        result.steps_done, begun = saved.step, replace(begun, examples=saved.examples)
        if evaluated and saved.before is not None:
            result.before = saved.before
        console.print(f"continuing from {last}")
    begun = replace(begun, before=result.before)

    if session.ranks.first:
        write_text(folder / CONFIG, with_checksum(kept))
        write_json(folder / ROWS, _accounts(data))
    with RunWriter(folder, resume_at_step=result.steps_done, keep_evaluations=evaluated) as writer:
        console.attach(writer.log)
        writer.attach(open_sinks(output.sinks, folder, result.steps_done + 1, console.print))
        if data.train_report.dropped or (data.held_out_report is not None and data.held_out_report.dropped):
            console.print(f"{folder / ROWS}: each dropped row with its reason")
        console.print(console.startup.line())
        if writer.last_step < result.steps_done:
            console.print(f"{writer.metrics_path}: no line of the steps after {writer.last_step:,} is left")
        held = HeldOut(train, checkpoints, writer, console, session.objective)
        if result.before is not None and not evaluated:
            held.enter(0, result.before)
        of_steps, of_evaluations = session.objective.loss_names
        if of_steps != of_evaluations and data.held_out:
            console.print(
                f"the loss of steps is the {of_steps}, that of held-out {session.objective.unit} the {of_evaluations}"
            )
        keeper = _Keeper(checkpoints, output.keep_last, session.policy.model, optimizer, begun, held)
        totals = RunTotals(_peak_flops(session))
        if not _train(config, session, data, reference, loader, keeper, writer, totals, result, console):
            console.print(f"stopped after step {result.steps_done} as asked; continue with {to_go_on(folder)}")
            return result
        result.after = score_held_out(session, data, reference, console, "evaluating the trained model")
        if result.after is not None and result.before is not None:
            if held.enter(result.steps_done, result.after):
                keeper.prune()
            _write_scores(folder, result, held)
        result.best, result.ends = held.best, writer.ends
        result.throughput = {**totals.summary(), "evaluation_seconds": held.seconds}
        if totals.all.steps or not (folder / "summary.json").exists():
            seconds = {phase: round(spent, 3) for phase, spent in console.startup.seconds.items()}
            write_json(folder / "summary.json", {**result.throughput, "startup_seconds": seconds})
        wanted = keeper.best if output.export == "best" else None
        result.exported_step = wanted or result.steps_done
        other = None if result.exported_step == result.steps_done else checkpoint.at(checkpoints, result.exported_step)
        export_model(session, folder, output, result.exported_step, other, console)
    result.finished = True
    return result


@dataclass
class _Keeper:
    """Keeps what a run has come to, and of its checkpoints the last ones and the best."""

    checkpoints: Path
    keep_last: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    begun: Progress  # of this process: its examples are those that were trained on before
    held: HeldOut

    @property
    def best(self) -> int | None:
        """The best step by the held-out examples, of those that have a checkpoint."""
        return None if self.held.best is None else self.held.best.step

    def save(self, step: int, examples: int) -> None:
        """Write a checkpoint after `step` steps on so many examples. Raises NonFiniteError, RunFolderError."""
        _check_weights(self.model, step)
        progress = replace(self.begun, step=step, examples=examples)
        checkpoint.save(self.checkpoints, progress, self.model, self.optimizer, self.keep_last, self.best)

    def prune(self) -> None:
        """Remove the checkpoints that are neither among the last nor the best."""
        checkpoint.prune(self.checkpoints, self.keep_last, self.best)


def _train(
    config: RunConfig,
    session: Session,
    data: Data,
    reference: ReferenceStore | None,
    loader: PackLoader,
    keeper: _Keeper,
    writer: RunWriter,
    totals: RunTotals,
    result: RunResult,
    console: Console,
) -> bool:
    """Train from `result.steps_done` on, with what happens between steps. False where the user asked to stop."""
    train = config.train
    output = config.output
    held, total_steps = keeper.held, loader.order.total_steps
    interval, examples, apart = Interval(totals.peak_flops), keeper.begun.examples, 0.0
    with (
        _stop_when_asked(console) as asked,
        console.phase("training", total_steps, "steps", done=result.steps_done) as phase,
    ):

        def stop_asked() -> bool:
            return session.ranks.any(asked())

        def look() -> float:
            """Score the held-out examples, and keep the weights if they are the best; the seconds that it took."""
            looked, name = time.perf_counter(), f"evaluating after step {result.steps_done}"
            with phase.paused():
                found = score_held_out(session, data, reference, console, name, stop_asked)
                if found is not None and held.enter(result.steps_done, found):
                    keeper.save(result.steps_done, examples)
                    keeper.prune()
            return time.perf_counter() - looked

        if held.due(result.steps_done) and result.steps_done < total_steps and not stop_asked():
            look()
        steps = training_steps(loader, session, keeper.optimizer, reference, train, result.steps_done)
        for step in () if stop_asked() else steps:
            step = replace(step, seconds=step.seconds - apart)
            result.steps_done, examples, apart = step.step, examples + step.examples, 0.0
            interval.add(step)
            totals.add(step)
            stopping = stop_asked()
            phase.advance(1, _headline(step, session.objective))
            ending = step.step == total_steps
            saving = step.step % output.save_every == 0 or ending or stopping
            looking = held.due(step.step) and not ending and not stopping
            # A line at every checkpoint too: a run that continues from there has then lost no step.
            if step.step % output.log_every == 0 or saving or looking:
                writer.line(interval.take())
            if saving:
                keeper.save(step.step, examples)
            if looking:
                apart = look()
                stopping = stop_asked()
                if stopping:
                    keeper.save(step.step, examples)
            if stopping:
                break
    return not stop_asked()  # it may have been asked while the last checkpoint was written


def _headline(step: StepResult, objective: Objective) -> dict[str, float | None]:
    """What the progress line says of a step."""
    means = step.statistics.values()
    of_objective = {heading: means[key] for heading, key in objective.headline.items()}
    loss, _ = objective.loss_names
    return {loss: step.loss, **of_objective, "tokens/s": step.tokens / step.seconds}


def _at_its_beginning(session: Session, data: Data, weights: str) -> Progress:
    """Where a run stands before its first step, and what it is: `weights` is the hash of the starting model's."""
    return Progress(
        step=0,
        examples=0,
        data_digest=dataset_digest(data.train),
        start_model=model_digest(session.policy, weights),
        dtype=dtype_name(session.policy.dtype),
        activation_memory=session.policy.activation_memory,
        held_out_digest=dataset_digest(data.held_out),
        before=None,
    )


def _write_scores(folder: Path, result: RunResult, held: HeldOut) -> None:
    """eval.json: the held-out numbers before and after, and those of the best step."""
    assert result.before is not None and result.after is not None
    scores: dict[str, object] = {"before": result.before.as_dict(), "after": result.after.as_dict()}
    if held.best is not None:
        scores["best"] = {"step": held.best.step, **held.best.scores}
    write_json(folder / "eval.json", scores)
    result.no_gain = held.no_gain(result.after.as_dict())


def _check_same_run(path: Path, saved: Progress, begun: Progress, config: TrainConfig) -> None:
    """Whether a checkpoint is one of the run that the settings, data and model describe now. Raises RunFolderError."""
    if saved.data_digest != begun.data_digest:
        raise RunFolderError(
            f"{path} was trained on other examples than data.train gives now. Restore the data file; or, where the "
            "chat template prints the date, set data.date to that of the run; or choose another output.dir."
        )
    if saved.start_model != begun.start_model:
        raise RunFolderError(
            f"{path} belongs to a run that started from another model (weights or config.json) than model.path holds "
            "now. Restore that model, or choose another output.dir."
        )
    if saved.dtype != begun.dtype:
        raise RunFolderError(
            f"{path} was computed in {saved.dtype}, this run would go on in {begun.dtype}. Set model.dtype to "
            f"{saved.dtype}: auto names another dtype on another device."
        )
    if not saved.step <= saved.examples <= saved.step * config.examples_per_step:
        raise RunFolderError(
            f"{path} says that {saved.step:,} steps of at most {config.examples_per_step:,} examples trained on "
            f"{saved.examples:,}, so no run has written it. Remove that folder; --resume then takes the checkpoint "
            "before it."
        )


def _check_weights(model: torch.nn.Module, step: int) -> None:
    """Weights that are no numbers are never saved: what was saved before stays the newest."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise NonFiniteError(f"step {step}: the step moved {name} to nan or infinity. Lower train.learning_rate.")


def _accounts(data: Data) -> dict[str, object]:
    """data_rows.json: what became of every row, under the names that the two data sets have in data_report.json."""
    held_out = None if data.held_out_report is None else report_dict(data.held_out_report)
    return {"train": report_dict(data.train_report), "eval": held_out}


def _peak_flops(session: Session) -> float | None:
    """Peak flops of the run's device in the dtype that it computes in; None where they are not known."""
    device, dtype = session.scorer.device, session.policy.dtype
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return peak_flops(card, "bfloat16" if dtype == torch.bfloat16 else "float32")


@contextmanager
def _stop_when_asked(console: Console) -> Iterator[Callable[[], bool]]:
    """Ctrl-C or SIGTERM once asks to stop after the current step; a second one stops at once, as KeyboardInterrupt."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        with suppress(RuntimeError):  # the signal came in the middle of a write to the screen
            console.print("stopping after this step; press Ctrl-C again to stop at once")

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever embeds us handles signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
