"""Tensor parallelism: the matrices of a block split over the processes of a tensor group, by the model's own plan.

A process has some of the outputs of one matrix and, of the next, the inputs that these are, so what lies between, such
as attention of some heads, needs no word from the others; then their parts of the output are added up (Shoeybi et al.
2019, arXiv:1909.08053).

The styles of torch.distributed.tensor.parallel would do, but for their sums: those come by all-reduce, in which where a
number lies decides the order in which it is added up, so the bits of an answer would depend on its pack. Here sums are
taken in the order of the ranks, number by number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tuningfork.distributed.sums import Group
from tuningfork.errors import ConfigError
from tuningfork.models.hf.kinds import with_forward
from tuningfork.models.policy import Policy
from tuningfork.models.sink import SharedVocabulary

PARTLY = "replicated_with_grad_allreduce"  # whole on every process, of which each computes a part of its gradient


def check_has_plan(config: Any, size: int) -> None:
    """Refuse to split, over `size` processes, a model whose family has no plan for it. A config tells, so that this is
    said before weights are there, and to one process that tries a recipe of many. Raises ConfigError."""
    if size > 1 and not config.base_model_tp_plan:
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        raise _without_plan(model.__name__, size)


def split_blocks(policy: Policy, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Split the matrices of a policy's blocks over a mesh of one dimension; each process keeps its part alone.

    Returns:
        The weights that are whole on every process and get a part of their gradient on each.

    Raises:
        ConfigError: the model has no plan, or not for all matrices of its blocks; or its heads, or the outputs or
            inputs of a matrix, do not divide by the size of the mesh.
        ModelError: the model's own code does not run with a part of the heads.
    """
    model: Any = policy.model
    kind, size = type(model).__name__, mesh.size()
    if not model.base_model.tp_plan:
        raise _without_plan(kind, size)
    names = {module: name for name, module in model.base_model.named_modules()}
    planned = [
        _Planned(names[module], module, _style(model.base_model.tp_plan, names[module]))
        for block in policy.blocks
        for module in block.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    _check_plan(kind, planned, size)
    _check_heads(model, planned, size)
    split = [one for one in planned if one.style in _STYLES]
    for one in split:
        _check_divides(one, size)
    group = Group.of(mesh)
    for one in split:
        _split(one.module, _STYLES[one.style], mesh, group)
    split_vocabulary(policy, mesh)
    policy.check_runs()
    return [weight for one in planned if one.style == PARTLY for weight in one.module.parameters(recurse=False)]


def split_vocabulary(policy: Policy, mesh: DeviceMesh) -> None:
    """Split embedding and head, one weight or two, by the tokens: neighbours of the vocabulary lie on one process.

    Raises:
        ConfigError: there are too few tokens.
    """
    model: Any = policy.model
    group = Group.of(mesh)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = embedding.weight is head.weight
    tokens = own_tokens(len(head.weight), group)
    if not isinstance(embedding, nn.Embedding) or len(embedding.weight) != len(head.weight) or tokens.size < 1:
        raise _refused(
            group.size,
            f"the vocabulary of {type(model).__name__} cannot be shared out: its embedding is a "
            f"{type(embedding).__name__} of {len(embedding.weight):,} tokens, and its head has {len(head.weight):,}",
        )
    _distribute(embedding, mesh, weight=Shard(0))
    if tied:
        head.weight = embedding.weight
    _distribute(head, mesh, **({} if tied else {"weight": Shard(0)}), bias=Shard(0))
    if embedding.padding_idx is not None:  # whose row gets no gradient
        padding = embedding.padding_idx - tokens.first
        embedding.padding_idx = padding if 0 <= padding < tokens.size else None
    vars(embedding)["forward"] = partial(_looked_up, embedding, embedding.forward, tokens, group)


def own_tokens(count: int, group: Group) -> SharedVocabulary:
    """The tokens of a vocabulary that this process of a group has: as many as each, or the rest."""
    each = -(-count // group.size)
    first = min(group.rank * each, count)
    return SharedVocabulary(first, min(each, count - first), group)


def _looked_up(
    embedding: Any, look_up: Callable[[Tensor], Tensor], tokens: SharedVocabulary, group: Group, ids: Tensor
) -> Tensor:
    """The embedding of tokens, each from the process that has it; the others add zeros, so its bits stay."""
    own = tokens.own(ids)
    there = vars(embedding)
    there["weight"] = local(embedding.weight)  # before the module's weight, for the model's own way to look up
    try:
        found = look_up(own.clamp(min=0))
    finally:
        del there["weight"]
    return group.summed(found.masked_fill((own < 0)[..., None], 0))


@dataclass(frozen=True, slots=True)
class _Planned:
    """A module of a block that has weights of its own, and what the model's plan says of it."""

    name: str  # in the backbone
    module: Any
    style: str

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def has_matrix(self) -> bool:
        return any(weight.ndim > 1 for weight in self.module.parameters(recurse=False))


def _by_columns(module: Any, rows: Tensor) -> Tensor:
    """Each process computes some of the outputs."""
    rows = module.tensor_group.copied(rows)
    return linear(rows, local(module.weight), None if module.bias is None else local(module.bias))


def _by_columns_gathered(module: Any, rows: Tensor) -> Tensor:
    """Each process computes some of the outputs, and all get all of them."""
    gathered: Tensor = module.tensor_group.gathered(_by_columns(module, rows))
    return gathered


def _by_rows(module: Any, rows: Tensor) -> Tensor:
    """Each process has some of the inputs."""
    products: Tensor = module.tensor_group.summed(linear(rows, local(module.weight)))
    return products if module.bias is None else products + local(module.bias).to(products.dtype)


def _by_rows_divided(module: Any, rows: Tensor) -> Tensor:
    """Each process has all of the inputs, and takes some."""
    return _by_rows(module, module.tensor_group.divided(rows))


class _Style(NamedTuple):
    """How a process computes its part of a linear layer, and where its parts of the weights lie."""

    forward: Callable[..., Tensor]
    weight: Placement
    bias: Placement


_OUTPUTS, _INPUTS = (Shard(0), Shard(0)), (Shard(1), Replicate())
_STYLES: Mapping[str, _Style] = {
    "colwise": _Style(_by_columns, *_OUTPUTS),
    "colwise_gather_output": _Style(_by_columns_gathered, *_OUTPUTS),
    "rowwise": _Style(_by_rows, *_INPUTS),
    "rowwise_split_input": _Style(_by_rows_divided, *_INPUTS),
}


def _split(module: Any, style: _Style, mesh: DeviceMesh, group: Group) -> None:
    """Leave a process its part of a linear layer."""
    _distribute(module, mesh, weight=style.weight, bias=style.bias)
    module.tensor_group = group
    module.__class__ = with_forward(type(module), style.forward)


def local(weight: Tensor) -> Tensor:
    """This process's part of a weight; its gradient is that of the weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def like(weight: Tensor, own: Tensor) -> Tensor:
    """This process's part of a tensor, as one that lies where a weight lies."""
    if not isinstance(weight, DTensor):
        return own
    return DTensor.from_local(
        own, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Put a DTensor, which knows where it lies, in the place of each of a module's weights."""
    for name, placement in placements.items():
        weight = getattr(module, name, None)
        if weight is None or isinstance(placement, Replicate):
            continue
        # Every process has loaded the whole weight, so nothing travels.
        split = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
        whole = DTensor.from_local(
            split.to_local().clone(), mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride()
        )
        own = nn.Parameter(whole)
        own.requires_grad_(weight.requires_grad)
        if weight.requires_grad:
            own.grad_dtype = weight.grad_dtype
        setattr(module, name, own)


def _style(plan: Mapping[str, str], name: str) -> str:
    """What the plan says of a module of the backbone, or ""; a * in it stands for a layer's number."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), "")


def _check_plan(kind: str, planned: list[_Planned], size: int) -> None:
    """Raises ConfigError where the plan leaves out, or treats in a way that is not known here, what has weights."""
    # What lies beside a split matrix may see a part of its outputs. A norm elsewhere sees whole rows.
    beside = {one.parent for one in planned if one.style == "colwise"}
    missing = [one.name for one in planned if not one.style and (one.has_matrix or one.parent in beside)]
    unknown = [
        f"{one.name} ({one.style}, {type(one.module).__name__})"
        for one in planned
        if one.style and not (one.style == PARTLY and not one.has_matrix)
        if not (one.style in _STYLES and isinstance(one.module, nn.Linear))
    ]
    for words, found in (("says nothing of", missing), ("asks for what is not supported of", unknown)):
        if found:
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            raise _refused(size, f"the plan by which {kind} splits its blocks {words} {', '.join(found[:4])}{more}")


def _check_heads(model: Any, planned: list[_Planned], size: int) -> None:
    """Raises ConfigError where heads are split and do not divide."""
    queries = model.config.num_attention_heads
    keys = getattr(model.config, "num_key_value_heads", None) or queries
    split = any(one.style == "colwise" and not one.parent.endswith("mlp") for one in planned)
    if split and (queries % size or keys % size):
        raise _refused(
            size, f"{type(model).__name__} has {queries} query heads and {keys} key heads, which do not divide by it"
        )


def _check_divides(one: _Planned, size: int) -> None:
    columns = one.style.startswith("colwise")
    width, what = (one.module.out_features, "outputs") if columns else (one.module.in_features, "inputs")
    if width % size:
        raise _refused(size, f"{one.name} has {width:,} {what}, which do not divide by it")


def _without_plan(kind: str, size: int) -> ConfigError:
    return _refused(size, f"{kind} has no plan of how to split its blocks (base_model_tp_plan of its config)")


def _refused(size: int, words: str) -> ConfigError:
    smaller = ", or to a number that divides them" if "divide" in words else ""
    return ConfigError(f"parallel.tensor is {size}, but {words}. Set it to 1{smaller}.")
