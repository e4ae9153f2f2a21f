"""A chat template that prints the date: a run prints one, the day it began, however long it takes and is resumed."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.tiny_tokenizers import CHATML
from tests.end_to_end.workbench import Job, make_model, make_tokenizer
from tuningfork.data import config
from tuningfork.recipe.load import from_yaml
from tuningfork.train import steps


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


def day_of(job: Job) -> str | None:
    """What a run's settings say, as they are kept with it."""
    return from_yaml((job.run / "config.yaml").read_text(), "config.yaml").data.date


def crash_in_fourth_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = steps.train_step, iter(range(1, 100))

    def crashing(*args: Any, **named: Any) -> Any:
        if next(count) == 4:
            raise Crash
        return step(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "train_step", crashing)
        with pytest.raises(Crash):
            job("train")


def test_a_run_is_resumed_on_another_day(dated: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "2026-01-31")
    crash_in_fourth_step(dated, monkeypatch)
    on(monkeypatch, "2026-02-01")
    other = dated.refused("train", "--resume", "--data.date", "2026-02-01")
    assert "data.date: the run has '2026-01-31', now '2026-02-01'" in other
    dated.done("train", "--resume")
    assert day_of(dated) == "2026-01-31"
    dated.done("train", "--resume", "--data.date", "2026-01-31")
    # A run that begins today prints today; the recipe can say another day.
    for name, options, day in (("new", (), "2026-02-01"), ("set", ("--data.date", "2025-12-24"), "2025-12-24")):
        other = dated.elsewhere(name)
        other.done("train", *options)
        assert day_of(other) == day


def test_every_command_prints_the_day_of_the_run_in_its_folder(dated: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first day's tokens, and so its scores and its numbers; without a run, today's."""
    on(monkeypatch, "2026-01-31")
    dated.done("train")
    after = json.loads((dated.run / "eval.json").read_text())["after"]
    on(monkeypatch, "2026-02-01")
    assert f"loss {after['loss']:.3f}" in " ".join(dated.done("eval").out.split())
    scored = len(list(dated.cache.rglob("*")))
    assert "scoring the reference" not in dated.done("reference").out
    assert len(list(dated.cache.rglob("*"))) == scored
    dated.done("data")
    assert json.loads((dated.run / "data" / "data_report.json").read_text())["tokenizer"]["date"] == "2026-01-31"
    other = dated.elsewhere("other")
    shown = other.done("data").out
    assert "day that the template prints 2026-02-01" in " ".join(shown.split())
    assert "2026-02-01" in (other.run / "data" / "data_report.html").read_text()


def test_a_run_whose_day_was_taken_out_goes_on_with_the_right_one(dated: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data tells that another day is not it."""
    on(monkeypatch, "2026-01-31")
    crash_in_fourth_step(dated, monkeypatch)
    settings = dated.run / "config.yaml"
    text = settings.read_text().partition("\n")[2]  # the first line has its checksum
    settings.write_text(text.replace("2026-01-31", "null").replace("'null'", "null"))
    assert day_of(dated) is None
    on(monkeypatch, "2026-02-01")
    assert "prints the date, set data.date to that of the run" in dated.refused("train", "--resume")
    dated.done("train", "--resume", "--data.date", "2026-01-31")
    assert day_of(dated) == "2026-01-31"


@pytest.mark.parametrize("text", ["", "project: x", "data: {date: '31.01.2026'}", "- a", None])
def test_settings_that_do_not_tell_a_day_are_told(job: Job, text: str | None) -> None:
    """Another program's, or spoilt ones. Where the recipe gives the day, nobody reads them."""
    settings = job.run / "config.yaml"
    if text is None:
        settings.mkdir(parents=True)
    else:
        job.run.mkdir()
        settings.write_text(text)
    others = (("data",), ("reference",), ("eval", "--policy", str(job.settings["model.path"])))
    job = job.but({"data.eval": job.settings["data.train"]})
    for command in others:
        message = job.refused(*command)
        assert str(settings) in message and "Set data.date, or choose another output.dir" in message
        job.done(*command, "--data.date", "2026-01-31")
    assert str(job.run) in job.refused("train", "--resume", "--data.date", "2026-01-31")


def test_a_name_that_is_no_folder_is_refused(job: Job) -> None:
    job.run.write_text("mine")
    for options in ((), ("--resume",)):
        assert f"{job.run} is not a folder. Choose another output.dir" in job.refused("train", *options)
    assert job.run.read_text() == "mine"
    long = job.elsewhere("a" * 300)
    for command in ("train", "data", "reference"):
        assert "File name too long" in long.refused(command)


def test_a_folder_with_other_things_is_not_called_a_run(job: Job) -> None:
    job.run.mkdir()
    (job.run / "scores").mkdir()
    for options in ((), ("--resume",)):
        assert f"{job.run} is no run folder: it has files, but no config.yaml" in job.refused("train", *options)


@pytest.mark.parametrize("day", ["2026-02-30", "31.01.2026", "2026-1-31", "20260131", "2026-W05-6", "today"])
def test_a_date_that_is_none_is_refused(dated: Job, day: str) -> None:
    assert f"data.date {day!r} is no day" in dated.refused("train", "--data.date", day)


def test_a_cache_in_the_run_folder_is_refused(job: Job) -> None:
    """The run holds its folder, and would wait for itself."""
    for place in ("", "tokens"):
        message = job.but(data={"cache": f"{job.run}/../run/{place}"}).refused("train")
        assert f"lies in output.dir {job.run}" in message
