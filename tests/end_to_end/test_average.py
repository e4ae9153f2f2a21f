"""A run that averages its weights: what is scored and exported, and that a kill changes no bit of it."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.end_to_end.test_resume import die_in, in_child
from tests.end_to_end.workbench import (
    Child,
    Job,
    assert_same_state,
    job_in,
    make_pairs,
    on_two,
    state_of,
    unequal,
    write_rows,
)

STEPS = 6


@pytest.fixture(scope="module")
def plain(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = job_in(tmp_path_factory.mktemp("average"), shelf).but(
        data={"eval": shelf / "held_out.jsonl"},
        train={"max_steps": STEPS, "eval_every": 2},
        output={"save_every": 1, "keep_last": STEPS},
    )
    job.done()
    return job


@pytest.fixture(scope="module")
def averaged(plain: Job) -> Job:
    job = plain.elsewhere("averaged").but({"train.ema_decay": 0.75})
    job.done()
    return job


def of(state: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(part): value for name, value in state.items() if name.startswith(part)}


def test_steps_are_those_of_a_run_without_and_the_export_is_the_average(plain: Job, averaged: Job) -> None:
    """Worked out in float64 from the checkpoints of all steps; a step rounds it twice."""
    states = [state_of(averaged.run / "checkpoints" / f"step-{step}") for step in range(1, STEPS + 1)]
    weights = [of(state, "model.") for state in states]
    assert unequal(weights[-1], of(state_of(plain.run / "checkpoints" / f"step-{STEPS}"), "model.")) == []
    assert [line["loss"] for line in averaged.metrics()] == [line["loss"] for line in plain.metrics()]
    found = of(states[-1], "average.")
    assert unequal(averaged.exported(), found) == [] and unequal(plain.exported(), weights[-1]) == []
    for name, average in found.items():
        by_hand = weights[0][name].double()
        for behind in weights[1:]:
            by_hand = 0.75 * by_hand + 0.25 * behind[name].double()
        allowed = 2 * STEPS * 2**-24 * float(by_hand.abs().max())
        assert torch.allclose(average.double(), by_hand, rtol=0, atol=allowed)
        assert not torch.equal(average, weights[-1][name])


def test_evaluations_are_of_the_average(averaged: Job, plain: Job) -> None:
    """As a run finds them that begins at the exported model, whose reference is another, so answers are compared."""
    after = json.loads((averaged.run / "eval.json").read_text())["after"]["logps/chosen"]
    assert after != json.loads((plain.run / "eval.json").read_text())["after"]["logps/chosen"]
    began = averaged.elsewhere("next").but({"model.path": averaged.run / "model", "train.max_steps": 1})
    began.but({"train.ema_decay": None}).done()
    assert json.loads((began.run / "eval.json").read_text())["before"]["logps/chosen"] == after


def test_the_best_step_is_exported_as_its_average(averaged: Job, tmp_path: Path) -> None:
    """Held-out pairs of the other mind, which every step makes worse."""
    rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in make_pairs(11, seed=5)]
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    best = averaged.elsewhere("best").but({"data.eval": held_out, "output.export": "best", "output.keep_last": 1})
    out = best.done().out
    assert "exporting the average of the weights in float32" in out and "exported model, step 2" in out
    assert unequal(best.exported(), of(state_of(best.run / "checkpoints" / "step-2"), "average.")) == []


def test_a_killed_run_has_the_average_of_an_unbroken_one(averaged: Job, tmp_path: Path) -> None:
    again = Job(tmp_path, averaged.settings | {"output.dir": tmp_path / "run"})
    assert Child(again.arguments("train"), again.folder, partial(die_in, 4)).wait().status == -signal.SIGKILL
    assert in_child(again, "--resume").status == 0
    assert_same_state(again, averaged, STEPS)
    assert again.evaluations() == averaged.evaluations()


def test_two_processes_score_and_export_their_average(averaged: Job, tmp_path: Path) -> None:
    """Of weights that are spread over them: the numbers of one process, up to rounding."""
    again = Job(tmp_path, averaged.settings | {"output.dir": tmp_path / "run"})
    on_two(again)
    for ours, theirs in zip(again.evaluations(), averaged.evaluations(), strict=True):
        assert ours["eval/loss"] == pytest.approx(theirs["eval/loss"], rel=1e-4)
    last = state_of(again.run / "checkpoints" / f"step-{STEPS}")
    assert unequal(again.exported(), of(last, "average.")) == []
    assert unequal(of(last, "model."), of(last, "average.")) != []
