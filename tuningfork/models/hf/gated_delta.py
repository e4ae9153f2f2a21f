"""The gated delta rule under transformers' model classes: how their layers come to run our mixer (see layers.py).

Convolution and scan are from what the model call hands on as ``gated_delta=<prepared>``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tuningfork.errors import ModelError
from tuningfork.kernels.causal_conv.plain import Heads
from tuningfork.models.hf.layers import prepared, put
from tuningfork.models.mixers.gated_delta import KEYWORD


class _Projected(NamedTuple):
    """What a layer makes of its rows by products alone."""

    mixed: Tensor  # [T, C], the convolution's channels: queries, keys, values
    gate: Tensor  # [T, Hv, dv], of the output
    strength: Tensor  # [T, Hv], of a correction of the state, before its sigmoid
    step: Tensor  # [T, Hv], of the state's decay, before its softplus


def _separate(layer: Any, rows: Tensor) -> _Projected:
    """OLMo Hybrid: a projection for each."""
    mixed = torch.cat([layer.q_proj(rows), layer.k_proj(rows), layer.v_proj(rows)], dim=-1)
    gate = layer.g_proj(rows).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return _Projected(mixed, gate, layer.b_proj(rows), layer.a_proj(rows))


def _by_key_head(layer: Any, rows: Tensor) -> _Projected:
    """Qwen3-Next: two projections, in which all that belongs to a key head lies together."""
    # private: transformers.GatedDeltaNet
    sort = layer.fix_query_key_value_ordering
    query, key, value, gate, strength, step = (
        part[0] for part in sort(layer.in_proj_qkvz(rows)[None], layer.in_proj_ba(rows)[None])
    )
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
    return _Projected(mixed, gate, strength, step)


def _together(layer: Any, rows: Tensor) -> _Projected:
    """Qwen3.5: one projection for what the convolution takes."""
    gate = layer.in_proj_z(rows).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return _Projected(layer.in_proj_qkv(rows), gate, layer.in_proj_b(rows), layer.in_proj_a(rows))


class _Kind(NamedTuple):
    """How a class has its weights: its projections, and by what names the gated norm and the output's projection."""

    project: Callable[[Any, Tensor], _Projected]
    norm: str
    out: str


# private: transformers.GatedDeltaNet
_KINDS: Mapping[str, _Kind] = {
    "OlmoHybridGatedDeltaNet": _Kind(_separate, "o_norm", "o_proj"),
    "Qwen3NextGatedDeltaNet": _Kind(_by_key_head, "norm", "out_proj"),
    "Qwen3_5GatedDeltaNet": _Kind(_together, "norm", "out_proj"),
}


_SINCE = "5.15"  # of transformers: one convolution a layer, and norms of its own whatever else is installed


def layers(model: nn.Module) -> list[Any]:
    """The layers of a model that can run our mixer."""
    return [module for module in model.modules() if type(module).__name__ in _KINDS]


def patch(model: nn.Module) -> None:
    """Put our mixer under a model. It may be called again.

    Raises:
        ModelError: its layers do what the mixer does not, or are built otherwise by this version of transformers.
    """
    for layer in layers(model):
        kind = type(layer).__name__
        _check_built(layer)
        if layer.activation not in ("silu", "swish"):
            raise ModelError(
                f"{kind} has {layer.activation!r} behind its convolution (hidden_act in config.json); only silu is "
                "supported."
            )
        if layer.conv1d.bias is not None:
            raise ModelError(f"the convolution of {kind} has a bias. Not supported.")
        put(layer, _forward)


def _check_built(layer: Any) -> None:
    """Refuse a layer that an older version of the library has built of other parts, or of another package's."""
    kind, version = type(layer).__name__, transformers.__version__
    missing = [name for name in ("conv1d", "activation") if not hasattr(layer, name)]
    if missing:
        raise ModelError(
            f"{kind} of transformers {version} has no {' and no '.join(missing)}: layers of this kind are supported as "
            f"transformers {_SINCE} and newer ones build them. Install one of these."
        )
    norm = type(getattr(layer, _KINDS[kind].norm))
    if norm.__module__.split(".")[0] != "transformers":
        raise ModelError(
            f"transformers {version} has given {kind} the gated norm of another package, {norm.__module__}."
            f"{norm.__name__}, because that is installed. It times several configurations for each length, so a row's "
            f"bits would depend on its pack. Install transformers {_SINCE} or newer, or uninstall that package."
        )


def _forward(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **keywords: Any) -> Tensor:
    """The layer as transformers calls it: hidden states [1, T, D] -> [1, T, D].

    Weights are read in here alone, where a model that is spread over processes has gathered them. Gates are float32 at
    least whatever the products are: decays add up along a chunk, and bfloat16 has no digits for that.
    """
    ops = prepared(layer, KEYWORD, "the packed gated delta rule", attention_mask, keywords)
    of, rows = _KINDS[type(layer).__name__], hidden_states[0]
    mixed, gate, strength, step = of.project(layer, rows)
    heads = Heads(layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim)
    query, key, value = ops.conv.query_key_value(mixed, layer.conv1d.weight.squeeze(1), heads)
    wide = torch.promote_types(mixed.dtype, torch.float32)
    beta = strength.to(wide).sigmoid()
    if getattr(layer, "allow_neg_eigval", False):
        beta = 2 * beta
    decay = -layer.A_log.to(wide).exp() * F.softplus(step.to(wide) + layer.dt_bias.to(wide))
    out = ops.scan.scan(query, key, value, decay, beta)
    normed = getattr(layer, of.norm)(out.flatten(0, 1), gate.flatten(0, 1))
    projected: Tensor = getattr(layer, of.out)(normed.view(len(rows), -1))
    return projected[None]
