"""Weights spread over processes by FSDP2, gathered block by block as they are needed, and their gradients added up.

Matrices are spread; norms and biases, whose size is nothing, stay whole on every process, so that they are what they
are on one device, and their gradients are added up here. What is added up are sums, never means: a batch's sizes are
known before its first pack runs. Gradients travel once a step, with the last pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tuningfork.distributed.layout import REPLICATE, SHARD, Layout
from tuningfork.distributed.pace import Pace, Seconds


class Sharding:
    """A model's weights, spread over the processes of a mesh.

    Blocks are gathered one by one. All that is in none, embedding and head among it, which may be one weight, is one
    group, that of the whole model. It stays gathered from the embedding to the end of the backward pass: the head runs
    behind the backbone, where no hook of FSDP's knows of it. So the model's own forward is the backbone's from now on,
    for the whole must be called to be gathered.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        layout: Layout,
        reduce_dtype: torch.dtype,
    ) -> None:
        """`model` may be one without memory as far as its matrices go, which then get some before it first runs."""
        self._mesh = mesh
        self._layout = layout
        self.copies = layout.spread
        self._whole = [weight for weight in model.parameters() if weight.ndim < 2]
        over = mesh[REPLICATE, SHARD] if layout.replicate > 1 else mesh[SHARD]
        same: dict[str, Any] = {
            "mesh": over,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
            "ignored_params": set(self._whole),
        }
        self.pace = Pace(blocks, torch.device(mesh.device_type))
        for block in blocks:
            fully_shard(block, **same)
        backbone = model.base_model
        model.forward = lambda **inputs: backbone(**inputs)  # type: ignore[method-assign]
        self._root: Any = fully_shard(model, reshard_after_forward=False, **same)
        for module in self._groups():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows no sum that divides on its way
        self._shards, self._copies = mesh[SHARD].get_group(), mesh[REPLICATE].get_group()

    def _groups(self) -> Iterable[Any]:
        return [module for module in self._root.modules() if isinstance(module, FSDPModule)]

    def begin(self, last: bool) -> None:
        """Before a pack's forward pass. `last`: its backward pass, if it has one, is the last one of the step, with
        which gradients travel."""
        self._root.set_requires_gradient_sync(last)

    def run(self, **inputs: Any) -> Any:
        """The backbone's forward pass, from gathered weights."""
        return self._root(**inputs)

    def exchange(self) -> None:
        """Behind the last pack: add up the gradients of what every process has whole."""
        whole = [weight for weight in self._whole if weight.requires_grad]
        if not whole:
            return
        dtypes = [weight.grad_dtype or weight.dtype for weight in whole]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        pieces = [
            torch.zeros(weight.numel(), dtype=widest, device=weight.device)
            if weight.grad is None
            else weight.grad.reshape(-1).to(widest)
            for weight in whole
        ]
        together = torch.cat(pieces)
        for group in (self._shards, self._copies):
            dist.all_reduce(together, group=group)
        for weight, dtype, piece in zip(whole, dtypes, together.split([p.numel() for p in pieces]), strict=True):
            weight.grad = piece.view_as(weight).to(dtype)

    def squared_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The squared 2-norm of all gradients of the model, float64, the same bits on every process."""
        gradients = list(gradients)
        spread = [_local(g) for g in gradients if isinstance(g, DTensor)]
        whole = [g for g in gradients if not isinstance(g, DTensor)]
        device = (spread or whole)[0].device
        own, all_have = (_squares(part, device) for part in (spread, whole))
        parts = [torch.zeros_like(own) for _ in range(self._layout.shard)]
        dist.all_gather(parts, own, group=self._shards)
        return torch.stack(parts).sum() + all_have

    def forward_seconds(self) -> Seconds:
        """Those of all forward passes since the last call, see pace.py. The device must be done with them."""
        return self.pace.take()

    def release(self) -> None:
        """Let go of gathered weights, see models/policy.py."""
        for module in self._groups():
            module.reshard()


def _local(tensor: DTensor) -> Tensor:
    return tensor.to_local()


def _squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = torch._foreach_norm(tensors, 2.0, dtype)  # private: torch._foreach_norm
    return torch.stack(norms).double().square().sum()
