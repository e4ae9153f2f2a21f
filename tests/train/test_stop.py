"""Asking a run to stop: one request stops it after its step, another at once, and one that comes twice is one."""

from __future__ import annotations

import io
import os
import signal
import time

import pytest

from tuningfork.report.run.console import Console
from tuningfork.train.stop import SAME, stop_when_asked


def test_one_signal_that_comes_twice_by_a_launcher_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler signals the processes and the launcher, which passes it on. Ctrl-C comes twice from a hand only."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    with stop_when_asked(Console(io.StringIO())) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with stop_when_asked(Console(io.StringIO())):
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + SAME)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_without_a_launcher_a_second_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with stop_when_asked(Console(io.StringIO())) as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
