"""One tiny model and one preference file for all end-to-end tests, and a job on them for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import logging

from tests.end_to_end.workbench import Job, job_in, make_model, make_pairs, start_server, write_rows

start_server()
logging.disable_progress_bar()  # cli does so by an environment variable, too late if transformers is imported already


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what no test changes: `model`, `other-model`, `pairs.jsonl` (40 rows), `held_out.jsonl` (11)."""
    folder = tmp_path_factory.mktemp("shelf")
    make_model(folder / "model")
    make_model(folder / "other-model", seed=1)
    write_rows(folder / "pairs.jsonl", make_pairs(40))
    write_rows(folder / "held_out.jsonl", make_pairs(11, seed=5))
    return folder


@pytest.fixture
def job(shelf: Path, tmp_path: Path) -> Job:
    """Ten steps of four pairs, one epoch; run folder and reference cache are the test's own."""
    return job_in(tmp_path, shelf)


@pytest.fixture(scope="session")
def finished(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that is done, to be looked at only: 3 epochs of 10 steps with held-out pairs and a large learning rate."""
    job = job_in(tmp_path_factory.mktemp("finished"), shelf).but(
        data={"eval": shelf / "held_out.jsonl"},
        train={"epochs": 3, "learning_rate": 3e-3},
        output={"save_every": 4, "keep_last": 3},
    )
    job.done()
    return job


@pytest.fixture(scope="session")
def filled_cache(finished: Job) -> Path:
    """The reference cache of the shelf's model, with all of its pairs; not to be changed."""
    return finished.cache
