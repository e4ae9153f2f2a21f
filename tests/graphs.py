"""What a compiler makes of a policy's blocks, without its back end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.tiny import one_pack, random_examples, scorer_of
from tuningfork.kernels.causal_conv.plain import Heads
from tuningfork.kernels.ccgqa.plain import Filters, QueryHeads
from tuningfork.models.policy import Policy
from tuningfork.records import ForkLayout


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


def graphs_of(policy: Policy) -> list[str]:
    """The code of every graph that is made while a pack is scored."""
    compiler, graphs = torch.compile, []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    forms = dict.fromkeys(policy.kernels.forms, _Whole)
    policy.kernels = replace(policy.kernels, forms=forms | {"row_logps": policy.kernels.forms["row_logps"]})
    torch._dynamo.reset()
    with mock.patch("torch.compile", lambda run, dynamic, **_: compiler(run, dynamic=dynamic, backend=note)):
        policy.compile()
        scorer_of(policy, 64).score(one_pack(random_examples([(3, (5, 4))]), "prompt"))
    return graphs
