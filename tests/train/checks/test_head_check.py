"""The head beside PyTorch's own log-softmax at a start: right in every family and dtype, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny import FAMILIES, scorer_of, tiny_model, with_row_logps
from tuningfork.errors import ModelError
from tuningfork.kernels import sums
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import plain
from tuningfork.models import head as head_module
from tuningfork.models.policy import Policy
from tuningfork.train.checks.head_check import check_head

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_rows", [4096, 5])
def test_a_right_head_passes_and_leaves_no_gradient(family, dtype, weights, chunk_rows):
    policy = Policy(tiny_model(family, weights), plain(), dtype)
    check_head(scorer_of(policy, chunk_rows), "here")
    assert all(weight.grad is None for weight in policy.model.parameters())


def times(factor: float) -> Callable[..., Any]:
    """Makes a function's result wrong by a factor."""
    return lambda function: lambda *args, **how: function(*args, **how) * factor


def off(logits, targets, transform):
    logps, lse = plain_rows.row_logps(logits, targets, transform)
    return logps + 0.001, lse


def flipped(logits, targets, lse, grad_logps, transform, out):
    return plain_rows.logits_gradient(logits, targets, lse, -grad_logps, transform, out)


def without_transform(logits, targets, lse, grad, transform, out):
    return plain_rows.logits_gradient(logits, targets, lse, grad, replace(transform, scale=1.0), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row_logps": off}, "log-probs"),
        ({"logits_gradient": flipped}, "gradients of hidden states"),
        ({"logits_gradient": without_transform}, "gradients of hidden states"),
    ],
)
def test_a_wrong_kernel_is_named(change, said, dtype):
    policy = Policy(tiny_model("granite", torch.float32), with_row_logps(**change), dtype)
    with pytest.raises(ModelError, match=f"here: the head, with row_logps kernel plain: {said} are"):
        check_head(scorer_of(policy), "here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("place", "name", "factor", "said"),
    [
        (head_module._Projection, "logits", 1.01, "log-probs"),
        (head_module, "sum_by_answer", 1.001, "log-probs"),
        (head_module, "product", 2.0, "log-probs"),
    ],
)
def test_a_step_of_the_head_that_is_wrong_is_named(monkeypatch, place, name, factor, said, dtype):
    """What no kernel does, and reference and policy have in common, so that it cancels at step 0."""
    policy = Policy(tiny_model("llama", torch.float32), plain(), dtype)
    monkeypatch.setattr(place, name, times(factor)(getattr(place, name)))
    with pytest.raises(ModelError, match=f"{said} are"):
        check_head(scorer_of(policy), "here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_gradients_of_the_weight_are_named(monkeypatch, dtype):
    policy = Policy(tiny_model("llama", torch.float32), plain(), dtype)
    add = head_module.Gradient.add_outer
    monkeypatch.setattr(head_module.Gradient, "add_outer", lambda self, d_logits, rows: add(self, 2 * d_logits, rows))
    with pytest.raises(ModelError, match="gradients of the weight are"):
        check_head(scorer_of(policy), "here")


def first_alone(values, places, size):
    """What the first answer of a shared logit row gives."""
    return values.new_zeros(size).index_copy_(0, places.flip(0), values.flip(0))


def last_alone(values, places, size):
    return values.new_zeros(size).index_copy_(0, places, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [first_alone, last_alone])
def test_a_wrong_sum_over_answers_is_named(monkeypatch, wrong, dtype):
    """The pack of the check has logit rows that answers of two examples share."""
    policy = Policy(tiny_model("llama", torch.float32), plain(), dtype)
    monkeypatch.setattr(head_module, "sum_by_place", wrong)
    with pytest.raises(ModelError, match="gradients of hidden states are"):
        check_head(scorer_of(policy), "here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_gradients_of_picked_rows_are_named(monkeypatch, dtype):
    policy = Policy(tiny_model("llama", torch.float32), plain(), dtype)
    backward = sums._Take.backward
    half = staticmethod(lambda ctx, gradient: (0.5 * backward(ctx, gradient)[0], None))
    monkeypatch.setattr(sums._Take, "backward", half)
    with pytest.raises(ModelError, match="rows picked for the head: gradients are"):
        check_head(scorer_of(policy), "here")
