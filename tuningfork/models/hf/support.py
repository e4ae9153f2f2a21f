"""Which models can be trained correctly. What cannot is refused with the reason and the way out."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import transformers
from torch import nn
from torch.nn.modules.dropout import _DropoutNd  # private: torch.nn.modules.dropout._DropoutNd
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from tuningfork.errors import ModelError
from tuningfork.models.hf import gated_delta, own, short_conv
from tuningfork.models.hf.attention import AHEAD
from tuningfork.models.hf.layers import class_of

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_OUR_LAYERS = {
    **dict.fromkeys(("olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "linear_attention"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "conv"),
}
"""The type of the layers that are no attention and known, by the type of the model."""
_SUPPORTED = (
    "the gated delta rule, in the dense models of OLMo Hybrid, Qwen3-Next and Qwen3.5, and gated short convolutions, "
    "in those of LFM2"
)
_MAMBA_2 = "Mamba-2 layers, each with a convolution and a state"
_KDA = "Kimi delta attention, convolutions and a state that decays by key channel"
_RECURRENT = {
    **dict.fromkeys(("nemotron_h", "bamba", "granitemoehybrid", "mamba2", "zamba2", "falcon_h1"), _MAMBA_2),
    **dict.fromkeys(("kimi_linear", "glm5_next", "bailing_hybrid"), _KDA),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), "Mamba layers, each with a convolution and a state"),
    **dict.fromkeys(("minimax", "minimax_text_01"), "lightning attention, which has a state"),
    "recurrent_gemma": "gated linear recurrences, each behind a convolution",
    "rwkv": "RWKV layers, which have a state and look at the token before",
    "xlstm": "xLSTM layers, which have a state",
}
"""What carries something from token to token in other families, by the type of the model."""
_RECURRENT_WORDS = (
    *("Mamba", "SSM", "Recurrent", "DeltaNet", "Rwkv", "RWKV", "LinearAttention", "ShortConv", "LRU"),
    *("LSTM", "GRU", "RNN"),
)
_EXPERTS = re.compile(r"(^|_)(n|num)_(local_|routed_)?experts$")
_EXPERTS_IN_USE = ("is_moe", "enable_moe_block")  # where a config has such a switch
_STATE = (
    "state from token to token; in a pack it would leak from one example into the next. Of recurrent and convolutional "
    f"layers only {_SUPPORTED}, are supported."
)
_OTHER_INPUTS = ("vision", "audio", "image", "video", "speech")  # in a part's name, such as vision_config
_TEXT_CONFIGS = ("text_config", "decoder", "generator", "text_encoder")  # where transformers looks for it
_CHANCE = re.compile(r"drop|jitter|noise|stochastic", re.IGNORECASE)
_READ = re.compile(r"""(?:(?<=config\.)|(?<=["']))\w+""")  # what code reads of a config, as an attribute or by a name


def check_config(config: Any, path: str) -> None:
    """Refuse what the config alone shows. Raises ModelError."""
    where = f"{path} ({config.model_type})"
    if config.is_encoder_decoder:
        raise ModelError(f"{where} is an encoder-decoder; tuningfork trains decoder-only language models.")
    for part in vars(config):
        if _is_of_other_inputs(part) and getattr(config, part) is not None:
            raise ModelError(
                f"{where} has {'an' if part[0] in 'aeiou' else 'a'} {part}: models with inputs other than text are not "
                "supported. Export its language model as a text-only checkpoint and train that."
            )
    inner = _text_config(config)
    if inner is not config:
        if not isinstance(inner, PreTrainedConfig):
            part = next((name for name, value in vars(config).items() if value is inner), "text_config")
            raise ModelError(
                f"{where}: config.json sets {part}, which is no setting of this model's: transformers takes it for the "
                "settings of a language model within the model, and they are none. Remove it."
            )
        raise ModelError(
            f"{where} holds a language model ({inner.model_type}) as one of its parts, and the others are not "
            "supported. Export its language model as a text-only checkpoint and train that."
        )
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise ModelError(f"{where} says no vocab_size: it is not known to be a language model over one vocabulary.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{where} is no causal language model that transformers {transformers.__version__} knows.")
    if getattr(config, "is_causal", True) is False:
        raise ModelError(f"{where} has is_causal set to false: {AHEAD}")
    if config.model_type in _RECURRENT:
        raise ModelError(f"{where} has {_RECURRENT[config.model_type]}: they carry {_STATE}")
    known = {*_ATTENTION_LAYERS, _OUR_LAYERS.get(config.model_type)}
    other = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if other:
        raise ModelError(
            f"{where} has layers of type {', '.join(other)}. Only full and sliding-window attention, and {_SUPPORTED}, "
            "are known to keep neighbouring examples of a pack apart, so others are not supported."
        )
    if _has_experts(config.to_dict()):
        raise ModelError(f"{where} is a mixture of experts; only dense models are supported.")
    for scaling, group in _rope_by_length(config):
        if not _length_left_alone(config, group):
            raise ModelError(
                f"{where} uses rotary scaling of type {scaling!r}, which depends on the longest sequence of a batch, "
                "and config.json does not say up to which length it does not (original_max_position_embeddings)."
            )
    if config.model_type not in own.FAMILIES:
        _check_code(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], where)


def positions(config: Any) -> int | None:
    """Tokens of the longest sequence that a model can be trained on; None where there is no such limit.

    Rotary scaling by length leaves sequences up to some length alone. Of longer ones it makes all numbers of a batch
    depend on the longest, so that an example's would depend on its neighbours in the pack.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += [_length_left_alone(config, group) for _, group in _rope_by_length(config)]
    return min((limit for limit in limits if limit), default=None)


def _check_code(kind: Any, where: str) -> None:
    """Refuse a class whose layers do not go through transformers' attention interface, before it is built."""
    code = vars(sys.modules[kind.__module__])
    # private: transformers.ALL_ATTENTION_FUNCTIONS
    if "ALL_ATTENTION_FUNCTIONS" in code:  # modelling code that can be given another attention imports this table
        return
    if any(word in name for name in code for word in _RECURRENT_WORDS):
        raise ModelError(f"{where} has layers that carry {_STATE}")
    raise ModelError(
        f"{where} computes attention in code of its own ({kind.__name__}), which cannot be replaced by attention that "
        "keeps the examples of a pack apart. Not supported."
    )


def check_modules(model: PreTrainedModel, path: str) -> None:
    """Refuse what only the built model shows: weights in front of the head, recurrence, chance. Raises ModelError.

    What no setting changes comes first: nobody should set rates of dropout to 0 in vain.
    """
    _check_head(model, path)
    ours = {*gated_delta.layers(model), *short_conv.layers(model)}
    parts = {part for layer in ours for part in layer.children()}  # such as their convolution
    for name, module in model.named_modules():
        kind = type(module).__name__
        if module in parts or not ours.isdisjoint(module.modules()):  # such as the block of such a layer
            continue
        if isinstance(module, nn.Conv1d | nn.RNNBase) or any(word in kind for word in _RECURRENT_WORDS):
            raise ModelError(f"{path}: {name or 'the model'} ({kind}) carries {_STATE}")
    _check_chance(model, path)


def _check_head(model: PreTrainedModel, path: str) -> None:
    """Refuse a model that does more to its last hidden states than multiply them by the head."""
    kind = type(model).__name__
    head: Any = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None or model.base_model is model:
        raise ModelError(
            f"{path}: {kind} has no output head of its own that turns hidden states into logits; not supported."
        )
    known = {id(weight) for weight in (*model.base_model.parameters(), head.weight, getattr(head, "bias", None))}
    between = [name for name, weight in model.named_parameters() if id(weight) not in known]
    if between:
        raise ModelError(
            f"{path}: {kind} makes logits of its last hidden states by more than a linear output head ({between[0]} "
            "besides), as masked language models do. Only a linear head is supported."
        )


def _check_chance(model: PreTrainedModel, path: str) -> None:
    """Refuse rates of dropout and the like, all of the config at once, and what has one in its code alone."""
    why = "What is left to chance makes the policy differ from its own reference before the first step."
    if settings := _chance_in_config(model):
        found = ", ".join(f"{field} to {value}" for field, value in settings.items())
        raise ModelError(
            f"{path}: config.json sets {found}. {why} Set {'each of them' if len(settings) > 1 else 'it'} to 0."
        )
    for name, module in model.named_modules():
        for what, value in _left_to_chance(module):
            raise ModelError(
                f"{path}: {name or 'the model'} ({type(module).__name__}) has {what} {value}, which no setting of "
                f"config.json turns off. {why} Not supported."
            )


def _is_of_other_inputs(part: str) -> bool:
    """Whether the part of a config with this name is a model's of something else than text."""
    name = part.removesuffix("_config")
    return name != part and any(word in name for word in _OTHER_INPUTS)


def _text_config(config: Any) -> Any:
    """The part of a config that is the language model's: itself, unless it is composed of several."""
    try:
        return config.get_text_config()
    except ValueError:  # there are several
        named = [value for name, value in vars(config).items() if name in _TEXT_CONFIGS and value is not None]
        return next((value for value in named if isinstance(value, PreTrainedConfig)), named[0])


def _has_experts(config: dict[str, Any]) -> bool:
    """Whether a config, or a config inside it, sets a number of experts, and does not say that it uses none."""
    if any(config.get(switch) is False for switch in _EXPERTS_IN_USE):
        return False
    return any(
        _has_experts(value) if isinstance(value, dict) else bool(value) and _EXPERTS.search(key) is not None
        for key, value in config.items()
        if isinstance(key, str)
    )


def _rope_by_length(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rotary settings that scale by the length of sequences, by type: one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for group in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = _rope_type(group)
        if kind in ("dynamic", "longrope"):
            yield kind, group


def _rope_type(group: dict[str, Any]) -> str | None:
    """By its name in either version of a config."""
    return group.get("rope_type", group.get("type"))


def _length_left_alone(config: Any, group: dict[str, Any]) -> int | None:
    original = group.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if _rope_type(group) == "longrope":
        return original
    return original or getattr(config, "max_position_embeddings", None)


def _left_to_chance(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module itself does by chance in training, with its rate: as a layer, or as a number that its code uses."""
    if isinstance(module, _DropoutNd) and module.p > 0:
        yield "dropout", module.p
    if isinstance(module, nn.RReLU) and module.lower != module.upper:
        yield "slopes drawn up to", module.upper
    for name, value in vars(module).items():
        if _CHANCE.search(name) and _is_rate(value):
            yield "dropout" if "dropout" in name else name, value


def _chance_in_config(model: PreTrainedModel) -> dict[str, Any]:
    """Rates above 0 that the config sets and code of this model reads.

    Configs also set rates of parts that a language model has not, such as a classifier's; no class of it reads those.
    """
    config = model.config
    kinds = {class_of(module) for module in model.modules()}
    ours = (kind for kind in kinds if not kind.__module__.startswith("torch."))
    read = frozenset().union(*map(_names_read, ours))  # type: ignore[arg-type]  # classes are hashable
    spellings: dict[str, set[str]] = {}
    for alias, field in config.attribute_map.items():  # private: transformers.attribute_map
        spellings.setdefault(field, set()).add(alias)
    return {
        field: value
        for field, value in config.to_dict().items()
        if _CHANCE.search(field) and _is_rate(value) and not read.isdisjoint({field, *spellings.get(field, ())})
    }


@cache
def _names_read(kind: type) -> frozenset[str]:
    """Fields that a class's code may read of the config."""
    return frozenset(_READ.findall(inspect.getsource(kind)))  # private: transformers by inspect.getsource


def _is_rate(value: Any) -> bool:
    """Whether it is a number above 0, or a list with one, such as a rate for each layer."""
    return any(
        type(rate) in (int, float) and rate > 0 for rate in (value if isinstance(value, list | tuple) else [value])
    )
