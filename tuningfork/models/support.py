"""Which models can be trained correctly. What cannot is refused with the reason and the way out."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tuningfork.errors import ModelError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_RECURRENT_WORDS = ("mamba", "ssm", "recurrent", "deltanet", "delta_net", "rwkv", "linearattention", "shortconv", "lru")


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
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ModelError(f"{where} is a mixture of experts; only dense models are supported.")
    rope_type = _rope_type(config)
    if rope_type in ("dynamic", "longrope"):
        raise ModelError(
            f"{where} uses rotary scaling of type {rope_type!r}, which depends on the longest sequence of a batch: "
            "an example's numbers would depend on its neighbours in the pack. Remove the scaling in config.json if "
            "your sequences fit the original length."
        )


def check_modules(model: PreTrainedModel, path: str) -> None:
    """Refuse what only the built model shows: dropout, recurrence, a biased head. Raises ModelError."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float | int) and rate > 0:
            raise ModelError(
                f"{path}: {name} ({kind}) has dropout {rate}. With dropout the policy differs from its own reference "
                "before the first step. Set every dropout of config.json to 0."
            )
        if isinstance(module, nn.Conv1d) or any(word in kind.lower() for word in _RECURRENT_WORDS):
            raise ModelError(
                f"{path}: {name} ({kind}) carries state from token to token; in a pack it would leak from one example "
                "into the next. Recurrent and convolutional layers are not supported."
            )
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ModelError(f"{path}: the output head has {'a bias' if head is not None else 'no weight'}; not supported.")


def _rope_type(config: Any) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, dict) else None
