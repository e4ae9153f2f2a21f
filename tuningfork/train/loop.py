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

from tuningfork.data.audit import dataset_digest, report_dict
from tuningfork.data.config import PackConfig
from tuningfork.data.loader import PackLoader, ahead
from tuningfork.data.store import Selection
from tuningfork.errors import NonFiniteError, RunFolderError, enough_memory
from tuningfork.files import clear_abandoned
from tuningfork.models.policy import graphs_compiled
from tuningfork.reference.config import ReferenceConfig
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.files import write_json, write_text
from tuningfork.report.run.console import Console, Phase
from tuningfork.report.run.metrics import Evaluation, Interval, StepResult, pair_statistics
from tuningfork.report.run.throughput import RunTotals, peak_flops
from tuningfork.report.run.writer import RunWriter, Scores
from tuningfork.report.sinks import open_sinks
from tuningfork.train import checkpoint
from tuningfork.train.batch import StepBatch
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import OutputConfig, TrainConfig
from tuningfork.train.evaluate import check_start
from tuningfork.train.exported import export_model
from tuningfork.train.extend import check_length, plan
from tuningfork.train.folder import CONFIG, ROWS, to_go_on, with_checksum
from tuningfork.train.held_out import Best, HeldOut, score_held_out
from tuningfork.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from tuningfork.train.setup import Data, Start, dtype_name, model_digest, open_reference, starting_weights
from tuningfork.train.step import train_step
from tuningfork.wording import counted


@dataclass
class RunResult:
    """What a run ended with."""

    folder: Path
    finished: bool  # false after Ctrl-C or SIGTERM: the folder can be resumed
    steps_done: int
    total_steps: int
    ends: tuple[Scores, ...] = ()  # the first and the last line of training steps in metrics.jsonl
    pairs_checked: int | None = None  # by the step-0 check; None without a reference
    before: Evaluation | None = None
    after: Evaluation | None = None
    best: Best | None = None  # of the steps that have a checkpoint; None without train.eval_every
    no_gain: bool = False  # no step that was looked at is better than the starting model, by train.best_by
    exported_step: int | None = None
    throughput: dict[str, float | int | None] = field(default_factory=dict)


