"""Layers whose `forward` is ours: to the compiler they are alike, and to their model still what they were."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import one_pack, random_examples, scorer_of, tiny_model, tiny_policy
from tuningfork.api import build_scorer
from tuningfork.kernels.causal_conv.plain import Heads
from tuningfork.kernels.ccgqa.plain import Filters, QueryHeads
from tuningfork.models.hf import layers
from tuningfork.models.policy import Policy
from tuningfork.records import ForkLayout

FAMILIES = ("olmo_hybrid", "qwen3_next", "lfm2", "ccgqa")


class _Whole:
    """Ops that a compiler has in one graph with what is around them, as it has those of a GPU."""

    @classmethod
    def prepare(cls, layout: ForkLayout) -> _Whole:
        return cls()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        return query * (key * value).sum(1, keepdim=True)

    def conv(self, rows: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        return rows * weight.sum(1)

    def query_key_value(self, rows: Tensor, weight: Tensor, heads: Heads) -> tuple[Tensor, ...]:
        keys, width, values, value_width = heads
        parts = (rows * weight.sum(1)).split([keys * width, keys * width, values * value_width], dim=1)
        return tuple(part.unflatten(1, (-1, of)) for part, of in zip(parts, (width, width, value_width), strict=True))

    def scan(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return value * (query * key).sum((1, 2), keepdim=True) * (decay + beta)[..., None]

    def query_key(self, rows: Tensor, filters: Filters, temperature: Tensor, heads: QueryHeads) -> list[Tensor]:
        queries, keys, width = heads
        parts = (rows * filters.depthwise.sum(1)).split([queries * width, keys * width], dim=1)
        return [part.unflatten(1, (-1, width)) for part in parts]

    def values(self, rows: Tensor, now: int) -> Tensor:
        return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_a_kind_share_a_graph(monkeypatch, family):
    compiler, graphs = torch.compile, []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda run, dynamic, **_: compiler(run, dynamic=dynamic, backend=note))
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    policy.kernels = replace(policy.kernels, forms=dict.fromkeys(policy.kernels.forms, _Whole) | _head(policy))
    policy.compile()
    scorer_of(policy, 64).score(one_pack(random_examples([(3, (5, 4))]), "prompt"))
    kinds = {(type(block), *(name for name, _ in block.named_children())) for block in policy.blocks}
    assert len(policy.blocks) > len(kinds)
    assert len(graphs) == len(kinds)


def _head(policy: Policy) -> dict[str, Any]:
    return {"row_logps": policy.kernels.forms["row_logps"]}


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
