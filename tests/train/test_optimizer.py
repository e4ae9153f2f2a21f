"""The learning rate by hand, and AdamW's first steps by its formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.tiny import tiny_model
from tuningfork.errors import ConfigError
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import (
    build_optimizer,
    gradient_norm,
    hold_gradients,
    learning_rate,
    move_weights,
    set_learning_rate,
)


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


def test_wsd_by_hand():
    """Ten steps: two of warm-up, held up to the sixth, then four on half a period down to a tenth."""
    half = math.sqrt(0.5)
    fall = [0.1 + 0.9 * left for left in (1.0, (1 + half) / 2, 0.5, (1 - half) / 2)]
    found = rates(10, schedule="wsd", warmup_steps=2, decay_start=0.6, min_lr_ratio=0.1)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *fall], rel=1e-14)
    held = rates(10, schedule="wsd", warmup_steps=8, decay_start=0.6)  # warm-up is never cut short
    assert held == pytest.approx([*((n + 1) / 8 for n in range(8)), 1.0, 0.5], rel=1e-14)


@pytest.mark.parametrize(
    ("schedule", "shape"), [("linear", lambda d: 1 - d), ("cosine", lambda d: math.cos(d * math.pi / 2) ** 2)]
)
def test_the_fall_ends_at_the_floor_just_after_the_last_step(schedule, shape):
    for total, warmup, floor in ((1, 0, 0.5), (7, 3, 0.3), (1000, 100, 0.1), (50, 0, 0.0)):
        found = rates(total, schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)
        n = total - warmup
        assert found[warmup:] == pytest.approx(
            [floor + (1 - floor) * shape(k / n) for k in range(n)], rel=1e-12, abs=1e-15
        )


def test_steps_of_warm_up_do_not_depend_on_the_length_of_the_run():
    for total in (5, 50, 500):
        found = rates(total, schedule="constant", warmup_steps=10)
        assert found[:10] == pytest.approx([(n + 1) / 10 for n in range(min(total, 10))], rel=1e-14)
        assert set(found[10:]) <= {1.0}
    assert rates(3, schedule="constant", warmup_steps=0) == [1.0] * 3


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "wsd"])
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


def moved(optimizer_of, gradients: list[torch.Tensor], scale: float | None) -> list[torch.Tensor]:
    """What two equal steps make of weights of ones."""
    weights = [nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
    optimizer = optimizer_of(weights)
    for _ in range(2):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        move_weights(optimizer, None if scale is None else torch.tensor(scale))
    assert getattr(optimizer, "grad_scale", None) is None
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("kind", ["fused", "plain"])
def test_a_scaled_step_is_that_of_scaled_gradients(kind):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((7, 5), (3,))]

    def optimizer_of(weights):  # an epsilon that counts, or Adam would divide the scale out again
        if kind == "plain":
            return torch.optim.SGD(weights, lr=0.1)
        return torch.optim.AdamW(weights, lr=0.1, eps=0.1, fused=True)

    scaled = moved(optimizer_of, gradients, 0.25)
    expected = moved(optimizer_of, [0.25 * gradient for gradient in gradients], None)
    for a, b in zip(scaled, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(scaled[0], moved(optimizer_of, gradients, None)[0], rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_all_gradients_keeps_the_digits_of_float32(dtype):
    """In bfloat16 itself it would have two."""
    weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((50, 30), (11,), (2, 3))]
    generator = torch.Generator().manual_seed(0)
    for weight in weights[:2]:  # the third has none
        weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
    exact = math.sqrt(sum(float(weight.grad.double().square().sum()) for weight in weights[:2]))
    assert float(gradient_norm(torch.optim.SGD(weights, lr=1.0))) == pytest.approx(exact, rel=1e-6)


def eight_bits(weights: torch.Tensor, gradient: float, steps: int, seed: int, rate: float) -> torch.Tensor:
    """Weights after some steps of 8-bit AdamW on a gradient that does not change."""
    model = nn.ParameterList([nn.Parameter(weights.clone())])
    optimizer = build_optimizer(model, TrainConfig(optimizer="adamw_8bit", learning_rate=1.0))
    set_learning_rate(optimizer, rate)
    torch.manual_seed(seed)
    for _ in range(steps):
        model[0].grad = torch.full_like(weights, gradient)
        move_weights(optimizer)
    return model[0].detach()


def test_8_bit_adamw_keeps_updates_below_the_spacing_of_bfloat16_on_average(uncompiled):
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    rate, steps = 2.0**-13, 16  # the spacing is 2^-8 below 1: each step is a 32nd of it
    after = eight_bits(ones, 0.5, steps, seed=1, rate=rate)
    # Adam moves by the rate while the gradient stays; 4096 roundings a step, each off by half a spacing at most
    noise = math.sqrt(steps / 4096) * 2.0**-8 / 2
    assert float(after.double().mean()) == pytest.approx(1 - steps * rate, abs=4 * noise)
    assert torch.equal(after, eight_bits(ones, 0.5, steps, seed=1, rate=rate))
    assert not torch.equal(after, eight_bits(ones, 0.5, steps, seed=2, rate=rate))


def test_8_bit_adamw_takes_float32_gradients_of_bfloat16_weights(uncompiled):
    """Clipped too; a gradient that bfloat16 holds exactly makes the same step in either precision."""
    config = TrainConfig(optimizer="adamw_8bit", learning_rate=0.1, gradient_dtype="float32")
    gradient, after = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), []
    for settings in (config, replace(config, gradient_dtype="weights")):
        model = nn.ParameterList([nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))])
        hold_gradients(model, settings)
        optimizer = build_optimizer(model, settings)
        model[0].grad = gradient.to(model[0].grad_dtype)
        assert gradient_norm(optimizer) == pytest.approx(float(gradient.float().norm()), rel=1e-6)
        torch.manual_seed(0)
        move_weights(optimizer, torch.tensor(0.5))
        after.append(model[0].detach().clone())
        assert model[0].grad.dtype == model[0].grad_dtype
    assert model[0].grad_dtype == torch.bfloat16
    assert torch.equal(*after) and not torch.equal(after[0], torch.ones_like(after[0]))


def test_8_bit_adamw_moves_float32_weights_as_adamw_does(uncompiled):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 64, generator=generator)
    gradients = [torch.randn(64, 64, generator=generator) for _ in range(5)]
    steps = {}
    for kind in ("adamw", "adamw_8bit"):
        model = nn.ParameterList([nn.Parameter(start.clone())])
        optimizer = build_optimizer(model, TrainConfig(optimizer=kind, learning_rate=1e-2))
        for gradient in gradients:
            model[0].grad = gradient.clone()
            move_weights(optimizer)
        steps[kind] = model[0].detach() - start
    # A moment of 8 bits is off by a few percent where it is far below the largest of its block.
    assert (steps["adamw_8bit"] - steps["adamw"]).norm() < 0.1 * steps["adamw"].norm()


def test_moments_that_do_not_divide_into_blocks_are_float32():
    """As those of a shard of a bfloat16 weight may be: bfloat16 is too coarse for a moment."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = nn.ParameterList([nn.Parameter(torch.ones(65, 67, dtype=torch.bfloat16))])
    optimizer = build_optimizer(model, TrainConfig(optimizer="adamw_8bit"))
    model[0].grad = torch.ones_like(model[0])
    move_weights(optimizer)
    assert optimizer.state[model[0]]["exp_avg"].dtype == torch.float32


def test_without_torchao_8_bit_adamw_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit.*pip install torchao"):
        build_optimizer(nn.Linear(2, 2), TrainConfig(optimizer="adamw_8bit"))
