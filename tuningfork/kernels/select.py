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
    logits_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, LogitTransform, Tensor], Tensor]
    names: dict[str, str]


def select(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """Choose kernels for a device, a compute dtype and the widest attention head: Triton on a GPU, plain elsewhere.

    One choice serves all layers, also where they differ in the width of their heads.

    Raises:
        ModelError: heads are wider than the GPU's kernel takes.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return plain()
    from tuningfork.kernels.attention.fork import WIDEST_HEAD, ForkAttention
    from tuningfork.kernels.row_logps import fast

    if head_dim > WIDEST_HEAD:
        raise ModelError(
            f"Attention on a GPU takes heads up to {WIDEST_HEAD} wide, these have {head_dim}. Use train.device: cpu."
        )
    names = {"attention": "fork", "row_logps": "triton"}
    return Kernels(ForkAttention, fast.row_logps, fast.logits_gradient, names)


def plain() -> Kernels:
    """The plain kernels: what every fast one is tested against."""
    names = {"attention": "plain", "row_logps": "plain"}
    return Kernels(PlainAttention, plain_rows.row_logps, plain_rows.logits_gradient, names)
