"""Several processes on this machine that run a function together, over Gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.world import world

SECONDS = 120.0
"""A world that has not ended by then hangs."""


def together(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(ranks, *args)` returns on each of `size` processes, which are forked from this one: they find
    everything imported. Raises AssertionError, with its traceback, where one fails."""
    return [found for _, found in ended(size, function, *args, failing=False)]


def ended(size: int, function: Callable[..., Any], *args: Any, failing: bool = True) -> list[tuple[bool, Any]]:
    """How `function(ranks, *args)` ends on each of `size` processes: True and what it returns, or False and why not.
    Unless some may be `failing`, raises AssertionError once one does."""
    port, context = free_port(), multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, rank, size, port, function, args))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads, since Python 3.12
            process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < size:
            left = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
            ready = wait(left, SECONDS)
            assert ready, f"ranks {[rank for rank in range(size) if rank not in found]} hang"
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pickle.loads(pipes[rank].recv_bytes())
                except EOFError:
                    found[rank] = (False, f"rank {rank} died")
                if not found[rank][0] and not failing:
                    raise AssertionError(f"rank {rank}: {found[rank][1]}")
        return [found[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process of one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _run(pipe: Connection, rank: int, size: int, port: int, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(environment(rank, size, port))
    torch.set_num_threads(1)
    try:
        with world(ParallelConfig(timeout_minutes=1), cuda=False) as ranks:
            found = function(ranks, *args)
        pipe.send_bytes(pickle.dumps((True, found)))  # whole, where the pipe's own way would share memory
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()


def alone(ranks: Ranks) -> int:
    """The least that a world can do."""
    ranks.barrier()
    return ranks.rank
