"""Which packs every worker runs in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuningfork.data.packing.pack import Bin, PackLimits, empty_bin, pack_evenly
from tuningfork.data.packing.portions import Portion
from tuningfork.distributed.balance import balance_examples


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The bins of each worker (distributed/ranks.py), of all alike many; some may be empty."""

    bins: list[list[Bin]]
    imbalance: float = 1.0  # cost of the slowest worker / mean


def plan_step(
    portions: Sequence[Portion], limits: PackLimits, workers: int, cost: Callable[[Portion], int]
) -> StepPlan:
    """Share a step's portions out over workers, so that all are done at the same time, in as many packs on each."""
    if workers == 1:
        return StepPlan([pack_evenly(portions, limits)])
    shares = balance_examples([cost(portion) for portion in portions], workers)
    bins = [pack_evenly([portions[place] for place in own], limits) if own else [] for own in shares.ranks]
    most = max(map(len, bins))
    return StepPlan([[*own, *[empty_bin(limits)] * (most - len(own))] for own in bins], shares.imbalance)
