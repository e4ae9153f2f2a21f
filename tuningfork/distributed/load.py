"""Loading a model spread over processes: each reads its own rows from the disk, and none ever has the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tuningfork.distributed.layout import TENSOR, Layout
from tuningfork.distributed.narrow import is_matrix
from tuningfork.distributed.rows import own_part
from tuningfork.distributed.sharding import Sharding
from tuningfork.distributed.tensor import like, local, split_blocks
from tuningfork.errors import ModelError
from tuningfork.models.hf import checks
from tuningfork.models.hf.load import (
    Draft,
    Loaded,
    all_tensors,
    held_dtype,
    load,
    loading,
    opened,
    read,
    without_memory,
)
from tuningfork.models.hf.safetensors_reader import Lying
from tuningfork.models.policy import Policy

WHOLE = (
    "each process has read the whole model before it was spread: its files are older than safetensors, or hold its "
    "tensors otherwise than the model has them"
)


def load_spread(
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    reduce_dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
    product_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
) -> tuple[Loaded, Sharding]:
    """Load a model folder as `models.hf.load.load` does, spread over the processes of a layout, all of which come here.

    The model is made without memory for its matrices and spread; then each process reads its rows of them. Where the
    library converts what lies on the disk, each process has it do so for the whole model, and a note says it.

    Args:
        progress: told the bytes that this process has read so far, and all that it will.
        product_dtype: of matrix products, see Sharding; so for `reshard_after_forward`.

    Raises as `models.hf.load.load`.
    """
    mesh = layout.mesh(device.type)
    blockwise: dict[str, Any] = {"product_dtype": product_dtype, "reshard_after_forward": reshard_after_forward}
    with loading(path):
        draft, loaded = opened(path, progress)
        model = loaded.model
        if not draft.unread or (names := _block_names(model)) is None:
            del draft
            loaded = load(path, device, dtype, progress)
            blocks = Policy.plain(loaded.model, torch.float32).blocks
            sharding = Sharding(loaded.model, blocks, mesh, layout, reduce_dtype, **blockwise)
            return replace(loaded, notes=(*loaded.notes, WHOLE)), sharding
        stored = _stored(model, draft)
        for weight, there in draft.unread:
            kind = held_dtype(weight, there.shape, dtype)
            if isinstance(weight, nn.Parameter) and is_matrix(weight) and layout.shard > 1:
                _put(model, weight, torch.empty(there.shape, dtype=kind, device="meta"))
            else:
                weight.data = torch.empty(there.shape, dtype=kind, device=device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        blocks = [model.get_submodule(name) for name in names]
        sharding = Sharding(model, blocks, mesh, layout, reduce_dtype, **blockwise)
        spread = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
        if device.type == "cpu":
            checks.check_room(sum(weight.to_local().nbytes for weight in spread))
        for weight in spread:
            _put(model, weight, _empty(weight, weight.dtype, device))
        read(_own(model, stored, draft), path, progress)
    model.train()
    return loaded, sharding


def load_split(
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    reduce_dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
    product_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
) -> tuple[Loaded, Policy]:
    """Load a model whose products several processes compute together, see tensor.py; arguments as of `load_spread`.

    The model is made without memory. So it is watched unsplit, as a model of one process is, and then split; only then
    it gets memory, for this process's parts, and reads these. Where that is not possible, each process reads the whole
    model, a note says it, and `parallelize` splits it.

    Raises as `models.hf.load.load`, and as `split_blocks`.
    """
    mesh = layout.mesh(device.type)
    with loading(path):
        draft, loaded = opened(path, progress)
        model = loaded.model
        if not draft.unread or _block_names(model) is None:
            del draft
            loaded = load(path, device, dtype, progress)
            return replace(loaded, notes=(*loaded.notes, WHOLE)), Policy.fast(loaded.model, product_dtype)
        stored = _stored(model, draft)
        dtypes = {name: held_dtype(weight, weight.shape, dtype) for name, weight in all_tensors(model)}
        for weight in list(model.parameters()):
            _put(model, weight, torch.empty(weight.shape, device="meta"))  # of one dtype, as nothing casts there
        for name, buffer in model.named_buffers():
            buffer.data = torch.empty_like(buffer, device=device) if name in stored else buffer.data.to(device)
        with _buffers_without_memory(model):
            policy = Policy.plain(model, product_dtype)
            partly = {*split_blocks(policy, mesh[TENSOR])}
        names = {name for name, weight in model.named_parameters() if weight in partly}
        for name, weight in list(model.named_parameters()):
            later = is_matrix(weight) and layout.shard > 1
            _put(model, weight, _empty(weight, dtypes[name], torch.device("meta") if later else device))
        policy.spread = Sharding(
            model, policy.blocks, mesh, layout, reduce_dtype, product_dtype,
            [weight for name, weight in model.named_parameters() if name in names],
            reshard_after_forward=reshard_after_forward,
        )  # fmt: skip
        if device.type == "cpu":
            checks.check_room(sum(local(weight).nbytes for weight in model.parameters()))
        for weight in [weight for weight in model.parameters() if weight.is_meta]:
            _put(model, weight, _empty(weight, weight.dtype, device))
        read(_own(model, stored, draft), path, progress)
    policy.choose_kernels()
    model.train()
    return loaded, policy


def replace_spread(model: PreTrainedModel, path: str) -> tuple[str, ...]:
    """Read the weights of another folder into a spread model, see `models.hf.load.replace_weights`; each process reads
    its own part."""
    with loading(path):
        draft, loaded = opened(path)
        notes = loaded.notes
        if draft.unread:
            of = {id(weight): there for weight, there in draft.unread}
            theirs = {name: of[id(weight)] for name, weight in all_tensors(loaded.model) if id(weight) in of}
            read(_own(model, theirs, draft), path)
            return notes
        other = loaded.model.state_dict()
        for name, tensor in model.state_dict().items():
            local, parts = own_part(tensor) if isinstance(tensor, DTensor) else (tensor, [])
            local.copy_(other[name][tuple(parts)])
    return (*notes, WHOLE)


def _own(model: PreTrainedModel, stored: dict[str, Lying], draft: Draft) -> Draft:
    """What this process has to read, each tensor once: its part of those that are spread, and the others whole. Of a
    part of the columns, which tensor parallelism makes, it reads the rows whole."""
    unread: dict[int, tuple[Tensor, Lying]] = {}
    for name, tensor in all_tensors(model):
        if name in stored and id(tensor) not in unread:
            unread[id(tensor)] = _part_of(tensor.detach(), stored[name])
    return replace(draft, model=model, unread=list(unread.values()))


def _stored(model: PreTrainedModel, draft: Draft) -> dict[str, Lying]:
    """Where on the disk each tensor of a model lies that is not read yet, by its name there."""
    of = {id(weight): there for weight, there in draft.unread}
    return {name: of[id(weight)] for name, weight in all_tensors(model) if id(weight) in of}


def _part_of(tensor: Tensor, there: Lying) -> tuple[Tensor, Lying]:
    if not isinstance(tensor, DTensor):
        return tensor, there
    local, (rows, *others) = own_part(tensor)
    there = there.rows(rows.start, len(local))
    if others and local.shape[1] < tensor.shape[1]:
        there = there.columns(others[0].start, local.shape[1])
    return local, there


def _empty(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for what of a weight lies on this process, of a weight that lies where that one does."""
    own = torch.empty_like(local(weight), dtype=dtype, device=device, requires_grad=False)
    return like(weight, own)


@contextmanager
def _buffers_without_memory(model: nn.Module) -> Iterator[None]:
    """The model's buffers where its weights are, on the meta device, and then as they were."""
    kept = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in kept:
        setattr(module, name, buffer.to("meta"))
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)


def _put(model: nn.Module, old: nn.Parameter, new: Tensor) -> None:
    """Put a parameter in the place, or the places, of another."""
    parameter = nn.Parameter(new, requires_grad=old.requires_grad)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if weight is old:
                setattr(module, name, parameter)


def _block_names(model: PreTrainedModel) -> list[str] | None:
    """Names of the decoder blocks, found by a model without any memory; None where such a one does not run."""
    empty = without_memory(model.config)
    try:
        blocks = Policy.plain(empty, torch.float32).blocks
    except ModelError:
        return None
    names = {id(module): name for name, module in empty.named_modules()}
    return [names[id(block)] for block in blocks]
