"""A run whose examples are grouped: its steps by hand, its bits after a kill, and what a continued run must keep."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.data.packing.test_groups import by_hand
from tests.end_to_end.test_resume import die_in, in_child
from tests.end_to_end.workbench import Child, Job, assert_same_state, job_in, make_pairs, unequal, write_rows
from tuningfork.train import steps

STEPS = 12
SESSIONS = [n % 5 if n % 3 else 7 for n in range(26)]  # six steps and two pairs an epoch
GROUPED = {"order": "grouped", "group_by": "session", "group_most": 3}


def rows(sessions: list[int]) -> list[dict[str, Any]]:
    return [pair | {"session": session} for pair, session in zip(make_pairs(len(sessions)), sessions, strict=True)]


@pytest.fixture(scope="module")
def whole(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Twelve steps of four pairs that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder / "pairs.jsonl", rows(SESSIONS))
    job = job_in(folder, shelf).but(
        {"data.train": folder / "pairs.jsonl", "output.save_every": 2},
        train={"max_steps": STEPS, "schedule": "constant", "warmup_ratio": 0, **GROUPED},
    )
    job.done()
    return job


@pytest.fixture
def again(whole: Job, tmp_path: Path) -> Job:
    """The same job in a run folder of its own, with rows of its own."""
    shutil.copy(whole.settings["data.train"], tmp_path / "pairs.jsonl")
    own = {"output.dir": tmp_path / "run", "data.train": tmp_path / "pairs.jsonl"}
    return Job(tmp_path, whole.settings | own)


def test_steps_hold_what_the_definition_puts_there_also_behind_a_resume(
    again: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair once an epoch, steps of four, also the seventh, which lies in two epochs."""
    seen: list[list[int]] = []
    train_step = steps.train_step

    def noting(scorer: Any, objective: Any, optimizer: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        seen.append(sorted(example.source.row - 1 for example in batch.examples))
        return train_step(scorer, objective, optimizer, batch, *rest, **named)

    monkeypatch.setattr(steps, "train_step", noting)
    again.but({"train.max_steps": 8}).done()
    again.done("train", "--resume")
    keys = [session + 1 for session in SESSIONS]  # the key 0 is that of no group
    order = [i for epoch in (0, 1) for i in by_hand(keys, 3, seed=0, epoch=epoch)]
    assert seen == [sorted(order[n : n + 4]) for n in range(0, STEPS * 4, 4)]


def test_killed_at_any_step_it_goes_on_to_the_same_bits(again: Job, whole: Job) -> None:
    for step in (4, 5):  # in the fourth step, and in the seventh, which lies in two epochs
        resume = ["--resume"] if (again.run / "config.yaml").exists() else []
        child = Child(again.arguments("train", *resume), again.folder, partial(die_in, step))
        assert child.wait().status == -signal.SIGKILL
    assert in_child(again, "--resume").status == 0
    assert_same_state(again, whole, STEPS)
    assert unequal(again.exported(), whole.exported()) == []


def test_made_longer_it_ends_as_a_run_of_that_length(again: Job, whole: Job) -> None:
    again.but({"train.max_steps": 7}).done()
    assert "the run is extended from 7 to 12 steps" in again.done("train", "--resume").out
    assert_same_state(again, whole, STEPS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"order": "shuffled", "group_by": "prompt", "group_most": 4}, "train.order: the run has 'grouped', now"),
        ({"group_by": "conversation"}, "train.group_by: the run has 'session', now 'conversation'"),
        ({"group_most": 2}, "train.group_most: the run has 3, now 2"),
    ],
)
def test_a_continued_run_must_have_the_order_that_it_had(change: dict[str, Any], words: str, whole: Job) -> None:
    assert words in whole.but(train=change).refused("train", "--resume")


def test_rows_that_belong_to_other_groups_than_before_are_other_data(again: Job) -> None:
    """Their tokens are the same; the order of the next epoch would not be."""
    again.but({"train.max_steps": 4}).done()
    write_rows(again.folder / "pairs.jsonl", rows([3, *SESSIONS[1:]]))
    assert "was trained on other examples than data.train gives now" in again.refused("train", "--resume")


def test_rows_with_another_session_train_alike_where_nobody_asks_for_it(again: Job) -> None:
    again = again.but(train={"max_steps": 4, "order": "shuffled", "group_by": "prompt", "group_most": 4})
    again.done()
    write_rows(again.folder / "pairs.jsonl", rows([3, *SESSIONS[1:]]))
    again.but({"train.max_steps": 5}).done("train", "--resume")


def test_the_order_is_said_by_the_report_and_by_the_run(again: Job) -> None:
    words = "grouped by session: 6 groups, at most 3 of one together"
    assert words in " ".join(again.done("data").out.split())
    run = json.loads((again.run / "data" / "data_report.json").read_text())["run"]
    assert run["order"] == words
    assert words in (again.run / "data" / "data_report.html").read_text()
    shuffled = again.but(train={"order": "shuffled", "group_by": "prompt", "group_most": 4})
    assert "steps, shuffled;" in " ".join(shuffled.done("data").out.split())


def test_prompts_and_conversations_need_nothing_of_the_rows(again: Job) -> None:
    """Two pairs of each prompt: a step of four holds two prompts."""
    twice = make_pairs(8)
    write_rows(
        again.folder / "pairs.jsonl", [pair | {"chosen": f"{pair['chosen']} {n}"} for pair in twice for n in (1, 2)]
    )
    for by in ("prompt", "conversation"):
        job = again.elsewhere(by).but(train={"group_by": by, "group_most": 2, "max_steps": 4, "examples_per_step": 4})
        assert f"order: grouped by {by}: 8 groups, at most 2 of one together" in job.done().out
