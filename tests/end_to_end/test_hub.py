"""A starting model by its name on the hub, here from the hub's cache: there is no network."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.end_to_end.test_resume import crash
from tests.end_to_end.workbench import Job, unequal
from tests.models.hf.hub_cache import COMMIT, put_in_cache
from tuningfork.recipe.load import from_yaml


@pytest.fixture
def cached(job: Job, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The job on `owner/name`, of which the cache has the shelf's model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(job.folder / "hub"))
    put_in_cache(job.folder / "hub", "owner/name", shelf / "model")
    return job.but({"model.path": "owner/name", "output.save_every": 2, "data.eval": shelf / "held_out.jsonl"})


def test_a_run_keeps_to_the_commit_that_it_began_with(cached: Job, shelf: Path) -> None:
    """config.yaml has it; after a crash the name means another model, and the run goes on with its own."""
    local = cached.but({"model.path": shelf / "model"}).elsewhere("local")
    local.done()
    crash(cached, step=4)
    kept = from_yaml((cached.run / "config.yaml").read_text(), "config.yaml")
    assert kept.model.path == f"hub:owner/name@{COMMIT}"
    put_in_cache(cached.folder / "hub", "owner/name", shelf / "other-model", commit="f" * 40)
    out = cached.done("train", "--resume").out
    assert f"owner/name@{COMMIT}: " in out and unequal(cached.exported(), local.exported()) == []
    assert "scoring" not in cached.done("eval").out
    assert (cached.run / "model" / "tokenizer.json").read_bytes() == (shelf / "model" / "tokenizer.json").read_bytes()
    cached.done("data")
    refused = cached.but({"model.path": "owner/name@main"}).refused("train", "--resume")
    assert "belongs to a run that started from another model" in refused


def test_a_folder_of_that_name_wins(cached: Job, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cached.folder / "owner").mkdir()
    (cached.folder / "owner" / "name").symlink_to(shelf / "model")
    monkeypatch.chdir(cached.folder)
    cached.but({"train.max_steps": 1}).done()
    assert from_yaml((cached.run / "config.yaml").read_text(), "config.yaml").model.path == "owner/name"


@pytest.mark.parametrize("command", ["train", "reference", "data", "eval"])
def test_a_model_that_is_not_to_be_had_is_said_once_with_the_way_to_get_it(cached: Job, command: str) -> None:
    options = ("--policy", str(cached.settings["model.path"])) if command == "eval" else ()
    message = cached.but({"model.path": "owner/nmae"}).refused(command, *options)
    assert "hf download owner/nmae --include" in message and "HF_HUB_OFFLINE is set" in message
    assert not cached.run.exists()
