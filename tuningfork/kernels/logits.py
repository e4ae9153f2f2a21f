"""What models do to their raw logits, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tuningfork.records import LogitTransform


def transformed(logits: Tensor, transform: LogitTransform) -> Tensor:
    """Logits as the model means them, from its raw ones of any shape, in their dtype."""
    z = logits if transform.scale == 1.0 else logits * transform.scale
    return z if transform.softcap is None else transform.softcap * (z / transform.softcap).tanh()
