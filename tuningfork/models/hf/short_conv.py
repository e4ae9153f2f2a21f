"""Gated short convolutions under transformers' model classes: how they come to run our mixer (see layers.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tuningfork.models.hf.layers import prepared, put
from tuningfork.models.mixers.short_conv import KEYWORD

_KINDS = {"Lfm2ShortConv"}  # private: transformers.Lfm2ShortConv


def layers(model: nn.Module) -> list[Any]:
    """The layers of a model that can run our mixer."""
    return [module for module in model.modules() if type(module).__name__ in _KINDS]


def patch(model: nn.Module) -> None:
    """Put our mixer under a model. It may be called again."""
    for layer in layers(model):
        put(layer, _forward)


def _forward(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **keywords: Any) -> Tensor:
    """The layer as transformers calls it: hidden states [1, T, D] -> [1, T, D].

    Of the three parts of its first product one is multiplied with what goes into the convolution, and one with what
    comes out. Weights are read in here alone, where a model that is spread over processes has gathered them.
    """
    conv = prepared(layer, KEYWORD, "the packed convolution", attention_mask, keywords)
    before, behind, x = layer.in_proj(hidden_states[0]).chunk(3, dim=-1)
    mixed = conv.conv(before * x, layer.conv.weight.squeeze(1), layer.conv.bias, silu=False)
    projected: Tensor = layer.out_proj(behind * mixed)
    return projected[None]
