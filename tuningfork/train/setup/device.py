"""Where and in which numbers a run computes: device, dtype, compiler, and the one process that it is."""

from __future__ import annotations

import os

import torch

from tuningfork.errors import ConfigError
from tuningfork.models.config import ModelConfig

# Variable that holds the number of processes -> who sets it. SLURM_NTASKS is not among them: it is what was asked for,
# also where a batch script then starts one process.
LAUNCHERS = {
    "WORLD_SIZE": "torchrun, accelerate or deepspeed",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def check_one_process() -> None:
    """Refuse to be one process of several: each would do all of the work, in the same folders. Raises ConfigError."""
    for name, launcher in LAUNCHERS.items():
        started = os.environ.get(name, "").strip()
        if started.isdecimal() and int(started) > 1:
            raise ConfigError(
                f"{name} is {started}: {launcher} has started several processes, and each would do the whole of the "
                "work. tuningfork trains in one process, on one GPU: give the command without a launcher."
            )


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises ConfigError where cuda is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda, but PyTorch sees no GPU. Use --train.device cpu, or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


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
