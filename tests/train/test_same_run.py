"""What a checkpoint must be to be one of the run that settings, data and model describe."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tuningfork.distributed.layout import Layout
from tuningfork.errors import RunFolderError
from tuningfork.train.checkpoint import Progress
from tuningfork.train.config import TrainConfig
from tuningfork.train.same_run import check_same_run

PROGRESS = Progress(3, 12, "data", "model", "float32", "none", "held out", before=None)


@pytest.mark.parametrize(("examples", "fits"), [(2, False), (3, True), (12, True), (13, False), (10**18, False)])
def test_a_checkpoint_stands_at_an_example_that_its_steps_can_have_come_to(examples, fits):
    saved, config = replace(PROGRESS, examples=examples), TrainConfig(examples_per_step=4)
    with nullcontext() if fits else pytest.raises(RunFolderError, match="3 steps of at most 4 examples"):
        check_same_run(Path("step-3"), saved, PROGRESS, config)


@pytest.mark.parametrize(("examples", "fits"), [(2, False), (3, True), (10**6, True)])
def test_steps_by_tokens_have_any_number_of_examples_but_none(examples, fits):
    saved, config = replace(PROGRESS, examples=examples), TrainConfig(tokens_per_step=4096)
    with nullcontext() if fits else pytest.raises(RunFolderError, match="3 steps trained on 2, so no run"):
        check_same_run(Path("step-3"), saved, PROGRESS, config)


@pytest.mark.parametrize(
    ("optimizer", "now", "fits"),
    [
        ("adamw", Layout(1, 4, 1), True),
        ("adamw_8bit", Layout(3, 2, 1), True),
        ("adamw_8bit", Layout(1, 4, 1), False),
        ("adamw_8bit", Layout(), False),
    ],
)
def test_moments_in_8_bits_keep_their_shards(optimizer, now, fits):
    saved, begun = replace(PROGRESS, layout=Layout(2, 2, 1)), replace(PROGRESS, layout=now)
    said = r"cut for 2 processes to a copy of the model; now there are \d.*Set parallel.shard to 2 and"
    with nullcontext() if fits else pytest.raises(RunFolderError, match=said):
        check_same_run(Path("step-3"), saved, begun, TrainConfig(optimizer=optimizer))
