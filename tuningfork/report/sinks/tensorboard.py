"""TensorBoard scalars, written at once: PyTorch's own writer uses a thread, whose errors (a full disk) reach nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # private: tensorboard.compat.proto
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter  # private: tensorboard.summary.writer.record_writer

from tuningfork.files import check_plain


class TensorBoard:
    """One event file in a TensorBoard folder. TensorBoard forgets what earlier files say of `first_step` and later.

    Raises:
        RunFolderError: the folder is a link, or no folder.
        OSError: the disk refuses, here and in `write`.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        check_plain(folder, folder=True)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._records = RecordWriter(path.open("xb"))  # never into a file, or a link, that is there
        self._record(Event(file_version="brain.Event:2"))
        self._record(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step as scalars."""
        shown = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._record(Event(step=step, summary=Summary(value=shown)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _record(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


def open_sink(folder: Path, first_step: int) -> TensorBoard:
    """A new event file in `folder`."""
    return TensorBoard(folder, first_step)
