"""How far a kernel's numbers may lie from the plain one's.

A number is measured against the plain kernels' in float32. What may lie between is known from the plain kernels as they
round in the run's own dtype: as often as the fast ones, though not at the same places, so the errors of the two are of
one size, and one that is several times the other is no rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode  # private: torch.utils._python_dispatch

from tuningfork.errors import ModelError
from tuningfork.train.checks.head_check import NOTHING_IS_TRAINED

# The plain kernels' own error, taken over all rows at once: there two errors of a kind are closer than that.
_TIMES = 3.0

FLOOR = 1e-4
"""Of a quantity's size: a thousand roundings of float32, for where the plain kernels are the measure itself."""


def check_rounding(what: str, quantity: str, found: Tensor, usual: Tensor, exact: Tensor, floor: float = 0.0) -> None:
    """Raises ModelError where one is further from the exact than rounding takes it; `floor` is added to what may be."""
    size, error, rounding = (float(t.double().norm()) for t in (exact, found - exact, usual - exact))
    if math.isfinite(rounding) and error <= _TIMES * rounding + FLOOR * size + floor:  # not so for NaN
        return
    size = size or 1.0
    raise wrong(
        f"{what}: {quantity} are {error / size:.1e} of their size away from those of plain kernels in float32; plain "
        f"kernels in the run's dtype are {rounding / size:.1e} away."
    )


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Matrix products, gradients' too, take operands rounded to a dtype, and add up as exactly as these were before.

    So a matrix unit has them; a plain kernel in the dtype itself mostly computes in float32 and rounds its results.
    """
    with sdpa_kernel(SDPBackend.MATH), _RoundedProducts(dtype):  # the fused forms of attention are no products
        yield


class _RoundedProducts(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            args = [*args[:-2], *(t.to(self._dtype).to(t.dtype) for t in args[-2:])]
        return func(*args, **(kwargs or {}))


_PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv")]


def relative(found: Tensor, exact: Tensor) -> float:
    """How far one lies from the exact, as a part of its size."""
    return float((found - exact).double().norm()) / (float(exact.double().norm()) or 1.0)


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers as a dtype has them, float32 again; those beyond its range stay."""
    narrow = t.to(dtype).float()
    return torch.where(narrow.isfinite(), narrow, t)


def farther(exact: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Of two, the one that lies farther from the exact: each is how plain kernels may round."""
    return max(one, other, key=lambda t: float((t - exact).double().norm()))


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
