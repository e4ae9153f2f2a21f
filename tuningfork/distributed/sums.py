"""Sums over a group of processes, number by number in the order of its ranks, and what else a split product needs.

An all-reduce adds a number up in an order that depends on where it lies in memory. In the order of the ranks a row gets
the same bits in whatever pack it comes, and every process has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
# By name, for an operator that a compiler knows takes no such object. They live as long as torch knows them: to take a
# group down later, in a forked process even, is to wait for threads that are gone.
_GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that compute together, of which this is the one at `rank` of `size`. All must do so in one order."""

    name: str
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """The processes of a mesh of one dimension."""
        group = mesh.get_group()
        _GROUPS[group.group_name] = group
        return cls(group.group_name, dist.get_rank(group), mesh.size())

    def copied(self, rows: Tensor) -> Tensor:
        """What every process has, before each computes something of its own with it: gradients are added up."""
        return _Copied.apply(rows, self)

    def summed(self, part: Tensor) -> Tensor:
        """The sum of each process's part, on every process: gradients are those of the sum."""
        return _Summed.apply(part, self)

    def gathered(self, part: Tensor) -> Tensor:
        """Each process's columns side by side [..., C], from those of this one [..., C / size], for what all then
        compute alike."""
        return _Gathered.apply(part, self)

    def divided(self, whole: Tensor) -> Tensor:
        """This process's columns [..., C / size] of what every process has [..., C]."""
        return _Divided.apply(whole, self)

    def sum(self, part: Tensor) -> Tensor:
        """`summed`, where no gradient is taken."""
        return _sum(part, self.name, self.size)

    def all(self, part: Tensor) -> Tensor:
        """What each process has, [size, ...] in the order of their ranks, where all have as much."""
        return _all(part, self.name, self.size)


@torch.library.custom_op("tuningfork::sum_in_order", mutates_args=())
def _sum(part: Tensor, group: str, size: int) -> Tensor:
    """Each process adds up a piece of all parts, in float32 at least, and gives it to the others."""
    piece = -(-part.numel() // size)
    fill = size * piece - part.numel()
    flat = part.contiguous().view(-1)
    own = torch.nn.functional.pad(flat, (0, fill)) if fill else flat
    pieces = torch.empty_like(own)
    dist.all_to_all_single(pieces, own, group=_GROUPS[group])
    first, *rest = pieces.view(size, piece).to(torch.promote_types(part.dtype, torch.float32)).unbind()
    total = first.clone()
    for more in rest:
        total += more
    whole = part.new_empty(own.shape if fill else part.shape)  # no view: a graph would hold for views alone
    _gather(whole.view(-1), total.to(part.dtype), group=_GROUPS[group])
    return whole[:-fill].view(part.shape).clone() if fill else whole


@_sum.register_fake
def _(part: Tensor, group: str, size: int) -> Tensor:
    return part.new_empty(part.shape)


@torch.library.custom_op("tuningfork::all_in_order", mutates_args=())
def _all(part: Tensor, group: str, size: int) -> Tensor:
    found = part.new_empty(size, *part.shape)
    _gather(found.view(-1), part.contiguous().view(-1), group=_GROUPS[group])
    return found


@_all.register_fake
def _(part: Tensor, group: str, size: int) -> Tensor:
    return part.new_empty(size, *part.shape)


def _side_by_side(part: Tensor, group: Group) -> Tensor:
    return torch.cat(group.all(part).unbind(), dim=-1)


def _own_columns(whole: Tensor, group: Group) -> Tensor:
    return whole.chunk(group.size, dim=-1)[group.rank].contiguous()


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.group.sum(gradient), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        return group.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _side_by_side(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _own_columns(gradient, ctx.group), None


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_columns(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _side_by_side(gradient, ctx.group), None


def squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared 2-norm of tensors together, a float64 scalar on their device; each one's own norm is computed in
    float32 at least."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = torch._foreach_norm(tensors, 2.0, dtype)  # private: torch._foreach_norm
    return torch.stack(norms).double().square().sum()
