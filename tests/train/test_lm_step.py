"""What a language model learns of its own targets, and of nothing else: random bytes stay as unlikely as they are."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from tests.tiny import limits_of, scorer_of
from tuningfork.data.packing.loader import build_packs
from tuningfork.models.hf.initial import initial_model
from tuningfork.models.policy import Policy
from tuningfork.objective.lm import LM
from tuningfork.records import Source, TokenAnswer, TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.step import train_step

STEPS, DOCUMENTS, LENGTH = 30, 8, 128  # 1,016 targets a step


def document(row: int, ids: np.ndarray) -> TokenExample:
    return TokenExample(Source("bytes", row), ids[:0], (TokenAnswer(ids.astype(np.int32), np.ones(len(ids), bool)),))


@cache
def losses(twice: bool) -> list[float]:
    """Of each step of a small model on fresh bytes, drawn alike and alone; or each of them written twice."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )  # fmt: skip
    policy = Policy.plain(initial_model(config, 0).train(), torch.float32)
    optimizer = build_optimizer(policy.model, TrainConfig(learning_rate=5e-3))
    draw, found = np.random.default_rng(0).integers, []
    for _ in range(STEPS):
        drawn = (draw(256, size=LENGTH // 2).repeat(2) if twice else draw(256, size=LENGTH) for _ in range(DOCUMENTS))
        packs = build_packs([document(row, ids) for row, ids in enumerate(drawn, start=1)], limits_of(512, "tree"))
        assert len(packs) == 2  # several documents in each, which see nothing of each other
        batch = StepBatch.of(packs, LM(), None)
        found.append(train_step(scorer_of(policy, 300), LM(), optimizer, batch, 1.0).loss)
    return found


def test_random_bytes_stay_at_the_logarithm_of_256() -> None:
    """Whoever sees a target, or a neighbour's, does better. A step's loss is a mean of 1,016 numbers that spread by
    less than 0.4 nats: the error of ten steps' mean is below 0.004."""
    assert np.mean(losses(twice=False)) == pytest.approx(math.log(256), abs=0.02)
    assert np.mean(losses(twice=False)[-10:]) == pytest.approx(math.log(256), abs=0.02)


def test_as_many_steps_are_enough_to_learn_to_copy() -> None:
    """Guards the test above: every second byte is the one before it, which the same run finds out."""
    assert np.mean(losses(twice=True)[-10:]) < math.log(256) - 0.5
