"""Products of matrices on a GPU whose sums over inputs are not cut into parts.

Where a product has too few outputs to fill a card, cuBLAS may have several programs add up parts of each sum (split-K).
Whether it does so depends on the number of rows, and a row would have other bits in a pack of another size: of 174
shapes of layers in bfloat16, on an H200 in packs of 1,024 to 16,384 rows, 41 had, all of at most 96 outputs; without
split-K none. Backward passes keep it, whose sums over rows it makes several times as fast: a gradient is added up over
a pack, and has no bits of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_workspace: bool | None = None  # whether products of this process have one; None: there has been no run yet


def without_split_k(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Around forward passes whose products are in a dtype of 16 bits: on a GPU none of them is cut."""
    return _whole_sums() if _has_switch(device, dtype) else nullcontext()


def running_without_split_k(run: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """A block's forward function, which a backward pass may call to compute the block again."""
    return _whole_sums()(run) if _has_switch(device, dtype) else run


def choose_library(device: torch.device, dtype: torch.dtype, exact: bool) -> None:
    """Before a run's first product: which interface of cuBLAS has its products, and whether with a workspace.

    cuBLASLt has the switch, for 16 bits. Float32 has none: there only products without a workspace cannot be cut, which
    for TF32 takes twice the time, and for true float32 up to a tenth more in forward passes. PyTorch asks for the
    workspace once in a process, so the first run decides, and behind another kind of run step 0 may refuse one.

    Args:
        exact: log-probs of packs of several sizes are compared to the bit.
    """
    global _workspace
    if device.type != "cuda":
        return
    if _workspace is None:
        if exact and dtype.itemsize > 2:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
            os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")  # of products with biases
        _workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":0:0"
    _prefer("cublaslt" if _has_switch(device, dtype) else "cublas")


def _has_switch(device: torch.device, dtype: torch.dtype) -> bool:
    """cuBLASLt does not work without a workspace, and nothing is cut there."""
    return device.type == "cuda" and dtype.itemsize == 2 and _workspace is not False


@contextmanager
def _whole_sums() -> Iterator[None]:
    """Of cuBLAS' interfaces cuBLASLt alone has the switch, so it is preferred meanwhile."""
    global _workspace
    _workspace = True
    matmul = torch.backends.cuda.matmul
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in names}
    library = _preferred()
    _prefer("cublaslt")
    for name in names:
        setattr(matmul, name, (False, False))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
        _prefer(library)


def _prefer(library: str) -> None:
    """PyTorch warns where that changes to cuBLASLt, once in a process: see __main__.py."""
    if _preferred() != library:
        torch.backends.cuda.preferred_blas_library(library)


def _preferred() -> str:
    """By the name that it is set by: of `_BlasBackend.Cublaslt`, cublaslt."""
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
