"""Single wrong bits in a run folder, which its readers would otherwise take for other numbers of the same run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.workbench import Job, unequal


@pytest.fixture
def ended(finished: Job, filled_cache: Path, tmp_path: Path) -> Job:
    """A copy of a run that is done, to be spoilt."""
    shutil.copytree(finished.run, tmp_path / "run")
    return finished.but({"output.dir": tmp_path / "run", "reference.cache": filled_cache})


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_spoilt_export_is_neither_scored_nor_kept(ended: Job, finished: Job, name: str) -> None:
    """A weight or a token with a wrong bit is one, too. Without that folder the run exports the model again."""
    path = ended.run / "model" / name
    place = path.read_bytes().rindex(b"3") if path.suffix == ".json" else -3
    flip(path, place)
    for command in (("eval",), ("train", "--resume")):
        message = ended.refused(*command)
        assert f"{ended.run / 'model'}: {name} is not as it was exported. Get the folder anew" in message
    shutil.rmtree(ended.run / "model")
    ended.done("train", "--resume")
    assert unequal(ended.exported(), finished.exported()) == []
    ended.done("eval")


def test_spoilt_metrics_are_not_gone_on_with(ended: Job) -> None:
    path = ended.run / "metrics.jsonl"
    flip(path, path.read_bytes().index(b'"loss": 0.') + 10)
    assert "metrics.jsonl: line 2 is no line of metrics, or not as it was written" in ended.refused("train", "--resume")
    path.unlink()
    assert "metrics.jsonl: no line of the steps after 0 is left" in ended.done("train", "--resume").out


def test_spoilt_settings_are_not_gone_on_with(ended: Job) -> None:
    """Also by commands that read them for the run's day."""
    path = ended.run / "config.yaml"
    flip(path, path.read_bytes().index(b"date: '20") + 10)
    for command in (("train", "--resume"), ("eval",), ("data",)):
        assert "config.yaml is not as the run wrote it" in ended.refused(*command)
