"""Launching several processes: how they end is how the launcher ends, and a signal reaches all of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousError

from tests.distributed.worlds import free_port
from tests.repeated import slow
from tuningfork.commands.launch import launch
from tuningfork.distributed.config import ParallelConfig
from tuningfork.errors import ConfigError, RankError

SECONDS = 60.0
RANK = "import os, signal, sys, time; rank, again = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']; "


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """A launcher is a process of its own, which leaves no logging and its own environment."""
    with patch.dict(os.environ):
        for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        yield
        logging.disable(logging.NOTSET)


def run(script: str, processes: int = 2, max_restarts: int = 0, grace: float = SECONDS) -> int:
    return launch(["-S", "-c", RANK + script], processes, "cpu", max_restarts, grace)


@pytest.mark.parametrize(
    ("script", "max_restarts", "status"),
    [
        ("sys.exit(0)", 0, 0),
        ("sys.exit(2 if rank == '1' else 0)", 0, 2),
        ("sys.exit(130)", 0, 130),
        ("sys.exit(2) if rank == '1' else time.sleep(60)", 0, 2),
        ("sys.exit(1 if again == '0' else 0)", 1, 0),
        ("sys.exit(1 + int(again))", 1, 2),
    ],
)
def test_the_status_is_that_of_the_process_that_failed(
    script: str, max_restarts: int, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(script, max_restarts=max_restarts) == status
    assert capfd.readouterr() == ("", "")


def test_a_process_that_was_killed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("rank == '1' and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)") == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert (
        out == "" and err.startswith("tuningfork: rank 1 (process ") and "was killed by SIGKILL. The machine's" in err
    )
    assert err.count("\n") == 1 and err.endswith("continue with --resume.\n")


@pytest.mark.parametrize("given", [None, "5"])
def test_processes_share_out_the_cores(given: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    if given is not None:
        os.environ["OMP_NUM_THREADS"] = given
    assert run("rank == '0' and print(os.environ['OMP_NUM_THREADS'], os.environ['WORLD_SIZE'])") == 0
    assert capfd.readouterr().out == f"{given or max(1, len(os.sched_getaffinity(0)) // 2)} 2\n"


def test_a_number_of_processes_is_asked_for_where_no_gpu_tells_it() -> None:
    with pytest.raises(ConfigError, match=r"train\.device is cpu.*--processes 2"):
        launch([], None, "cpu", 0, SECONDS)
    with patch("torch.cuda.device_count", lambda: 0), pytest.raises(ConfigError, match="no GPU is seen here"):
        launch([], None, "auto", 0, SECONDS)


MEETING = """
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.world import world
from tuningfork.errors import ConfigError, SaidElsewhere
try:
    with world(ParallelConfig(timeout_minutes=1), cuda=False) as ranks:
        ranks.barrier()
        if rank == '1' and again == '0':
            os.kill(os.getpid(), signal.SIGKILL)
        if again == '1':
            print(ranks.all(ranks.rank), flush=True)
            raise ConfigError()
        ranks.barrier()
except ConfigError:
    print('failed', flush=True)
    sys.exit(2)
except SaidElsewhere:
    sys.exit(2)
"""


def test_processes_meet_again_after_a_failure(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At addresses of their own, not at those that the first start left behind; and count their failures anew."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert launch(["-c", f"{RANK}exec({MEETING!r})"], 2, "cpu", 1, SECONDS) == 2
    said = capfd.readouterr().out  # a line of one may lie within another's
    assert (said.count("[0, 1]"), said.count("failed")) == (2, 1)


def _as_node(script: str, port: int, pipe: Connection) -> None:
    pipe.send(launch(["-S", "-c", RANK + script], 1, "cpu", 0, SECONDS, nodes=2, rendezvous=f"127.0.0.1:{port}"))


def test_several_machines_meet(capfd: pytest.CaptureFixture[str]) -> None:
    """Two launchers, which think that they are on two machines."""
    script = "print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'], flush=True)"
    context, port, pipes = multiprocessing.get_context("fork"), free_port(), []
    for _ in range(2):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=_as_node, args=(script, port, theirs)).start()
        pipes.append(ours)
    assert all(pipe.poll(SECONDS) and pipe.recv() == 0 for pipe in pipes)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 2 1", "1 2 1"]


def test_a_machine_that_was_lost_is_not_one_that_never_came() -> None:
    """The store in which machines meet may go at any time."""
    error = RendezvousError("The connection to the C10d store has failed. See inner exception for details.")
    for begun, words in ((True, "has ended, or its machine is gone"), (False, r"did not meet at .*details\. Is that")):

        def run(agent: LocalElasticAgent, begun: bool = begun) -> None:
            agent.get_worker_group().workers[0].id = 7 if begun else None
            raise error

        store = patch("tuningfork.commands.launch.get_rendezvous_handler")
        with store, patch.object(LocalElasticAgent, "run", run), pytest.raises(RankError, match=words):
            launch([], 1, "cpu", 0, SECONDS, nodes=2, rendezvous="node1:29500")


def test_machines_must_know_where_they_meet() -> None:
    with pytest.raises(ConfigError, match=r"--nodes is 2.*--rendezvous host:port"):
        launch([], 1, "cpu", 0, SECONDS, nodes=2)


def launched(script: str, grace: float) -> None:
    """A launcher in a process of its own, whose status is its exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line has it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    os._exit(run(script, grace=grace))


