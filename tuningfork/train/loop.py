"""The training loop: step after step, and between two what the settings ask for there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from tuningfork.distributed.pace import PaceWatch
from tuningfork.objective.base import Objective
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import Phase
from tuningfork.report.run.metrics import Interval, StepResult
from tuningfork.report.run.throughput import Dtype, RunTotals, peak_flops
from tuningfork.report.run.writer import Records
from tuningfork.train.checkpointer import Checkpointer
from tuningfork.train.gates import GateWatch
from tuningfork.train.held_out import HeldOut
from tuningfork.train.late import LateCompilations
from tuningfork.train.prepare import PreparedRun
from tuningfork.train.session import Session
from tuningfork.train.steps import training_steps
from tuningfork.train.stop import stop_when_asked


class TrainingLoop:
    """Trains a prepared run to its last step, or until held-out numbers stop getting better: lines of metrics,
    checkpoints and evaluations lie between the steps.

    Attributes:
        progress: where the run stands.
        totals: of the steps that this process made.
    """

    def __init__(
        self, config: RunConfig, run: PreparedRun, held_out: HeldOut, checkpointer: Checkpointer, writer: Records
    ) -> None:
        self.config = config.train
        self.output = config.output
        self.run, self.held_out, self.checkpointer, self.writer = run, held_out, checkpointer, writer
        self.progress = run.progress
        self.totals = RunTotals(_peak_flops(run.session, config.model.tf32))
        self._pace, self._hosts = PaceWatch(), run.session.ranks.all(socket.gethostname())
        self._late = LateCompilations(run.console, run.session.ranks)
        self._gates = GateWatch()
        self._stall = run.stall

    def train(self) -> bool:
        """Train to the end. False where the user asked to stop; the last step done is saved then."""
        run, total_steps = self.run, self.run.total_steps
        interval, apart = Interval(self.totals.peak_flops), 0.0
        with (
            stop_when_asked(run.console) as asked,
            self.checkpointer,
            run.console.phase("training", total_steps, "steps", done=self.progress.step) as phase,
        ):

            def stop_asked() -> bool:
                return run.session.ranks.any(asked() or self.checkpointer.failed)  # saving again says why it failed

            if self.held_out.due(self.progress.step) and self.progress.step < total_steps and not stop_asked():
                self._evaluate(phase, stop_asked)
            steps = training_steps(
                run.loader, run.session, run.optimizer, run.reference, self.config, self.progress.step,
                self.progress.loss_scale,
            )  # fmt: skip
            self._stall.beat(f"step {self.progress.step + 1}")
            over = self.held_out.stops(self.progress.step)
            for step in () if stop_asked() or over else steps:
                step = self._late.step(replace(step, seconds=step.seconds - apart))
                apart = 0.0
                self._enter(step)
                interval.add(step)
                self.totals.add(step)
                self._watch(step)
                stopping = stop_asked()
                phase.advance(1, _headline(step, run.session.objective))
                ending = step.step == total_steps
                saving = step.step % self.output.save_every == 0 or ending or stopping
                evaluating = self.held_out.due(step.step) and not ending and not stopping
                # A line at every checkpoint too: a run that continues from there has then lost no step.
                if step.step % self.output.log_every == 0 or saving or evaluating:
                    self.writer.line(interval.take())
                if saving:
                    self._save()
                if evaluating:
                    apart = self._evaluate(phase, stop_asked)
                    stopping = stop_asked()
                    over = self.held_out.stops(step.step) and not stopping
                    if stopping or over:
                        self._save()
                if stopping or over:
                    break
                self._stall.beat("the last checkpoint" if ending else f"step {step.step + 1}")
        self._stall.rest()
        return not stop_asked()  # it may have been asked while the last checkpoint was written

    def _enter(self, step: StepResult) -> None:
        """Note where the run stands behind a step."""
        before, scale = self.progress, self.progress.loss_scale
        behind = None if scale is None else scale.after(step.skipped)
        self.progress = replace(before, step=step.step, examples=before.examples + step.examples, loss_scale=behind)

    def _watch(self, step: StepResult) -> None:
        """Say what goes wrong step after step: gates that have collapsed, a rank that is slower than the others."""
        if said := self._gates.add(step.statistics.values()):
            self.run.console.print(f"! after step {step.step}, {said}")
        slow = None if step.ranks is None else self._pace.add(step.ranks.paces)
        if slow is not None:
            host = self._hosts[slow.rank]
            self.run.console.print(
                f"! rank {slow.rank} ({host}) takes {slow.times:.1f} times as long as the others for the same work, so "
                "all wait for it: look for another program on its device, or heat; tuningfork check-cluster measures it"
            )

    def _save(self) -> None:
        self._stall.beat(f"saving step {self.progress.step}")
        self.checkpointer.save(self.progress)

    def _evaluate(self, phase: Phase, stop_asked: Callable[[], bool]) -> float:
        """Score the held-out examples, and keep the weights if they are the best; the seconds that it took."""
        begun, step = time.perf_counter(), self.progress.step
        with phase.paused(), self._late.evaluation(step):
            found = self.run.score_held_out(f"evaluating after step {step}", stop_asked)
            if found is not None and self.held_out.enter(step, found):
                self._save()
            if found is not None and self.held_out.stops(step):
                self.held_out.say_stop(step)
        return time.perf_counter() - begun


def _headline(step: StepResult, objective: Objective) -> dict[str, float | None]:
    """What the progress line says of a step."""
    means = step.statistics.values()
    of_objective = {heading: means[key] for heading, key in objective.headline.items()}
    loss, _ = objective.loss_names
    return {loss: step.loss, **of_objective, "tokens/s": step.tokens / step.seconds}


def _peak_flops(session: Session, tf32: bool) -> float | None:
    """Peak flops of the run's devices together in the dtype that it computes in; None where they are not known."""
    device, dtype = session.scorer.device, session.policy.dtype
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    of_float32: Dtype = "tf32" if tf32 else "float32"
    of_one = peak_flops(card, "bfloat16" if dtype in (torch.bfloat16, torch.float16) else of_float32)
    return of_one and session.ranks.size * of_one
