"""A process of the run that is gone is noticed by all others at once, whatever they wait for.

Gloo fails a collective when a process that takes part has ended. NCCL does not within a machine: GPUs wait until
parallel.timeout_minutes are over, and Python, which waits for its GPU, hears no signal meanwhile. So each process keeps
a connection to the first one. The system closes the connections of a process that ends, however it ends, and one that
had not said goodbye is gone. The first process tells all others.

A machine that is lost closes nothing. The systems of the others ask it whether it is there (TCP keepalive), and close
connections that have not answered for PROBED seconds.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from weakref import WeakSet

import torch.distributed as dist

MEETING = "watch"  # where the store has the first process's port, a word that strangers do not know, and its addresses
NUMBER = struct.Struct("!i")  # what is said: by a newcomer its rank, to all the rank that is gone, or GOODBYE
GOODBYE = -1
MEET = 60.0  # seconds in which all connect, who have only just met in a process group
HELLO = 5.0  # seconds that a newcomer has to say who it is
LEAVING = 5.0  # seconds that a process at most waits for its watching thread
IDLE, EVERY, PROBES = 30, 10, 3  # seconds of silence before a probe, and between probes; how many without an answer
PROBED = IDLE + EVERY * PROBES

_OPEN: WeakSet[_First | _Other] = WeakSet()


@contextmanager
def watched(
    store: dist.Store, rank: int, size: int, gone: Callable[[int], None], grace: float, meet: float = MEET
) -> Iterator[None]:
    """Call `gone`, in a thread, with the rank of the first other process that is gone, unless this one leaves the
    context within `grace` seconds of that.

    Whoever leaves it with an error is gone to the others. Not so with an interrupt: all processes get one, and each
    ends in its own time.

    Args:
        store: of all processes.
        meet: seconds in which all have to connect.

    Raises:
        OSError: a process did not connect in time.
        RuntimeError: the store does not answer.
    """
    watch = _First(store, size, meet) if rank == 0 else _Other(store, rank, meet)
    _OPEN.add(watch)

    def listen() -> None:
        number = watch.first_gone()
        if number is not None and not watch.left.wait(grace):
            gone(number)
        watch.close()

    thread = Thread(target=listen, name="watch of processes", daemon=True)
    thread.start()
    well = False
    try:
        yield
        well = True
    except KeyboardInterrupt:
        well = True
        raise
    finally:
        watch.leave(well)
        # Else the thread may be the last to hold what `gone` needs: a process group that is taken down while Python
        # ends aborts the process.
        thread.join(LEAVING)


def _close_in_a_child() -> None:
    """A forked child would keep the connections of a dead parent open."""
    for watch in _OPEN:
        watch.close()


os.register_at_fork(after_in_child=_close_in_a_child)


class _First:
    """The first process: it hears of all others, and tells them."""

    def __init__(self, store: dist.Store, size: int, meet: float) -> None:
        """Let all others in."""
        self.left = Event()
        self.lines: dict[socket.socket, int] = {}
        until = time.monotonic() + meet
        word = secrets.token_bytes(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual) as door:
            store.set(MEETING, " ".join([str(door.getsockname()[1]), word.hex(), *_own_addresses()]))
            while len(self.lines) < size - 1:
                door.settimeout(max(0.001, until - time.monotonic()))
                try:
                    line, _ = door.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, size)) - set(self.lines.values()))
                    raise TimeoutError(f"ranks {missing} did not connect to the first in {meet:.0f} s") from error
                line.settimeout(HELLO)
                number = _heard(line) if _read(line, len(word)) == word else None
                if number is None:  # a stranger
                    line.close()
                else:
                    _probed(line)
                    self.lines[line] = number

    def first_gone(self) -> int | None:
        """Its rank; None once this process has left, or all others have."""
        with selectors.DefaultSelector() as ready:
            for line in self.lines:
                ready.register(line, selectors.EVENT_READ)
            while ready.get_map():
                for key, _ in ready.select():
                    line: socket.socket = key.fileobj  # type: ignore[no-redef, assignment]
                    ready.unregister(line)
                    if _heard(line) != GOODBYE and not self.left.is_set():
                        self._tell(self.lines[line])
                        return self.lines[line]
        return None

    def _tell(self, number: int) -> None:
        for line in self.lines:
            _say(line, number)

    def leave(self, well: bool) -> None:
        self.left.set()
        if well:
            self._tell(GOODBYE)
        for line in self.lines:
            _hang_up(line)

    def close(self) -> None:
        for line in self.lines:
            line.close()


class _Other:
    """Any other process: it hears of the first one, and from it of all others."""

    def __init__(self, store: dist.Store, rank: int, meet: float) -> None:
        """Connect to the first process."""
        self.left = Event()
        port, word, *addresses = store.get(MEETING).decode().split()
        self.line = _reached([os.environ["MASTER_ADDR"], *addresses], int(port), meet)
        _probed(self.line)
        self.line.sendall(bytes.fromhex(word) + NUMBER.pack(rank))

    def first_gone(self) -> int | None:
        """Its rank; None once this process, or the first one, has left."""
        said = _heard(self.line)
        return None if said == GOODBYE or self.left.is_set() else said or 0

    def leave(self, well: bool) -> None:
        self.left.set()
        if well:
            _say(self.line, GOODBYE)
        _hang_up(self.line)

    def close(self) -> None:
        self.line.close()


def _own_addresses() -> list[str]:
    """Of this machine: MASTER_ADDR need not be the first process's, nor let other ports through than its own."""
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return []


def _reached(addresses: Sequence[str], port: int, meet: float) -> socket.socket:
    """A connection to the first of the addresses that takes one. Raises OSError where none does."""
    failures = []
    for address in dict.fromkeys(addresses):
        try:
            return socket.create_connection((address, port), meet / len(addresses))
        except OSError as error:
            failures.append(f"{address}:{port}: {error}")
    raise OSError(f"the first process is not reached at {'; '.join(failures)}")


def _probed(line: socket.socket) -> None:
    """Let the kernel look whether the other machine is there, and wait for it as long as it is."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # not everywhere: there the system's own hours stand
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _heard(line: socket.socket) -> int | None:
    """The number that is said next; None where there is nobody any more."""
    said = _read(line, NUMBER.size)
    return NUMBER.unpack(said)[0] if len(said) == NUMBER.size else None


def _read(line: socket.socket, count: int) -> bytes:
    """So many bytes, or as many as come."""
    found = b""
    with suppress(OSError):
        while len(found) < count and (more := line.recv(count - len(found))):
            found += more
    return found


def _say(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody is there to hear it
        line.sendall(NUMBER.pack(number))


def _hang_up(line: socket.socket) -> None:
    """End both directions. What was said before still arrives."""
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
