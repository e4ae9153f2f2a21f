"""A model on the processes of a mesh: weights spread by FSDP2, gathered block by block, and gradients added up.

Matrices are spread, where a copy of the model has several processes; norms, biases and filters, whose size is nothing,
stay whole on each (whole.py). Matrices travel in the dtype of the products that they are for (narrow.py). What is added
up are sums, never means: a batch's sizes are known before its first pack runs. Gradients travel once a step, with the
last pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from tuningfork.distributed.layout import REPLICATE, SHARD, TENSOR, Layout
from tuningfork.distributed.narrow import is_matrix, keep_gradients_wide, narrows, widened
from tuningfork.distributed.pace import Pace, Seconds
from tuningfork.distributed.sums import Group, squared_norm
from tuningfork.distributed.tensor import like, local, own_tokens
from tuningfork.distributed.whole import WholeWeights
from tuningfork.models.sink import WHOLE, Output, StepGradient, Vocabulary

# Renamed in torch 2.13.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Sharding:
    """A model on the processes of a mesh.

    Where a copy of it has several of them, its weights are spread over these. Blocks are gathered one by one. All that
    is in none, embedding and head among it, which may be one weight, is one group, that of the whole model. It stays
    gathered from the embedding to the end of the backward pass: the head runs behind the backbone, where no hook of
    FSDP's knows of it. So the model's own forward is the backbone's from now on, for the whole must be called to be
    gathered. Weights that tensor parallelism has split already are spread part by part.

    Args:
        product_dtype: of matrix products, in which blocks are gathered that only have matrices for them (narrow.py).
        partly: weights that are whole and get a part of their gradient on each process of a tensor group.
        always: spread also over one process.
        reshard_after_forward: whether blocks are gathered twice a pack and hold their weights only while they run, or
            once a step and hold them till its last backward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        layout: Layout,
        reduce_dtype: torch.dtype,
        product_dtype: torch.dtype = torch.float32,
        partly: Iterable[nn.Parameter] = (),
        always: bool = False,
        reshard_after_forward: bool = True,
    ) -> None:
        """`model` may be one without memory as far as its matrices go, which then get some before it first runs."""
        self._layout = layout
        self.copies = layout.spread
        self.pace = Pace(blocks, torch.device(mesh.device_type))
        self._shards, self._tensor = Group.of(mesh[SHARD]), Group.of(mesh[TENSOR])
        sharded = layout.shard > 1 or always
        over = [mesh.get_group(name) for name in (REPLICATE, SHARD) if getattr(layout, name) > 1]
        whole = [weight for weight in model.parameters() if not (sharded and is_matrix(weight))]
        self._whole = WholeWeights(whole, over, self._tensor, partly, reduce_dtype)
        self._head: Any = model.get_output_embeddings()
        self._mesh = mesh
        self._vocabulary: Vocabulary = WHOLE
        if layout.tensor > 1:
            self._vocabulary = own_tokens(len(self._head.weight), self._tensor)
        self._last = False
        self._gradients: tuple[_OfOutput, StepGradient | None] | None = None
        self._root: Any = model.base_model
        self._groups: list[Any] = []
        self._reshard_after_forward = reshard_after_forward
        self._narrow_blocks = [block for block in blocks if sharded and narrows(block, product_dtype)]
        if sharded:
            self._shard(model, blocks, reduce_dtype, product_dtype, {*whole})

    def _shard(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
        reduce_dtype: torch.dtype,
        product_dtype: torch.dtype,
        whole: set[nn.Parameter],
    ) -> None:
        mesh = self._mesh
        over = mesh[REPLICATE, SHARD] if self._layout.replicate > 1 else mesh[SHARD]
        same: dict[str, Any] = {"mesh": over, "ignored_params": whole}
        of_block = {**same, "reshard_after_forward": self._reshard_after_forward}
        wide = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for block in blocks:
            if block in self._narrow_blocks:
                fully_shard(block, mp_policy=replace(wide, param_dtype=product_dtype), **of_block)
                block.register_forward_pre_hook(keep_gradients_wide)  # behind the hook that gathers
            else:
                fully_shard(block, mp_policy=wide, **of_block)
        backbone = model.base_model
        model.forward = lambda **inputs: backbone(**inputs)  # type: ignore[method-assign]
        self._root = fully_shard(model, reshard_after_forward=False, mp_policy=wide, **same)
        self._groups = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        if self.copies == 1:
            return  # a sum of one is none; asked for a factor, FSDP would yet divide by it
        for module in self._groups:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows no sum that divides on its way

    def begin(self, last: bool) -> None:
        """Before a pack's forward pass. `last`: its backward pass, if it has one, is the last one of the step, with
        which gradients travel."""
        self._last = last
        self._whole.begin(last)
        if self._groups:
            self._root.set_requires_gradient_sync(last)
            if not self._reshard_after_forward:
                self._root.set_reshard_after_backward(last)

    def run(self, **inputs: Any) -> Any:
        """The backbone's forward pass, from gathered weights."""
        return self._root(**inputs)

    def widened(self) -> AbstractContextManager[Any]:
        """Around passes in float32, see models/policy.py."""
        return widened(self._narrow_blocks)

    def output(self) -> Output:
        """This process's part of the output projection, whose gradients are kept over the packs of a step."""
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        own, own_bias = local(weight.detach()), None if bias is None else local(bias.detach())
        if self._gradients is None:
            of_bias = None if bias is None or own_bias is None else StepGradient(own_bias, bias.requires_grad)
            self._gradients = _OfOutput(own, weight.requires_grad, self._depart), of_bias
        self._gradients[0].last = self._last
        return Output(own, own_bias, self._vocabulary, self._gradients)

    def exchange(self) -> None:
        """Behind the last pack: see to it that all gradients are added up, over all processes."""
        self._reshard()
        self._whole.arrive()
        self._take_output()
        self._whole.add_up()

    def _take_output(self) -> None:
        """Add the gradient of the output projection to that of its weights."""
        if self._gradients is None:
            return
        (of_weight, of_bias), self._gradients = self._gradients, None
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        total = of_weight.sum()
        if total is not None:
            _add(weight, total)
        total = None if of_bias is None else of_bias.take()
        if bias is not None and total is not None:
            _add(bias, total)

    def _depart(self, total: Tensor) -> Callable[[], Tensor]:
        """Begin to add up what each process has [v, D]; what is returned waits for this process's rows of the sum."""
        copies, shards = (self._mesh.get_group(name) for name in (REPLICATE, SHARD))
        if not self._groups:
            work = dist.all_reduce(total, group=copies, async_op=True)
            return lambda: _awaited(work, total)
        rows = -(-len(total) // self._layout.shard)
        sent = pad(total, (0, 0, 0, rows * self._layout.shard - len(total)))
        own = total.new_empty(rows, *total.shape[1:])
        work = _reduce_scatter(own, sent, group=shards, async_op=True)
        first = rows * self._shards.rank

        def arrive() -> Tensor:
            _awaited(work, own)
            if self._layout.replicate > 1:
                dist.all_reduce(own, group=copies)
            return own[: max(0, len(total) - first)]

        return arrive

    def squared_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The squared 2-norm of all gradients of the model, float64, the same bits on every process."""
        kinds: dict[tuple[bool, bool], list[Tensor]] = {(s, t): [] for s in (False, True) for t in (False, True)}
        for gradient in gradients:
            dimensions = _dimensions(gradient)
            kinds[SHARD in dimensions, TENSOR in dimensions].append(local(gradient))
        device = next(part.device for parts in kinds.values() for part in parts)
        own = torch.stack([squared_norm(parts, device) for parts in kinds.values()])
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
        self._whole.release()
        self._reshard()

    def _reshard(self) -> None:
        for module in self._groups:
            module.reshard()


class _OfOutput(StepGradient):
    """That of the output weight, in float32 at least. It travels, once a step, as soon as the last pack's head has
    added to it, beside the backward pass of the blocks; and is rounded to the weight's dtype behind that."""

    def __init__(self, weight: Tensor, wanted: bool, depart: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        super().__init__(weight, wanted)
        self.last = False
        self._depart = depart
        self._arrive: Callable[[], Tensor] | None = None

    def store(self) -> None:
        total = self.take() if self.last else None
        if total is not None:
            self._arrive = self._depart(total)

    def sum(self) -> Tensor | None:
        """Behind the last pack: this process's rows of the sum over all processes; None where the weight is frozen."""
        return None if self._arrive is None else self._arrive()


def _awaited(work: Any, total: Tensor) -> Tensor:
    work.wait()
    return total


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
