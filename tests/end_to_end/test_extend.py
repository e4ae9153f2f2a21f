"""A run that is continued with more steps or epochs than it had: what it goes on with, and what else stays refused."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_resume import crash, die_in, in_child
from tests.end_to_end.workbench import Child, Job, job_in, make_pairs, state_of, unequal, write_rows
from tuningfork.recipe.load import from_yaml
from tuningfork.train import steps
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import learning_rate


@pytest.fixture(scope="module")
def short(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Six steps that have ended, of a schedule that falls to 0; to be copied."""
    job = job_in(tmp_path_factory.mktemp("short"), shelf).but({"train.max_steps": 6, "output.save_every": 2})
    job.done()
    return job


@pytest.fixture
def ended(short: Job, tmp_path: Path) -> Job:
    """The same run in a folder of its own."""
    shutil.copytree(short.run, tmp_path / "run")
    return Job(tmp_path, short.settings | {"output.dir": tmp_path / "run"})


def test_under_a_constant_rate_it_ends_as_a_run_of_that_length(job: Job) -> None:
    """Six steps, then four more: weights, optimizer and every line are those of ten steps at once."""
    job = job.but(train={"schedule": "constant", "warmup_ratio": 0, "max_steps": 10})
    job.done()
    longer = job.elsewhere("longer")
    longer.but({"train.max_steps": 6}).done()
    out = longer.done("train", "--resume").out
    assert (
        "the run is extended from 6 to 10 steps; learning rate, constant over all 10: 0.001 in step 7, after 0.001"
        in out
    )
    ends = [each.run / "checkpoints" / "step-10" for each in (job, longer)]
    assert unequal(*map(state_of, ends)) == [] and unequal(job.exported(), longer.exported()) == []
    for ours, theirs in zip(job.metrics(), longer.metrics(), strict=True):
        assert all(ours[key] == theirs[key] for key in ("step", "epoch", "loss", "lr", "grad_norm", "tokens"))


def test_the_schedule_of_the_new_length_holds_from_the_next_step_on(ended: Job) -> None:
    """Said with the rate before and after; the lines of before stay, the model of before keeps its own name."""
    before, old = ended.metrics(), ended.exported()
    longer = ended.but({"train.max_steps": 12})
    out = longer.done("train", "--resume").out
    of_12, of_6 = (TrainConfig(learning_rate=1e-3, max_steps=steps) for steps in (12, 6))
    rates = [learning_rate(of_6, step, 6) for step in range(6)] + [
        learning_rate(of_12, step, 12) for step in range(6, 12)
    ]
    assert [line["lr"] for line in longer.metrics()] == rates and longer.metrics()[:6] == before
    assert f"from 6 to 12 steps; learning rate, linear over all 12: {rates[6]:.4g} in step 7" in out
    assert f", after {rates[5]:.4g} in step 6" in out and rates[6] > rates[5]
    assert f"kept as {ended.run / 'model-step-6'}" in out and unequal(longer.exported(), old) != []
    assert json.loads((ended.run / "export.json").read_text()) == {"step": 12}
    config = from_yaml((ended.run / "config.yaml").read_text(), "config.yaml")
    assert config.train.max_steps == 12
    assert "extended" not in longer.done("train", "--resume").out
    assert "the run has 12, now 6" in ended.refused("train", "--resume")


def test_a_killed_extension_goes_on_to_the_same_bits(ended: Job) -> None:
    shutil.copytree(ended.run, ended.folder / "whole")
    whole = ended.elsewhere("whole").but({"train.max_steps": 12})
    whole.done("train", "--resume")
    longer = ended.but({"train.max_steps": 12})
    for step in (1, 4):  # before its first checkpoint, and behind one
        child = Child(longer.arguments("train", "--resume"), longer.folder, partial(die_in, step))
        assert child.wait().status == -signal.SIGKILL
    assert in_child(longer, "--resume").status == 0
    ends = [each.run / "checkpoints" / "step-12" for each in (whole, longer)]
    assert unequal(*map(state_of, ends)) == [] and unequal(whole.exported(), longer.exported()) == []


