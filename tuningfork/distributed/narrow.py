"""Matrices that are gathered in the dtype of the products that they go into: half the bytes of float32.

A linear layer rounds its weight to that dtype anyway, so its results keep their bits. Gradients stay float32 until they
are added up, and the weights that an optimizer moves are float32, too. What is no matrix of a linear layer is gathered
as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def narrows(block: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all matrices of a block can be gathered in `dtype`: they are wider, and those of linear layers."""
    matrices = {weight for weight in block.parameters() if is_matrix(weight)}
    linear = {module.weight for module in block.modules() if isinstance(module, nn.Linear)}
    return bool(matrices) and matrices <= linear and all(w.dtype.itemsize > dtype.itemsize for w in matrices)


def is_matrix(weight: Tensor) -> bool:
    """What is spread over processes: a matrix, or several in one. Norms, biases and filters of depthwise convolutions
    [C, 1, W] are small, and stay whole."""
    return weight.ndim > 1 and not (weight.ndim == 3 and weight.shape[1] == 1)


def keep_gradients_wide(block: nn.Module, *_: Any) -> None:
    """Before a pass through a gathered block: gradients of what is gathered in fewer bits are float32."""
    for weight in block.parameters():
        if weight.requires_grad and weight.dtype.itemsize < 4 and weight.grad_dtype != torch.float32:
            weight.grad_dtype = torch.float32


@contextmanager
def widened(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Around passes of blocks in more bits than their weights are gathered in, backward passes too, since these may
    compute anew: a linear layer widens its own weight. Not for compiled blocks."""
    layers = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward  # type: ignore[method-assign]


def _linear(layer: nn.Linear, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, _Wide.apply(layer.weight, rows.dtype), layer.bias)


class _Wide(torch.autograd.Function):
    """A cast whose gradient is not cast back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None
