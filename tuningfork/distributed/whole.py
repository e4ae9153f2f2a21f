"""Weights that every process has whole, and how their gradients are added up, once a step.

Norms and biases always are, so that they are what they are on one device. Where each copy of the model is on one
process, all weights are: nothing has to be gathered, and nothing is copied on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tuningfork.distributed.narrow import is_matrix
from tuningfork.distributed.sums import Group
from tuningfork.distributed.tensor import like, local


class _Travel(NamedTuple):
    """A gradient that is being added up: `sum` is it, or what it is copied from in the end."""

    gradient: Tensor
    sum: Tensor
    work: Any


class WholeWeights:
    """Weights that are whole on every process. A matrix's gradient travels as soon as the last backward pass of a step
    has made it, beside the rest of that pass; those of norms and biases go together, behind it.

    Args:
        over: the groups of processes with examples of their own; matrices may be among the weights where there is one
            at most.
        tensor: the processes that compute each product together.
        partly: weights that get a part of their gradient on each of these.
        reduce_dtype: in what matrices' gradients are added up. The others are, in their own.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        over: Sequence[dist.ProcessGroup],
        tensor: Group,
        partly: Iterable[Tensor],
        reduce_dtype: torch.dtype,
    ) -> None:
        self._weights = [*weights]
        self._over = over
        self._tensor = tensor
        self._partly = {*partly}
        self._reduce_dtype = reduce_dtype
        self._last = False
        self._hooked: set[Tensor] = set()
        self._travels: dict[Tensor, _Travel] = {}

    def begin(self, last: bool) -> None:
        """Before a pack's forward pass; `last` of a step. Every process's backward pass makes gradients in one order,
        for all have the same model."""
        self._last = last and bool(self._over)
        if self._last and not self._hooked:  # not before: reading weights may put others in their places
            self._hooked = {weight for weight in self._weights if is_matrix(weight) and weight.requires_grad}
            for weight in self._hooked:
                weight.register_post_accumulate_grad_hook(self._depart)

    def _depart(self, weight: Tensor) -> None:
        if self._last and weight.grad is not None:
            gradient = local(weight.grad)
            total = gradient.to(self._reduce_dtype)
            self._travels[weight] = _Travel(gradient, total, dist.all_reduce(total, group=self._over[0], async_op=True))

    def arrive(self) -> None:
        """Behind the last backward pass: wait for what travels."""
        travels, self._travels = self._travels, {}
        self._last = False
        for travel in travels.values():
            travel.work.wait()
            if travel.sum is not travel.gradient:
                travel.gradient.copy_(travel.sum)

    def release(self) -> None:
        """Let go of what a step that has failed leaves on its way."""
        self._travels.clear()
        self._last = False

    def add_up(self) -> None:
        """Add up the gradients of norms and biases."""
        few = [weight for weight in self._weights if weight.requires_grad and not is_matrix(weight)]
        for same, weights in groupby(sorted(few, key=self._is_same), key=self._is_same):
            self._add_up([*weights], same)

    def _is_same(self, weight: Tensor) -> bool:
        """Whether a tensor group has the same gradient on every process already."""
        return weight not in self._partly

    def _add_up(self, weights: list[Tensor], same: bool) -> None:
        dtypes = [weight.grad_dtype or weight.dtype for weight in weights]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        pieces = [
            torch.zeros(local(weight).numel(), dtype=widest, device=weight.device)
            if weight.grad is None
            else local(weight.grad).reshape(-1).to(widest)
            for weight in weights
        ]
        together = torch.cat(pieces)
        for group in self._over:
            dist.all_reduce(together, group=group)
        if not same:
            together = self._tensor.sum(together)
        for weight, dtype, piece in zip(weights, dtypes, together.split([p.numel() for p in pieces]), strict=True):
            weight.grad = like(weight, piece.view_as(local(weight)).to(dtype))
