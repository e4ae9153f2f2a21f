"""Where and in which numbers a run computes: device, dtype, compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

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


def check_tf32(model: ModelConfig, device: torch.device) -> None:
    """Raises ConfigError where `model.tf32` would do nothing: on a CPU, and on a GPU from before it."""
    if not model.tf32:
        return
    if device.type != "cuda":
        raise ConfigError("model.tf32 is true, but this runs on a CPU, which has no TF32. Remove it.")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise ConfigError(f"model.tf32 is true, but {device_name(device)} has no TF32. Remove it.")


def set_tf32(on: bool) -> None:
    """Have PyTorch's products of float32 matrices on a GPU round their factors to TF32, or not: those of this process,
    of all its threads, from here on.

    By the function that sets what each library's own switch (`torch.backends.cuda.matmul.fp32_precision`) says, too:
    where that alone is set, PyTorch 2.11 to 2.13 raise an error wherever the older one is read, as its compiler does.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")


def real_float32() -> AbstractContextManager[None]:
    """Around what is checked: products without TF32, whatever they are outside."""
    return tf32_products(False)


@contextmanager
def tf32_products(on: bool) -> Iterator[None]:
    """`set_tf32` for a while."""
    before = torch.get_float32_matmul_precision()
    set_tf32(on)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
