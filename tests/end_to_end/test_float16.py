"""Runs in float16: a gradient that is not finite skips one step and no more, and a run goes on to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.end_to_end.workbench import Job, assert_same_state, state_of, unequal
from tuningfork.train import step, steps


class Crash(Exception):
    """Stands for whatever ends a process at once."""


def plant(patch: pytest.MonkeyPatch, planted: int, crash: int = 0) -> None:
    """In the step `planted` of this process, from 1, a gradient is infinite; in the step `crash` the process dies."""
    norm, train_step, count = step.gradient_norm, steps.train_step, {"norms": 0, "steps": 0}

    def infinite(optimizer: torch.optim.Optimizer, *rest: Any) -> torch.Tensor:
        count["norms"] += 1
        if count["norms"] == planted:
            optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.inf
        return norm(optimizer, *rest)

    def crashing(*args: Any, **named: Any) -> Any:
        count["steps"] += 1
        if count["steps"] == crash:
            raise Crash
        return train_step(*args, **named)

    patch.setattr(step, "gradient_norm", infinite)
    patch.setattr(steps, "train_step", crashing)


def with_planted(job: Callable[[], object], planted: int, crash: int = 0) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, planted, crash)
        job()


def test_a_planted_infinity_skips_one_step_and_a_resumed_run_has_the_same_bits(job: Job) -> None:
    job = job.but(
        model={"dtype": "float16"},
        train={"max_steps": 6, "learning_rate": 1e-3},
        output={"save_every": 1, "keep_last": 9},
    )
    whole = job.elsewhere("whole")
    with_planted(lambda: whole.done(), planted=3)
    lines = whole.metrics()
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert [line["loss_scale"] for line in lines] == [65536.0] * 3 + [32768.0] * 3
    assert lines[2]["grad_norm"] is None and all(line["grad_norm"] > 0 for line in lines if line is not lines[2])
    assert lines[0]["rewards/margin"] == 0.0
    states = [state_of(whole.run / "checkpoints" / f"step-{n}") for n in range(1, 7)]
    moved = [unequal(one, other) != ["rng"] for one, other in pairwise(states)]  # which is seeded by the step
    assert moved == [True, False, True, True, True]
    saved = json.loads((whole.run / "checkpoints" / "step-3" / "progress.json").read_text())
    assert saved["loss_scale"] == {"scale": 32768.0, "clean": 0, "skipped": 1}

    with pytest.raises(Crash):
        with_planted(lambda: job("train"), planted=3, crash=5)
    assert "continuing from" in job.done("train", "--resume").out
    assert_same_state(job, whole, 6)
    keys = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps", "rewards/margin")
    assert [[line[key] for key in keys] for line in job.metrics()] == [[line[key] for key in keys] for line in lines]


@pytest.mark.parametrize("crash", [2, 3])
def test_where_the_first_step_is_skipped_neither_saving_nor_a_kill_changes_a_bit(job: Job, crash: int) -> None:
    """Moments and the average begin with the step that moves the weights first, in the same process or in another."""
    job = job.but(model={"dtype": "float16"}, train={"max_steps": 3, "ema_decay": 0.5, "learning_rate": 1e-3})
    whole, cut = job.elsewhere("whole"), job.but({"output.save_every": 1})
    with_planted(whole.done, planted=1)
    with pytest.raises(Crash):
        with_planted(lambda: cut("train"), planted=1, crash=crash)
    assert f"continuing from {cut.run}/checkpoints/step-{crash - 1}" in cut.done("train", "--resume").out
    assert [line["skipped_steps"] for line in cut.metrics()] == [1, 0, 0]
    assert_same_state(cut, whole, 3)


def test_it_learns_what_float32_learns(job: Job) -> None:
    job = job.but(train={"learning_rate": 1e-3})
    half, whole = job.elsewhere("half").but(model={"dtype": "float16"}), job.elsewhere("whole")
    half.done()
    whole.done()
    ours, theirs = ([line["loss"] for line in run.metrics()] for run in (half, whole))
    assert ours[-1] < ours[0] and ours == pytest.approx(theirs, abs=5e-3)
    assert "loss_scale" not in whole.metrics()[0]
