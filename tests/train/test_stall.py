"""A run that stands still is said once, with its stacks; one that goes on is said, too."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import Queue

from tuningfork.train.stall import StallWatch


def test_a_stall_is_said_once_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """The thread that stands still waits in a function of this file, which the stacks name."""
    said: Queue[str] = Queue()
    free = threading.Event()

    def stands_still() -> None:
        free.wait()

    hanging = threading.Thread(target=stands_still)
    hanging.start()
    with StallWatch(0.05, tmp_path / "stalls.txt", said.put) as watch:
        watch.beat("step 8")
        first = said.get(timeout=30)
        free.set()
        hanging.join()
        watch.beat("saving step 8")
        again, third = said.get(timeout=30), said.get(timeout=30)
        watch.beat("step 9")
    assert first == f"! nothing is heard of step 8 for 0.05 s; where its threads stand is in {tmp_path / 'stalls.txt'}"
    assert again.startswith("the run goes on: step 8 came to an end after ")
    assert third.startswith("! nothing is heard of saving step 8 for 0.05 s")
    text = (tmp_path / "stalls.txt").read_text()
    assert text.count("nothing is heard of step 8") == 1 and text.count("nothing is heard of saving step 8") == 1
    before, _, after = text.partition("saving step 8")
    assert "in stands_still" in before and "in stands_still" not in after and "test_stall.py" in after


def test_a_run_that_goes_on_in_time_and_no_watch_say_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    for seconds in (0.0, 3600.0):
        with StallWatch(seconds, tmp_path / "stalls.txt", said.append) as watch:
            for step in range(100):
                watch.beat(f"step {step}")
    assert said == [] and not (tmp_path / "stalls.txt").exists()


def test_a_folder_that_takes_no_file_is_said_and_nothing_more(tmp_path: Path) -> None:
    said: Queue[str] = Queue()
    (tmp_path / "elsewhere").touch()
    (tmp_path / "stalls.txt").symlink_to(tmp_path / "elsewhere")
    with StallWatch(0.01, tmp_path / "stalls.txt", said.put) as watch:
        watch.beat("step 1")
        assert "where its threads stand cannot be written" in said.get(timeout=30)
    assert (tmp_path / "elsewhere").read_text() == ""


def test_a_line_that_cannot_be_written_holds_up_no_run(tmp_path: Path) -> None:
    """A disk that hangs is what a run may be waiting for; the next step must not wait for the line about it."""
    said, free = threading.Event(), threading.Event()

    def say(line: str) -> None:
        if line.startswith("!"):
            said.set()
            assert free.wait(30)

    with StallWatch(0.01, tmp_path / "stalls.txt", say) as watch:
        watch.beat("step 1")
        assert said.wait(30)
        beat = threading.Thread(target=watch.beat, args=("step 2",))
        beat.start()
        beat.join(10)
        held = beat.is_alive()
        free.set()
        beat.join()
    assert not held


def test_any_number_of_seconds_can_be_waited(tmp_path: Path) -> None:
    with StallWatch(1e12, tmp_path / "stalls.txt", lambda line: None) as watch:
        watch.beat("step 1")
        watch._thread.join(0.2)
        assert watch._thread.is_alive()


def test_nothing_is_watched_while_it_rests(tmp_path: Path) -> None:
    """What comes behind an evaluation, such as reading a checkpoint, may take any time; the next one is watched again,
    and each of its packs has the whole time."""
    said: Queue[str] = Queue()
    seconds = 0.0
    with StallWatch(0.05, tmp_path / "stalls.txt", said.put, lambda: seconds) as watch:
        with watch.watching("one") as alive:
            for _ in range(3):
                seconds += 0.04
                time.sleep(0.1)  # in which the watch looks at its clock
                alive()
        seconds += 10
        time.sleep(0.1)
        with watch.watching("another"):
            seconds += 0.06
            assert said.get(timeout=30).startswith("! nothing is heard of another for 0.05 s")
        assert said.get(timeout=30).startswith("the run goes on: another came to an end after")
    assert said.empty()
