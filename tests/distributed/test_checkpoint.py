"""Checkpoints that several processes write and read together: whole or absent, and loaded by any number of them."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from tests.distributed.worlds import together
from tests.tiny import limits_of, random_examples, scorer_of, tiny_model
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import portions_of
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.errors import RunFolderError
from tuningfork.files import is_aside
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.train import checkpoint, checkpoint_writer
from tuningfork.train.batch import StepBatch
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.plan import plan_step
from tuningfork.train.step import train_step

EXAMPLES = random_examples([(n % 7 + 1, (2 * n % 11 + 1, 3 + n % 5)) for n in range(11)])
LAYOUTS: dict[str, dict[str, Any]] = {"FSDP": {}, "HSDP": {"replicate": 2}, "DDP": {"shard": 1}}


class Job:
    """A tiny model that is trained on the same examples again and again."""

    def __init__(self, ranks: Ranks, parallel: dict[str, Any], family: str = "llama") -> None:
        self.ranks = ranks
        self.policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
        self.layout = Layout.plan(ParallelConfig(**parallel), ranks)
        parallelize(self.policy, "none", compiled=False, layout=self.layout)
        self.scorer = scorer_of(self.policy, 64)
        self.optimizer = build_optimizer(self.policy.model, TrainConfig(learning_rate=1e-3))

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of some steps."""
        limits, objective, found = limits_of(512, "tree"), ObjectiveConfig(name="simpo").build(), []
        for _ in range(steps):
            plan = plan_step(portions_of(EXAMPLES, limits), limits, self.ranks.size, lambda p: p.rows)
            packs = [lay(b.examples, b.forest, b.slots) for b in plan.bins[self.ranks.rank]]
            batch = StepBatch.shared_out(EXAMPLES, plan.bins, packs, objective, None, self.ranks)
            step = train_step(self.scorer, objective, self.optimizer, batch, 1.0, ranks=self.ranks)
            found.append((step.loss, step.grad_norm))
        return found

    def save(self, folder: Path, step: int) -> Path:
        progress = Progress(step, 11 * step, "data", "model", "float32", "none", "held out", None, self.layout)
        return checkpoint.save(folder, progress, self.policy.model, self.optimizer, 2, None, self.ranks)

    def restore(self, path: Path) -> Progress:
        if self.policy.spread is not None:
            self.policy.spread.release()
        return checkpoint.restore(path, self.policy.model, self.optimizer, self.ranks)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments, whole."""
        if self.policy.spread is not None:
            self.policy.spread.release()
        state = checkpoint._state(self.policy.model, self.optimizer)
        moments = {
            f"{name}.{kind}": value
            for name, of_weight in state["optimizer"]["state"].items()
            for kind, value in of_weight.items()
        }
        return {name: _whole(value) for name, value in (state["model"] | moments).items()}


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def trained_and_saved(ranks: Ranks, parallel: dict[str, Any], folder: Path, family: str) -> Any:
    """Two steps, a checkpoint, and two more."""
    job = Job(ranks, parallel, family)
    job.train(2)
    job.save(folder, 2)
    tensors = job.tensors()
    return tensors, job.train(2), job.tensors()


def went_on(ranks: Ranks, parallel: dict[str, Any], folder: Path, family: str) -> Any:
    """What a checkpoint gave, and two steps from there."""
    job = Job(ranks, parallel, family)
    path = checkpoint.newest(folder, ranks)
    assert path is not None
    stood = job.restore(path)
    tensors = job.tensors()
    return tensors, job.train(2), job.tensors(), stood


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "granite"])  # untied, tied
def test_the_same_processes_go_on_to_the_same_bits(tmp_path: Path, layout: str, family: str) -> None:
    parallel = LAYOUTS[layout]
    (tensors, steps, end), *_ = together(4, trained_and_saved, parallel, tmp_path, family)
    for loaded, their_steps, their_end, stood in together(4, went_on, parallel, tmp_path, family):
        same(loaded, tensors)
        assert their_steps == steps and stood.step == 2
        same(their_end, end)


def test_others_load_the_same_bits_and_go_on_up_to_rounding(tmp_path: Path) -> None:
    (tensors, steps, _), *_ = together(4, trained_and_saved, LAYOUTS["FSDP"], tmp_path, "llama")
    worlds = [together(2, went_on, {}, tmp_path, "llama"), together(4, went_on, {"replicate": 2}, tmp_path, "llama")]
    for loaded, their_steps, _, stood in [went_on(ONE_PROCESS, {}, tmp_path, "llama"), *worlds[0], *worlds[1]]:
        same(loaded, tensors)
        assert stood.layout == Layout(1, 4, 1)
        assert [loss for loss, _ in their_steps] == pytest.approx([loss for loss, _ in steps], rel=1e-6)


def test_one_process_is_gone_on_from_by_several(tmp_path: Path) -> None:
    tensors, _, _ = trained_and_saved(ONE_PROCESS, {}, tmp_path, "llama")
    for loaded, *_ in together(3, went_on, {}, tmp_path, "llama"):  # 97 words, 32 and 64 rows: none of equal shards
        same(loaded, tensors)
