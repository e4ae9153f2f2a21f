"""Two agents of torchrun, which stand for two machines: how a run begins there, and how it ends where one is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.distributed.kills import assert_same, finished, prepared, start, train
from tests.distributed.worlds import free_port, together
from tuningfork.distributed import shared
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.shared import check_shared
from tuningfork.errors import ConfigError
from tuningfork.train.checkpoint import Progress
from tuningfork.train.checkpointer import Checkpointer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `whole` is a run on two machines that nobody disturbs."""
    found = tmp_path_factory.mktemp("machines")
    prepared(found)
    assert finished(on_two(found, "whole", resume=False)) == [0, 0]
    return found


def on_two(folder: Path, out: str, resume: bool) -> list[Any]:
    """The processes of two machines, one on each, which no agent looks after."""
    return start(folder, out, 2, resume, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


def disturbed(folder: Path, out: str) -> None:
    """Train. When step 4 is about to be saved, the process of the second machine is killed, once; and at step 8 that
    machine is lost: its agent and its process at once."""
    save = Checkpointer.save

    def killed_or_saved(self: Checkpointer, progress: Progress) -> None:
        done = folder / f"{out}-killed-{progress.step}"
        if progress.step in (4, 8) and os.environ["RANK"] == "1" and not done.exists():
            done.touch()
            if progress.step == 8:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, progress)

    with patch.object(Checkpointer, "save", killed_or_saved):
        code = train(folder, out)
    if code and not (folder / f"{out}-killed-8").exists():
        time.sleep(5)  # a large process takes a while to end: its agent first sees that the other machine begins anew
    raise SystemExit(code)


def agent(port: int, folder: Path, out: str) -> None:
    """That of `torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-endpoint 127.0.0.1:PORT ...`, whose
    process is forked here."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as docs/cluster.md has it
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}", "run_id": "machines"}
    once = LaunchConfig(2, 2, 1, max_restarts=1, monitor_interval=0.1, start_method="fork", **place)
    elastic_launch(once, disturbed)(folder, out)


def test_each_machine_has_a_copy_of_the_model(folder: Path) -> None:
    assert "2 processes: 2 copies of the model" in (folder / "whole-said-0.txt").read_text()


def test_a_process_is_started_again_on_all_machines_and_a_lost_machine_ends_all(folder: Path) -> None:
    """Each agent counts starts for itself: one sees its process die, the other that machines come anew. The run ends
    with the bits of one that nobody disturbed."""
    context, port = multiprocessing.get_context("fork"), free_port()
    agents = [context.Process(target=agent, args=(port, folder, "lost")) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        for process in agents:
            process.start()
    codes = finished(agents, seconds=60.0)
    assert -signal.SIGKILL in codes and 0 not in codes and (folder / "lost-killed-8").exists()
    said = [(folder / f"lost-said-{rank}.txt").read_text() for rank in range(2)]
    assert said[0].count("2 processes: 2 copies of the model") == 2
    assert all(text.count("tuningfork: ") <= 2 and "did not find the others" not in text for text in said)
    assert finished(on_two(folder, "lost", resume=True)) == [0, 0]
    assert "continuing from lost/checkpoints/step-" in (folder / "lost-said-0.txt").read_text()
    assert_same(folder / "lost", folder / "whole")


def _shared(ranks: Ranks, folder: Path, own: bool) -> list[str]:
    """What is said on a machine that has a folder of its own by the name of the first one's, or not."""
    os.chdir(folder / str(ranks.rank) if own else folder)
    shared.PATIENCE = 0.2
    try:
        check_shared(ranks, {"output.dir": "runs/first", "reference.cache": str(folder / "cache")})
    except ConfigError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("own", [False, True])
def test_folders_that_are_not_one_are_refused_by_all(own: bool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0/runs").mkdir()  # which the other looks for in vain
    said = together(2, _shared, tmp_path, own)
    assert said[0] == said[1] and len(said[0]) == own
    assert all(words in line for line in said[0] for words in ("output.dir runs/first", "(rank 1)", "that they share"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1", "runs"]


def test_one_process_shares_with_nobody() -> None:
    check_shared(ONE_PROCESS, {"output.dir": "/nowhere"})
