"""Model shapes by name, with random weights, and the yardstick's pairs for a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from bench import nothing, workload, workload_long
from tuningfork.models.hf import attention
from tuningfork.records import Source, TokenAnswer, TokenExample

# The fixed workloads: prompts of about 120 tokens, at most 2,048 a sequence; of about 6,000, at most 12,288.
WORKLOADS: dict[str, Any] = {"short": workload, "long": workload_long}

_OLMO2 = {"max_position_embeddings": 4096, "rope_theta": 500000, "tie_word_embeddings": False}


def _hybrid(heads: int) -> dict[str, Any]:
    """Settings of OLMo Hybrid with so many heads in a block with a state."""
    return {
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": None},
        "tie_word_embeddings": False,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
    }


# name -> (config class, hidden size, inner size of the MLP, layers, heads, key heads, vocabulary, the rest)
SHAPES: dict[str, tuple[Any, int, int, int, int, int, int, dict[str, Any]]] = {
    "olmo2_1b": (transformers.Olmo2Config, 2048, 8192, 16, 16, 16, 100352, _OLMO2),
    "olmo2_7b": (transformers.Olmo2Config, 4096, 11008, 32, 32, 32, 100352, _OLMO2),
    "qwen3_1_7b": (
        transformers.Qwen3Config,
        *(2048, 6144, 28, 16, 8, 151936),
        {"head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "tie_word_embeddings": True},
    ),
    "smollm2_135m": (
        transformers.LlamaConfig,
        *(576, 1536, 30, 9, 3, 49152),
        {"max_position_embeddings": 8192, "rope_theta": 100000, "tie_word_embeddings": True},
    ),
    # Three of four blocks with a state; heads of them as wide as published.
    "olmo_hybrid_1b": (transformers.OlmoHybridConfig, 2048, 8192, 16, 16, 16, 100352, _hybrid(16)),
    "olmo_hybrid_7b": (transformers.OlmoHybridConfig, 3840, 11008, 32, 30, 30, 100352, _hybrid(30)),
    "tiny_hybrid": (transformers.OlmoHybridConfig, 64, 128, 4, 4, 4, 512, _hybrid(2)),
    "tiny": (transformers.Olmo2Config, 64, 128, 2, 4, 4, 512, _OLMO2),
}


def config(name: str, layers: int | None = None) -> Any:
    """The transformers config of a named shape, or of so many of its first blocks; or of a recipe's model from nothing
    (nothing.py), by the recipe's name."""
    if name in nothing.RECIPES:
        return nothing.config(name, layers)
    kind, hidden, inner, all_layers, heads, key_heads, vocabulary, rest = SHAPES[name]
    layers = all_layers if layers is None else layers
    return kind(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        pad_token_id=0,
        eos_token_id=1,
        **rest,
    )


def build(
    name: str, device: torch.device | str, seed: int = 0, positions: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """A model of a named shape with random float32 weights and our attention under it, in training mode.

    Args:
        layers: how many of its first blocks it has, if not all.
        positions: that it knows at least; of random weights it is as good for many as for few.
    """
    torch.manual_seed(seed)
    settings = config(name, layers)
    settings.max_position_embeddings = max(settings.max_position_embeddings, positions)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            settings, attn_implementation=attention.NAME, dtype=torch.float32, trust_remote_code=False
        )
    return model.train()


def yardstick(count: int, vocabulary: int | None = None, length: str = "short") -> list[TokenExample]:
    """The first pairs of a fixed workload (WORKLOADS); where a vocabulary is smaller than its ids, ids modulo it."""
    return [_example(row, pair, vocabulary) for row, pair in enumerate(WORKLOADS[length].pairs(count), start=1)]


def random_pairs(lengths: list[tuple[int, int, int]], vocabulary: int, seed: int = 0) -> list[TokenExample]:
    """Pairs of random ids with (prompt, chosen, rejected) lengths."""
    rng = np.random.default_rng(seed)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    drawn = ({name: rng.integers(0, vocabulary, n) for name, n in zip(names, ns, strict=True)} for ns in lengths)
    return [_example(row, pair, vocabulary) for row, pair in enumerate(drawn, start=1)]


def _example(row: int, pair: Mapping[str, Any], vocabulary: int | None) -> TokenExample:
    prompt, *answers = (
        np.asarray(pair[name]) % (vocabulary or 2**31) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
    )
    return TokenExample(
        Source("workload", row),
        prompt.astype(np.int32),
        tuple(TokenAnswer(ids.astype(np.int32), np.ones(len(ids), dtype=bool)) for ids in answers),
    )