def run(
    data: Data,
    start: Start,
    config_text: str,
    pack: PackConfig,
    reference_config: ReferenceConfig,
    config: TrainConfig,
    output: OutputConfig,
    console: Console,
    before: TrainConfig | None = None,
) -> RunResult:
    """Train, or continue training, in the run folder `output.dir`, which the caller holds (files.exclusive).

    Args:
        config_text: the whole resolved config, kept as the folder's config.yaml.
        before: the settings that the run in the folder has so far; a continued run may become longer.

    Raises:
        ReferenceMismatch: the reference is not that of the starting model.
        NonFiniteError: a number is not finite; the last checkpoint is whole.
        RunFolderError: the disk refuses, or the checkpoint belongs to another run, or to a longer one.
    """
    folder = Path(output.dir)
    checkpoints = folder / "checkpoints"
    clear_abandoned(folder, held=True)
    last = checkpoint.newest(checkpoints)
    saved = None if last is None else checkpoint.progress(last)

    weights = starting_weights(start.policy, console)
    dtype, mode = dtype_name(start.policy.dtype), start.policy.activation_memory
    start_model, held_out = model_digest(start.policy, weights), dataset_digest(data.held_out)
    begun = Progress(0, 0, dataset_digest(data.train), start_model, dtype, mode, held_out, None)
    if last is not None and saved is not None:
        _check_same_run(last, saved, begun, config)  # another model has another reference, which is not worth scoring
    order = plan(len(data.train), config, saved)
    if before is not None and (longer := check_length(folder, len(data.train), before, config, saved)) is not None:
        console.print(longer)
    if config.examples_per_step > len(data.train):
        so = "a step has some more than once" if order.total_examples > len(data.train) else "the run is one step"
        examples_in_all = counted(len(data.train), "example")
        console.print(f"! train.examples_per_step is {config.examples_per_step:,}, but {examples_in_all} are all: {so}")
    loader = PackLoader(data.train, order, data.limits, pin_memory=start.policy.device.type == "cuda")

    # Whatever compares with the starting model happens before a checkpoint is loaded into it.
    reference = None
    result = RunResult(folder, False, 0, order.total_steps)
    if start.objective.needs_reference:
        used, cache = Selection([data.train], order.used_indices()), reference_config.cache
        reference = open_reference(start, pack.share_prompt, cache, used, data.limits, console, data.held_out, weights)
        with console.stage("step-0 check", "checking that margins are exactly 0 before the first step"):
            result.pairs_checked = check_start(start, loader.step(0), reference)
        console.print(f"step-0 check: margin exactly 0 for {result.pairs_checked} of {result.pairs_checked} pairs")
    evaluated = saved is not None and saved.before is not None and saved.held_out_digest == begun.held_out_digest
    if not evaluated:
        if saved is not None and data.held_out:
            console.print(
                "data.eval holds other pairs than when the run began; the starting model is evaluated on these, and "
                "what was found on the others is forgotten"
            )
        with console.startup.time("evaluation"):
            result.before = score_held_out(start, data, reference, console, "evaluating the starting model")

    optimizer = build_optimizer(start.policy.model, config)
    if last is not None:
        with console.stage("checkpoint", f"reading {last}"):
            saved = checkpoint.restore(last, start.policy.model, optimizer)
        result.steps_done, begun = saved.step, replace(begun, examples=saved.examples)
        if evaluated and saved.before is not None:
            result.before = saved.before
        console.print(f"continuing from {last}")
    begun = replace(begun, before=result.before)

    peak = peak_flops(_card(start.policy.device), "bfloat16" if start.policy.dtype == torch.bfloat16 else "float32")
    totals = RunTotals(peak)
    write_text(folder / CONFIG, with_checksum(config_text))
    write_json(folder / ROWS, _accounts(data))
    with RunWriter(folder, resume_at_step=result.steps_done, keep_evaluations=evaluated) as writer:
        console.attach(writer.log)
        writer.attach(open_sinks(output.sinks, folder, result.steps_done + 1, console.print))
        if data.train_report.dropped or (data.held_out_report is not None and data.held_out_report.dropped):
            console.print(f"{folder / ROWS}: each dropped row with its reason")
        console.print(console.startup.line())
        if writer.last_step < result.steps_done:
            console.print(f"{writer.metrics_path}: no line of the steps after {writer.last_step:,} is left")
        held = HeldOut(config, checkpoints, writer, console)
        if result.before is not None and not evaluated:
            held.enter(0, result.before)

        def best() -> int | None:
            return None if held.best is None else held.best.step

        def save() -> None:
            _check_weights(start.policy.model, result.steps_done)
            progress = replace(begun, step=result.steps_done, examples=examples)
            checkpoint.save(checkpoints, progress, start.policy.model, optimizer, output.keep_last, best())

        def look(phase: Phase) -> float:
            """Score the held-out pairs between two steps, and keep the weights if they are the best; the seconds it
            took."""
            looked, name = time.perf_counter(), f"evaluating after step {result.steps_done}"
            with phase.paused():
                found = score_held_out(start, data, reference, console, name, stop_asked)
                if found is not None and held.enter(result.steps_done, found):
                    save()
                    checkpoint.prune(checkpoints, output.keep_last, best())
            return time.perf_counter() - looked

        with_sft = start.objective.config.sft_weight > 0
        if with_sft and data.held_out:
            console.print("the loss of steps has the SFT term (objective.sft_weight) in it; that of held-out pairs not")
        interval, examples, apart = Interval(peak), begun.examples, 0.0
        with (
            _stop_when_asked(console) as stop_asked,
            console.phase("training", order.total_steps, "steps", done=result.steps_done) as phase,
        ):
            if held.due(result.steps_done) and result.steps_done < order.total_steps and not stop_asked():
                look(phase)
            steps = training_steps(loader, start, optimizer, reference, config, result.steps_done)
            for step in () if stop_asked() else steps:
                step = replace(step, seconds=step.seconds - apart)
                result.steps_done, examples, apart = step.step, examples + step.examples, 0.0
                interval.add(step)
                totals.add(step)
                stopping = stop_asked()
                means = step.pairs.means()
                phase.advance(
                    1,
                    {
                        "loss with SFT term" if with_sft else "loss": step.loss_sum / step.examples,
                        "margin": means["rewards/margin"],
                        "accuracy": means["rewards/accuracy"],
                        "tokens/s": step.tokens / step.seconds,
                    },
                )
                ending = step.step == order.total_steps
                saving = step.step % output.save_every == 0 or ending or stopping
                looking = held.due(step.step) and not ending and not stopping
                # A line at every checkpoint too: a run that continues from there has then lost no step.
                if step.step % output.log_every == 0 or saving or looking:
                    writer.line(interval.take())
                if saving:
                    save()
                if looking:
                    apart = look(phase)
                    stopping = stop_asked()
                    if stopping:
                        save()
                if stopping:
                    break
        if stop_asked():  # perhaps while the last checkpoint was written
            console.print(f"stopped after step {result.steps_done} as asked; continue with {to_go_on(folder)}")
            return result

        result.after = score_held_out(start, data, reference, console, "evaluating the trained model")
        if result.after is not None and result.before is not None:
            if held.enter(result.steps_done, result.after):
                checkpoint.prune(checkpoints, output.keep_last, best())
            scores: dict[str, object] = {"before": result.before.as_dict(), "after": result.after.as_dict()}
            if held.best is not None:
                scores["best"] = {"step": held.best.step, **held.best.scores}
            write_json(folder / "eval.json", scores)
            result.no_gain = held.no_gain(result.after.as_dict())
        result.best, result.ends = held.best, writer.ends
        result.throughput = {**totals.summary(), "evaluation_seconds": held.seconds}
        if totals.all.steps or not (folder / "summary.json").exists():
            seconds = {phase: round(spent, 3) for phase, spent in console.startup.seconds.items()}
            write_json(folder / "summary.json", {**result.throughput, "startup_seconds": seconds})
        result.exported_step = best() or result.steps_done if output.export == "best" else result.steps_done
        other = None if result.exported_step == result.steps_done else checkpoint.at(checkpoints, result.exported_step)
        export_model(start, folder, output, result.exported_step, other, console)
    result.finished = True
    return result


