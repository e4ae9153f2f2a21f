"""Attention under transformers' unchanged model classes: how their layers come to run our mixer.

transformers looks attention functions up by name and hands them whatever keywords the model call carries, so a model
loaded with ``attn_implementation="tuningfork"`` and called with ``fork=<prepared attention>`` runs a fork layout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tuningfork.errors import ModelError
from tuningfork.models.mixers import ccgqa, gated_delta, short_conv
from tuningfork.models.mixers.attention import KEYWORD

NAME = "tuningfork"
AHEAD = (
    "its tokens see those that come after them, as in an encoder, so it cannot be trained to predict them. Not "
    "supported."
)

HARMLESS = {"position_ids", "use_cache", "cache_position", "past_key_values", "output_attentions", "is_causal"}
"""Keywords of the model call that a mixer may ignore: they say nothing that the fork layout does not."""
_OTHERS = {ccgqa.KEYWORD, gated_delta.KEYWORD, short_conv.KEYWORD}  # what other kinds of layers are told

# Decoder blocks that are given keywords and do not pass them to their attention.
# private: transformers.DecoderLayer
_ONLY_HAND_ON_MASKS = {"NemotronDecoderLayer", "StableLmDecoderLayer"}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    fork: Any = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Fork attention as transformers calls it: query, key, value [1, H, T, d] -> ([1, T, H, d], None).

    `s_aux` [H] are attention sinks.
    """
    for name, given in other.items():
        if given is not None and given is not False and name not in HARMLESS | _OTHERS:
            raise ModelError(
                f"attention of this model ({type(module).__name__}) takes {name!r} into account, which packed "
                "attention does not know. Not supported."
            )
    if fork is None:  # see patch
        fork = attention_mask
    if not hasattr(fork, "attend"):
        raise ModelError(
            f"attention of this model ({type(module).__name__}) is not told which tokens belong to one example: its "
            "layers do not hand on what the model is given. Not supported."
        )
    if isinstance(attention_mask, Tensor):  # none is made for us, see below
        raise ModelError(
            f"attention of this model ({type(module).__name__}) makes a mask of its own, which packed attention does "
            "not know. Not supported."
        )
    if getattr(module, "is_causal", True) is False:
        raise ModelError(f"attention of this model ({type(module).__name__}) looks both ways: {AHEAD}")
    if sliding_window is not None and sliding_window < 1:
        raise ModelError(
            f"attention of this model ({type(module).__name__}) has a window of {sliding_window} tokens. Set "
            "sliding_window in config.json to null if it has none, else to the right number."
        )
    if dropout:
        raise ModelError(f"{type(module).__name__} uses attention dropout {dropout}; set it to 0 in config.json.")
    # Under autocast a rotary embedding may return float32 queries beside bfloat16 values.
    q, k, v = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    sinks: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
    out = fork.attend(q, k, v, scale=scale, window=sliding_window, softcap=softcap, **sinks)
    return out[None], None


def patch(model: nn.Module) -> None:
    """Put our attention under a model that was built to look it up by NAME. It may be called again.

    What is left to do is to bring the layout to blocks that keep keywords to themselves: they hand on their mask.
    """
    for block in model.modules():
        # private: torch.nn.Module._forward_pre_hooks
        if type(block).__name__ in _ONLY_HAND_ON_MASKS and _as_mask not in block._forward_pre_hooks.values():
            block.register_forward_pre_hook(_as_mask, with_kwargs=True)


def _as_mask(block: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if keywords.get(KEYWORD) is not None:
        keywords = {**keywords, "attention_mask": keywords[KEYWORD]}
    return args, keywords


# No mask function beside it: the fork layout says who sees whom, and transformers, where it has none for a name, makes
# no mask. With one it would first look for sequences among the positions, which makes the host wait for the device.
ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)  # private: transformers.ALL_ATTENTION_FUNCTIONS
