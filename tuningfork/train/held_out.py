"""Held-out pairs in the course of a run: when they are scored, where that is shown, and which step did best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tuningfork.objective.base import Objective
from tuningfork.ranges import phase
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.console import Console, score
from tuningfork.report.run.metrics import Evaluation
from tuningfork.report.run.writer import Records, Scores
from tuningfork.train import checkpoint
from tuningfork.train.config import TrainConfig
from tuningfork.train.early_stop import MEASURES, out_of_patience
from tuningfork.train.evaluate import evaluate
from tuningfork.train.session import Data, Session
from tuningfork.train.stall import StallWatch


@dataclass(frozen=True, slots=True)
class Best:
    """The step that did best on the held-out pairs, of those that have a checkpoint, and its numbers."""

    step: int
    scores: Scores


class _Stopped(Exception):
    """The user asked to stop in the middle of an evaluation."""


def score_held_out(
    session: Session,
    data: Data,
    reference: ReferenceStore | None,
    console: Console,
    name: str,
    stall: StallWatch,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The policy as it is on the held-out pairs, by the graph that trains it; a phase of this `name` shows how far it
    is, and each of its packs has to come in the time that `stall` gives it. None where there are no such pairs, or
    where the user asked to stop meanwhile."""
    if not data.held_out:
        return None
    with (
        phase("evaluation"),
        stall.watching(name) as alive,
        console.phase(name, len(data.held_out), session.objective.unit) as shown,
    ):

        def scored(count: int) -> None:
            alive()
            shown.advance(count)
            if shown.done < shown.total and stop_asked():
                raise _Stopped

        try:
            return evaluate(session, data.held_out, data.limits, reference, scored)
        except _Stopped:
            return None


class HeldOut:
    """The evaluations of a run, and the best step of them.

    What was found before a kill is read off the lines of metrics.jsonl, and what can be had of it off the checkpoints.
    """

    def __init__(
        self, config: TrainConfig, checkpoints: Path, writer: Records, console: Console, objective: Objective
    ) -> None:
        self.config, self.objective = config, objective
        self.checkpoints = checkpoints
        self.every, self.by = config.eval_every, config.best_by
        self.writer, self.console = writer, console
        self.best: Best | None = None
        self.seconds = 0.0  # that evaluations took in this process
        self._newest: tuple[int, Evaluation] | None = None
        self._asked = False  # whether the answers are swapped
        for step, scores in sorted(writer.evaluations.items()):
            if checkpoint.at(checkpoints, step).exists():
                self._consider(step, scores)

    def due(self, step: int) -> bool:
        """Whether an evaluation belongs behind this step, were it not the last one, and has not been made."""
        return self.every is not None and step > 0 and step % self.every == 0 and step not in self.writer.evaluations

    def enter(self, step: int, evaluation: Evaluation) -> bool:
        """Put an evaluation after `step` steps into the records. True if that step is the best so far."""
        scores = evaluation.as_dict()
        if step not in self.writer.evaluations:
            self.writer.evaluation(step, scores, evaluation.seconds)
        self.seconds += evaluation.seconds
        self._newest = step, evaluation
        best = step > 0 and self._consider(step, scores)
        headline = {"loss": "loss", **self.objective.headline}
        shown = ((name, scores[key]) for name, key in headline.items())
        numbers = [f"{name} {score(name, value)}" for name, value in shown if value is not None]
        said = f"step {step}: held-out {', '.join(numbers)}"
        notes = [f"the best so far by {self.by}"] if best else []
        if step > 0 and self.no_gain(scores):
            notes.append("no step is better than the starting model")
        self.console.print("; ".join([said, *notes]))
        self._ask(step, scores)
        return best

    def entered(self, step: int) -> Evaluation | None:
        """The evaluation after `step` steps, if it is the last that this process has entered."""
        return None if self._newest is None or self._newest[0] != step else self._newest[1]

    def stops(self, step: int) -> bool:
        """Whether the run stops early behind its evaluation after `step` steps; see early_stop.py."""
        return out_of_patience(self.writer.evaluations, step, self.config) is not None

    def say_stop(self, step: int) -> None:
        """Say why it does, and which checkpoint is the best."""
        why = out_of_patience(self.writer.evaluations, step, self.config)
        best = "none" if self.best is None else checkpoint.at(self.checkpoints, self.best.step)
        self.console.print(f"stopping early after step {step}: {why}; the best checkpoint: {best}")

    def no_gain(self, scores: Scores) -> bool:
        """Whether the best step is no better than the starting model; where no best is kept, that of these scores."""
        key, sign = MEASURES[self.by]
        start = self.writer.evaluations.get(0, {}).get(key)
        value = (scores if self.best is None else self.best.scores)[key]
        return value is not None and start is not None and sign * value <= sign * start

    def _ask(self, step: int, scores: Scores) -> None:
        """Ask, once, whether the answers are swapped: where accuracy is below that of the starting model, and below
        chance by more than two standard errors of guessing."""
        accuracy, examples = scores.get("rewards/accuracy"), scores[self.objective.unit]
        start = self.writer.evaluations.get(0, {}).get("rewards/accuracy")
        if self._asked or step == 0 or accuracy is None or not examples or (start is not None and accuracy >= start):
            return
        if accuracy < 0.5 - 2 * (0.25 / examples) ** 0.5:
            self._asked = True
            self.console.print(
                f"! held-out accuracy is {accuracy:.1%} of {int(examples):,} {self.objective.unit}, which is less than "
                "chance gives: are chosen and rejected swapped, in data.eval or in data.train?"
            )

    def _consider(self, step: int, scores: Scores) -> bool:
        """Whether this step is better than all before; without train.eval_every nobody asks which is the best."""
        if self.every is None:
            return False
        key, sign = MEASURES[self.by]
        value, other = scores[key], None if self.best is None else self.best.scores[key]
        if value is None or (other is not None and sign * value <= sign * other):
            return False
        self.best = Best(step, scores)
        return True
