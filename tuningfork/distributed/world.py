"""How the processes of a run find each other, and how all of them end when one does.

A launcher, torchrun or one like it, starts the processes and tells each in its environment which one it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist

from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks, lost, of_a_collective, unanswered
from tuningfork.distributed.watch import watched
from tuningfork.errors import ConfigError, RankError, SaidElsewhere, TuningforkError

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variable that holds the number of processes -> who sets it, and nothing that says where the first process is.
# SLURM_NTASKS is not among them: it is what was asked for, also where a batch script then starts one process.
OTHER_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun", "SLURM_STEP_NUM_TASKS": "srun"}
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often a launcher has started all anew, after one of them had failed
KEPT = "TORCHELASTIC_USE_AGENT_STORE"
"""Says "True" where a launcher keeps one store for all starts. Those after a failure must not find what the last has
left there. Else each start has a store of its own, and the number of starts, which each machine counts for itself and
not always to the same, must not part them."""
ANSWER = 10.0  # seconds for what takes the store milliseconds
FAILURES = "failures"  # how many processes have failed, in the store that all of them share
GRACE = 20.0
"""Seconds that a process has to end by itself when another one is gone. Most find out in what they exchange, and leave
their files in order; one that waits for its GPU never does."""

KEEPS = (
    "Where torchrun starts all anew on several machines, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: "
    "else machines may look for each other under different numbers of the start."
)


ALONE = dict(zip(OF_TORCHRUN, ("0", "1", "0", "1", "127.0.0.1", "0"), strict=True))
"""The environment of a world of one."""


@contextmanager
def world(parallel: ParallelConfig, cuda: bool, always: bool = False) -> Iterator[Ranks]:
    """All processes of a run, which have found each other, as one of them sees them.

    Of several that fail, the first keeps its error and the others get `SaidElsewhere`, so that a console that shows the
    output of all has each error once.

    Args:
        cuda: whether the run computes on GPUs, one a process.
        always: find the others also where there are none, so that what one process does can be seen as one of several.

    Raises:
        ConfigError: the launcher is none that says where the others are, or its variables are incomplete; the settings
            do not share out the processes; or two of them have one GPU.
        RankError: the others did not come in time.
    """
    if not started_together() and not always:
        yield ONE_PROCESS
        return
    named = {name: _number(name) for name in OF_TORCHRUN[:4]}
    timeout = timedelta(minutes=parallel.timeout_minutes)
    if cuda:
        torch.cuda.set_device(named["LOCAL_RANK"] % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        if os.environ.get(KEPT) == "True":
            store = dist.PrefixStore(f"start {_number(RESTARTS, absent=0)}", store)
        dist.init_process_group(
            backend, store=dist.PrefixStore("run", store), rank=rank, world_size=size, timeout=timeout
        )
        host = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"process {named['RANK']} of {named['WORLD_SIZE']} did not find the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}",
            *([KEEPS] if restarted() and os.environ.get(KEPT) == "True" else []),
        ) from error
    ranks = Ranks(rank, size, named["LOCAL_RANK"], named["LOCAL_WORLD_SIZE"], host=host)
    try:
        with _watched(ranks, store):
            if cuda:
                _check_own_gpus(ranks.all(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)))
            ranks = replace(ranks, tensor=Layout.plan(parallel, ranks).tensor)
            yield ranks
    except SaidElsewhere:  # the one that fails counts first: the store may end with this one
        with suppress(RuntimeError):
            store.wait([FAILURES], timeout)
        raise
    except BaseException as caught:
        failure = unanswered(caught) if of_a_collective(caught) else caught
        if not _is_first_to_fail(ranks, store):
            raise SaidElsewhere() from failure
        if rank and isinstance(failure, TuningforkError):
            failure.args = (f"rank {rank}: {failure.args[0] if failure.args else ''}", *failure.args[1:])
        if failure is caught:
            raise
        raise failure from caught
    finally:
        if sys.exc_info()[0] is None:  # else the others may be gone already, and must not be waited for
            dist.destroy_process_group()


@contextmanager
def _watched(ranks: Ranks, store: dist.Store) -> Iterator[None]:
    """End this process where another one is gone and it does not notice. Raises RankError where they do not connect."""
    if ranks.size == 1:
        yield
        return
    with ExitStack() as watch:
        try:
            # A connection of its own to the store: the main thread may be waiting for it through the other one.
            end = partial(_end_without, ranks, store.clone())  # type: ignore[attr-defined]
            watch.enter_context(watched(store, ranks.rank, ranks.size, end, GRACE))
        except (OSError, RuntimeError) as error:
            raise RankError(f"the processes met, and did not all connect to watch each other: {error}") from error
        yield


def _end_without(ranks: Ranks, store: dist.Store, number: int) -> None:
    """End this process at once, whatever it waits for: process `number` is gone. It is a kill: what has been written
    is whole, what waits to be is lost."""

    def say() -> None:
        if _is_first_to_fail(ranks, store, speaks_unanswered=ranks.on_node == 0):
            print(f"tuningfork: {lost(number)}", file=sys.stderr, flush=True)

    speaker = Thread(target=say, daemon=True)  # nobody may be reading on, or the other end of a pipe stands still
    speaker.start()
    speaker.join(2 * ANSWER + ranks.on_node)
    os._exit(2)


def _is_first_to_fail(ranks: Ranks, store: dist.Store, speaks_unanswered: bool = True) -> bool:
    """Whether this process is the one to say why the run fails: `_first_to_fail` with what its place says.

    speaks_unanswered: whether it is where the store does not answer.
    """
    seconds = ANSWER + ranks.on_node  # so that one speaks, where all wait in vain
    return _first_to_fail(store, seconds, far=ranks.rank != ranks.on_node == 0, unanswered=speaks_unanswered)


def started_together() -> bool:
    """Whether this is one process of several. Raises ConfigError where it cannot find the others."""
    for name, launcher in OTHER_LAUNCHERS.items():
        if "WORLD_SIZE" not in os.environ and _number(name, absent=1) > 1:
            raise ConfigError(
                f"{name} is {os.environ[name]}: {launcher} has started several processes, which do not know where the "
                f"first is. Let {launcher} start one process on each machine, and that one start the others: torchrun "
                "--nproc-per-node <GPUs> ... -m tuningfork train <recipe>, see docs/cluster.md."
            )
    if _number("WORLD_SIZE", absent=1) <= 1:
        return False
    missing = [name for name in OF_TORCHRUN if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set, so this process does not "
            "find the others. Start it with torchrun, or with tuningfork launch."
        )
    return True


def _check_own_gpus(gpus: Sequence[str]) -> None:
    """Raises ConfigError where two ranks have one GPU, which NCCL does not take. `gpus`: the name of each rank's."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu in first:
            raise ConfigError(
                f"ranks {first[gpu]} and {rank} have the same GPU, {gpu}. Start as many processes on a machine as it "
                "has GPUs, or set train.device to cpu."
            )
        first[gpu] = rank


