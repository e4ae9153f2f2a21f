"""Where and in which numbers a run computes: device, dtype, compiler."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tuningfork.errors import ConfigError
from tuningfork.models.config import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ConfigError where cuda is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda, but PyTorch sees no GPU. Use --train.device cpu, or auto.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if dist.is_initialized() else torch.device("cuda")


def choose_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and for bfloat16 weights, else float32."""
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    return torch.bfloat16 if device.type == "cuda" or model.weights == "bfloat16" else torch.float32


def choose_compile(name: str, device: torch.device) -> bool:
    """`auto` compiles on a GPU."""
    return name == "on" or (name == "auto" and device.type == "cuda")


def dtype_name(dtype: torch.dtype) -> str:
    """As a recipe spells it."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's instruction set: what decides the bits of a matrix product."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