def stopped(script: str, folder: Path, *numbers: int, grace: float = SECONDS) -> tuple[int, list[str]]:
    """The status of a launcher that is sent these signals once both processes are there, and the files they left."""
    process = multiprocessing.get_context("fork").Process(
        target=launched, args=(f"os.chdir({str(folder)!r}); {script}", grace)
    )
    process.start()
    _until(lambda: len(list(folder.iterdir())) >= 2)
    for number in numbers:
        assert process.pid is not None
        os.kill(process.pid, number)
        time.sleep(0.5)
    process.join(SECONDS)
    assert process.exitcode is not None, "the launcher hangs"
    return process.exitcode, sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process is told of its parent's end on Linux")
def test_processes_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); from tuningfork.commands.launched import *; "
        "end_with_launcher(); open(os.path.join(sys.argv[2], str(os.getpid())), 'x').close(); time.sleep(60)"
    )
    arguments = ["-S", "-c", script, str(Path(__file__).parents[2]), str(tmp_path)]
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(arguments, 2, "cpu", 0, SECONDS))
    launcher.start()
    _until(lambda: len([*tmp_path.iterdir()]) == 2)
    launcher.kill()
    _until(lambda: not any(Path("/proc", process.name).exists() for process in tmp_path.iterdir()))


def test_a_layout_that_does_not_fit_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="do not share out 2 processes"):
        launch(["-S", "-c", "raise SystemExit(9)"], 2, "cpu", 0, SECONDS, parallel=ParallelConfig(tensor=3))


def _until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


SAVING = """
def save(number, frame):
    time.sleep(1)  # longer than the launcher looks away
    open('saved' + rank + '-' + str(int(number)), 'x').close()
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
open('ready' + rank, 'x').close()
time.sleep(60)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); open('ready' + rank, 'x').close(); time.sleep(60)"
HASTY = """
def again(*_):
    open('again' + rank, 'x').close()
    sys.exit(130)
def first(*_):
    signal.signal(signal.SIGINT, again)
signal.signal(signal.SIGINT, first)
open('ready' + rank, 'x').close()
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("number", [slow(signal.SIGTERM), signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_all_processes_save(number: signal.Signals, tmp_path: Path) -> None:
    """A terminal that closes counts as the scheduler's signal, for a process that hears only that ends unsaved."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("whoever started the tests ignores it, as nohup does, and so do all programs that they start")
    told = signal.SIGTERM if number == signal.SIGHUP else number
    status, files = stopped(f"exec({SAVING!r})", tmp_path, number)
    assert status == 130
    assert files == ["ready0", "ready1", f"saved0-{told:d}", f"saved1-{told:d}"]


def test_a_second_signal_reaches_them_too(tmp_path: Path) -> None:
    status, files = stopped(f"exec({HASTY!r})", tmp_path, signal.SIGINT, signal.SIGINT)
    assert (status, files) == (130, ["again0", "again1", "ready0", "ready1"])


def test_processes_that_do_not_end_are_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    status, files = stopped(DEAF, tmp_path, signal.SIGTERM, grace=0.5)
    assert (status, files) == (130, ["ready0", "ready1"]) and time.monotonic() - begun < 50
    assert capfd.readouterr().err.count("did not end in 0.5 s and is killed\n") == 2
