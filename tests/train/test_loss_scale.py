"""The loss scale: its rule by hand, and a step by it."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tiny import random_pairs, scorer_of, tiny_policy
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.errors import NonFiniteError
from tuningfork.models.policy import Policy
from tuningfork.objective.sft import SFT
from tuningfork.records import TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.loss_scale import CLEAN_STEPS, LossScale
from tuningfork.train.step import StepOutcome, train_step


def test_a_skipped_step_halves_it_and_2000_clean_ones_double_it() -> None:
    assert LossScale() == LossScale(65536.0, 0, 0) and CLEAN_STEPS == 2000
    assert LossScale(65536.0, 700, 0).after(skipped=True) == LossScale(32768.0, 0, 1)
    assert LossScale(32768.0, 1998, 1).after(skipped=False) == LossScale(32768.0, 1999, 1)
    assert LossScale(32768.0, 1999, 1).after(skipped=False) == LossScale(65536.0, 0, 1)


def test_a_scale_that_no_halving_mends_is_an_error() -> None:
    assert LossScale(2.0, 0, 15).after(skipped=True) == LossScale(1.0, 0, 16)
    with pytest.raises(NonFiniteError, match="not finite in float16, at a loss scale of 1"):
        LossScale(1.0, 0, 16).after(skipped=True)


def single(count: int) -> list[TokenExample]:
    return [one for pair in random_pairs(count) for one in pair.alone()[:1]]


def stepped(policy: Policy, loss_scale: float | None, max_grad_norm: float | None = 0.01) -> StepOutcome:
    batch = StepBatch.of(build_packs(single(4), PackLimits.plan(512, "prompt", False)), SFT(), None)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2, fused=True)
    return train_step(scorer_of(policy), SFT(), optimizer, batch, max_grad_norm, loss_scale=loss_scale)


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_weights_move_as_without_one(max_grad_norm: float | None) -> None:
    """It is a power of two, so that in float32 nothing is rounded otherwise; the norm is told without it."""
    plain = tiny_policy()
    scaled = copy.deepcopy(plain)
    one, other = stepped(plain, None, max_grad_norm), stepped(scaled, 1024.0, max_grad_norm)
    assert one.grad_norm == other.grad_norm and torch.equal(one.logps, other.logps) and not other.skipped
    for ours, theirs in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-22, atol=0)


def test_a_gradient_that_is_infinite_moves_nothing() -> None:
    policy = tiny_policy()
    before = copy.deepcopy(policy.model.state_dict())
    outcome = stepped(policy, 2.0**127)
    assert outcome.skipped and outcome.logps.isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert all(weight.grad is None for weight in policy.model.parameters())


def test_gradients_that_float16_has_no_number_for_come_through() -> None:
    """A scale of 1 loses small ones; the usual one gives those of float32, up to what float16 rounds."""
    exact = tiny_policy()
    small = 1e-6  # of the loss: what one token of a million has in a step
    wanted = gradient(exact, small)
    half = Policy.plain(exact.model, torch.float16)

    def error(scale: float) -> float:
        return float((gradient(half, small * scale) / scale - wanted).norm() / wanted.norm())

    assert error(65536.0) < 2e-2 < error(1.0)


def gradient(policy: Policy, factor: float) -> torch.Tensor:
    """All gradients of a pack whose loss is `factor` times the sum of log-probs, in float64."""
    [pack] = build_packs(single(4), PackLimits.plan(512, "prompt", False))
    policy.model.zero_grad(set_to_none=True)
    scorer_of(policy).backward(pack, lambda first, last, logps: -factor * logps.sum(), linear=True)
    found = [weight.grad.double().flatten() for weight in policy.model.parameters() if weight.grad is not None]
    policy.model.zero_grad(set_to_none=True)
    return torch.cat(found)
