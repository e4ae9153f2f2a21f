"""The running records of a run: metrics.jsonl, whose numbers go to sinks too, and log.txt."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from tuningfork.errors import NonFiniteError, RunFolderError
from tuningfork.files import append_plain, explained, read_plain
from tuningfork.json_files import as_object
from tuningfork.report.files import write_text
from tuningfork.report.run.metrics import EVAL
from tuningfork.report.sinks import Sink

Scores = Mapping[str, float | int | None]
"""Numbers of an evaluation by name, without the prefix that they have in metrics.jsonl."""

CHECKSUM = "crc32"
"""In a line of metrics.jsonl: zlib's CRC-32 of the line as `json.dumps` writes it without this number."""

_LARGEST_METRICS = 1 << 30  # bytes, of more than a million lines


class Records:
    """What a run keeps in mind of its running records. This one writes none: ranks that print nothing have it.

    `evaluations` has the numbers of all evaluations: step -> numbers. `ends` has the first and the last line of
    training steps, as far as there are any. `last_step` is that of the last line which a resumed run keeps, 0 if there
    is none.
    """

    def __init__(self, evaluations: Mapping[int, Scores] | None = None) -> None:
        self.last_step = 0
        self.evaluations: dict[int, Scores] = dict(evaluations or {})
        self.ends: tuple[Scores, ...] = ()

    def evaluation(self, step: int, scores: Scores, seconds: float) -> None:
        """A line of held-out numbers after `step` steps, see `metrics.evaluation_definitions`.

        Args:
            seconds: that the evaluation took.
        """
        self.line({"step": step, **{EVAL + key: value for key, value in scores.items()}, f"{EVAL}seconds": seconds})
        self.evaluations[step] = dict(scores)

    def line(self, metrics: Mapping[str, float | int | None]) -> None:
        """One line of numbers, among them "step". Raises NonFiniteError rather than take what JSON lacks."""
        for key, value in metrics.items():
            if value is not None and not math.isfinite(value):
                raise NonFiniteError(f"step {metrics['step']}: {key} is {value}. Lower train.learning_rate.")
        if not is_evaluation(metrics):
            self.ends = (*self.ends[:1], dict(metrics))

    def close(self) -> None:
        """There are no more lines."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RunWriter(Records):
    """Writes the running records of a run into its folder. One process, the first rank, has one.

    - `metrics.jsonl`: a line of JSON for each `line` and each `evaluation`, on disk as soon as it is written
    - `log.txt`: what the run said

    Sinks that are attached get the numbers of each line, once it is written.

    Args:
        resume_at_step: the step of the checkpoint that a run continues from. Lines of later steps are forgotten, so
            that no step stands twice. Without it the run is a fresh one.
        keep_evaluations: whether a resumed run keeps the evaluations up to that step.

    Raises:
        RunFolderError: a fresh run finds metrics in the folder, those of a resumed one are damaged, or the disk
            refuses.
    """

    def __init__(self, folder: Path, resume_at_step: int | None = None, keep_evaluations: bool = True) -> None:
        super().__init__()
        self.folder = folder
        self.metrics_path = folder / "metrics.jsonl"
        self.log_path = folder / "log.txt"
        self._sinks: list[Sink] = []
        if resume_at_step is not None:
            for line in _keep_lines(self.metrics_path, resume_at_step, keep_evaluations):
                self.last_step = line["step"]
                if not is_evaluation(line):
                    self.ends = (*self.ends[:1], line)
                self.evaluations |= evaluations_of([line])
        elif os.path.lexists(self.metrics_path):
            raise RunFolderError(
                f"{self.metrics_path} exists. Add --resume to continue that run, or choose another output.dir."
            )
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = append_plain(self.metrics_path)

    def attach(self, sink: Sink) -> None:
        """Also send the numbers of every line from now on to `sink`, and close it with the writer."""
        self._sinks.append(sink)

    def evaluation(self, step: int, scores: Scores, seconds: float) -> None:
        super().evaluation(step, scores, seconds)
        with explained(self.metrics_path):
            os.fsync(self._metrics.fileno())  # which checkpoint is the best is told by these lines alone

    def line(self, metrics: Mapping[str, float | int | None]) -> None:
        super().line(metrics)
        with explained(self.metrics_path):
            self._metrics.write(_as_line(metrics))
            self._metrics.flush()
        numbers = {key: value for key, value in metrics.items() if key != "step" and value is not None}
        for sink in self._sinks:
            sink.write(int(metrics["step"] or 0), numbers)

    def log(self, text: str) -> None:
        """Append a line of text to log.txt. Works after `close` too: a run's last words follow its last numbers."""
        with explained(self.log_path), append_plain(self.log_path, errors="backslashreplace") as file:
            file.write(text + "\n")

    def close(self) -> None:
        """Close the sinks and metrics.jsonl."""
        try:
            for sink in self._sinks:
                sink.close()
        finally:
            with explained(self.metrics_path):
                self._metrics.close()


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is of held-out pairs, not of training steps."""
    return f"{EVAL}loss" in line


def evaluations_of(lines: Iterable[Mapping[str, Any]]) -> dict[int, Scores]:
    """The numbers of all evaluations among the lines of a metrics.jsonl, by their step."""
    return {
        line["step"]: {
            key.removeprefix(EVAL): value
            for key, value in line.items()
            if key.startswith(EVAL) and key != f"{EVAL}seconds"
        }
        for line in lines
        if is_evaluation(line)
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none where there is no file. A last line that a kill has torn is left out.

    Raises RunFolderError for any other line that is no JSON, or not as it was written, and where the file is a link.
    """
    if not os.path.lexists(path):
        return []
    texts = read_plain(path, _LARGEST_METRICS).split(
        b"\n"
    )  # a whole file ends in a newline, so its last piece is empty
    lines, have_checksums = [], set[bool]()
    for number, text in enumerate(texts, start=1):
        try:
            line = as_object(text)
            checksum = line.pop(CHECKSUM, None)
            have_checksums.add(checksum is not None)
            if checksum not in (None, _checksum(json.dumps(line))) or len(have_checksums) > 1:
                raise ValueError
            if not all(
                value is None or (type(value) in (int, float) and math.isfinite(value)) for value in line.values()
            ):
                raise ValueError
            lines.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError, OverflowError):
            if number < len(texts):
                raise RunFolderError(
                    f"{path}: line {number} is no line of metrics, or not as it was written. Restore the file, or move "
                    "it away: a run that continues begins a new one."
                ) from None
    return lines


def _as_line(metrics: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl: the numbers, and behind them their checksum, for most wrong digits are digits too."""
    text = json.dumps(metrics, allow_nan=False)
    return f"{text[:-1]}, {json.dumps(CHECKSUM)}: {_checksum(text)}}}\n"


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _keep_lines(path: Path, last_step: int, evaluations: bool) -> list[dict[str, Any]]:
    """Cut metrics.jsonl back to the lines up to a step, with or without those of evaluations; returns what stays."""
    lines = [line for line in read_metrics(path) if line["step"] <= last_step]
    lines = [line for line in lines if evaluations or not is_evaluation(line)]
    if path.exists():
        write_text(path, "".join(map(_as_line, lines)))
    return lines
