"""The learning rate by hand, and AdamW's first steps by its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.tiny import tiny_model
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer, learning_rate


def rates(total: int, **settings) -> list[float]:
    config = TrainConfig(learning_rate=1.0, **settings)
    return [learning_rate(config, step, total) for step in range(total)]


def test_linear_by_hand():
    # 2 of 10 steps rise to the peak, 8 fall in eighths and would reach 0 with an eleventh.
    expected = [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert rates(10, schedule="linear", warmup_ratio=0.2) == pytest.approx(expected, rel=1e-14)


def test_cosine_by_hand():
    # Half a period over 4 steps: cos 0, cos 45, cos 90, cos 135 degrees.
    half = math.sqrt(0.5)
    expected = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert rates(4, schedule="cosine", warmup_ratio=0.0) == pytest.approx(expected, rel=1e-14)
    with_warmup = rates(6, schedule="cosine", warmup_ratio=1 / 3)
    assert with_warmup == pytest.approx([0.5, 1.0, *expected], rel=1e-14)


def test_constant_by_hand():
    assert rates(6, schedule="constant", warmup_ratio=0.5) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1], rel=1e-14)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_no_step_is_wasted_and_none_exceeds_the_peak(schedule):
    for total in (1, 2, 3, 7, 100):
        for ratio in (0.0, 0.1, 0.5, 1.0):
            values = rates(total, schedule=schedule, warmup_ratio=ratio)
            assert all(0 < value <= 1 for value in values)
            assert max(values) == 1.0
            peak = values.index(1.0)
            assert values[:peak] == sorted(values[:peak])
            assert values[peak:] == sorted(values[peak:], reverse=True)


def test_warm_up_of_every_step_ends_at_the_peak():
    assert rates(4, warmup_ratio=1.0) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("ratio", "total", "steps"),
    # A part of a step is a whole one; 0.07 * 100 is 7, though not in floating point.
    [(0.1, 10, 1), (0.1, 11, 2), (0.1, 30, 3), (0.03, 100, 3), (0.07, 100, 7), (0.28, 25, 7), (0.001, 100, 1)],
)
def test_steps_of_warm_up(ratio, total, steps):
    values = rates(total, schedule="constant", warmup_ratio=ratio)
    assert values.index(1.0) + 1 == steps


def test_the_rate_scales_with_the_setting():
    config = TrainConfig(learning_rate=5e-7, schedule="linear", warmup_ratio=0.0)
    assert learning_rate(config, 0, 4) == 5e-7
    assert learning_rate(config, 3, 4) == pytest.approx(1.25e-7, rel=1e-14)


def test_weight_decay_is_on_matrices_only():
    model = tiny_model("qwen2", torch.float32)  # qwen2 has biases too
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.1))
    decay_of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay_of) == sum(len(group["params"]) for group in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        expected = 0.0 if name.endswith("bias") or "norm" in name else 0.1
        assert decay_of.pop(id(parameter)) == expected, name
    assert not decay_of


def test_a_tied_weight_is_in_the_optimizer_once():
    model = tiny_model("granite", torch.float32)
    optimizer = build_optimizer(model, TrainConfig())
    parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len(set(parameters)) == len(list(model.parameters()))


def test_frozen_weights_are_left_out():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, TrainConfig())
    assert [p is model.weight for group in optimizer.param_groups for p in group["params"]] == [True]


def test_two_steps_of_adamw_by_its_formula():
    """Loshchilov and Hutter 2019, algorithm 2: every setting of TrainConfig that it has."""
    lr, b1, b2, eps, decay = 0.1, 0.8, 0.95, 1e-3, 0.5
    config = TrainConfig(learning_rate=lr, adam_beta1=b1, adam_beta2=b2, adam_eps=eps, weight_decay=decay)
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    optimizer = build_optimizer(model, config)
    gradients = (0.3, -0.7)
    for gradient in gradients:
        model.weight.grad, model.bias.grad = torch.tensor([[gradient]]), torch.tensor([gradient])
        optimizer.step()

    def by_hand(decay: float) -> float:
        weight = 2.0
        m = v = 0.0
        for t, g in enumerate(gradients, start=1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            weight -= lr * decay * weight
            weight -= lr * (m / (1 - b1**t)) / (math.sqrt(v / (1 - b2**t)) + eps)
        return weight

    assert model.weight.item() == pytest.approx(by_hand(decay), rel=1e-6)
    assert model.bias.item() == pytest.approx(by_hand(0.0), rel=1e-6)
