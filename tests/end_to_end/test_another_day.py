"""A chat template that prints the date: a run prints one, the day it began, however long it takes and is resumed."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.data.tiny_tokenizers import CHATML
from tests.end_to_end.workbench import Job, make_model, make_tokenizer
from tuningfork.data import config
from tuningfork.train import checkpoint, loop


class Crash(BaseException):
    """The process is gone."""


@pytest.fixture
def dated(job: Job, tmp_path: Path) -> Job:
    """Six steps on a model whose template prints the day."""
    tokenizer = make_tokenizer(chat_template="{{ strftime_now('%d') }}" + CHATML)
    model = make_model(tmp_path / "dated", tokenizer=tokenizer)
    eval_pairs = str(job.settings["data.train"])
    changes = {"model.path": model, "data.eval": eval_pairs, "train.max_steps": 6, "output.save_every": 2}
    return Job(job.folder, job.settings | changes)


def on(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    class Clock(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date.fromisoformat(day)

    monkeypatch.setattr(config, "date", Clock)


def crash_in_fourth_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = loop.train_step, iter(range(1, 100))

    def crashing(*args: Any) -> Any:
        if next(count) == 4:
            raise Crash
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", crashing)
        with pytest.raises(Crash):
            job("train")


def test_a_run_is_resumed_on_another_day(dated: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "2026-01-31")
    crash_in_fourth_step(dated, monkeypatch)
    on(monkeypatch, "2026-02-01")
    dated.done("train", "--resume")
    last = checkpoint.newest(dated.run / "checkpoints")
    assert last is not None and checkpoint.progress(last).date == "2026-01-31"
    # A run that begins today prints today; the recipe can say another day.
    for name, options, day in (("new", (), "2026-02-01"), ("set", ("--data.date", "2025-12-24"), "2025-12-24")):
        other = dated.elsewhere(name)
        other.done("train", *options)
        last = checkpoint.newest(other.run / "checkpoints")
        assert last is not None and checkpoint.progress(last).date == day


@pytest.mark.parametrize("day", ["2026-02-30", "31.01.2026", "2026-1-31", "20260131", "2026-W05-6", "today"])
def test_a_date_that_is_none_is_refused(dated: Job, day: str) -> None:
    assert f"data.date {day!r} is no day" in dated.refused("train", "--data.date", day)


def test_a_cache_in_the_run_folder_is_refused(job: Job) -> None:
    """The run holds its folder, and would wait for itself."""
    for place in ("", "tokens"):
        message = job.but(data={"cache": f"{job.run}/../run/{place}"}).refused("train")
        assert f"lies in output.dir {job.run}" in message
