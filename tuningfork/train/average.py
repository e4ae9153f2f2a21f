"""A moving average of the weights (EMA), kept beside them, in which the noise of single steps cancels.

Behind each step: average = decay · average + (1 - decay) · weights. It begins as the weights behind the first one. An
average of all steps alike (Polyak and Juditsky 1992) has to be told when it begins, by a share of the run; this one
forgets what is far behind, so that a run can be made longer.

It lies among what the optimizer keeps of each weight: it is spread over processes as the weight is, and each moves what
it has of it. It is float32, as the weights: in fewer bits most of (1 - decay) times an update would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tuningfork.models.policy import Spread

AVERAGE = "average"
"""Its name in the optimizer's state of a weight, and of its part of a checkpoint."""


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Have an optimizer keep the average of what it moves, from its next step on."""
    move = get_ema_multi_avg_fn(decay)

    def behind_a_step(optimizer: Optimizer, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            optimizer.state[weight].setdefault(AVERAGE, weight.detach().clone())
        move([optimizer.state[weight][AVERAGE] for weight in weights], weights, 0)

    optimizer.register_step_post_hook(behind_a_step)


def keeps_average(optimizer: Optimizer) -> bool:
    """Whether there is an average: where one is kept, from the first step on."""
    return any(AVERAGE in state for state in optimizer.state.values())


@contextmanager
def averaged(optimizer: Optimizer, spread: Spread | None) -> Iterator[None]:
    """Within it the weights are their averages, where these are kept; behind it they are themselves again, to the bit.

    The two are exchanged in place, weight by weight, which takes memory for one.
    """
    pairs = [(weight, state[AVERAGE]) for weight, state in optimizer.state.items() if AVERAGE in state]
    if not pairs:
        yield
        return
    _exchange(pairs, spread)
    try:
        yield
    finally:
        _exchange(pairs, spread)


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]], spread: Spread | None) -> None:
    if spread is not None:
        spread.release()  # what was gathered of the weights is not what they are now
    for pair in pairs:
        one, other = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in pair)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
