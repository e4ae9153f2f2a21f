"""An optimizer's step on this process's shards.

What AdamW does to a weight it does number by number, so no process needs to know of another's. The step is that of
plain tensors, at their speed, and with optimizers that cannot take spread ones.

Between steps weights, gradients and moments are DTensors, as checkpoints want them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@contextmanager
def own_shards(optimizer: Optimizer) -> Iterator[None]:
    """Within it, an optimizer has this process's shards of weights and moments, and their gradients. Moments that it
    makes there are spread like their weights behind it."""
    spread = [weight for group in optimizer.param_groups for weight in group["params"] if isinstance(weight, DTensor)]
    if not spread:
        yield
        return
    groups = [group["params"] for group in optimizer.param_groups]
    own = {weight: _own(weight) for weight in spread}
    for group, weights in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [own.get(weight, weight) for weight in weights]
    # The moments as the optimizer made them, by those that checkpoints see: these are views, which torchao's compiled
    # step does not take of 8-bit ones.
    made: dict[int, tuple[Any, Any]] = vars(optimizer).setdefault("own_moments", {})
    before = {weight: optimizer.state.pop(weight, {}) for weight in spread}
    for weight, state in before.items():
        if state:
            optimizer.state[own[weight]] = {name: _whole(value, made) for name, value in state.items()}
    made.clear()
    try:
        yield
    finally:
        for group, weights in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = weights
        for weight in spread:
            state = optimizer.state.pop(own[weight], {})
            if state:
                optimizer.state[weight] = {name: _as(weight, value) for name, value in state.items()}
                made |= {
                    id(shown): (shown, value)
                    for shown, value in zip(optimizer.state[weight].values(), state.values(), strict=True)
                }


def make_moments(optimizer: Optimizer) -> None:
    """The moments of an optimizer that has not moved anything, all 0, for what a checkpoint holds to be read into."""
    if optimizer.state:
        return
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    _set_rates(optimizer, [0.0] * len(rates))
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with own_shards(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    _set_rates(optimizer, rates)


def _set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


def _own(weight: DTensor) -> Tensor:
    """This process's shard of a weight, in the same memory, with its gradient."""
    own: Tensor = _local(weight.detach()).requires_grad_()
    if weight.grad is not None:
        own.grad_dtype = weight.grad.dtype
        gradient: Any = weight.grad
        if gradient.placements != weight.placements:
            gradient = gradient.redistribute(weight.device_mesh, weight.placements)
        own.grad = _local(gradient)
    return own


def _whole(value: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    """A moment's own shard, and no view of it."""
    shown, own = made.get(id(value), (None, None))
    if shown is value:
        return own
    own = _local(value)  # read from a checkpoint
    # private: torch.Tensor.__tensor_flatten__
    return own if type(own) is not DTensor and not hasattr(own, "__tensor_flatten__") else own.clone()


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _as(weight: DTensor, value: Any) -> Any:
    """A moment spread as its weight is; what is one number, such as the count of steps, is the same everywhere."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return DTensor.from_local(
        value, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
