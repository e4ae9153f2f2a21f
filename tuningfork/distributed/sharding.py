"""Weights spread over processes by FSDP2, gathered block by block as they are needed, and their gradients added up.

Matrices are spread; norms and biases, whose size is nothing, stay whole on every process, so that they are what they
are on one device, and their gradients are added up here. What is added up are sums, never means: a batch's sizes are
known before its first pack runs. Gradients travel once a step, with the last pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from tuningfork.distributed.layout import REPLICATE, SHARD, TENSOR, Layout
from tuningfork.distributed.pace import Pace, Seconds
from tuningfork.distributed.sums import Group
from tuningfork.distributed.tensor import like, local, own_tokens
from tuningfork.models.sink import WHOLE, Output, StepGradient, Vocabulary


class Sharding:
    """A model's weights, spread over the processes of a mesh.

    Blocks are gathered one by one. All that is in none, embedding and head among it, which may be one weight, is one
    group, that of the whole model. It stays gathered from the embedding to the end of the backward pass: the head runs
    behind the backbone, where no hook of FSDP's knows of it. So the model's own forward is the backbone's from now on,
    for the whole must be called to be gathered. Weights that tensor parallelism has split already are spread part by
    part.

    Args:
        partly: weights that are whole and get a part of their gradient on each process of a tensor group.
        always: spread also over one process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        layout: Layout,
        reduce_dtype: torch.dtype,
        partly: Iterable[nn.Parameter] = (),
        always: bool = False,
    ) -> None:
        """`model` may be one without memory as far as its matrices go, which then get some before it first runs."""
        self._layout = layout
        self.copies = layout.spread
        self.pace = Pace(blocks, torch.device(mesh.device_type))
        self._whole = [weight for weight in model.parameters() if weight.ndim < 2]
        self._partly = {*partly}
        self._over = [mesh.get_group(name) for name in (REPLICATE, SHARD) if getattr(layout, name) > 1]
        self._shards, self._tensor = Group.of(mesh[SHARD]), Group.of(mesh[TENSOR])
        self._head: Any = model.get_output_embeddings()
        self._mesh = mesh
        self._vocabulary: Vocabulary = WHOLE
        if layout.tensor > 1:
            self._vocabulary = own_tokens(len(self._head.weight), self._tensor)
        self._gradients: tuple[StepGradient, StepGradient | None] | None = None
        self._root: Any = model.base_model
        self._groups: list[Any] = []
        if layout.spread > 1 or always:
            self._spread(model, blocks, reduce_dtype)

    def _spread(self, model: PreTrainedModel, blocks: Sequence[nn.Module], reduce_dtype: torch.dtype) -> None:
        mesh = self._mesh
        over = mesh[REPLICATE, SHARD] if self._layout.replicate > 1 else mesh[SHARD]
        same: dict[str, Any] = {
            "mesh": over,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
            "ignored_params": set(self._whole),
        }
        for block in blocks:
            fully_shard(block, **same)
        backbone = model.base_model
        model.forward = lambda **inputs: backbone(**inputs)  # type: ignore[method-assign]
        self._root = fully_shard(model, reshard_after_forward=False, **same)
        self._groups = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        for module in self._groups:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows no sum that divides on its way

    def begin(self, last: bool) -> None:
        """Before a pack's forward pass. `last`: its backward pass, if it has one, is the last one of the step, with
        which gradients travel."""
        if self._groups:
            self._root.set_requires_gradient_sync(last)

    def run(self, **inputs: Any) -> Any:
        """The backbone's forward pass, from gathered weights."""
        return self._root(**inputs)

    def output(self) -> Output:
        """This process's part of the output projection, whose gradients are kept over the packs of a step."""
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        own, own_bias = local(weight.detach()), None if bias is None else local(bias.detach())
        if self._gradients is None:
            of_bias = None if bias is None or own_bias is None else StepGradient(own_bias, bias.requires_grad)
            self._gradients = StepGradient(own, weight.requires_grad), of_bias
        return Output(own, own_bias, self._vocabulary, self._gradients)

    def exchange(self) -> None:
        """Behind the last pack: add up the gradients of the output projection, and of what every process has whole.

        In a tensor group they are the same on every process already, but for those of `partly`, which are added up.
        """
        self._reshard()
        self._take_output()
        whole = [weight for weight in self._whole if weight.requires_grad]
        for same, weights in groupby(sorted(whole, key=self._is_same), key=self._is_same):
            self._add_up([*weights], same)

    def _take_output(self) -> None:
        """Add the gradient of the output projection to that of its weights; where these are spread it travels here,
        once a step, in float32, and is rounded behind that."""
        if self._gradients is None:
            return
        (of_weight, of_bias), self._gradients = self._gradients, None
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        total = of_weight.take()
        if total is not None:
            _add(weight, self._scattered(total))
        total = None if of_bias is None else of_bias.take()
        if bias is not None and total is not None:
            _add(bias, total)

    def _scattered(self, total: Tensor) -> Tensor:
        """This process's rows of the sum over all processes that have examples of their own."""
        if not self._groups:
            return total
        to: list[Placement]
        if self._layout.replicate > 1:
            mesh, to = self._mesh[REPLICATE, SHARD], [Replicate(), Shard(0)]
        else:
            mesh, to = self._mesh[SHARD], [Shard(0)]
        parts = DTensor.from_local(total, mesh, [Partial()] * len(to), run_check=False)
        return parts.redistribute(placements=to).to_local()

    def _is_same(self, weight: Tensor) -> bool:
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

    def squared_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The squared 2-norm of all gradients of the model, float64, the same bits on every process."""
        kinds: dict[tuple[bool, bool], list[Tensor]] = {(s, t): [] for s in (False, True) for t in (False, True)}
        for gradient in gradients:
            dimensions = _dimensions(gradient)
            kinds[SHARD in dimensions, TENSOR in dimensions].append(local(gradient))
        device = next(part.device for parts in kinds.values() for part in parts)
        own = torch.stack([_squares(parts, device) for parts in kinds.values()])
        found = self._shards.all(self._tensor.all(own))
        whole, by_tensor, by_shard, by_both = found.unbind(-1)
        return whole[0, 0] + by_tensor[0].sum() + by_shard[:, 0].sum() + by_both.sum()

    def restart_clock(self) -> None:
        """Before a step: `forward_seconds` are those of its passes."""
        self.pace.restart()

    def forward_seconds(self) -> Seconds:
        """Those of all forward passes since the last call, see pace.py. The device must be done with them."""
        return self.pace.take()

    def release(self) -> None:
        """Let go of gathered weights, see models/policy.py; and of what a step that has failed leaves."""
        self._gradients = None
        self._reshard()

    def _reshard(self) -> None:
        for module in self._groups:
            module.reshard()


def _add(weight: Tensor, gradient: Tensor) -> None:
    """Add this process's part of a gradient to that of a weight."""
    if weight.grad is not None:
        local(weight.grad).add_(gradient)
    else:
        weight.grad = like(weight, gradient.to(weight.grad_dtype or weight.dtype))


def _dimensions(tensor: Tensor) -> set[str]:
    """The dimensions of the mesh over which a tensor lies in parts."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {name for name, lies in zip(names, tensor.placements, strict=True) if not lies.is_replicate()}


def _squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = torch._foreach_norm(tensors, 2.0, dtype)  # private: torch._foreach_norm
    return torch.stack(norms).double().square().sum()
