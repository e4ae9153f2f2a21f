"""How layers of our CCGQA class come to run our mixers (see layers.py): its own forward is for single sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tuningfork.kernels.ccgqa.plain import Filters, QueryHeads
from tuningfork.models.ccgqa.modeling_ccgqa import rotated
from tuningfork.models.hf.layers import prepared, put
from tuningfork.models.mixers import attention
from tuningfork.models.mixers.ccgqa import KEYWORD

_KINDS = {"CcgqaAttention"}


def layers(model: nn.Module) -> list[Any]:
    """The layers of a model that can run our mixers."""
    return [module for module in model.modules() if type(module).__name__ in _KINDS]


def patch(model: nn.Module) -> None:
    """Put our mixers under a model. It may be called again."""
    for layer in layers(model):
        put(layer, _forward)


def _forward(layer: Any, hidden_states: Tensor, rotation: tuple[Tensor, Tensor], **keywords: Any) -> Tensor:
    """The layer as its model calls it: hidden states [1, T, D] -> [1, T, D], with the rotation [1, T, ...] of rows.

    Weights are read in here alone, where a model that is spread over processes has gathered them.
    """
    ops = prepared(layer, KEYWORD, "packed CCGQA", None, keywords)
    fork = prepared(layer, attention.KEYWORD, "packed attention", None, keywords)
    rows = hidden_states[0]
    values = ops.values(layer.v_proj(rows), layer.now).unflatten(1, (-1, layer.head_dim))
    filters = Filters(layer.depthwise_weight, layer.grouped_weight, layer.depthwise_bias, layer.grouped_bias)
    heads = QueryHeads(layer.heads, layer.key_heads, layer.head_dim)
    query, key = ops.query_key(layer.qk_proj(rows), filters, layer.temperature, heads)
    query, key = (rotated(t, *(part[0] for part in rotation)).to(values.dtype) for t in (query, key))
    out = fork.attend(query, key, values, scale=layer.head_dim**-0.5, window=None, softcap=None)
    projected: Tensor = layer.o_proj(out.flatten(1))
    return projected[None]
