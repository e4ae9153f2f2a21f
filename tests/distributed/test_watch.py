"""A process that is gone is noticed by all others, and one that leaves well by none."""

from __future__ import annotations

import os
import queue
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.worlds import ended
from tuningfork.distributed import watch as watching
from tuningfork.distributed import world as worlds
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.watch import MEETING, watched

SOON = 20.0  # seconds; what is noticed is noticed in milliseconds, on a machine that has time


class Watchers:
    """As many processes as `size`, in one: they meet in a store, and what each hears of is put down."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, grace: float = 0.0) -> None:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=SOON))
        self.size, self.grace = size, grace
        self.heard: queue.Queue[tuple[int, int]] = queue.Queue()
        self.inside = [ExitStack() for _ in range(size)]

    def enter(self, rank: int) -> None:
        gone = lambda number: self.heard.put((rank, number))  # noqa: E731
        self.inside[rank].enter_context(watched(self.store, rank, self.size, gone, self.grace))

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        self.inside[rank].__exit__(type(error) if error else None, error, None)

    def hear(self, count: int) -> list[tuple[int, int]]:
        return sorted(self.heard.get(timeout=SOON) for _ in range(count))


@contextmanager
def together(size: int, monkeypatch: pytest.MonkeyPatch, grace: float = 0.0) -> Iterator[Watchers]:
    watchers = Watchers(size, monkeypatch, grace)
    with ThreadPoolExecutor(size) as threads:  # each waits for the others
        list(threads.map(watchers.enter, range(size)))
    try:
        yield watchers
    finally:
        for rank in range(size):
            watchers.leave(rank)


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_all_others_hear_of_one_that_fails(dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with together(4, monkeypatch) as watchers:
        watchers.leave(dead, RuntimeError("out of memory"))
        assert watchers.hear(3) == [(rank, dead) for rank in range(4) if rank != dead]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nobody_hears_of_those_that_leave_well(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of an interrupt, which all get and which each ends in its own time."""
    with together(3, monkeypatch) as watchers:
        for rank in order:
            watchers.leave(rank, KeyboardInterrupt() if rank == 1 else None)
            time.sleep(0.2)
        assert watchers.heard.empty()


def test_who_leaves_in_time_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with together(3, monkeypatch, grace=1.0) as watchers:
        watchers.leave(1, RuntimeError("out of memory"))
        time.sleep(0.5)  # else the first process may leave before it has heard, and tells nobody
        watchers.leave(0)
        assert watchers.hear(1) == [(2, 1)]
        assert watchers.heard.empty()


def test_strangers_are_shown_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever scans ports comes to it, too."""
    monkeypatch.setattr(watching, "HELLO", 0.3)
    watchers = Watchers(2, monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(watchers.enter, 0)
        port, word, *_ = watchers.store.get(MEETING).decode().split()
        lines = []
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(20), bytes.fromhex(word) + b"\0"):
            lines.append(socket.create_connection(("127.0.0.1", int(port))))  # some stay and say no more
            lines[-1].sendall(said)
        watchers.enter(1)
        first.result(SOON)
    for line in lines:
        line.close()
    watchers.leave(1, RuntimeError("out of memory"))
    assert watchers.hear(1) == [(0, 1)]
    watchers.leave(0)


def test_a_process_that_does_not_come_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    inside = watched(dist.HashStore(), 0, 2, lambda number: None, 0.0, meet=0.2)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not connect"), inside:
        pass


def test_the_first_process_is_reached_where_the_store_alone_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where MASTER_ADDR lets nothing through but its own port."""
    monkeypatch.setattr(watching, "_own_addresses", lambda: ["127.0.0.1"])
    with together(2, monkeypatch) as watchers:
        watchers.leave(1, RuntimeError("out of memory"))
        assert watchers.hear(1) == [(0, 1)]
    with pytest.raises(OSError, match=r"not reached at 127\.0\.0\.1:1: .*; localhost:1: "):
        watching._reached(["127.0.0.1", "localhost"], 1, 2.0)


def _waits(ranks: Ranks, dead: int, has_child: bool, heard: bool) -> Any:
    """Where one is killed, the others wait as for a GPU: for nothing that another process has a part in."""
    if not heard:
        sys.stderr = open("/dev/full", "w")  # noqa: SIM115
    if ranks.rank == dead:
        if has_child and not os.fork():  # as those that read data are
            for file in map(int, os.listdir("/proc/self/fd")):
                with suppress(OSError):
                    if stat.S_ISFIFO(os.fstat(file).st_mode):  # which this test waits for
                        os.close(file)
            time.sleep(2 * SOON)
            os._exit(0)
        os._exit(9)
    time.sleep(2 * SOON)
    return "waited in vain"


@pytest.mark.parametrize(
    ("dead", "has_child", "heard"), [(1, False, True), (2, True, True), (0, False, True), (1, False, False)]
)
def test_a_process_that_waits_for_its_gpu_ends_when_another_is_killed(
    dead: int, has_child: bool, heard: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where nobody hears what it has to say."""
    monkeypatch.setattr(worlds, "GRACE", 0.2)
    begun = time.monotonic()
    assert ended(3, _waits, dead, has_child, heard) == [(False, f"rank {rank} died") for rank in range(3)]
    assert time.monotonic() - begun < 1.5 * SOON
    said = re.findall(r"tuningfork: process (\d) of the run has ended, and others wait", capfd.readouterr().err)
    # The store of all ends with the first process here. Its launcher says how that has ended.
    assert said == ([str(dead)] if dead and heard else [])


def _interrupted(ranks: Ranks) -> None:
    try:
        raise KeyboardInterrupt
    finally:
        time.sleep(0 if ranks.rank else 1)  # to flush and close


def test_an_interrupt_leaves_each_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "GRACE", 0.2)
    last = [said.splitlines()[-1] for _, said in ended(3, _interrupted)]
    assert sorted(last) == ["KeyboardInterrupt", *["tuningfork.errors.SaidElsewhere"] * 2]
