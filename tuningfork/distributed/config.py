"""Settings of the processes that share a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass
class ParallelConfig:
    """How several processes, one a GPU, share a run; torchrun or `tuningfork launch` starts them. replicate x shard x
    tensor is their number. One process has nothing to share, whatever these ask for."""

    replicate: Annotated[int, Field(ge=1)] | None = None
    """Copies of the model, each spread over shard x tensor processes, that train on different examples. null: one for
    each machine. As many as there are processes is what DDP does; more than one, with shard, is HSDP."""
    shard: Annotated[int, Field(ge=1)] | None = None
    """Processes over which each copy's weights, gradients and moments are spread (FSDP2), each with examples of its
    own. null: all that replicate and tensor leave."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Processes that compute each matrix product together, by the model's own plan, on the same examples. Attention
    heads, of keys too, must divide by it. Log-probs have other last bits: the reference is scored anew. A family
    without such a plan is refused, also on one process."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """In what gradients are added up over processes. bfloat16 halves what travels, and rounds each sum."""
    reshard_after_forward: bool = True
    """Whether a block's gathered weights are let go of behind its forward pass, and gathered anew for the backward one.
    false: they are gathered once a step, and kept, which takes the bytes of all matrices on each GPU: in model.dtype,
    or in model.weights where a block has others than those of linear layers."""
    timeout_minutes: Annotated[float, Field(gt=0)] = 10.0
    """A process that has not answered the others for so long ends the run, which continues with --resume. Longer than
    the longest thing that one does while the others wait, such as reading data for the first time."""
