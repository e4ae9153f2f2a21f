"""Element by element on a CPU: the same bits wherever in a tensor an element lies.

PyTorch deals a tensor out to threads in pieces of ⌈elements / pieces⌉, and computes what of a piece fills no vector
register by another function than the rest: by the library's `exp`, not the vectorised one, which differ in the last
bit. So with three threads, or where a tensor is three of the smallest pieces long, a row's bits depend on where it is.
Here a tensor goes in slabs whose pieces are whole numbers of vector registers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # private: torch.utils._python_dispatch

PIECE = 16384
"""Elements that no function deals out to threads; a multiple of any vector register. Of twice as many each thread of
several gets some (at::internal::GRAIN_SIZE)."""

_NAMES = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid", "silu", "tanh", "sin", "cos", "erf"),
    *("gelu", "softplus", "mish", "elu", "pow", "logaddexp"),
)
_IN_PLACE = {getattr(torch.ops.aten, f"{name}_") for name in _NAMES if hasattr(torch.ops.aten, f"{name}_")}
_OPS = _IN_PLACE | {getattr(torch.ops.aten, name) for name in _NAMES}


def evenly(device: torch.device, compiled: bool) -> AbstractContextManager[Any]:
    """Within it, functions of single elements have the same bits wherever one lies: on a CPU by the mode below; on a
    GPU, and where a compiler has made the loops, they do anyway."""
    return _Evenly() if device.type == "cpu" and not compiled else nullcontext()


class _Evenly(TorchDispatchMode):
    """Computes functions of single elements slab by slab. Tensors that do not lie side by side, or that are stretched
    to another's shape, are left as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in _OPS or not _is_large(args[0]):
            return func(*args, **kwargs)
        first = args[0]
        tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim]
        if not all(tensor.shape == first.shape and tensor.is_contiguous() for tensor in tensors):
            return func(*args, **kwargs)
        flat = [arg.view(-1) if isinstance(arg, Tensor) and arg.ndim else arg for arg in args]
        parts = []
        for begin, end in _slabs(first.numel(), torch.get_num_threads() * 2 * PIECE):
            own = [arg[begin:end] if isinstance(arg, Tensor) and arg.ndim else arg for arg in flat]
            parts.append(func(*own, **kwargs))
        return first if func.overloadpacket in _IN_PLACE else torch.cat(parts).view(first.shape)


def _is_large(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > PIECE


def _slabs(elements: int, slab: int) -> list[tuple[int, int]]:
    """Whole slabs, which all threads share, then pieces and the rest, which one gets."""
    whole = elements // slab * slab
    bounds = sorted({*range(0, whole + 1, slab), *range(whole, elements, PIECE), elements})
    return list(pairwise(bounds))
