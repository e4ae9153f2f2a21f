"""TensorBoard's files: what TensorBoard reads of them, at once and after a resume."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tuningfork.report.sinks.tensorboard import open_sink


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_numbers_are_on_disk_at_once(tmp_path: Path) -> None:
    board = open_sink(tmp_path / "board", 1)
    board.write(1, {"loss": 0.5, "lr": 0.25})
    board.write(1, {"eval/loss": 0.125})
    assert scalars(tmp_path / "board", "loss") == [(1, 0.5)]
    assert scalars(tmp_path / "board", "eval/loss") == [(1, 0.125)]
    board.close()


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    board = open_sink(tmp_path, 1)
    for step in range(1, 8):
        board.write(step, {"loss": step / 4})
    board.close()
    board = open_sink(tmp_path, 6)
    for step in range(6, 9):
        board.write(step, {"loss": 100 + step})
    board.close()
    assert scalars(tmp_path, "loss") == [*((step, step / 4) for step in range(1, 6)), (6, 106), (7, 107), (8, 108)]


def test_an_event_file_is_always_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name can be guessed."""
    monkeypatch.setattr("tuningfork.report.sinks.tensorboard.time.time_ns", lambda: 5)
    path = tmp_path / "tensorboard" / f"events.out.tfevents.5.{os.getpid()}"
    path.parent.mkdir()
    (tmp_path / "elsewhere").write_text("precious")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        open_sink(path.parent, 1)
    assert (tmp_path / "elsewhere").read_text() == "precious"
