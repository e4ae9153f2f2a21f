"""Ctrl-C and SIGTERM while a run trains: the first asks to stop after the step, the second stops at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tuningfork.report.run.console import Console

SAME = 5.0  # seconds within which one request may come twice


@contextmanager
def stop_when_asked(console: Console) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM asked to stop after the current step; a second one raises KeyboardInterrupt at once.

    One SIGTERM of a scheduler reaches a process that a launcher has started twice, for the launcher passes on its own.
    There a second one soon after the first counts as the same.
    """
    asked: float | None = None
    launched = "TORCHELASTIC_RUN_ID" in os.environ

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked is not None:
            if launched and number == signal.SIGTERM and time.monotonic() - asked < SAME:
                return
            raise KeyboardInterrupt
        asked = time.monotonic()
        with suppress(RuntimeError):  # the signal came in the middle of a write to the screen
            console.print("stopping after this step; press Ctrl-C again to stop at once")

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever embeds us handles signals
        yield lambda: False
        return
    try:
        yield lambda: asked is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
