"""When two configs are those of one model."""

from __future__ import annotations

from typing import Any

_NUMBERS_DO_NOT_DEPEND_ON = (
    # private: transformers._name_or_path
    *("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache"),
    *("auto_map", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("output_attentions", "output_hidden_states", "return_dict"),
)


def comparable(config: Any) -> dict[str, Any]:
    """What of a config decides a model's numbers: all but names, versions, special ids and the stored dtype."""
    values = config.to_dict()
    for key in _NUMBERS_DO_NOT_DEPEND_ON:
        values.pop(key, None)
    if "partial_rotary_factor" in (values.get("rope_parameters") or {}):
        values.pop("partial_rotary_factor", None)  # some versions give StableLM's a default that nobody reads
    return values
