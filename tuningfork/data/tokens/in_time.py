"""A bound on the time of a call into a library that does not come back to Python, such as the tokenizer's.

An expression of a tokenizer.json may take years to read a word, and nothing ends such a call from within its thread:
neither an exception nor a signal. So it is made in another thread, which is left alone once its time is over, while
this one stays free to hear of Ctrl-C. That thread stays for the next call: handing one over takes some 50 microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from tuningfork.data.tokens.bounded import OutOfTime

_LOOK = 0.5  # seconds between two looks at the clocks

Result = TypeVar("Result")


def in_time(work: Callable[[], Result], seconds: float) -> Result:
    """What `work` returns or raises, from another thread. It must let other threads of Python run.

    Raises OutOfTime where it takes more seconds, of the clock and of the process's processors both: a machine that was
    asleep, and other threads, take no time from it. The work goes on then, until the process ends.
    """
    global _helper
    if not _helper.is_alive():
        _helper = _Helper()
        _helper.start()
    helper, done = _helper, Future[Result]()
    begun, used = time.monotonic(), time.process_time()
    helper.tasks.put((work, done))
    try:
        while not wait([done], min(_LOOK, seconds)).done:
            if min(time.monotonic() - begun, time.process_time() - used) > seconds:
                raise OutOfTime(f"{seconds:.3g} s of processor time")
    except BaseException:
        _helper = _Helper()  # another one for the next call
        helper.tasks.put(None)
        raise
    return done.result()


class _Helper(threading.Thread):
    """Makes the calls that are handed to it, one after the other; None ends it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)  # the process does not wait for it
        self.tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            work, done = task
            try:
                done.set_result(work())
            except BaseException as error:  # a library's panic is no Exception
                done.set_exception(error)
            del task, work, done  # which hold texts and tokens


_helper = _Helper()
