"""Which models can be trained correctly. What cannot is refused with the reason and the way out."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tuningfork.errors import ModelError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_RECURRENT_WORDS = ("Mamba", "SSM", "Recurrent", "DeltaNet", "Rwkv", "RWKV", "LinearAttention", "ShortConv", "LRU")
_EXPERTS = re.compile(r"(^|_)(n|num)_(local_|routed_)?experts$")


def check_config(config: Any, path: str) -> None:
    """Refuse what the config alone shows. Raises ModelError."""
    where = f"{path} ({config.model_type})"
    if config.is_encoder_decoder:
        raise ModelError(f"{where} is an encoder-decoder; tuningfork trains decoder-only language models.")
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise ModelError(
                f"{where} has a {part}: models with inputs other than text are not supported. "
                "Export its language model as a text-only checkpoint and train that."
            )
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if other:
        raise ModelError(
            f"{where} has layers of type {', '.join(other)}. In a pack these would mix neighbouring examples, "
            "so only full and sliding-window attention are supported."
        )
    if _has_experts(config.to_dict()):
        raise ModelError(f"{where} is a mixture of experts; only dense models are supported.")
    for kind in _rope_types(config) & {"dynamic", "longrope"}:
        raise ModelError(
            f"{where} uses rotary scaling of type {kind!r}, which depends on the longest sequence of a batch: "
            "an example's numbers would depend on its neighbours in the pack. Remove the scaling in config.json if "
            "your sequences fit the original length."
        )


def check_modules(model: PreTrainedModel, path: str) -> None:
    """Refuse what only the built model shows: dropout, recurrence, a biased head. Raises ModelError."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        rate = _dropout(module)
        if rate > 0:
            raise ModelError(
                f"{path}: {name} ({kind}) has dropout {rate}. With dropout the policy differs from its own reference "
                "before the first step. Set every dropout of config.json to 0."
            )
        if isinstance(module, nn.Conv1d) or any(word in kind for word in _RECURRENT_WORDS):
            raise ModelError(
                f"{path}: {name} ({kind}) carries state from token to token; in a pack it would leak from one example "
                "into the next. Recurrent and convolutional layers are not supported."
            )
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ModelError(f"{path}: the output head has {'a bias' if head is not None else 'no weight'}; not supported.")


def _has_experts(config: dict[str, Any]) -> bool:
    """Whether a config, or a config inside it, sets a number of experts."""
    return any(
        _has_experts(value) if isinstance(value, dict) else bool(value) and _EXPERTS.search(key) is not None
        for key, value in config.items()
        if isinstance(key, str)
    )


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary scaling in use: one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(group.get("rope_type", group.get("type"))) for group in groups}


def _dropout(module: nn.Module) -> float:
    """The highest dropout rate that a module holds by itself, as a layer or as a number for a functional dropout."""
    rates = [module.p] if isinstance(module, nn.Dropout) else []
    rates += [value for name, value in vars(module).items() if "dropout" in name and type(value) in (float, int)]
    return max(map(float, rates), default=0.0)
