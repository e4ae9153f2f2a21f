"""Runs of the tiny recipes of models from nothing, smaller still: killed and resumed, and on two processes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.distributed.worlds import environment, free_port
from tests.end_to_end.test_lm import numbers_of, texts
from tests.end_to_end.test_resume import die_in
from tests.end_to_end.workbench import Child, Job, assert_same_state, write_rows

RECIPES = Path(__file__).parents[2] / "recipes" / "scratch"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
STEPS = 6


@pytest.fixture(scope="module", params=["nsa-tiny", "ccgqa-tiny"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of a recipe with a smaller model on documents of some 300 bytes, which nothing interrupts.

    Where a gradient is next to nothing, AdamW makes a whole step of its rounding; a larger eps makes none of it.
    """
    folder = tmp_path_factory.mktemp(request.param)
    recipe = yaml.safe_load((RECIPES / f"{request.param}.yaml").read_text())
    lines = texts(64, 0)
    write_rows(folder / "docs.jsonl", [{"text": " ".join(lines[n : n + 4])} for n in range(0, 64, 4)])
    settings = {f"{section}.{key}": value for section, keys in recipe.items() for key, value in keys.items()}
    job = Job(folder, settings).but(
        {"model.init": recipe["model"]["init"] | SMALL, "pack.tokens": 512, "parallel.timeout_minutes": 0.5},
        data={"train": folder / "docs.jsonl", "eval": None, "max_length": 128, "cache": folder / "tokens"},
        train={"tokens_per_step": 700, "max_steps": STEPS, "epochs": None, "adam_eps": 1e-4, "device": "cpu"},
        output={"dir": folder / "whole", "save_every": 2, "keep_last": 9, "sinks": "[]"},
    )
    job.done()
    assert [line["step"] for line in job.metrics()] == [*range(1, STEPS + 1)]
    return job


def test_killed_in_a_step_it_goes_on_to_the_bit(whole: Job) -> None:
    again = whole.elsewhere("again")
    child = Child(again.arguments("train"), again.folder, partial(die_in, 4))  # type: ignore[arg-type]
    assert child.wait().status == -signal.SIGKILL
    assert "continuing from" in again.done("train", "--resume").out
    assert_same_state(again, whole, STEPS)
    assert numbers_of(again) == numbers_of(whole)


def launched(surroundings: dict[str, str]) -> None:
    os.environ.update(surroundings)


def test_two_processes_train_as_one_does(whole: Job) -> None:
    """The same log-probs at first, to the bit; then losses, and weights in the end, up to the order of sums."""
    both = whole.elsewhere("both")
    port, children = free_port(), []
    for rank in range(2):
        said = both.folder / f"rank-{rank}"
        said.mkdir()
        children.append(Child(both.arguments("train"), said, partial(launched, environment(rank, 2, port))))
    for outcome in [child.wait() for child in children]:
        assert outcome.status == 0, outcome.err
    ours, theirs = numbers_of(both), numbers_of(whole)
    assert ours[0]["loss"] == theirs[0]["loss"]
    for line, alone in zip(ours, theirs, strict=True):
        assert line["tokens"] == alone["tokens"]
        assert line["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        for name in (name for name in alone if name.startswith("nsa/")):
            assert line[name] == pytest.approx(alone[name], rel=1e-6), name
    weights, expected = both.exported(), whole.exported()
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-6 * weight.norm(), name
