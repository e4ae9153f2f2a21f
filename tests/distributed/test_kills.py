"""kill -9 of a rank, then --resume, or an agent that starts all anew; kills.py does it a hundred times."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.distributed.kills import assert_same, finished, killed_again_and_again, prepared, start, train
from tuningfork.train.checkpoint import Progress
from tuningfork.train.checkpointer import Checkpointer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `whole` is the run of two processes that nobody kills."""
    found = tmp_path_factory.mktemp("kills")
    prepared(found)
    assert finished(start(found, "whole", 2, resume=False)) == [0, 0]
    return found


def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_is_not(folder: Path) -> None:
    assert killed_again_and_again(folder, "killed", 2, kills=3, seed=1) == 3


def killed_once(folder: Path) -> None:
    """Train. The second process of the first start is killed when it is about to save step 8."""
    save = Checkpointer.save

    def killed_or_saved(self: Checkpointer, progress: Progress) -> None:
        if progress.step == 8 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, progress)

    with patch.object(Checkpointer, "save", killed_or_saved if os.environ["RANK"] == "1" else save):
        if code := train(folder, "anew"):
            raise SystemExit(code)


def restarting(folder: Path) -> None:
    """The agent of `torchrun --standalone --nproc-per-node 2 --max-restarts 1`, whose processes are forked here."""
    place: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    once = LaunchConfig(nproc_per_node=2, max_restarts=1, monitor_interval=0.1, start_method="fork", **place)
    elastic_launch(once, killed_once)(folder)


def test_a_run_that_torchrun_starts_anew_goes_on_from_its_newest_checkpoint(folder: Path) -> None:
    """With the arguments of the first start, and to the bits of the run that nobody killed."""
    agent = multiprocessing.get_context("fork").Process(target=restarting, args=(folder,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads, here and in the agent
        agent.start()
    assert finished([agent]) == [0]
    said = (folder / "anew-said-0.txt").read_text()
    assert said.count("continuing from") == said.count("continuing from anew/checkpoints/step-6") == 1
    assert_same(folder / "anew", folder / "whole")
