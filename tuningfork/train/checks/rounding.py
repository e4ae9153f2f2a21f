"""How far a kernel's numbers may lie from the plain one's.

A number is measured against the plain kernels' in float32. What may lie between is known from the plain kernels in the
run's own dtype: they round as often as the fast ones, though not at the same places, so the errors of the two are of
one size, and one that is several times the other is no rounding.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from tuningfork.errors import ModelError
from tuningfork.train.checks.head_check import NOTHING_IS_TRAINED

# The plain kernels' own error, taken over all rows at once: there two errors of a kind are closer than that.
_TIMES = 3.0

FLOOR = 1e-4
"""Of a quantity's size: a thousand roundings of float32, for where the plain kernels are the measure itself."""


def check_rounding(what: str, quantity: str, found: Tensor, usual: Tensor, exact: Tensor, floor: float = 0.0) -> None:
    """Raises ModelError where one is further from the exact than rounding takes it; `floor` is added to what may be."""
    size, error, rounding = (float(t.double().norm()) for t in (exact, found - exact, usual - exact))
    if error <= _TIMES * rounding + FLOOR * size + floor:  # not so for NaN
        return
    size = size or 1.0
    raise wrong(
        f"{what}: {quantity} are {error / size:.1e} of their size away from those of plain kernels in float32; plain "
        f"kernels in the run's dtype are {rounding / size:.1e} away."
    )


def wrong(found: str) -> ModelError:
    """The error that says what was found, a sentence, and what to do about it."""
    return ModelError(
        f"{found} {NOTHING_IS_TRAINED} Set model.compile to off, if blocks are compiled; or use train.device cpu, or "
        f"other versions (here: {_here()})."
    )


def _here() -> str:
    """The card, and the versions of what makes its kernels."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = [card, f"PyTorch {torch.__version__}"]
    with suppress(PackageNotFoundError):
        found.append(f"Triton {version('triton')}")
    return ", ".join(found)


def noise(like: Tensor, seed: int) -> Tensor:
    """Normal numbers of a tensor's shape, the same whenever asked, and from no generator that the run uses."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)
