"""The model that a run exports: of which step it is, and what becomes of one that was exported before."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.optim import Optimizer

from tuningfork.distributed.export import save
from tuningfork.errors import RunFolderError
from tuningfork.files import explained, read_plain
from tuningfork.json_files import as_object
from tuningfork.models.hf import digests
from tuningfork.models.hf.load import load_config
from tuningfork.report.files import write_json
from tuningfork.report.run.console import Console
from tuningfork.train import checkpoint
from tuningfork.train.average import averaged, keeps_average
from tuningfork.train.config import OutputConfig
from tuningfork.train.session import Session
from tuningfork.train.setup.device import DTYPES, dtype_name

MODEL = "model"
RECORD = "export.json"  # written before the model, so that it is true of any model that is there


def export_model(
    session: Session,
    optimizer: Optimizer,
    folder: Path,
    output: OutputConfig,
    step: int,
    weights_at: Path | None,
    console: Console,
) -> None:
    """Write the model after `step` steps into the run folder, as a Hugging Face folder; all ranks must come here.

    It is the model in memory, or one whose weights lie in the checkpoint `weights_at`, which are read into it; where
    the optimizer keeps an average of the weights, it is that. A model of the same step that is there already is this
    run's own, and stays; one of another step is kept under a name with that step.

    Raises:
        ModelError: the model that is there is not as it was exported.
        RunFolderError: the disk refuses, the checkpoint is damaged, or the model was exported before in another dtype.
    """
    path, ranks = folder / MODEL, session.ranks
    asked = DTYPES.get(output.export_dtype)  # else the stored one
    dtype = asked or session.loaded.stored_dtype
    there = ranks.from_first(step_of(folder) if path.exists() else None)  # before it is moved
    if there == step:
        digests.check_export(str(path), weights=True)  # the small files are compared when the config is read
        stored = load_config(str(path)).dtype
        if stored != dtype:
            raise RunFolderError(
                f"{path} was exported in {stored}, now {dtype} is asked for. Remove it, then --resume."
            )
        return
    if session.policy.spread is not None:
        session.policy.spread.release()
    if weights_at is not None:
        checkpoint.restore_weights(weights_at, session.policy.model, optimizer, ranks)
    if ranks.first:
        if there is not None:
            _set_aside(path, folder / f"{MODEL}-step-{there}", console)
        write_json(folder / RECORD, {"step": step})
    rounding = ", which rounds small updates away; output.export_dtype: float32 keeps all digits"
    what = "the average of the weights" if keeps_average(optimizer) else "the model"
    console.print(f"exporting {what} in {dtype_name(dtype)}{rounding if dtype != torch.float32 else ''}")
    with averaged(optimizer, session.policy.spread) if weights_at is None else nullcontext():
        save(session.loaded, ranks, path, asked)


def step_of(folder: Path) -> int:
    """Of which step the exported model is. Raises RunFolderError."""
    record = folder / RECORD
    try:
        return int(as_object(read_plain(record))["step"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise RunFolderError(
            f"{record}, which says of which step {folder / MODEL} is, cannot be read. Move that model away, then "
            "--resume: it is exported again."
        ) from error


def _set_aside(path: Path, other: Path, console: Console) -> None:
    if os.path.lexists(other):
        raise RunFolderError(f"{path} is to be kept as {other}, which exists. Move one of them away, then --resume.")
    with explained(path):
        os.rename(path, other)
    console.print(f"the model that was exported before is kept as {other}")
