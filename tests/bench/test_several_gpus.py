"""bench.several_gpus: what it starts, and what it makes of what comes back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import several_gpus, step
from tuningfork.distributed.config import ParallelConfig


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What bench.step would have measured, by its own reading of the command line; nothing is started."""
    seen: list[dict[str, Any]] = []

    def measured(**settings: Any) -> dict[str, Any]:
        seen.append(settings)
        return {"pairs_s": 10.0, "tokens_s": 500.0, "median_step_s": 0.1, "step0_pairs_exact": 8, "startup": {}}

    def run(commands: list[list[str]], each_its_own: bool, limit: float) -> str:
        for line in commands:
            step.main(line[line.index("bench.step") + 1 :])
        return ""

    monkeypatch.setattr(step, "measure", measured)
    monkeypatch.setattr(several_gpus, "run", run)
    return seen


def test_every_job_is_one_that_a_step_can_be_told(told, tmp_path, capsys):
    several_gpus.main(["--out", str(tmp_path / "lines.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    by_job = {line["job"]: line for line in lines}
    assert by_job["alone"]["pairs_s"] == 20.0  # two programs
    assert by_job["spread"]["ratio"] == 0.5 and by_job["spread"]["tokens_gpu"] == 250
    assert "copies of what is spread" not in by_job  # it takes four
    ways = [settings["parallel"] for settings in told]
    assert ParallelConfig(reshard_after_forward=False) in ways and ParallelConfig(tensor=2) in ways


def test_a_job_that_fails_says_why_and_the_next_one_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(several_gpus, "run", lambda *_: "not done in 5 s")
    several_gpus.main(["--jobs", "spread", "kept", "--out", str(tmp_path / "lines.jsonl")])
    notes = [json.loads(line)["note"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert notes == ["not done in 5 s"] * 2


def test_the_cause_is_the_programs_own_error():
    errors = "[rank0]: Traceback\n[rank0]: pkg.DataError: row 3\nW12 closing\nE1 ChildFailedError: \n=====\n"
    assert several_gpus._cause(errors) == "pkg.DataError: row 3"
    assert several_gpus._cause("") == "no word"


def test_programs_that_take_too_long_are_ended(tmp_path: Path):
    line = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert several_gpus.run([line], each_its_own=False, limit=0.1) == "not done in 0 s"
