"""Layers whose `forward` is ours: to the compiler they are alike, and to their model still what they were."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.graphs import graphs_of
from tests.tiny import tiny_model, tiny_policy
from tuningfork.api import build_scorer
from tuningfork.models.hf import layers
from tuningfork.models.policy import Policy

FAMILIES = ("olmo_hybrid", "qwen3_next", "lfm2", "ccgqa")


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_a_kind_share_a_graph(family):
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    kinds = {(type(block), *(name for name, _ in block.named_children())) for block in policy.blocks}
    assert len(policy.blocks) > len(kinds)
    assert len(graphs_of(policy)) == len(kinds)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_its_class_in_name_and_kind(family):
    model = tiny_policy(family).model
    own = [layer for layer in model.modules() if type(layer) is not layers.class_of(layer)]
    assert own
    for layer in own:
        assert isinstance(layer, layers.class_of(layer)) and type(layer).__name__ == layers.class_of(layer).__name__
    with layers.taken_out(model):
        assert all(type(layer) is layers.class_of(layer) for layer in own)
    kinds = [type(layer) for layer in own]
    assert all(kind is not layers.class_of(layer) for kind, layer in zip(kinds, own, strict=True))
    layers.put(own[0], kinds[0].forward)  # again: the same class
    assert type(own[0]) is kinds[0] and type(copy.deepcopy(own[0])) is kinds[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_memory_may_be_made_ready_again(family):
    model = tiny_model(family, torch.float32)
    for _ in range(2):
        build_scorer(model)