def restarted() -> bool:
    """Whether a launcher has started this process anew after one of them failed, which it does with the arguments of
    the first start: a run that this first start began then goes on, as with --resume."""
    return _number(RESTARTS, absent=0) > 0


def _number(name: str, absent: int | None = None) -> int:
    """A whole number in the environment. Raises ConfigError where it is none."""
    said = os.environ.get(name, "").strip()
    if not said and absent is not None:
        return absent
    if not said.isdecimal():
        raise ConfigError(f"{name} is {said!r} in the environment, which is no number. It is the launcher's to set.")
    return int(said)


def _first_to_fail(store: dist.Store, seconds: float, far: bool = False, unanswered: bool = True) -> bool:
    """Count this process among those that have failed; whether none has before it, as far as can be told.

    Not where the process that keeps the store has ended, for it or its launcher has said why, unless that is `far` from
    here: a machine that is lost says nothing, and what another one says is not read here. Nor where the launcher stops
    this process meanwhile.

    Args:
        seconds: in which the store has to answer. Its own calls would wait without end where the process that keeps it
            hangs, or its machine is gone.
        unanswered: what is found where it does not.
    """
    count: list[int] = []

    def ask() -> None:
        with suppress(RuntimeError):
            count.append(store.add(FAILURES, 1))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    try:
        asking.join(seconds)
    except KeyboardInterrupt:
        return False
    return unanswered if asking.is_alive() else count == [1] or (far and not count)
