"""How a policy is put on its devices, in the one order that works: each step wraps what the one before has made."""

from __future__ import annotations

import torch

from tuningfork.distributed.layout import ONE, TENSOR, Layout
from tuningfork.distributed.sharding import Sharding
from tuningfork.distributed.tensor import split_blocks
from tuningfork.models.policy import Policy


def parallelize(
    policy: Policy,
    activation_memory: str,
    compiled: bool,
    layout: Layout = ONE,
    reduce_dtype: torch.dtype = torch.float32,
    always: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Make a loaded policy ready to train.

    1. Tensor parallelism splits the matrices of each block, where `layout.tensor` asks for it.
    2. Activation memory decides what of a block is kept for its backward pass, and
    3. the compiler compiles each block, whole with what 2. has put around its matrices: `Policy.keep_activations`.
    4. Sharding spreads each compiled block over the ranks: nothing is spread on one rank, and a policy that was spread
       when its weights were read (load.py) is so already.

    Args:
        activation_memory: a mode of models/activations.py.
        layout: of the processes, all of which must come here.
        reduce_dtype: in what gradients are added up over them.
        always: shard also over one process, to see what that costs.
        reshard_after_forward: see Sharding.

    Raises:
        ConfigError: the mode needs compiled blocks and they are not, or the model has no plan for `layout.tensor`,
            or one that does not divide by it.
    """
    mesh = layout.mesh(policy.device.type) if policy.spread is None and (layout.size > 1 or always) else None
    partly = split_blocks(policy, mesh[TENSOR]) if mesh is not None and layout.tensor > 1 else []
    if compiled:
        policy.compile()
    policy.keep_activations(activation_memory)
    if mesh is not None:
        policy.spread = Sharding(
            policy.model, policy.blocks, mesh, layout, reduce_dtype, policy.dtype, partly, always, reshard_after_forward
        )
