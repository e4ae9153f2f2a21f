"""The only place that chooses a kernel: once per run, written to the log, never silently changed later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tuningfork.errors import ModelError
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.records import LogitTransform


@dataclass(frozen=True)
class Kernels:
    """The kernels of a run, and a name for each that goes into the log and the reference's fingerprint."""

    attention: type
    row_logps: Callable[[Tensor, Tensor, LogitTransform], tuple[Tensor, Tensor]]
    logits_gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, LogitTransform], Tensor]
    names: dict[str, str]


def select(device: torch.device, dtype: torch.dtype, *, softcap: bool, head_dim: int) -> Kernels:
    """Choose kernels for a device, a compute dtype and what the model's attention needs.

    On a GPU, flash attention serves 16-bit dtypes with heads up to 256 wide; FlexAttention serves soft-capping and
    float32. Everything else is plain PyTorch.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return plain()
    from tuningfork.kernels.attention.flex import FlexAttention
    from tuningfork.kernels.attention.varlen import VarlenAttention
    from tuningfork.kernels.row_logps import fast

    flash = dtype in (torch.bfloat16, torch.float16) and not softcap and head_dim % 8 == 0 and head_dim <= 256
    if not flash and head_dim < 16:
        raise ModelError(f"FlexAttention needs heads of size 16 or more, these have {head_dim}. Use train.device: cpu.")
    attention: type = VarlenAttention if flash else FlexAttention
    names = {"attention": "varlen" if flash else "flex", "row_logps": "triton"}
    return Kernels(attention, fast.row_logps, fast.logits_gradient_, names)


def plain() -> Kernels:
    """The plain kernels: what every fast one is tested against."""
    names = {"attention": "plain", "row_logps": "plain"}
    return Kernels(PlainAttention, plain_rows.row_logps, plain_rows.logits_gradient_, names)
