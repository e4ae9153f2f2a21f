"""Which run a checkpoint is of: what a run is known by, and whether that is what settings, data and model say now."""

from __future__ import annotations

from pathlib import Path

import torch

from tuningfork.data.prepare import dataset_digest
from tuningfork.errors import RunFolderError
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.loss_scale import LossScale
from tuningfork.train.session import Data, Session
from tuningfork.train.setup.device import dtype_name
from tuningfork.train.setup.reference import model_digest
from tuningfork.wording import counted


def at_its_beginning(session: Session, data: Data, weights: str) -> Progress:
    """Where a run stands before its first step, and what it is: `weights` is the hash of the starting model's."""
    return Progress(
        step=0,
        examples=0,
        data_digest=dataset_digest(data.train),
        start_model=model_digest(session.policy, weights),
        dtype=dtype_name(session.policy.dtype),
        activation_memory=session.policy.activation_memory,
        held_out_digest=dataset_digest(data.held_out),
        before=None,
        layout=session.layout,
        loss_scale=LossScale() if session.policy.dtype == torch.float16 else None,
    )


def check_same_run(path: Path, saved: Progress, begun: Progress, config: TrainConfig) -> None:
    """Whether the checkpoint at `path` is one of the run that settings, data and model describe now.

    Args:
        saved: where the run of the checkpoint stood.
        begun: where the run that is described now stands before its first step.

    Raises:
        RunFolderError: it is of another run, or no run has written it.
    """
    if saved.data_digest != begun.data_digest:
        raise RunFolderError(
            f"{path} was trained on other examples than data.train gives now. Restore the data file; or, where the "
            "chat template prints the date, set data.date to that of the run; or choose another output.dir."
        )
    if saved.start_model != begun.start_model:
        raise RunFolderError(
            f"{path} belongs to a run that started from another model (weights or config.json) than model.path holds "
            "now. Restore that model, or choose another output.dir."
        )
    if saved.dtype != begun.dtype:
        raise RunFolderError(
            f"{path} was computed in {saved.dtype}, this run would go on in {begun.dtype}. Set model.dtype to "
            f"{saved.dtype}: auto names another dtype on another device."
        )
    shards, now = saved.layout.shard * saved.layout.tensor, begun.layout.shard * begun.layout.tensor
    if config.optimizer == "adamw_8bit" and shards != now:
        raise RunFolderError(
            f"{path} has moments in 8 bits whose blocks were cut for {counted(shards, 'process', 'processes')} to a "
            f"copy of the model; now there are {now}, and cut for these they would be other numbers. Set "
            f"parallel.shard to {saved.layout.shard} and parallel.tensor to {saved.layout.tensor}; parallel.replicate "
            "is free."
        )
    by_tokens = config.tokens_per_step is not None  # whose steps have any number of examples
    if saved.examples < saved.step or (not by_tokens and saved.examples > saved.step * config.examples_per_step):
        most = "" if by_tokens else f" of at most {config.examples_per_step:,} examples"
        raise RunFolderError(
            f"{path} says that {saved.step:,} steps{most} trained on {saved.examples:,}, so no run has written it. "
            "Remove that folder; --resume then takes the checkpoint before it."
        )
