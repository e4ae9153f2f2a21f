"""A run that has ended: what it left, told from its folder and its data alone, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

from tuningfork.data.prepare import dataset_digest
from tuningfork.files import read_plain
from tuningfork.json_files import as_object
from tuningfork.models.hf import digests
from tuningfork.models.hf.load import load_config
from tuningfork.report.run.writer import read_metrics
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import OutputConfig, TrainConfig
from tuningfork.train.exported import MODEL, step_of
from tuningfork.train.run_folder import CONFIG, LOG, ROWS
from tuningfork.train.session import Data
from tuningfork.train.setup.device import DTYPES
from tuningfork.wording import visible


def has_ended(saved: Progress, data: Data, train: TrainConfig) -> bool:
    """Whether a checkpoint is of the last step of the run that settings and data describe."""
    if saved.data_digest != dataset_digest(data.train):
        return False  # which is refused, with the reason, once the model is there
    if train.max_steps is not None:
        return train.max_steps <= saved.step
    return round(train.epochs * len(data.train)) <= saved.examples


def is_whole(
    folder: Path, saved: Progress, data: Data, train: TrainConfig, output: OutputConfig, starting: str
) -> bool:
    """Whether an ended run has left all that it leaves: its metrics, its scores on the held-out pairs, a summary, and
    the exported model of its last step in the dtype that is asked for. `starting` is the starting model's folder.

    False where that is not plain to see without the starting model, or where there is a best step to be told.

    Raises:
        ModelError: the exported model is not as it was exported.
        RunFolderError: metrics.jsonl or export.json is not as the run wrote it.
    """
    model, summary = folder / MODEL, folder / "summary.json"
    if train.eval_every is not None or saved.held_out_digest != dataset_digest(data.held_out) or not model.is_dir():
        return False
    metrics = read_metrics(folder / "metrics.jsonl")
    try:
        if len(data.held_out):
            as_object(read_plain(folder / "eval.json"))
        last = as_object(read_plain(summary)).get("last_step")
    except (OSError, ValueError):  # not there, or damaged: it is written anew
        return False
    if {step_of(folder), last, metrics[-1]["step"] if metrics else 0} != {saved.step}:
        return False
    digests.check_export(str(model), weights=True)
    dtype = load_config(str(model)).dtype
    return dtype is not None and dtype == DTYPES.get(output.export_dtype, load_config(starting).dtype)


def places(folder: Path, exported_step: int | None, held_out: bool) -> list[str]:
    """A line for each thing that a run leaves, with its path."""
    found = [
        (f"exported model, step {exported_step}", folder / MODEL),
        ("metrics", folder / "metrics.jsonl"),
        *([("held-out numbers", folder / "eval.json")] if held_out else []),
        ("rows used and dropped", folder / ROWS),
        ("settings", folder / CONFIG),
        ("log", folder / LOG),
    ]
    width = max(len(name) for name, _ in found)
    return [f"{name:<{width}}  {visible(str(path))}" for name, path in found]
