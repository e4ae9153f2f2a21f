"""What every rank runs in a step: its own packs, and as many of them as every other rank.

Ranks gather weights and add gradients up together, pack by pack, so none may run a pack more than another. A pure
function of the step's portions: every rank plans for all, and all have the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil

from tuningfork.data.packing.bin_packing import best_fit, members_of
from tuningfork.data.packing.pack import Bin, PackLimits, pack_of, shared_evenly
from tuningfork.data.packing.portions import Portion, part
from tuningfork.distributed.balance import Shares, balance_within, exchanged
from tuningfork.records import TokenExample

ALIKE = 1.03
"""Slowest rank / mean. Ranks as alike as this have no tree parted for them: its stem would be computed twice."""

_WORTH = 0.99  # slowest rank with trees parted further / before: so much faster, or they stay as they are
_FINEST = 8  # parts of a tree cost no less than a rank's fair share / this


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's portions in packs, and these on ranks."""

    packs: list[list[list[Portion]]]  # of each rank, of each pack that it runs; an empty one may be among them
    costs: tuple[int, ...]  # of each rank's portions together; none where there is one rank
    limits: PackLimits

    @property
    def imbalance(self) -> float:
        """Slowest rank / mean of all: 1 is perfect."""
        whole = sum(self.costs)
        return max(self.costs) * len(self.costs) / whole if whole else 1.0

    @property
    def examples(self) -> list[list[TokenExample]]:
        """Those of each rank, in no order to be relied on."""
        return [[example for pack in packs for portion in pack for example in portion.examples] for packs in self.packs]

    @property
    def bins(self) -> list[list[Bin]]:
        """The packs of each rank, to be laid out; as many of each. An empty one has no example and the fewest slots."""
        return [self.bins_of(rank) for rank in range(len(self.packs))]

    def bins_of(self, rank: int) -> list[Bin]:
        """Those of one rank."""
        return [pack_of(portions, self.limits) for portions in self.packs[rank]]


def plan_step(portions: Sequence[Portion], limits: PackLimits, ranks: int, cost: Callable[[Portion], int]) -> StepPlan:
    """Share a step's portions out over ranks: as few packs a rank as there is a way to, and then ranks alike.

    Each example is on one rank. A tree is parted where that makes the slowest rank faster: where it costs more than a
    rank's fair share of the step, and further where ranks are still not ALIKE.

    Args:
        cost: of a portion, in any whole unit, not negative. It is not asked for where there is one rank.

    Raises:
        ValueError: there is no rank, or a cost is negative.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks to plan a step for")
    if ranks == 1:
        return StepPlan([shared_evenly(portions, limits)], (), limits)
    costs = [cost(portion) for portion in portions]
    best = _dealt(portions, costs, limits, ranks)
    most, fineness = len(portions), 1
    while best.imbalance > ALIKE and fineness <= _FINEST:
        aim = sum(costs) / ranks / fineness
        pieces = [part(portion, ceil(own / aim)) for portion, own in zip(portions, costs, strict=True)]
        fineness *= 2
        if (found := sum(map(len, pieces))) > most:
            most, tried = found, _dealt(*_priced(pieces, costs, cost), limits, ranks)
            if max(tried.costs) > _WORTH * max(best.costs):
                break
            best = tried
    return best


def _priced(
    pieces: Sequence[Sequence[Portion]], costs: Sequence[int], cost: Callable[[Portion], int]
) -> tuple[list[Portion], list[int]]:
    """The parts of each portion, one after the other, and what they cost. `costs`: of the whole portions."""
    own = [[whole] if len(some) == 1 else list(map(cost, some)) for some, whole in zip(pieces, costs, strict=True)]
    return list(chain.from_iterable(pieces)), list(chain.from_iterable(own))


def _dealt(portions: Sequence[Portion], costs: Sequence[int], limits: PackLimits, ranks: int) -> StepPlan:
    """The plan that parts nothing: packs alike in cost, for ranks wait for each other at each, and then ranks alike."""
    if not portions:
        return StepPlan([[] for _ in range(ranks)], (0,) * ranks, limits)
    rows = [portion.rows for portion in portions]
    packs = ceil(sum(rows) / (ranks * limits.tokens))  # of each rank, at least
    while (filled := _filled(rows, costs, limits.tokens, ranks * packs)) is None:
        packs += 1
    dealt = balance_within(filled.costs, ranks, lambda own: len(own) <= packs)
    assert dealt is not None  # there are as many packs as places for them
    on_ranks = [sorted(own, key=lambda pack: (-filled.costs[pack], pack)) for own in dealt.ranks]
    return StepPlan(
        [[[portions[i] for i in filled.ranks[pack]] for pack in own] for own in on_ranks], dealt.costs, limits
    )


def _filled(rows: Sequence[int], costs: Sequence[int], capacity: int, packs: int) -> Shares | None:
    """What lies in each of so many packs, alike in cost; None: no way was found to put all into so few.

    Dealt out by cost, if all find room in that way. Else as full as can be at first, for what has much attention or
    many logit rows costs more in as many rows.
    """

    def fits(own: Sequence[int]) -> bool:
        return sum(rows[i] for i in own) <= capacity

    if shares := balance_within(costs, packs, fits):
        return shares
    filled = members_of(best_fit(rows, capacity))
    if len(filled) > packs:
        return None
    return exchanged(costs, [*filled, *([] for _ in range(packs - len(filled)))], fits)
