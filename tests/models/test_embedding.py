"""The gradient of an embedding is asked for in one order, and nothing else is."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.tiny import one_pack, random_pairs, scorer_of, tiny_gpt2, tiny_policy
from tuningfork.models import embedding
from tuningfork.models.embedding import repeat_gradients
from tuningfork.models.policy import Policy

IDS = torch.arange(12).reshape(1, 12) % 5


class Asked(TorchDispatchMode):
    """Which operations ran while deterministic algorithms were asked for; one of them may fail."""

    def __init__(self, failing: str = "") -> None:
        super().__init__()
        self.failing = failing
        self.while_asked: list[str] = []
        self.ran: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(op.overloadpacket.__name__)
        if torch.are_deterministic_algorithms_enabled():
            self.while_asked.append(op.overloadpacket.__name__)
        if op.overloadpacket.__name__ == self.failing:
            raise torch.OutOfMemoryError("no memory is left")
        return op(*args, **(kwargs or {}))


class Scaled(nn.Embedding):
    """As some families have it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (super().forward(ids) * self.weight.shape[1] ** 0.5).to(torch.bfloat16)


@pytest.fixture
def switched(monkeypatch):
    """How often deterministic algorithms were switched on and off."""
    seen = []
    switch = embedding._switch
    monkeypatch.setattr(embedding, "_switch", lambda *state, **more: (seen.append(state[0]), switch(*state, **more)))
    return seen


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("prepared", ["once", "twice", "copied and again"])
def test_one_order_is_asked_for_once_around_the_addition_alone(prepared, kind, switched):
    model = nn.Sequential(kind(7, 4))
    repeat_gradients(model)
    if prepared != "once":
        model = deepcopy(model) if prepared == "copied and again" else model
        repeat_gradients(model)
    with Asked() as seen:
        model(IDS).float().square().sum().backward()
    assert seen.while_asked == ["embedding_dense_backward"] and switched == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_model_may_be_prepared_any_number_of_times():
    model = nn.Embedding(7, 4)
    for _ in range(3):
        repeat_gradients(model)
    assert len(model._forward_hooks) == 1


def test_a_block_that_is_computed_again_asks_again(switched):
    model = nn.Embedding(7, 4)
    repeat_gradients(model)
    with Asked() as seen:
        checkpoint(model, IDS, use_reentrant=False).square().sum().backward()
    assert seen.while_asked == ["embedding_dense_backward"] and switched == [True, False]


@pytest.mark.parametrize("warn_only", [False, True])
def test_who_asks_for_it_everywhere_keeps_it(warn_only):
    model = nn.Embedding(7, 4)
    repeat_gradients(model)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        model(IDS).sum().backward()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("ask", ["no gradient", "frozen"])
def test_without_a_gradient_nothing_is_switched(ask, switched):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    repeat_gradients(model)
    if ask == "frozen":
        model[0].weight.requires_grad_(False)
    with torch.set_grad_enabled(ask == "frozen"):
        out = model(IDS).sum()
    if ask == "frozen":
        out.backward()
    assert switched == []


@pytest.mark.parametrize("make", [tiny_gpt2, partial(tiny_policy, "gemma3")])
def test_a_policy_asks_for_all_embeddings_of_its_model(make):
    policy = make()
    policy = Policy(policy.model, policy.kernels, policy.dtype)  # prepared twice
    embeddings = sum(isinstance(module, nn.Embedding) for module in policy.model.modules())
    with Asked() as seen:
        scorer_of(policy).backward(one_pack(random_pairs(3), "prompt"), lambda a, b, logps: logps.sum())
    assert seen.while_asked == ["embedding_dense_backward"] * embeddings and len(seen.ran) > 50


def test_an_addition_that_fails_leaves_nothing_asked_for():
    """As when `train.activation_memory: auto` tries what does not fit, and goes on."""
    scorer = scorer_of(tiny_gpt2())
    with Asked(failing="embedding_dense_backward"), pytest.raises(torch.OutOfMemoryError):
        scorer.backward(one_pack(random_pairs(3), "prompt"), lambda a, b, logps: logps.sum())
    assert not torch.are_deterministic_algorithms_enabled()
