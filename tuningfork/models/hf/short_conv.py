"""Gated short convolutions under transformers' model classes: how they come to run our mixer (see layers.py)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from tuningfork.models.hf.layers import class_of, prepared, put
from tuningfork.models.mixers.short_conv import KEYWORD

_KINDS = {"Lfm2ShortConv"}  # private: transformers.Lfm2ShortConv

_NUMBERS = "seq_idx"  # the library's name for the numbers of rows' sequences


def layers(model: nn.Module) -> list[Any]:
    """The layers of a model that can run our mixer."""
    return [module for module in model.modules() if type(module).__name__ in _KINDS]


def patch(model: nn.Module) -> None:
    """Put our mixer under a model. It may be called again.

    In some versions of the library a block tells such a layer nothing but the number of each row's sequence: there what
    the mixer needs comes by that name.
    """
    for layer in layers(model):
        put(layer, _forward)
    for block in model.modules():
        # private: torch.nn.Module._forward_pre_hooks
        if _told_too_little(block) and _as_numbers not in block._forward_pre_hooks.values():
            block.register_forward_pre_hook(_as_numbers, with_kwargs=True)


def _told_too_little(block: nn.Module) -> bool:
    kinds = [class_of(layer) for layer in block.children() if type(layer).__name__ in _KINDS]
    return any("kwargs" not in inspect.signature(kind.forward).parameters for kind in kinds)


def _as_numbers(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if keywords.get(KEYWORD) is not None:
        keywords = {**keywords, _NUMBERS: keywords[KEYWORD]}
    return args, keywords


def _forward(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **keywords: Any) -> Tensor:
    """The layer as transformers calls it: hidden states [1, T, D] -> [1, T, D].

    Of the three parts of its first product one is multiplied with what goes into the convolution, and one with what
    comes out. Weights are read in here alone, where a model that is spread over processes has gathered them.
    """
    if KEYWORD not in keywords and not isinstance(keywords.get(_NUMBERS), Tensor):
        keywords[KEYWORD] = keywords.pop(_NUMBERS, None)
    conv = prepared(layer, KEYWORD, "the packed convolution", attention_mask, keywords)
    before, behind, x = layer.in_proj(hidden_states[0]).chunk(3, dim=-1)
    mixed = conv.conv(before * x, layer.conv.weight.squeeze(1), layer.conv.bias, silu=False)
    projected: Tensor = layer.out_proj(behind * mixed)
    return projected[None]
