"""Row log-probs in plain PyTorch: any float dtype, any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tuningfork.kernels.logits import transformed
from tuningfork.records import LogitTransform


def row_logps(logits: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor]:
    """Log-prob of each row's target, and each row's log-sum-exp in two parts.

    Args:
        logits: [R, V], any float dtype; read, not changed.
        targets: int64 [R].
        transform: what the model does to its raw logits.

    Returns:
        `(logps, lse)`: [R] and [R, 2], float32 (float64 where the logits are). The log-sum-exp is the row's maximum and
        the rest, kept apart: their sum would cancel the digits that a common offset of the logits takes up.
    """
    z = _transform(logits, transform)
    top = z.amax(dim=-1)
    rest = torch.exp(z - top[:, None]).sum(dim=-1).log()
    return (z.gather(1, targets[:, None])[:, 0] - top) - rest, torch.stack([top, rest], dim=1)


def logits_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, grad_logps: Tensor, transform: LogitTransform, out: Tensor
) -> Tensor:
    """Write the gradient of ``sum(grad_logps * logps)`` by the logits to `out`, and return that.

    d logp / d z = onehot(target) - softmax(z), times the derivative of the logit transform.

    Args:
        targets: int64 [R]; -1 for one that is not among the logits, of which the log-sum-exp is not theirs alone.
        out: [R, V], any float dtype, to which the gradient is rounded. It may be the logits themselves.
    """
    z = _transform(logits, transform)
    gradient = -torch.exp((z - lse[:, :1]) - lse[:, 1:])
    there = (targets >= 0)[:, None].to(gradient.dtype)
    gradient.scatter_add_(1, targets.clamp(min=0)[:, None], there)
    gradient *= grad_logps[:, None] * transform.scale
    if transform.softcap is not None:
        gradient *= 1 - (z / transform.softcap) ** 2
    return out.copy_(gradient)


def _transform(logits: Tensor, transform: LogitTransform) -> Tensor:
    return transformed(logits if logits.dtype == torch.float64 else logits.float(), transform)