def training_steps(
    loader: PackLoader,
    start: Start,
    optimizer: torch.optim.Optimizer,
    reference: ReferenceStore | None,
    config: TrainConfig,
    first: int,
) -> Iterator[StepResult]:
    """Train step after step from step `first` (from 0), and measure each."""
    cuda = start.policy.device.type == "cuda"
    flops = start.policy.flops()
    graphs = -1

    def batches() -> Iterator[tuple[int, StepBatch, int]]:
        for step, packs in loader.steps(first):
            examples = [example for pack in packs for example in pack.examples]
            refs = None if reference is None else reference.lookup(examples)
            yield step, StepBatch.of(packs, start.objective, refs, loader.pin_memory), flops.training(examples)

    begun = waiting = time.perf_counter()
    for step, batch, model_flops in ahead(batches()):
        data_seconds = time.perf_counter() - waiting
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        lr = learning_rate(config, step, loader.order.total_steps)
        set_learning_rate(optimizer, lr)
        torch.manual_seed(config.seed * 2**32 + step)  # for rounding by chance: a pure function of (seed, step)
        try:
            rows = max(len(pairs.pack.input_ids) for pairs in batch.packs)
            with enough_memory(f"step {step + 1}, with packs of up to {rows:,} rows"):
                outcome = train_step(
                    start.policy, start.head, start.objective, optimizer, batch, config.max_grad_norm, step == 0
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
            loss_sum=outcome.loss * len(batch.examples),
            tokens=batch.tokens,
            unique_tokens=batch.unique_tokens,
            answer_tokens=batch.answer_tokens,
            rows=batch.rows,
            pad_rows=batch.rows - batch.unique_tokens,
            seconds=now - begun,
            data_seconds=data_seconds,
            model_flops=model_flops,
            pairs=pair_statistics(
                outcome.rewards[:, 0], outcome.rewards[:, 1], outcome.logps[:, 0], outcome.logps[:, 1]
            ),
            peak_memory_bytes=torch.cuda.max_memory_allocated() if cuda else None,
            compiled=start.compiled and graphs != graphs_compiled(),
        )
        graphs = graphs_compiled()
        begun, waiting = now, time.perf_counter()


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


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


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
