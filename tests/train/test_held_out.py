"""What is said of held-out numbers that get worse."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tuningfork.objective.pairs import DPO
from tuningfork.report.run.console import Console
from tuningfork.report.run.metrics import Means
from tuningfork.report.run.writer import RunWriter
from tuningfork.train.config import TrainConfig
from tuningfork.train.evaluate import Evaluation
from tuningfork.train.held_out import HeldOut

NO_GAIN = "no step is better than the starting model"


def found(loss: float, correct: float = 50.0, pairs: int = 100) -> Evaluation:
    sums = {**dict.fromkeys(DPO.statistics_defined, 0.0), "rewards/accuracy": correct}
    return Evaluation(pairs, "pairs", loss, Means(sums, dict.fromkeys(sums, pairs)))


def said(folder: Path, config: TrainConfig, *evaluations: Evaluation) -> tuple[HeldOut, list[str]]:
    """What is said of the starting model, and after steps 1, 2, ..."""
    screen = io.StringIO()
    with RunWriter(folder) as writer:
        held = HeldOut(config, folder / "checkpoints", writer, Console(screen), DPO())
        for step, evaluation in enumerate(evaluations):
            held.enter(step, evaluation)
    return held, screen.getvalue().splitlines()


def test_no_step_is_better_than_the_starting_model_until_one_is(tmp_path: Path) -> None:
    evaluations = [found(0.7), found(0.8), found(0.7), found(0.6), found(0.9)]
    held, lines = said(tmp_path, TrainConfig(eval_every=1), *evaluations)
    numbers = "held-out loss {}, margin 0, accuracy 50.0%"
    assert lines == [
        f"step 0: {numbers.format(0.7)}",
        f"step 1: {numbers.format(0.8)}; the best so far by loss; {NO_GAIN}",
        f"step 2: {numbers.format(0.7)}; the best so far by loss; {NO_GAIN}",
        f"step 3: {numbers.format(0.6)}; the best so far by loss",
        f"step 4: {numbers.format(0.9)}",
    ]
    assert not held.no_gain(evaluations[-1].as_dict())


def test_it_goes_by_the_measure_that_is_named(tmp_path: Path) -> None:
    _, lines = said(tmp_path, TrainConfig(eval_every=1, best_by="accuracy"), found(0.7), found(0.8, 51), found(0.9))
    assert not any(NO_GAIN in line for line in lines)


@pytest.mark.parametrize(("by", "scores"), [("loss", {"loss": 0.6}), ("accuracy", {"loss": 0.6, "correct": 70})])
def test_of_equals_the_earliest_is_the_best(tmp_path: Path, by: str, scores: dict[str, float]) -> None:
    held, lines = said(tmp_path, TrainConfig(eval_every=1, best_by=by), found(0.7), found(**scores), found(**scores))
    assert held.best is not None and held.best.step == 1
    assert [line for line in lines if "the best so far" in line] == lines[1:2]


def test_the_last_step_alone_is_compared_where_no_best_is_kept(tmp_path: Path) -> None:
    held, lines = said(tmp_path, TrainConfig(), found(0.7), found(0.7, 60))
    assert lines[-1].endswith(f"; {NO_GAIN}") and held.no_gain(found(0.7).as_dict())
    assert not held.no_gain(found(0.6).as_dict())


@pytest.mark.parametrize(
    ("start", "after", "asks"),
    [
        (50, [39, 30], 1),  # of 100 guesses, 40 is two standard errors below half
        (50, [40, 41], 0),
        (30, [35, 31], 0),  # without a reference, a starting model may have its own mind
        (30, [29], 1),
        (20, [], 0),
    ],
)
def test_whether_answers_are_swapped_is_asked_once(tmp_path: Path, start: int, after: list[int], asks: int) -> None:
    config = TrainConfig(eval_every=1)
    _, lines = said(tmp_path, config, found(0.7, start), *(found(0.6, correct) for correct in after))
    asked = [line for line in lines if "are chosen and rejected swapped" in line]
    assert len(asked) == asks and all(line.startswith(f"! held-out accuracy is {after[0]}.0% of 100") for line in asked)
