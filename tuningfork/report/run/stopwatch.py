"""Where the time of a start goes: wall seconds of each phase, from the imports to the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds of the phases of a start, in the order in which they began. A phase that comes again adds to its time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase, such as `with stopwatch.time("weights"):`."""
        begun = self._clock()
        self.seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            self.add(phase, self._clock() - begun)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def line(self) -> str:
        """Such as ``start-up: weights 12.3 s, self-check 0.8 s``."""
        return "start-up: " + ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())