def test_an_epoch_whose_last_step_was_short_is_not_cut_short_by_the_next(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13 pairs in steps of 4 end with one of 1 pair. Two epochs more, one after the other and with a crash between,
    have every pair once each."""
    write_rows(job.folder / "pairs.jsonl", make_pairs(13))
    job = job.but({"data.train": job.folder / "pairs.jsonl", "output.save_every": 1})
    seen: list[list[str]] = []
    train_step = steps.train_step

    def noting(scorer: Any, objective: Any, optimizer: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        seen.append([example.id for example in batch.examples])
        return train_step(scorer, objective, optimizer, batch, *rest, **named)

    monkeypatch.setattr(steps, "train_step", noting)
    job.done()
    job.but({"train.epochs": 2}).done("train", "--resume")
    crash(job.but({"train.epochs": 3}), step=3, options=("--resume",))
    job.but({"train.epochs": 3}).done("train", "--resume")
    assert list(map(len, seen)) == [4, 4, 4, 1] * 3
    for epoch in range(3):
        found = Counter(pair for step in seen[4 * epoch : 4 * epoch + 4] for pair in step)
        assert len(found) == 13 and set(found.values()) == {1}
    assert [line["epoch"] for line in job.metrics()][3::4] == [1.0, 2.0, 3.0]


def test_steps_behind_a_short_one_are_as_many_as_are_asked_for(job: Job) -> None:
    """13 pairs, an epoch of four steps, then train.max_steps 6: two more, both full."""
    write_rows(job.folder / "pairs.jsonl", make_pairs(13))
    job = job.but({"data.train": job.folder / "pairs.jsonl"})
    job.done()
    job.but({"train.max_steps": 6}).done("train", "--resume")
    assert [line["examples"] for line in job.metrics()] == [4, 4, 4, 1, 4, 4]


def test_less_than_an_epoch_is_extended_to_pairs_without_a_reference_yet(job: Job) -> None:
    """They are scored by the starting model, not by the one that has been trained."""
    job = job.but(train={"schedule": "constant", "warmup_ratio": 0})
    job.done()
    longer = job.elsewhere("longer").but({"reference.cache": job.folder / "other-cache"})
    longer.but({"train.epochs": 0.5}).done()
    assert "scoring the reference: 20/20 examples" in longer.done("train", "--resume").out
    assert unequal(job.exported(), longer.exported()) == []


def test_a_run_that_has_not_ended_may_be_made_longer_too(ended: Job, short: Job) -> None:
    job = short.elsewhere("crashed").but({"output.dir": ended.folder / "crashed"})
    crash(job, step=2)
    out = job.but({"train.max_steps": 8}).done("train", "--resume").out
    assert "extended from 6 to 8 steps; learning rate, linear over all 8: 0.001 in step 1\n" in out
    assert len(job.metrics()) == 8


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"train.max_steps": 5}, "train.max_steps: the run has 6, now 5"),
        ({"train.epochs": 0.5}, "train.epochs: the run has 1.0, now 0.5"),
        ({"train.epochs": 7}, "is a run of 6 steps; train.epochs 7 and train.max_steps 6 come to 6"),
        ({"train.max_steps": None, "train.epochs": 1.0}, None),
        ({"train.max_steps": None, "train.epochs": 0.6}, "train.epochs: the run has 1.0, now 0.6"),
        ({"train.max_steps": 9, "train.seed": 1}, "train.seed: the run has 0, now 1"),
        ({"train.max_steps": 9, "train.schedule": "constant"}, "train.schedule: the run has 'linear', now 'constant'"),
        ({"train.max_steps": 9, "train.learning_rate": 1e-4}, "train.learning_rate: the run has 0.001, now 0.0001"),
    ],
)
def test_what_makes_no_run_longer_is_refused(ended: Job, settings: dict[str, Any], said: str | None) -> None:
    """Nothing is trained and config.yaml stays; an epoch of ten steps is longer than six."""
    config = (ended.run / "config.yaml").read_bytes()
    if said is None:
        assert "extended from 6 to 10 steps" in ended.but(settings).done("train", "--resume").out
        return
    message = ended.but(settings).refused("train", "--resume")
    assert said in message and "train.max_steps" in message
    assert (ended.run / "config.yaml").read_bytes() == config and len(ended.metrics()) == 6


def test_the_best_step_of_the_shorter_run_stays_the_best(job: Job, shelf: Path) -> None:
    """Held-out pairs of the other mind, which every step makes worse: the end of the shorter run is scored and kept."""
    rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in make_pairs(11, seed=5)]
    job = job.but({"data.eval": write_rows(job.folder / "held_out.jsonl", rows), "train.eval_every": 5})
    job = job.but({"train.max_steps": 3, "output.keep_last": 1, "output.export": "best"})
    job.done()
    before = job.exported()
    longer = job.but({"train.max_steps": 7})
    longer.done("train", "--resume")
    assert [line["step"] for line in longer.evaluations()] == [0, 3, 5, 7]
    assert longer.checkpoints() == ["step-3", "step-7"] and unequal(longer.exported(), before) == []
    assert not (job.run / "model-step-3").exists()
