"""The plain row log-probs, which every fast form is measured against, against log_softmax in float64 (G8)."""

from __future__ import annotations

import pytest
import torch

from tuningfork.kernels.row_logps.plain import logits_gradient, row_logps
from tuningfork.records import LogitTransform

TRANSFORMS = {
    "none": LogitTransform(),
    "scale": LogitTransform(scale=0.25),
    "softcap": LogitTransform(softcap=3.0),
    "both": LogitTransform(scale=1.7, softcap=5.0),
}


def random_rows(rows: int, vocab: int, dtype=torch.float64, spread: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits = spread * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocab, (rows,), generator=generator)


def truth(logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    """Log-probs by the definition, in float64, differentiable."""
    z = logits.double() * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return z.log_softmax(-1)[torch.arange(len(targets)), targets]


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 97), (5, 2), (33, 97), (7, 5000)])
def test_values_and_gradient_are_those_of_log_softmax(transform, shape):
    logits, targets = random_rows(*shape)
    leaf = logits.clone().requires_grad_()
    expected = truth(leaf, targets, transform)
    weights = torch.linspace(-2, 3, shape[0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), leaf)

    logps, lse = row_logps(logits, targets, transform)
    torch.testing.assert_close(logps, expected.detach(), rtol=1e-12, atol=1e-13)
    ours = logits_gradient(logits, targets, lse, weights, transform, logits.clone())
    torch.testing.assert_close(ours, gradient, rtol=1e-12, atol=1e-13)


def test_a_row_by_hand():
    """Logits 0, ln 2, ln 5 are probabilities 1/8, 2/8, 5/8."""
    logits = torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log()
    logps, lse = row_logps(logits, torch.tensor([1]), LogitTransform())
    torch.testing.assert_close(logps.exp(), torch.tensor([0.25], dtype=torch.float64))
    torch.testing.assert_close(lse.sum(1).exp(), torch.tensor([8.0], dtype=torch.float64))
    gradient = logits_gradient(
        logits, torch.tensor([1]), lse, torch.tensor([16.0], dtype=torch.float64), LogitTransform(), logits
    )
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, 12.0, -10.0]], dtype=torch.float64))


def assert_error_is_at_most_twice_that_of_log_softmax(
    logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform
) -> None:
    weights = torch.linspace(-2, 3, 64, dtype=torch.float64)
    dtype = logits.dtype
    leaf = logits.double().requires_grad_()
    expected = truth(leaf, targets, transform)
    (true_gradient,) = torch.autograd.grad((weights * expected).sum(), leaf)

    plain_leaf = logits.clone().requires_grad_()
    z = plain_leaf.float() * transform.scale
    z = z if transform.softcap is None else transform.softcap * torch.tanh(z / transform.softcap)
    plain = z.log_softmax(-1)[torch.arange(64), targets]
    (plain_gradient,) = torch.autograd.grad((weights.float() * plain).sum(), plain_leaf)

    logps, lse = row_logps(logits, targets, transform)
    gradient = logits_gradient(logits, targets, lse, weights.float(), transform, logits.clone())
    assert logps.dtype == lse.dtype == torch.float32
    assert gradient.dtype == dtype
    for ours, theirs, true in ((logps, plain.detach(), expected.detach()), (gradient, plain_gradient, true_gradient)):
        error = (ours.double() - true).norm()
        assert error <= 2 * (theirs.double() - true).norm() + 1e-12
        assert error > 0  # it was rounded: the comparison compares something


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_error_is_at_most_twice_that_of_the_same_dtypes_log_softmax(dtype, transform):
    logits, targets = random_rows(64, 1000, dtype)
    assert_error_is_at_most_twice_that_of_log_softmax(logits, targets, transform)


@pytest.mark.parametrize("offset", [-100, 30, 100])
def test_a_common_offset_of_the_logits_costs_no_digits(offset):
    """Log-probs do not depend on it, and the logits of real models have one."""
    logits, targets = random_rows(64, 1000)
    assert_error_is_at_most_twice_that_of_log_softmax((logits + offset).float(), targets, LogitTransform())


