"""Which rows of a spread tensor lie on this process."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tuningfork.distributed.ranks import Ranks

PIECE = 1 << 26
"""Bytes of rows that travel at once, or one row."""


def own_rows(tensor: Tensor) -> tuple[Tensor, int] | None:
    """This process's rows of a tensor, as they lie there, and the number of the first; all, of what every process has
    whole. None where it has parts of rows."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    place, parts = _place(tensor)
    if parts is None:
        return None
    local: Tensor = tensor.to_local()
    return local, min(place * -(-len(tensor) // parts), len(tensor)) if parts > 1 else 0


def own_part(tensor: DTensor) -> tuple[Tensor, list[slice]]:
    """This process's part of a tensor, as it lies there, and which part it is in each dimension."""
    mesh = tensor.device_mesh
    parts = [slice(0, size) for size in tensor.shape]
    for number in reversed(range(mesh.ndim)):  # tensor parallelism, the last of a mesh, has cut first
        how = tensor.placements[number]
        if how == Replicate():
            continue
        dimension = how.dim  # type: ignore[attr-defined]
        whole = parts[dimension]
        each = -(-(whole.stop - whole.start) // mesh.size(number))
        first = min(whole.start + mesh.get_local_rank(number) * each, whole.stop)
        parts[dimension] = slice(first, min(first + each, whole.stop))
    return tensor.to_local(), parts


def rows_to_count(tensor: Tensor) -> tuple[Tensor, int] | None:
    """Rows of a tensor and the number of the first of them, such that all processes together have each row once; None
    for none. All processes must ask together: what lies on them in parts of rows is gathered for the first of them, and
    so is a split bias, which is one row."""
    if not isinstance(tensor, DTensor):
        return None if dist.is_initialized() and dist.get_rank() else (tensor, 0)
    found, of_mesh = own_rows(tensor) if tensor.ndim > 1 else None, tensor.device_mesh.get_coordinate() or ()
    of_copy = 0 not in tensor.device_mesh.mesh  # each copy may have a mesh of its own
    if found is None:
        gathered = tensor.full_tensor()
        return None if of_copy or any(of_mesh) else (gathered, 0)
    copy = of_copy or any(place for place, how in zip(of_mesh, tensor.placements, strict=True) if how == Replicate())
    return None if copy else found


def pieces(tensor: DTensor, ranks: Ranks, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Rows of a tensor that is spread, from `start` up to `end`, some at a time: the number of the first, and the rows,
    on the device of the tensor. All ranks must go through all of them together, and none ever has many."""
    end = len(tensor) if end is None else end
    own, own_start = rows_to_count(tensor) or (tensor.to_local()[:0], 0)
    at_once = max(1, PIECE // max(1, tensor.numel() // max(1, len(tensor)) * tensor.element_size()))
    for source, (first, count) in enumerate(ranks.all((own_start, len(own)))):
        for begin in range(max(first, start), min(first + count, end), at_once):
            there = min(at_once, first + count - begin, end - begin)
            if source == ranks.rank:
                rows = own[begin - first : begin - first + there].contiguous()
            else:
                rows = own.new_empty(there, *tensor.shape[1:])
            dist.broadcast(rows, src=source)
            yield begin, rows


def _place(tensor: DTensor) -> tuple[int, int | None]:
    """Which of how many parts of a tensor's rows lies here, where there is one cut at most; (0, None) else."""
    mesh = tensor.device_mesh
    cuts = [number for number, how in enumerate(tensor.placements) if how != Replicate()]
    if not cuts:
        return 0, 1
    if len(cuts) > 1 or tensor.placements[cuts[0]] != Shard(0):
        return 0, None
    return mesh.get_local_rank(cuts[0]), mesh.size(cuts[0])
