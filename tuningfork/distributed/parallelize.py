"""How a policy is put on its devices, in the one order that works: each step wraps what the one before has made."""

from __future__ import annotations

from tuningfork.distributed.ranks import Ranks
from tuningfork.models.policy import Policy


def parallelize(policy: Policy, activation_memory: str, compiled: bool, ranks: Ranks) -> None:
    """Make a loaded policy ready to train.

    1. Tensor parallelism splits the matrices of each block: nothing is split on one rank.
    2. Activation memory decides what of a block is kept for its backward pass, and
    3. the compiler compiles each block, whole with what 2. has put around its matrices: `Policy.keep_activations`.
    4. Sharding spreads each compiled block over the ranks: nothing is spread on one rank.

    Args:
        activation_memory: a mode of models/activations.py.

    Raises:
        ConfigError: the mode needs compiled blocks and they are not.
    """
    if ranks.size > 1:
        raise NotImplementedError(f"{ranks.size} ranks: blocks are neither split nor sharded, so a run has one process")
    if compiled:
        policy.compile()
    policy.keep_activations(activation_memory)
