"""A training run, from its first step or from where it stopped, to the exported model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuningfork.data.prepare import report_dict
from tuningfork.ranges import ranges
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.files import write_json, write_text
from tuningfork.report.run.console import Console
from tuningfork.report.run.metrics import Evaluation
from tuningfork.report.run.writer import Records, RunWriter, Scores
from tuningfork.report.sinks import open_sinks
from tuningfork.train import checkpoint
from tuningfork.train.checkpointer import Checkpointer
from tuningfork.train.config import OutputConfig, TrainConfig
from tuningfork.train.exported import export_model
from tuningfork.train.held_out import Best, HeldOut
from tuningfork.train.loop import TrainingLoop
from tuningfork.train.prepare import PreparedRun, prepare
from tuningfork.train.run_folder import CONFIG, ROWS, stalls_of, to_go_on, with_checksum
from tuningfork.train.session import Data, Session
from tuningfork.train.stall import StallWatch


@dataclass(frozen=True)
class RunResult:
    """What a run ended with. What has a default is left at it where the run stopped before its last step."""

    folder: Path
    finished: bool  # false after Ctrl-C or SIGTERM: the folder can be resumed
    steps_done: int
    total_steps: int
    checked: int | None  # examples, by the step-0 check; None without a reference
    before: Evaluation | None
    after: Evaluation | None = None
    ends: tuple[Scores, ...] = ()  # the first and the last line of training steps in metrics.jsonl
    best: Best | None = None  # of the steps that have a checkpoint; None without train.eval_every
    no_gain: bool = False  # no step that was looked at is better than the starting model, by train.best_by
    exported_step: int | None = None
    throughput: Mapping[str, float | int | None] = field(default_factory=dict)


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
    stalls = stalls_of(Path(config.output.dir), session.ranks.rank)
    with ranges(config.output.nvtx_ranges), StallWatch(config.output.stall_s, stalls, console.print) as stall:
        prepared = prepare(config, session, data, console, before, stall)
        if session.ranks.first:
            write_text(prepared.folder / CONFIG, with_checksum(kept))
            write_json(prepared.folder / ROWS, _accounts(data))
        with _records(prepared) as writer:
            return _run(config, prepared, writer)


def _run(config: RunConfig, run: PreparedRun, writer: Records) -> RunResult:
    """Train a run that is ready to its end, or until the user asks to stop."""
    if isinstance(writer, RunWriter):
        _open_records(config.output, run, writer)
    held_out = _open_held_out(config.train, run, writer)
    checkpointer = Checkpointer(run.checkpoints, config.output, run.session, run.optimizer, held_out)
    loop = TrainingLoop(config, run, held_out, checkpointer, writer)
    if loop.train():
        return _finish(config.output, run, loop)
    step = loop.progress.step
    run.console.print(f"stopped after step {step} as asked; continue with {to_go_on(run.folder, run.session.ranks)}")
    return RunResult(run.folder, False, step, run.total_steps, run.checked, run.progress.before)


def _records(run: PreparedRun) -> Records:
    """The running records: the first rank writes them, and the others know which evaluations they have."""
    ranks, writer = run.session.ranks, None
    if ranks.first:
        writer = RunWriter(run.folder, resume_at_step=run.progress.step, keep_evaluations=run.keeps_evaluations)
    evaluations = ranks.from_first(None if writer is None else writer.evaluations)
    return writer or Records(evaluations)


def _open_records(output: OutputConfig, run: PreparedRun, writer: RunWriter) -> None:
    """Have console and sinks write where the run does, and say what the first lines of its log should have."""
    console, data, step = run.console, run.data, run.progress.step
    console.attach(writer.log)
    writer.attach(open_sinks(output.sinks, run.folder, step + 1, console.print))
    if data.train_report.dropped or (data.held_out_report is not None and data.held_out_report.dropped):
        console.print(f"{run.folder / ROWS}: each dropped row with its reason")
    console.print(console.startup.line())
    if writer.last_step < step:
        console.print(f"{writer.metrics_path}: no line of the steps after {writer.last_step:,} is left")


def _open_held_out(train: TrainConfig, run: PreparedRun, writer: Records) -> HeldOut:
    """The evaluations of the run so far, that of the starting model among them."""
    console, objective, before = run.console, run.session.objective, run.progress.before
    held_out = HeldOut(train, run.checkpoints, writer, console, objective)
    if before is not None and not run.keeps_evaluations:
        held_out.enter(0, before)
    of_steps, of_evaluations = objective.loss_names
    if of_steps != of_evaluations and run.data.held_out:
        console.print(f"the loss of steps is the {of_steps}, that of held-out {objective.unit} the {of_evaluations}")
    return held_out


def _finish(output: OutputConfig, run: PreparedRun, loop: TrainingLoop) -> RunResult:
    """What follows the last step: the last evaluation, eval.json, summary.json, the exported model."""
    held_out, before, step = loop.held_out, run.progress.before, loop.progress.step
    no_gain = False
    after = held_out.entered(step)  # that by which the run has stopped early
    if after is None:
        after = run.score_held_out("evaluating the trained model")
        if after is not None and held_out.enter(step, after):
            loop.checkpointer.prune()
    if after is not None and before is not None:
        if run.session.ranks.first:
            _write_scores(run.folder, before, after, held_out.best)
        no_gain = held_out.no_gain(after.as_dict())
    throughput = {**loop.totals.summary(), "evaluation_seconds": held_out.seconds}
    new = loop.totals.all.steps or not (run.folder / "summary.json").exists()
    if run.session.ranks.first and new:
        _write_summary(run.folder, throughput, run.console)
    wanted = loop.checkpointer.best if output.export == "best" else None
    exported = wanted or step
    other = None if exported == step else checkpoint.at(run.checkpoints, exported)
    export_model(run.session, run.optimizer, run.folder, output, exported, other, run.console)
    return RunResult(
        folder=run.folder,
        finished=True,
        steps_done=step,
        total_steps=run.total_steps,
        checked=run.checked,
        before=before,
        after=after,
        ends=loop.writer.ends,
        best=held_out.best,
        no_gain=no_gain,
        exported_step=exported,
        throughput=throughput,
    )


def _accounts(data: Data) -> dict[str, object]:
    """data_rows.json: what became of every row, under the names that the two data sets have in data_report.json."""
    held_out = None if data.held_out_report is None else report_dict(data.held_out_report)
    return {"train": report_dict(data.train_report), "eval": held_out}


def _write_scores(folder: Path, before: Evaluation, after: Evaluation, best: Best | None) -> None:
    """eval.json: the held-out numbers before and after, and those of the best step."""
    scores: dict[str, object] = {"before": before.as_dict(), "after": after.as_dict()}
    if best is not None:
        scores["best"] = {"step": best.step, **best.scores}
    write_json(folder / "eval.json", scores)


def _write_summary(folder: Path, throughput: Mapping[str, float | int | None], console: Console) -> None:
    """summary.json: the totals and rates of the steps that this process made, and how long its start took."""
    seconds = {phase: round(spent, 3) for phase, spent in console.startup.seconds.items()}
    write_json(folder / "summary.json", {**throughput, "startup_seconds": seconds})
