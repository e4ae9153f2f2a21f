"""An optimizer's step on this process's shards.

What AdamW does to a weight it does number by number, so no process needs to know of another's. The step is that of
plain tensors, at their speed, and with optimizers that cannot take spread ones.

Between steps weights, gradients and moments are DTensors, as checkpoints want them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tuningfork.distributed.tensor import like


@contextmanager
def own_shards(optimizer: Optimizer) -> Iterator[None]:
    """Within it, an optimizer has this process's shards of weights and moments, and their gradients. Moments that it
    makes there are spread like their weights behind it."""
    spread = [weight for group in optimizer.param_groups for weight in group["params"] if isinstance(weight, DTensor)]
    if not spread:
        yield
        return
    # What there is of each weight is made once, and found again at the next step.
    known: dict[DTensor, _Own] = vars(optimizer).setdefault("own_shards", {})
    owns = {weight: _Own.of(weight, known.get(weight), optimizer.state.pop(weight, {})) for weight in spread}
    groups = [group["params"] for group in optimizer.param_groups]
    for group, weights in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [owns[weight].shard if weight in owns else weight for weight in weights]
    for own in owns.values():
        if own.moments:
            optimizer.state[own.shard] = {name: moment for name, (_, moment) in own.moments.items()}
    try:
        yield
    finally:
        for group, weights in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = weights
        for weight, own in owns.items():
            own.shard.grad = None
            if state := own.take(weight, optimizer.state.pop(own.shard, {})):
                optimizer.state[weight] = state
        known.update(owns)


@dataclass(slots=True)
class _Own:
    """What this process has of a weight: its shard, in the weight's memory, and by name the moments, each as it is
    spread and as it is here. The first are views of the second, which torchao's compiled step does not take of 8-bit
    ones."""

    shard: Tensor
    moments: dict[str, tuple[Any, Any]]

    @classmethod
    def of(cls, weight: DTensor, before: _Own | None, state: dict[str, Any]) -> _Own:
        """`state`: the moments as they are spread, some of which may be others than `before`."""
        there = _local(weight)
        shard = None if before is None or before.shard.data_ptr() != there.data_ptr() else before.shard
        shard = there.detach().requires_grad_() if shard is None else shard
        if weight.grad is not None:
            gradient: Any = weight.grad
            if gradient.placements != weight.placements:
                gradient = gradient.redistribute(weight.device_mesh, weight.placements)
            shard.grad_dtype = gradient.dtype
            shard.grad = _local(gradient)
        moments = {} if before is None else before.moments
        return cls(shard, {
            name: moments[name] if name in moments and moments[name][0] is value else (value, _unviewed(value))
            for name, value in state.items()
        })  # fmt: skip

    def take(self, weight: DTensor, state: dict[str, Any]) -> dict[str, Any]:
        """The moments as they are spread, after a step that left these here."""
        self.moments = {
            name: self.moments[name]
            if name in self.moments and self.moments[name][1] is value
            # What is one number, such as the count of steps, is the same everywhere.
            else (like(weight, value) if isinstance(value, Tensor) and value.ndim else value, value)
            for name, value in state.items()
        }
        return {name: spread for name, (spread, _) in self.moments.items()}


def make_moments(optimizer: Optimizer) -> None:
    """The moments of an optimizer that has not moved anything, all 0, and no step counted."""
    if optimizer.state:
        return
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    _set_rates(optimizer, [0.0] * len(rates))
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with own_shards(optimizer):
        optimizer.step()
    for of_weight in optimizer.state.values():
        of_weight["step"].zero_()
    optimizer.zero_grad(set_to_none=True)
    _set_rates(optimizer, rates)


def _set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


@torch.no_grad()  # with gradients it would be a view
def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _unviewed(value: Any) -> Any:
    """The shard of a moment that was read from a checkpoint."""
    own = _local(value)
    # private: torch.Tensor.__tensor_flatten__
    if not hasattr(own, "__tensor_flatten__"):
        return own
    parts, rest = own.__tensor_flatten__()  # for torchao's moments in 8 bits cannot be cloned
    copies = {part: getattr(own, part).clone() for part in parts}
    return type(own).__tensor_unflatten__(copies, rest, own.shape, own.stride())
