"""The seam in transformers: our attention under its unchanged model classes.

transformers looks attention functions up by name and hands them whatever keywords the model call carries, so a model
loaded with ``attn_implementation="tuningfork"`` and called with ``fork=<prepared attention>`` runs a fork layout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tuningfork.errors import ModelError

NAME = "tuningfork"

# Keywords of the model call that attention may ignore: they say nothing that the fork layout does not.
_HARMLESS = {"position_ids", "use_cache", "cache_position", "past_key_values", "output_attentions", "is_causal"}


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
    fork: Any = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Fork attention as transformers calls it: query, key, value [1, H, T, d] -> ([1, T, H, d], None)."""
    for name, given in other.items():
        if given is not None and given is not False and name not in _HARMLESS:
            raise ModelError(
                f"{type(module).__name__} passes {name!r} to its attention, which packed attention does not know. "
                "This model family is not supported."
            )
    if dropout:
        raise ModelError(f"{type(module).__name__} uses attention dropout {dropout}; set it to 0 in config.json.")
    # Under autocast a rotary embedding may return float32 queries beside bfloat16 values.
    q, k, v = (t[0].transpose(0, 1).to(value.dtype) for t in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = fork.attend(q, k, v, scale=scale, window=sliding_window, softcap=softcap)
    return out[None], None


# No mask function beside it: the fork layout says who sees whom, and transformers, where it has none for a name, makes
# no mask. With one it would first look for sequences among the positions, which makes the host wait for the device.
ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
