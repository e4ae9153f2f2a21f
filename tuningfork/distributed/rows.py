"""Which rows of a spread tensor lie on this process."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


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


def rows_to_count(tensor: Tensor) -> tuple[Tensor, int] | None:
    """Rows of a tensor and the number of the first of them, such that all processes together have each row once; None
    for none. All processes must ask together: what lies on them in parts of rows is gathered for the first of them."""
    if not isinstance(tensor, DTensor):
        return None if dist.is_initialized() and dist.get_rank() else (tensor, 0)
    found, of_mesh = own_rows(tensor), tensor.device_mesh.get_coordinate() or ()
    if found is None:
        gathered = tensor.full_tensor()
        return None if any(of_mesh) else (gathered, 0)
    copy = any(place for place, how in zip(of_mesh, tensor.placements, strict=True) if how == Replicate())
    return None if copy else found


def _place(tensor: DTensor) -> tuple[int, int | None]:
    """Which of how many parts of a tensor's rows lies here, where there is one cut at most; (0, None) else."""
    mesh = tensor.device_mesh
    cuts = [number for number, how in enumerate(tensor.placements) if how != Replicate()]
    if not cuts:
        return 0, 1
    if len(cuts) > 1 or tensor.placements[cuts[0]] != Shard(0):
        return 0, None
    return mesh.get_local_rank(cuts[0]), mesh.size(cuts[0])
