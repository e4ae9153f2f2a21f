"""What a run writes has the rights that its user's umask gives, and goes nowhere but into its own folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.workbench import Job


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_all_that_a_run_leaves_has_the_mode_that_the_umask_gives(umask: int, job: Job) -> None:
    """Exported weights, checkpoints, caches and reports: a group can read them, or nobody, as its user wants."""
    job = job.but({"train.max_steps": 1, "data.cache": job.folder / "tokens"})
    job.done()
    job.done("data")
    made = [path for top in (job.run, job.cache, job.folder / "tokens") for path in (top, *top.rglob("*"))]
    names = {path.name for path in made}
    assert {"model.safetensors", "config.json", "__0_0.distcp", "fingerprint.json", "ids", "log.txt"} <= names
    assert {"metrics.jsonl", "config.yaml", "data_report.html", "summary.json", "tensorboard"} <= names
    for path in made:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_a_run_folder_that_leads_elsewhere_is_refused_before_any_work(job: Job) -> None:
    """A stranger's run, to be gone on with: what its links lead to stays as it is."""
    job.but({"train.max_steps": 1}).done()
    precious = job.folder / "precious"
    precious.write_text("precious")
    for name in ("log.txt", "metrics.jsonl", "eval.json", "model", "tensorboard"):
        path, kept = job.run / name, job.folder / f"kept {name}"
        if path.exists():
            path.rename(kept)
        path.symlink_to(precious)
        message = job.but({"train.max_steps": 1}).refused("train", "--resume")
        assert f"{path} is a link" in message and "Remove it" in message
        path.unlink()
        if kept.exists():
            kept.rename(path)
    assert precious.read_text() == "precious"
    job.but({"train.max_steps": 1}).done("train", "--resume")


def test_a_run_on_another_disk(job: Job, tmp_path: Path) -> None:
    """The run folder and the caches may be links, and lie below links."""
    for name in ("run", "reference", "tokens"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (job.folder / f"linked {name}").symlink_to(tmp_path / "disk" / name)
    run, reference, tokens = (job.folder / f"linked {name}" for name in ("run", "reference", "tokens"))
    job = job.but(
        {"train.max_steps": 1, "output.dir": run, "reference.cache": reference, "data.cache": tokens},
    )
    job.done()
    job.done("train", "--resume")
    assert (tmp_path / "disk" / "run" / "model" / "model.safetensors").exists()
    assert list((tmp_path / "disk" / "reference").glob("rows-*.bin")) and list((tmp_path / "disk" / "tokens").iterdir())
