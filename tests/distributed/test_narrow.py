"""Matrices that are gathered in bfloat16: the bits of a device that has them whole, gradients that are not rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.worlds import together
from tests.tiny import limits_of, random_examples, scorer_of, tiny_model
from tuningfork.data.packing.loader import build_packs
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.narrow import is_matrix, narrows
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.sharding import Sharding
from tuningfork.distributed.world import ALONE, world
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.step import train_step

EXAMPLES = [(n % 7 + 1, (2 * n % 11 + 1, 3 + n % 5)) for n in range(9)]


def whole(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def spread_over(layout: Layout, family: str, always: bool, activations: str = "none") -> Policy:
    policy = Policy.plain(tiny_model(family, torch.float32), torch.bfloat16)
    parallelize(policy, activations, compiled=False, layout=layout, always=always)
    return policy


def steps_of(policy: Policy) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs of some steps, which have several packs, and the weights in the end."""
    objective, limits = ObjectiveConfig("simpo").build(), limits_of(64, "tree")
    scorer, found = scorer_of(policy, 64), []
    optimizer = build_optimizer(policy.model, TrainConfig(learning_rate=1e-3))
    for step in range(3):
        packs = build_packs(random_examples(EXAMPLES, seed=step), limits)
        assert len(packs) > 1
        found.append(train_step(scorer, objective, optimizer, StepBatch.of(packs, objective, None), None).logps)
    return found, {name: whole(weight) for name, weight in policy.model.named_parameters()}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    with world(ParallelConfig(), cuda=False, always=True):
        yield


@pytest.mark.parametrize("activations", ["none", "block"])
@pytest.mark.parametrize("family", ["llama", "olmo_hybrid", "nsa_mean"])
def test_over_one_process_all_bits_are_those_of_whole_weights(family: str, activations: str, alone: None) -> None:
    expected, weights = steps_of(spread_over(Layout(), family, always=False))
    policy = spread_over(Layout(), family, always=True, activations=activations)
    found, theirs = steps_of(policy)
    assert isinstance(policy.spread, Sharding) and policy.spread._narrow_blocks == policy.blocks
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * 3
    assert [name for name, weight in weights.items() if not torch.equal(weight, theirs[name])] == []


def in_a_pass(ranks: Ranks) -> tuple[Tensor, dict[str, set[torch.dtype]], dict[str, tuple[torch.dtype, Tensor]]]:
    """Of two processes, each with the same pack: its log-probs, the dtypes that weights had in the blocks, by their
    number of dimensions, and all gradients."""
    policy = spread_over(Layout.plan(ParallelConfig(), ranks), "olmo_hybrid", always=False)
    seen: dict[str, set[torch.dtype]] = {}

    def look(block: nn.Module, *_: Any) -> None:
        for weight in block.parameters():
            seen.setdefault("matrices" if weight.ndim == 2 else "others", set()).add(weight.dtype)

    for block in policy.blocks:
        block.register_forward_pre_hook(look)
    (pack,) = build_packs(random_examples(EXAMPLES[:3]), limits_of(128, "tree"))
    hidden = policy.hidden_rows(pack, last=True)
    hidden.float().square().sum().backward()
    assert policy.spread is not None
    policy.spread.exchange()
    gradients = {n: (w.grad.dtype, whole(w.grad)) for n, w in policy.model.named_parameters() if w.grad is not None}
    return hidden.detach(), seen, gradients


def test_matrices_alone_travel_in_fewer_bits_and_their_gradients_in_float32() -> None:
    policy = Policy.plain(tiny_model("olmo_hybrid", torch.float32), torch.bfloat16)
    (pack,) = build_packs(random_examples(EXAMPLES[:3]), limits_of(128, "tree"))
    expected = policy.hidden_rows(pack)
    expected.float().square().sum().backward()
    for hidden, seen, gradients in together(2, in_a_pass):
        assert torch.equal(hidden, expected)
        assert seen == {"matrices": {torch.bfloat16}, "others": {torch.float32}}
        for name, weight in policy.model.named_parameters():
            if weight.grad is not None:
                dtype, gradient = gradients[name]
                assert dtype == torch.float32
                assert torch.equal(gradient, 2 * weight.grad), name  # two processes have the same pack


def test_a_pass_in_float32_rounds_weights_and_nothing_else(alone: None) -> None:
    """That of the checks at a start, which run before anything is compiled."""
    policy = spread_over(Layout(), "llama", always=True)
    exact = Policy.plain(policy.model, torch.float32, policy.spread)
    exact.keep_activations("block")  # whose backward pass computes anew
    rounded = tiny_model("llama", torch.float32)
    for block in rounded.model.layers:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.bfloat16().float()
    expected = Policy.plain(rounded, torch.float32)
    (pack,) = build_packs(random_examples(EXAMPLES[:3]), limits_of(128, "tree"))
    hidden, theirs = exact.hidden_rows(pack, last=True), expected.hidden_rows(pack)
    assert torch.equal(hidden, theirs)
    assert exact.spread is not None
    with exact.spread.widened():
        hidden.square().sum().backward()
    theirs.square().sum().backward()
    exact.spread.exchange()
    gradients = dict(exact.model.named_parameters())
    for name, weight in rounded.named_parameters():
        if weight.grad is not None:
            assert torch.equal(whole(gradients[name].grad), weight.grad), name  # type: ignore[arg-type]


def test_a_block_with_other_matrices_than_those_of_linear_layers_is_gathered_as_it_is() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert narrows(block, torch.bfloat16) and not narrows(block, torch.float32)
    assert not narrows(nn.Sequential(block, nn.Embedding(4, 4)), torch.bfloat16)
    assert not narrows(block.bfloat16(), torch.bfloat16)
    assert not narrows(nn.LayerNorm(4), torch.bfloat16)


def test_filters_stay_whole_and_several_matrices_in_one_do_not() -> None:
    """Experts of a layer, say, are most of a model."""
    lying = {"matrix": (4, 6), "several": (3, 4, 6), "filters": (4, 1, 3), "norm": (4,)}
    assert [name for name, shape in lying.items() if is_matrix(torch.empty(shape))] == ["matrix", "several"]
    several = nn.Linear(4, 4)
    several.register_parameter("others", nn.Parameter(torch.empty(3, 4, 4)))
    assert not narrows(several, torch.bfloat16)  # they are no weight of a linear layer
