"""A run that stops early: by which evaluation, after a kill too, on two processes, and with what it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.test_resume import die_in, in_child
from tests.end_to_end.workbench import Child, Job, assert_same_state, job_in, make_pairs, on_two, write_rows
from tuningfork.train import run as training
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import learning_rate

PATIENT = {"train.early_stopping_patience": 2}


@pytest.fixture(scope="module")
def whole(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Ten steps, scored every two on pairs of the other mind: what training learns makes them ever worse."""
    folder = tmp_path_factory.mktemp("early")
    rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in make_pairs(11, seed=5)]
    write_rows(folder / "held_out.jsonl", rows)
    job = job_in(folder, shelf).but(
        data={"eval": folder / "held_out.jsonl"}, train={"eval_every": 2}, output={"save_every": 5, "keep_last": 1}
    )
    job.done()
    return job


@pytest.fixture(scope="module")
def stopped(whole: Job) -> tuple[Job, str]:
    """The same with patience for two evaluations, and what it said."""
    job = whole.elsewhere("stopped").but(PATIENT)
    return job, job.done().out


@pytest.fixture
def again(stopped: tuple[Job, str], tmp_path: Path) -> Job:
    """The job in a run folder of its own, which is not there yet."""
    return Job(tmp_path, stopped[0].settings | {"output.dir": tmp_path / "run"})


def assert_same_end(job: Job, other: Job, step: int) -> None:
    assert_same_state(job, other, step)
    assert job.evaluations() == other.evaluations()
    assert [line["loss"] for line in job.metrics()] == [line["loss"] for line in other.metrics()]
    assert json.loads((job.run / "eval.json").read_text()) == json.loads((other.run / "eval.json").read_text())


def test_it_stops_behind_the_evaluation_and_keeps_the_best(stopped: tuple[Job, str]) -> None:
    """Steps 4 and 6 are no better than step 2. Step 6 is saved, exported and not scored again; the learning rate is
    that of ten steps."""
    job, out = stopped
    best = job.evaluations()[1]
    assert [line["step"] for line in job.evaluations()] == [0, 2, 4, 6] and len(job.metrics()) == 6
    assert (
        f"stopping early after step 6: no held-out loss was better than {best['eval/loss']:.6g} of step 2 in "
        f"2 evaluations up to step 6; the best checkpoint: {job.run}/checkpoints/step-2\n"
    ) in out
    assert "evaluating the trained model" not in out and out.count("step 6: held-out loss") == 1
    assert job.checkpoints() == ["step-2", "step-6"] and "exported model, step 6" in out
    scores = json.loads((job.run / "eval.json").read_text())
    assert scores["best"]["step"] == 2 and scores["after"]["loss"] == job.evaluations()[3]["eval/loss"]
    config = TrainConfig(learning_rate=1e-3)
    assert [line["lr"] for line in job.metrics()] == [learning_rate(config, step, 10) for step in range(6)]


def test_the_best_is_exported_on_request(again: Job) -> None:
    assert "exported model, step 2" in again.but({"output.export": "best"}).done().out


def test_it_has_ended_until_it_is_given_more_patience(stopped: tuple[Job, str], again: Job, whole: Job) -> None:
    """More steps alone are refused, with what to set; without patience it ends with the bits of a run that had none."""
    shutil.copytree(stopped[0].run, again.run)
    out = again.done("train", "--resume").out
    assert "nothing left to train, for it stops early behind step 6: no held-out loss was better than" in out
    assert "stopping early" not in out and len(again.metrics()) == 6
    longer = again.but({"train.epochs": 2})
    message = longer.refused("train", "--resume")
    assert "is to become longer, but it stops early behind step 6: no held-out loss was better than" in message
    assert "raise train.early_stopping_patience, or set it to null" in message
    patient = again.but({"train.early_stopping_patience": 3})
    assert "stopping early after step 8" in patient.done("train", "--resume").out
    again.but({"train.early_stopping_patience": "null"}).done("train", "--resume")
    assert_same_end(again, whole, 10)
    assert (
        "extended from 10 to 12"
        in again.but({"train.early_stopping_patience": 9, "train.max_steps": 12}).done("train", "--resume").out
    )


def die_behind_the_last_step() -> None:
    """kill -9 oneself once the run has stopped, before anything is exported."""

    def dying(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    training.export_model = dying  # type: ignore[assignment]


@pytest.mark.parametrize("kill", [partial(die_in, 6), die_behind_the_last_step])
def test_a_killed_run_stops_at_the_same_step(stopped: tuple[Job, str], again: Job, kill: Callable[[], None]) -> None:
    """In its last step, whose checkpoint is that of step 5, and behind it."""
    assert Child(again.arguments("train"), again.folder, kill).wait().status == -signal.SIGKILL
    assert in_child(again, "--resume").status == 0
    assert_same_end(again, stopped[0], 6)


def test_two_processes_stop_together(stopped: tuple[Job, str], again: Job) -> None:
    """At the step at which one process does, and say so once."""
    outcomes = on_two(again)
    assert [outcome.out.count("stopping early after step 6") for outcome in outcomes] == [1, 0]
    assert again.checkpoints() == ["step-2", "step-6"] and len(again.metrics()) == 6
    for ours, theirs in zip(again.evaluations(), stopped[0].evaluations(), strict=True):
        assert ours["step"] == theirs["step"] and ours["eval/loss"] == pytest.approx(theirs["eval/loss"], rel=1e-4)
