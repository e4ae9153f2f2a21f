"""When a run stops early, by numbers worked out by hand."""

from __future__ import annotations

from typing import Any

from tuningfork.train.config import TrainConfig
from tuningfork.train.early_stop import MEASURES, out_of_patience


def stops(values: list[float | None], **settings: Any) -> list[int]:
    """Behind which steps 1, 2, ... with these numbers; the first one is the starting model's."""
    config = TrainConfig(eval_every=1, **settings)
    key, _ = MEASURES[config.best_by]
    evaluations = {step: {key: value} for step, value in enumerate(values)}
    return [step for step in range(len(values)) if out_of_patience(evaluations, step, config)]


def test_so_many_in_a_row_are_no_better_than_the_best_before_them() -> None:
    losses = [0.1, 0.9, 0.8, 0.8, 0.85, 0.7, 0.75, 0.72, 0.7, 0.69]
    assert stops(losses, early_stopping_patience=1) == [3, 4, 6, 7, 8]
    assert stops(losses, early_stopping_patience=2) == [4, 7, 8]
    assert stops(losses, early_stopping_patience=3) == [8]
    assert stops(losses, early_stopping_patience=4) == stops(losses) == []


def test_more_is_better_of_an_accuracy() -> None:
    assert stops([0.9, 0.5, 0.6, 0.6, 0.5], best_by="accuracy", early_stopping_patience=2) == [4]


def test_gains_below_the_threshold_count_once_they_add_up_to_more() -> None:
    """0.96 and 0.92 are no better than 1 by more than 0.1, 0.88 is; from there on it is measured against 0.88."""
    losses = [2.0, 1.0, 0.96, 0.92, 0.88, 0.8, 0.77]
    settings: dict[str, Any] = {"early_stopping_threshold": 0.1}
    assert stops(losses, early_stopping_patience=2, **settings) == [3]
    assert stops(losses, early_stopping_patience=3, **settings) == []
    assert stops([1.0, 0.5, 0.25], early_stopping_patience=1, early_stopping_threshold=0.25) == [2]


def test_where_there_is_no_number_none_is_better() -> None:
    assert stops([None, None, None, 0.5, None], best_by="accuracy", early_stopping_patience=2) == [2]


def test_only_an_evaluation_stops_a_run() -> None:
    """A step between two of them, as one that was saved, does not."""
    config = TrainConfig(eval_every=3, early_stopping_patience=1)
    evaluations = {0: {"loss": 1.0}, 3: {"loss": 0.5}, 6: {"loss": 0.6}}
    assert [step for step in range(9) if out_of_patience(evaluations, step, config)] == [6]


def test_the_end_of_a_run_that_was_made_longer_counts_where_an_evaluation_belongs_alone() -> None:
    """A run of 4 steps has the evaluation of step 4, and one of 9 that goes on from there would not."""
    config = TrainConfig(eval_every=3, early_stopping_patience=2)
    evaluations = {0: {"loss": 1.0}, 3: {"loss": 0.5}, 4: {"loss": 0.6}, 6: {"loss": 0.7}, 9: {"loss": 0.8}}
    assert [step for step in range(10) if out_of_patience(evaluations, step, config)] == [9]
    assert "was better than 0.5 of step 3 in 2 evaluations up to step 9" in str(out_of_patience(evaluations, 9, config))


def test_why_is_said_in_numbers() -> None:
    config = TrainConfig(eval_every=1, early_stopping_patience=2, early_stopping_threshold=0.01)
    evaluations = {1: {"loss": 0.5}, 2: {"loss": 0.495}, 3: {"loss": 0.6}}
    assert out_of_patience(evaluations, 3, config) == (
        "no held-out loss was better than 0.5 of step 1 by more than 0.01 in 2 evaluations up to step 3"
    )
