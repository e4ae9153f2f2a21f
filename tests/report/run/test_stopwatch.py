"""Where the time of a start goes."""

import pytest

from tests.report.run.test_console import Clock
from tuningfork.report.run.stopwatch import Stopwatch


def test_phases_come_in_order_and_add_up() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    stopwatch.add("imports", 3.0)
    for phase, seconds in (("weights", 5.0), ("self-check", 0.25), ("weights", 7.0)):
        with stopwatch.time(phase):
            clock.now += seconds
    assert stopwatch.seconds == {"imports": 3.0, "weights": 12.0, "self-check": 0.25}
    assert stopwatch.line() == "start-up: imports 3.0 s, weights 12.0 s, self-check 0.2 s"


def test_a_phase_that_fails_or_takes_no_time_has_its_place() -> None:
    stopwatch = Stopwatch(Clock())
    with pytest.raises(KeyError), stopwatch.time("weights"):
        raise KeyError
    assert stopwatch.line() == "start-up: weights 0.0 s"
