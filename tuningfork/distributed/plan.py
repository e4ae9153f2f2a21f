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
from tuningfork.data.packing.pack import Bin, PackLimits, empty_pack, pack_evenly, packs_needed
from tuningfork.data.packing.portions import Portion, part
from tuningfork.distributed.balance import Shares, balance_examples, balance_within, exchanged

ALIKE = 1.03
"""Slowest rank / mean. Ranks as alike as this have no tree parted for them: its stem would be computed twice."""

_WORTH = 0.99  # slowest rank with trees parted further / before: so much faster, or they stay as they are
_FINEST = 8  # parts of a tree cost no less than a rank's fair share / this


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's portions on ranks."""

    portions: list[list[Portion]]  # of each rank
    packs: int  # that every rank runs
    costs: tuple[int, ...]  # of each rank's portions together; none where there is one rank
    limits: PackLimits

    @property
    def imbalance(self) -> float:
        """Slowest rank / mean of all: 1 is perfect."""
        whole = sum(self.costs)
        return max(self.costs) * len(self.costs) / whole if whole else 1.0

    @property
    def bins(self) -> list[list[Bin]]:
        """The packs of each rank."""
        return [self.bins_of(rank) for rank in range(len(self.portions))]

    def bins_of(self, rank: int) -> list[Bin]:
        """The packs of one rank, largest first, so that large ones run beside large ones; the last ones may be empty.

        An empty pack has no example and the fewest slots. Where there is one rank, packs are as `pack_evenly` has them.
        """
        bins = pack_evenly(self.portions[rank], self.limits, self.packs)
        if len(self.portions) > 1:
            bins.sort(key=lambda found: -found.slots)
        return bins + [empty_pack(self.limits)] * (self.packs - len(bins))


def plan_step(portions: Sequence[Portion], limits: PackLimits, ranks: int, cost: Callable[[Portion], int]) -> StepPlan:
    """Share a step's portions out over ranks: as few packs a rank as there is a way to, and then ranks alike.

    Each example is on one rank. A tree is parted where that makes the slowest rank faster: where it costs more than a
    rank's fair share of the step, and further where ranks are still not ALIKE.

    Args:
        cost: of a portion, in any whole unit, not negative. It is not asked for where there is one rank.

    Raises:
        ValueError: there is no rank, or a cost is negative.
    """
    if ranks == 1:
        return StepPlan([list(portions)], packs_needed([portion.rows for portion in portions], limits), (), limits)
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
    """The plan that parts nothing.

    Ranks that are alike in cost may need different numbers of packs, for what has much attention or many logit rows
    costs more in as many rows. Then the fewest packs are tried into which all can be made to fit.
    """
    rows = [portion.rows for portion in portions]
    shares = balance_examples(costs, ranks)
    packs = max(packs_needed([rows[i] for i in own], limits) for own in shares.ranks)
    for fewer in range(ceil(sum(rows) / (ranks * limits.tokens)), packs):
        if found := _within(rows, costs, limits, ranks, fewer):
            shares, packs = found, fewer
            break
    return StepPlan([[portions[i] for i in own] for own in shares.ranks], packs, shares.costs, limits)


def _within(rows: Sequence[int], costs: Sequence[int], limits: PackLimits, ranks: int, packs: int) -> Shares | None:
    """Shares of which none needs more than so many packs; None: no such were found.

    Dealt out by cost, if all find room in that way; else packed over all ranks together, and the packs dealt out.
    """

    def fits(own: Sequence[int]) -> bool:
        return _fit([rows[i] for i in own], limits, packs)

    if shares := balance_within(costs, ranks, fits):
        return shares
    filled = members_of(best_fit(rows, limits.tokens))
    dealt = balance_within([sum(costs[i] for i in some) for some in filled], ranks, lambda own: len(own) <= packs)
    if dealt is None:
        return None
    members = [[i for pack in own for i in filled[pack]] for own in dealt.ranks]
    return exchanged(costs, members, fits) if all(map(fits, members)) else None


def _fit(rows: Sequence[int], limits: PackLimits, packs: int) -> bool:
    """Whether portions of so many rows need no more than so many packs."""
    whole, largest = sum(rows), max(rows)
    if whole > packs * limits.tokens:
        return False
    # Whoever opens another pack found no room in those before: each has more than the capacity without the newcomer.
    return whole <= packs * (limits.tokens - largest) + largest or packs_needed(rows, limits) <= packs
