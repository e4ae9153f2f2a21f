"""`tuningfork launch`: a command on several processes, by the agent that torchrun, too, runs on each machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from types import FrameType

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tuningfork.commands.launched import LAUNCHER
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.ranks import Ranks
from tuningfork.errors import ConfigError, RankError
from tuningfork.wording import first_line

INTERRUPTED = 130
PASSED_ON = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""Signals to the launcher -> what it sends the processes: a terminal that closes stops a run as the scheduler does."""
LOOK = 0.1  # seconds between two looks at the processes

AS_IT_STANDS = ParallelConfig()


def launch(
    arguments: Sequence[str],
    processes: int | None,
    device: str,
    max_restarts: int,
    grace: float,
    nodes: int = 1,
    rendezvous: str | None = None,
    parallel: ParallelConfig = AS_IT_STANDS,
) -> int:
    """Run Python several times, as processes that find each other, until all have ended.

    Args:
        arguments: of each Python, such as -m tuningfork train recipe.yaml.
        processes: how many on this machine; None for one a GPU.
        device: the recipe's train.device.
        max_restarts: how often all of them are started again after one has failed.
        grace: seconds that they have to save and end after a signal, before they are killed.
        nodes: machines on which the same is launched.
        rendezvous: host:port of one of them, where all meet; None for one machine, where any port will do.
        parallel: what the processes will share out, or refuse to.

    Returns the exit status: 0, that of the process that failed first, 128 + the number of the signal that killed it,
    or 130 where the launcher was told to stop. Raises ConfigError.
    """
    if nodes > 1 and rendezvous is None:
        raise ConfigError(
            f"--nodes is {nodes}, and nothing says where they meet. Give all of them the same --rendezvous host:port, "
            "a free port of one of them."
        )
    count = processes or _gpus(device)
    Layout.plan(parallel, Ranks(size=nodes * count, per_node=count))  # each of them would find out, once it has begun
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are ours: in 2.11 its patience ends in 30 s
    # One store for all starts would tell those after a failure the addresses of the start before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.disable(logging.CRITICAL)  # this process only starts others, and says itself how they ended
    here = None if nodes > 1 else "127.0.0.1"
    parameters = RendezvousParameters("c10d", rendezvous or f"{here}:0", "tuningfork", nodes, nodes, local_addr=here)
    with TemporaryDirectory(prefix="tuningfork-launch-") as logs:  # for nothing but what the agent leaves
        spec = WorkerSpec(
            role="tuningfork",
            local_world_size=count,
            rdzv_handler=get_rendezvous_handler(parameters),
            entrypoint=sys.executable,
            args=tuple(arguments),
            max_restarts=max_restarts,
            monitor_interval=LOOK,
        )
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=logs))
        try:
            with _signals_passed_on(lambda: _running(agent), grace):
                result = agent.run()
        except SignalException:
            return INTERRUPTED
        except RendezvousError as error:
            begun = any(worker.id for worker in agent.get_worker_group().workers)
            raise _lost(rendezvous) if begun else _did_not_meet(nodes, rendezvous, error) from error
        finally:
            spec.rdzv_handler.shutdown()
    return _status(result.failures) if result.is_failed() else 0


def _did_not_meet(nodes: int, rendezvous: str | None, error: RendezvousError) -> RankError:
    return RankError(
        f"the {nodes} machines did not meet at {rendezvous or 'localhost'}: {first_line(error).rstrip('.')}. Is that "
        "port of that machine free, and reached from the others?"
    )


def _lost(rendezvous: str | None) -> RankError:
    """Once processes had begun: the store of all machines is gone, and with it this one's knowledge of the others."""
    return RankError(
        f"the launcher at {rendezvous or 'localhost'}, where all machines meet, has ended, or its machine is gone; its "
        "own words, if it had any, stand there. What was saved is whole: continue with --resume."
    )


def _gpus(device: str) -> int:
    """The number of GPUs. Raises ConfigError where there is none, or the recipe wants none."""
    found = 0 if device == "cpu" else torch.cuda.device_count()
    if not found:
        why = "train.device is cpu" if device == "cpu" else "no GPU is seen here"
        raise ConfigError(f"{why}, so the number of processes must be given: tuningfork launch --processes 2 ...")
    return found


def _running(agent: LocalElasticAgent) -> list[int]:
    """The processes that have not ended, each of which leads a process group."""
    return [int(worker.id) for worker in agent.get_worker_group().workers if worker.id and _runs(int(worker.id))]


def _runs(process: int) -> bool:
    """Whether a child runs. One that has ended stays there for the agent, which wants its exit status."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # the agent has it already
        return False


@contextmanager
def _signals_passed_on(running: Callable[[], list[int]], grace: float) -> Iterator[None]:
    """Pass signals on to the processes. The first ends the agent as soon as they have ended, or after `grace` seconds;
    a second makes them stop at once."""
    stopping = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        for process in running():
            with suppress(ProcessLookupError):
                os.killpg(process, PASSED_ON[signal.Signals(number)])
        if stopping:
            return
        stopping = True
        until = time.monotonic() + grace
        while running() and time.monotonic() < until:
            time.sleep(LOOK)
        for process in running():
            print(f"tuningfork: process {process} did not end in {grace:g} s and is killed", file=sys.stderr)
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        raise SignalException("", signal.Signals(number))

    heard = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _status(failures: dict[int, ProcessFailure]) -> int:
    """The exit status of the process that failed first. One that was killed had no last word, so it is named here."""
    ended = (INTERRUPTED, -signal.SIGTERM)  # how those end that the agent stops because another has failed
    rank, first = min(failures.items(), key=lambda found: (found[1].exitcode in ended, found[1].timestamp, found[0]))
    if first.exitcode >= 0:
        return first.exitcode
    name = first.signal_name()
    cause = " The machine's memory may have run out: `dmesg` tells." if name == "SIGKILL" else ""
    print(
        f"tuningfork: rank {rank} (process {first.pid}) was killed by {name}.{cause} What was saved is whole: continue "
        "with --resume.",
        file=sys.stderr,
    )
    return 128 - first.exitcode
