"""Settings of the model room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class ModelConfig:
    """Which model is trained, and in which precision it computes."""

    path: str = ""
    """A Hugging Face model folder: config.json, safetensors weights, tokenizer."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision; weights and optimizer are always float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile, one decoder block at a time. auto: on for a GPU."""
