"""Two agents of torchrun, which stand for two machines: how a run begins there, and anew on all where one fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path
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
    one_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # processes of a machine
    assert finished(start(found, "whole", 2, resume=False, **one_each)) == [0, 0]
    return found


def disturbed(folder: Path, out: str) -> None:
    """Train. When step 4 is about to be saved for the first time, the process of the second machine is killed."""
    save, done = Checkpointer.save, folder / f"{out}-disturbed"

    def killed_or_saved(self: Checkpointer, progress: Progress) -> None:
        if progress.step == 4 and os.environ["RANK"] == "1" and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, progress)

    with patch.object(Checkpointer, "save", killed_or_saved):
        code = train(folder, out)
    if code:
        time.sleep(10)  # a large process takes a while to end: its agent first sees that the other machine begins anew
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


def test_a_process_that_is_killed_is_started_again_on_all_machines(folder: Path) -> None:
    """Each agent counts starts for itself: one sees its process die, the other that machines come anew. The run ends
    with the bits of one that nobody disturbed."""
    context, port = multiprocessing.get_context("fork"), free_port()
    agents = [context.Process(target=agent, args=(port, folder, "anew")) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        for process in agents:
            process.start()
    assert finished(agents, seconds=60.0) == [0, 0]
    said = (folder / "anew-said-0.txt").read_text()
    assert said.count("2 processes: 2 copies of the model") == 2 and (folder / "anew-disturbed").exists()
    assert "continuing from anew/checkpoints/step-2" in said or "it begins at its first step" in said
    assert_same(folder / "anew", folder / "whole")


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
