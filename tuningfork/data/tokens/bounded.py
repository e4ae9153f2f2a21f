"""A bound on the processor time and the memory that foreign code takes, such as a chat template's.

A template is a program. Its sandbox keeps it away from files, but a loop within a loop, a text that is doubled again
and again or a power of a power needs no more than a line to take hours, or all memory. There are countless ways to
write such a line, so none of them is looked for: the kernel counts time and memory while the template prints.
"""

from __future__ import annotations

import faulthandler
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

SECONDS = 10.0  # of processor time: a text of ten million characters is printed in a tenth of one
WHOLE = 60.0  # seconds, for all that is printed of a row: of a conversation of thousands of turns that takes minutes
MEMORY = 1 << 30  # bytes: three times what a row with such texts takes
LAST = 40.0  # seconds, the kernel's for the process among them: the process ends if no exception has ended the work
_AGAIN = 1.0  # seconds; a library may take the first interruption for some failure of its own

Result = TypeVar("Result")
_running = False  # whether time is counted
_begun = 0.0  # by the process's clock of processor time


class OutOfTime(BaseException):
    """The time is over. It is no Exception, for code of others goes on after those."""


def bounded(work: Callable[[], Result], memory_too: bool = True) -> Result:
    """What `work` returns, with a bound on the memory that it takes beyond what the process has, where that is asked
    for; and on its processor time, up to each `renew` and as a whole.

    The limits are the process's, and Python hears of time in its main thread alone: work in another one has no bound.
    Nor has it one of memory where the kernel is not Linux.

    Python hears of time between two calls alone, and some, such as a comparison of lists within lists, take years. No
    exception ends those. The kernel then ends the process, by SIGPROF, with the lines of Python that were at work on
    stderr, those of the template or of jinja2 first.

    Raises:
        OutOfTime: the work took SECONDS up to a `renew` or to its end, or WHOLE.
        MemoryError: it asked for MEMORY bytes.
    """
    global _running, _begun
    if threading.current_thread() is not threading.main_thread():
        return work()
    before = signal.signal(signal.SIGVTALRM, _end)
    before_last = signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A handler in C, which waits for nothing; then comes the default, the end of the process.
    faulthandler.register(signal.SIGPROF, file=2, all_threads=False, chain=True)
    memory = _limit_memory() if memory_too else None
    try:
        _running, _begun = True, time.process_time()
        _start()
        return work()
    finally:
        # First of all, and in this very place: until then an interruption that is due comes with the next call, and
        # a block of `with` would be left without its end.
        _running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, memory)
        # The default is the end of the process, should the last signal still be on its way.
        signal.signal(signal.SIGVTALRM, before if callable(before) else signal.SIG_IGN)
        faulthandler.unregister(signal.SIGPROF)
        signal.signal(signal.SIGPROF, signal.SIG_DFL if before_last is None else before_last)


def renew() -> None:
    """Let the time of the work that this is called in, if it is bounded, begin anew."""
    if _running and threading.current_thread() is threading.main_thread():
        _start()


def _start() -> None:
    left = WHOLE - (time.process_time() - _begun)
    signal.setitimer(signal.ITIMER_VIRTUAL, max(0.001, min(SECONDS, left)), _AGAIN)  # 0 would be no bound
    signal.setitimer(signal.ITIMER_PROF, LAST)


def _end(*_: object) -> None:
    if _running:
        taken = time.process_time() - _begun
        raise OutOfTime(f"{WHOLE if taken >= WHOLE else SECONDS:g} s of processor time")


def _limit_memory() -> tuple[int, int] | None:
    """Bound the process's memory; the limits that it had, None where there is no way.

    Memory is then refused to all threads of the process, of which no other should be at work meanwhile.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = min(given for given in (used + MEMORY, soft, hard) if given != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    return soft, hard