def test_gradient_may_be_written_over_the_logits_and_the_values_read_them_only():
    logits, targets = random_rows(9, 30, torch.float32)
    before = logits.clone()
    _, lse = row_logps(logits, targets, LogitTransform(0.5, 4.0))
    assert torch.equal(logits, before)
    elsewhere = logits_gradient(logits, targets, lse, torch.ones(9), LogitTransform(0.5, 4.0), torch.empty(9, 30))
    assert torch.equal(logits, before)
    result = logits_gradient(logits, targets, lse, torch.ones(9), LogitTransform(0.5, 4.0), logits)
    assert result.data_ptr() == logits.data_ptr()
    assert torch.equal(logits, elsewhere)


def test_the_gradient_of_float32_logits_in_bfloat16_is_rounded_once():
    logits, targets = random_rows(9, 30, torch.float32)
    _, lse = row_logps(logits, targets, LogitTransform())
    exact = logits_gradient(logits, targets, lse, torch.ones(9), LogitTransform(), torch.empty(9, 30))
    narrow = torch.empty(9, 32, dtype=torch.bfloat16)[:, :30]
    assert torch.equal(logits_gradient(logits, targets, lse, torch.ones(9), LogitTransform(), narrow), exact.bfloat16())


def test_each_gradient_row_sums_to_nothing_and_pulls_the_target_up():
    logits, targets = random_rows(12, 40)
    _, lse = row_logps(logits, targets, LogitTransform())
    gradient = logits_gradient(logits, targets, lse, torch.ones(12, dtype=torch.float64), LogitTransform(), logits)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(12, dtype=torch.float64), rtol=0, atol=1e-14)
    target_gradient = gradient[torch.arange(12), targets]
    assert (target_gradient > 0).all()
    assert ((gradient > 0).sum(1) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_log_prob_is_never_above_zero(dtype):
    """verl#2656. Where one logit towers over all others, log-sum-exp must not round below it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 50, generator=generator)
    logits[:, 7] = torch.linspace(-5, 60, 4000)
    targets = torch.full((4000,), 7)
    logps, _ = row_logps(logits.to(dtype), targets, LogitTransform())
    assert (logps <= 0).all()
    assert (logps == 0).any() and (logps < -1).any()


def test_extreme_logits_neither_overflow_nor_underflow():
    logits = torch.tensor([[1e4, 0.0], [-80.0, -80.0], [3e38, 3e38]])
    logps, _ = row_logps(logits, torch.tensor([1, 0, 1]), LogitTransform())
    # At 80, neighbouring float32 are 7.6e-6 apart.
    torch.testing.assert_close(logps[:2], torch.tensor([-1e4, -0.6931472]), rtol=1e-7, atol=1e-5)
    assert logps[2] <= 0


def test_minus_infinity_elsewhere_is_a_token_that_cannot_be():
    """Models mask vocabulary entries so; the rest must stay exact and the masked entry must get no gradient."""
    logits = torch.tensor([[0.0, float("-inf"), 0.0]], dtype=torch.float64)
    logps, lse = row_logps(logits, torch.tensor([0]), LogitTransform())
    torch.testing.assert_close(logps, torch.tensor([0.5], dtype=torch.float64).log())
    one = torch.ones(1, dtype=torch.float64)
    gradient = logits_gradient(logits, torch.tensor([0]), lse, one, LogitTransform(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.0, -0.5]], dtype=torch.float64))


def test_not_a_number_stays_in_its_row_and_is_not_hidden():
    logits, _ = random_rows(4, 10, torch.float32)
    clean = logits.clone()
    logits[1, 3] = float("nan")
    logits[2, 5] = float("inf")
    targets = torch.tensor([0, 0, 0, 0])
    logps, _ = row_logps(logits, targets, LogitTransform())
    expected, _ = row_logps(clean, targets, LogitTransform())
    assert torch.equal(logps[[0, 3]], expected[[0, 3]])
    assert not torch.isfinite(logps[[1, 2]]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(dtype):
    logits, targets = random_rows(65, 777, dtype)
    transform = LogitTransform(0.7, 9.0)
    logps, lse = row_logps(logits, targets, transform)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 65)):
        part, part_lse = row_logps(logits[rows].clone(), targets[rows], transform)
        assert torch.equal(part, logps[rows])
        assert torch.equal(part_lse, lse[rows])


def test_no_rows_are_no_rows():
    logits = torch.zeros(0, 10)
    logps, lse = row_logps(logits, torch.zeros(0, dtype=torch.int64), LogitTransform(1.0, 2.0))
    assert logps.tolist() == lse.tolist() == []
    assert logits_gradient(logits, torch.zeros(0, dtype=torch.int64), lse, logps, LogitTransform(), logits).numel() == 0
