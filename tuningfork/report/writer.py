"""What a run leaves on disk: metrics.jsonl, TensorBoard, log.txt, and JSON files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuningfork.errors import NonFiniteError, RunFolderError, escaped
from tuningfork.files import append_plain, explained, read_plain, whole_file
from tuningfork.json_files import as_object
from tuningfork.report.board import Board

CHECKSUM = "crc32"
"""In a line of metrics.jsonl: zlib's CRC-32 of the line as `json.dumps` writes it without this number."""


class RunWriter:
    """Writes the running records of a run into its folder. One process, the first rank, has one.

    - `metrics.jsonl`: a line of JSON for each `line`, on disk as soon as it is written
    - `tensorboard/`: the same numbers as scalars
    - `log.txt`: what the run said

    A fresh run refuses a folder that has metrics already. A resumed one (`resume_at_step=n`, n the step of the
    checkpoint) forgets everything after step n, so that no step stands twice; `last_step` is that of the last line
    that stays, 0 if there is none. Raises RunFolderError.
    """

    def __init__(self, folder: Path, resume_at_step: int | None = None) -> None:
        self.folder = folder
        self.metrics_path = folder / "metrics.jsonl"
        self.log_path = folder / "log.txt"
        self.last_step = 0
        if resume_at_step is not None:
            kept = _keep_lines(self.metrics_path, last_step=resume_at_step)
            self.last_step = kept[-1]["step"] if kept else 0
        elif os.path.lexists(self.metrics_path):
            raise RunFolderError(
                f"{self.metrics_path} exists. Add --resume to continue that run, or choose another output.dir."
            )
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = append_plain(self.metrics_path)
            try:
                self._board = Board(folder / "tensorboard", first_step=(resume_at_step or 0) + 1)
            except BaseException:
                self._metrics.close()
                raise

    def line(self, metrics: Mapping[str, float | int | None]) -> None:
        """Append one line of numbers, among them "step". Raises NonFiniteError rather than write what JSON lacks."""
        step = int(metrics["step"] or 0)
        for key, value in metrics.items():
            if value is not None and not math.isfinite(value):
                raise NonFiniteError(f"step {step}: {key} is {value}.")
        with explained(self.metrics_path):
            self._metrics.write(_as_line(metrics))
            self._metrics.flush()
        self.scalars(step, {key: value for key, value in metrics.items() if key != "step"})

    def scalars(self, step: int, values: Mapping[str, float | int | None], prefix: str = "") -> None:
        """Show numbers in TensorBoard only; nulls are left out. `prefix` such as "eval/" leads their names."""
        with explained(self.folder / "tensorboard"):
            self._board.scalars(step, {prefix + key: value for key, value in values.items() if value is not None})

    def log(self, text: str) -> None:
        """Append a line of text to log.txt. Works after `close` too: a run's last words follow its last numbers."""
        with explained(self.log_path), append_plain(self.log_path, errors="backslashreplace") as file:
            file.write(text + "\n")

    def close(self) -> None:
        with explained(self.folder):
            self._metrics.close()
            self._board.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; none where there is no file. A last line that a kill has torn is left out.

    Raises RunFolderError for any other line that is no JSON, or not as it was written, and where the file is a link.
    """
    if not os.path.lexists(path):
        return []
    texts = read_plain(path).split(b"\n")  # a whole file ends in a newline, so its last piece is empty
    lines, have_checksums = [], set[bool]()
    for number, text in enumerate(texts, start=1):
        try:
            line = as_object(text)
            checksum = line.pop(CHECKSUM, None)
            have_checksums.add(checksum is not None)
            if checksum not in (None, _checksum(json.dumps(line))) or len(have_checksums) > 1:
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


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, atomically. Raises NonFiniteError for a nan or infinity, RunFolderError as `write_text`.

    What a terminal would obey is written as JSON's own escapes, for people look at such files with `cat`.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise NonFiniteError(f"{path}: a number to be written is nan or infinite.") from None
    write_text(path, escaped(text) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: after a crash at any moment it is the old one or the new one, never a part.

    Raises RunFolderError, naming the file, where the disk refuses (full, read-only).
    """
    # A lone surrogate has no UTF-8; backslashreplace makes it \udc80, which in a JSON string means the same.
    with whole_file(path) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


def _keep_lines(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Cut metrics.jsonl back to the lines up to a step; returns these."""
    lines = [line for line in read_metrics(path) if line["step"] <= last_step]
    if path.exists():
        write_text(path, "".join(map(_as_line, lines)))
    return lines
