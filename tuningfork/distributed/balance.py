"""Which rank works on which examples of a step, so that all ranks are done at the same time.

A pure function of the examples' costs: every rank computes the whole plan for itself, and all have the same one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

GOOD_ENOUGH = 1.001  # slowest rank / the least possible; packs round their sizes up by more than what is left
_PARTNERS = 256  # that the slowest of many ranks asks for an exchange, from the one with least to do up to its own like

Fits = Callable[[Sequence[int]], bool]
"""Whether one rank has room for these examples, given as places in the batch. If it has, it has for some of them."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A step's examples, shared out over ranks. Costs are in the unit in which they were given."""

    ranks: tuple[tuple[int, ...], ...]  # each rank's examples as places in the batch, in order
    costs: tuple[int, ...]  # what each rank's examples cost together
    largest: int  # cost of the costliest example

    @property
    def mean(self) -> float:
        """Cost of a rank if all were alike."""
        return sum(self.costs) / len(self.costs)

    @property
    def bound(self) -> float:
        """No plan has a slowest rank below this: an example is never cut."""
        return max(self.mean, self.largest)

    @property
    def imbalance(self) -> float:
        """Slowest rank / mean: how much longer a step takes than it would on ranks alike; 1 is perfect."""
        return max(self.costs) / self.mean if self.mean else 1.0


def balance_examples(costs: Sequence[int], ranks: int) -> Shares:
    """Share examples out over ranks so that the slowest rank has as little to do as can be.

    The costliest example first, each to the rank that has least so far; then the slowest rank gives examples to others,
    for one of theirs or for nothing, as long as that helps. Every example is on exactly one rank, and every rank has
    one where there are enough of them; ranks may have different numbers of examples.

    Args:
        costs: of each example, in any whole unit, not negative; `FlopCounter.training` gives it in flops.
        ranks: how many there are.

    Raises:
        ValueError: there is no rank, or a cost is negative.
    """
    shares = balance_within(costs, ranks, lambda _: True)
    assert shares is not None  # there is room for everything everywhere
    return shares


def balance_within(costs: Sequence[int], ranks: int, fits: Fits) -> Shares | None:
    """The same on ranks that do not have room for everything: each gets only what it has room for.

    Returns:
        None: dealt out in this way, an example found no rank with room for it.

    Raises:
        ValueError: there is no rank, or a cost is negative.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks to share examples out over")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"example {next(i for i, cost in enumerate(costs) if cost < 0)} of the batch costs below 0")
    costs = [int(cost) for cost in costs]  # numpy's integers overflow
    members: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, 0, rank) for rank in range(ranks)]  # a heap: load, examples, rank
    for example in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full = []
        while least and not fits([*members[least[0][2]], example]):
            full.append(heappop(least))
        if not least:
            return None
        load, count, rank = heappop(least)
        members[rank].append(example)
        for entry in (*full, (load + costs[example], count + 1, rank)):
            heappush(least, entry)
    return exchanged(costs, members, fits)


def exchanged(costs: Sequence[int], members: Sequence[Sequence[int]], fits: Fits) -> Shares:
    """Examples that are dealt out already, after ranks have exchanged some for as long as the slowest gains by it.

    Args:
        members: each rank's examples, as places in the batch. It has room for them.
    """
    costs = [int(cost) for cost in costs]
    own = [list(some) for some in members]
    loads = [sum(costs[i] for i in some) for some in own]
    largest = max(costs, default=0)
    _trade(costs, own, loads, GOOD_ENOUGH * max(sum(costs) / len(own), largest), fits)
    return Shares(tuple(tuple(sorted(some)) for some in own), tuple(loads), largest)


def _trade(costs: Sequence[int], members: list[list[int]], loads: list[int], goal: float, fits: Fits) -> None:
    """Exchange examples of the slowest rank until it is at the goal, or no exchange makes it faster.

    One that gets nothing back gives an example away. Of many ranks some are asked, as far apart as they are many, so
    that the time grows with their number and not with its square.
    """
    by_load = sorted((load, rank) for rank, load in enumerate(loads))
    while by_load[-1][0] > goal:
        load, slowest = by_load[-1]
        for other_load, partner in by_load[: -1 : max(len(by_load) // _PARTNERS, 1)]:
            pair = _exchange(costs, members[slowest], members[partner], load - other_load, fits)
            if pair is not None:
                break
        else:
            return
        gone, come = pair
        members[slowest] = _with_other(members[slowest], gone, come)
        members[partner] = _with_other(members[partner], come, gone)
        moved = costs[gone] - (0 if come is None else costs[come])
        for rank, more in ((slowest, -moved), (partner, moved)):
            del by_load[bisect_left(by_load, (loads[rank], rank))]
            loads[rank] += more
            insort(by_load, (loads[rank], rank))


def _exchange(
    costs: Sequence[int], slow: Sequence[int], fast: Sequence[int], apart: int, fits: Fits
) -> tuple[int, int | None] | None:
    """The example of the slow rank and that of the fast one, or nothing, that leave the two closest when exchanged.

    Both ranks have room for what they get. `apart` is the difference of their costs. None: every exchange leaves one
    of them at least as slow.
    """
    offers: list[tuple[int, int | None]] = [(0, None), *sorted((costs[i], i) for i in fast)]
    prices = [price for price, _ in offers]
    best, closest = None, apart
    for example in slow:
        place = bisect_left(prices, costs[example] - apart // 2)  # to move half of the difference would be ideal
        for cost, other in offers[max(place - 1, 0) : place + 1]:
            after = abs(apart - 2 * (costs[example] - cost))
            if after < closest and _both_fit(slow, fast, example, other, fits):
                best, closest = (example, other), after
    return best


def _both_fit(slow: Sequence[int], fast: Sequence[int], gone: int, come: int | None, fits: Fits) -> bool:
    return fits(_with_other(fast, come, gone)) and fits(_with_other(slow, gone, come))


def _with_other(members: Sequence[int], gone: int | None, come: int | None) -> list[int]:
    kept = [i for i in members if i != gone]
    return kept if come is None else [*kept, come]
