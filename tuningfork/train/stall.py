"""A run that stands still: said once, with what every thread is doing at that moment."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tuningfork.errors import RunFolderError
from tuningfork.files import append_plain


class StallWatch:
    """Warns where nothing is heard of a run for some seconds, from a thread of its own; to be used as a context.

    The run calls `beat` with what it begins, and is watched from then on until it calls `rest`. Where the next call
    does not come in time, the stacks of all threads are written to a file, by Python's faulthandler, and a line says
    so; another one when the run goes on. A warning is all: what is slow may be meant, and what hangs in a library, a
    driver or another process nobody can free from here. A call that keeps Python's lock keeps this thread waiting, too.

    Args:
        seconds: 0 for no watch.
        file: where stacks go, behind those that are there; made at the first stall.
        say: is called with each line, from whichever thread has it.
    """

    def __init__(
        self, seconds: float, file: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.file, self.say, self.clock = seconds, file, say, clock
        self._changed = threading.Condition()
        self._what, self._since = "", 0.0  # nothing has begun
        self._stalled = self._ended = False
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def __enter__(self) -> StallWatch:
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self.seconds:
            self._thread.join()

    def beat(self, what: str) -> None:
        """The run is alive, and what it begins now is called so, such as ``step 8``."""
        now = self.clock()
        with self._changed:
            before, since, stalled = self._what, self._since, self._stalled
            self._what, self._since, self._stalled = what, now, False
            if stalled or not before:
                self._changed.notify()  # else the thread looks when the time is over
        if stalled:
            self.say(f"the run goes on: {before} came to an end after {now - since:,.1f} s")

    def rest(self) -> None:
        """What was begun is over, and what comes now may take any time."""
        self.beat("")

    @contextmanager
    def watching(self, what: str) -> Iterator[Callable[[], None]]:
        """Watch what is done within, which calls what it gets here whenever a part of it is done; then `rest`."""
        self.beat(what)
        try:
            yield lambda: self.beat(what)
        finally:
            self.rest()

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                left = self._since + self.seconds - self.clock()
                if self._stalled or not self._what or left > 0:
                    waits = self._stalled or not self._what
                    self._changed.wait(None if waits else min(left, threading.TIMEOUT_MAX))
                    continue
                self._stalled, what = True, self._what
                self._changed.release()  # a disk that hangs must not hold up a run that goes on
                try:
                    self.say(f"! nothing is heard of {what} for {self.seconds:,g} s; {self._stacks(what)}")
                finally:
                    self._changed.acquire()

    def _stacks(self, what: str) -> str:
        """Write what every thread is doing; where that is written."""
        try:
            with append_plain(self.file) as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}: nothing is heard of {what}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
        except (OSError, RunFolderError) as error:
            return f"where its threads stand cannot be written ({error})"
        return f"where its threads stand is in {self.file}"
