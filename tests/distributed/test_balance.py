"""Sharing a step out over ranks: nothing lost, nothing twice, and no rank much slower than the mean."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lengths import QUANTILES, draw
from tests.data.rows import read_examples
from tests.data.test_real_files import DPO_EN, HH
from tuningfork.distributed.balance import balance_examples, balance_within, exchanged

RANKS = [2**n for n in range(1, 11)]
COSTS = st.lists(st.integers(0, 50) | st.integers(0, 10**15), max_size=60)


@settings(max_examples=300)
@given(costs=COSTS, ranks=st.integers(1, 20))
def test_every_example_is_on_exactly_one_rank_and_every_rank_has_one(costs, ranks):
    shares = balance_examples(costs, ranks)
    assert len(shares.ranks) == len(shares.costs) == ranks
    assert sorted(i for own in shares.ranks for i in own) == list(range(len(costs)))
    assert all(list(own) == sorted(own) for own in shares.ranks)
    assert shares.costs == tuple(sum(costs[i] for i in own) for own in shares.ranks)
    assert shares.largest == max(costs, default=0)
    assert sum(bool(own) for own in shares.ranks) == min(ranks, len(costs))
    assert max(shares.costs) >= shares.bound * (1 - 1e-12)
    assert balance_examples(list(costs), ranks) == shares


@settings(max_examples=150)
@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=7), ranks=st.integers(1, 3))
def test_the_slowest_rank_is_close_to_the_best_of_all_plans(costs, ranks):
    """Against every plan there is. Costliest first alone is within 4/3 - 1/(3 ranks) of the best (Graham 1969)."""
    plans = product(range(ranks), repeat=len(costs))
    best = min(
        max(sum(c for c, r in zip(costs, plan, strict=True) if r == rank) for rank in range(ranks)) for plan in plans
    )
    slowest = max(balance_examples(costs, ranks).costs)
    assert best <= slowest <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_costliest_first_by_hand():
    # 8 | 7 | 6, then 5 to the 6, 4 to the 7, 3 to the 8: 11 each.
    shares = balance_examples([3, 8, 5, 7, 4, 6], 3)
    assert shares.ranks == ((0, 1), (3, 4), (2, 5))
    assert (shares.costs, shares.mean, shares.bound, shares.imbalance) == ((11, 11, 11), 11, 11, 1)


def test_exchanges_by_hand():
    # Costliest first ends with 5 3 3 | 5 3 | 4 4. The first gives a 5 for the 3 of the second: 3 3 3 | 5 5 | 4 4.
    # Then the second gives a 5 for a 4 of the third.
    costs = [5, 5, 4, 4, 3, 3, 3]
    shares = balance_examples(costs, 3)
    assert shares.costs == (9, 9, 9)
    assert sorted(sorted(costs[i] for i in own) for own in shares.ranks) == [[3, 3, 3], [4, 5], [4, 5]]


def test_an_example_is_given_for_nothing_where_that_helps():
    # Dealt out as they came: 4 3 2 | 5 and nothing. The first gives the 4 for nothing, and then 5 | 5 is as good as 5.
    shares = exchanged([4, 3, 2, 5], [[0, 1, 2], [3], []], lambda _: True)
    assert shares.costs == (5, 5, 4) and shares.ranks == ((1, 2), (3,), (0,))


def test_ranks_get_only_what_they_have_room_for():
    # 6 | 5, then 4 to the 5 and 2 to the 6, if no rank holds more than two; the 1 finds no room.
    assert balance_within([6, 5, 4, 2], 2, lambda own: len(own) <= 2).ranks == ((0, 3), (1, 2))
    assert balance_within([6, 5, 4, 2, 1], 2, lambda own: len(own) <= 2) is None
    # 4 2 2 | 3 1: a 2 for nothing leaves 6 | 6, unless the 2s have no room beside the others' examples.
    costs, dealt = [4, 2, 2, 3, 1], [[0, 1, 2], [3, 4]]
    assert exchanged(costs, dealt, lambda _: True).ranks == ((0, 2), (1, 3, 4))
    apart = lambda own: {1, 2}.isdisjoint(own) or {3, 4}.isdisjoint(own)  # noqa: E731
    assert exchanged(costs, dealt, apart).ranks == ((0, 1, 2), (3, 4))


def test_an_exchange_that_does_not_help_is_not_made():
    # Costliest first: 6 2 2 | 5 4; a 6 for the 5 would leave 9 | 10.
    assert balance_examples([6, 5, 4, 2, 2], 2).ranks == ((0, 3, 4), (1, 2))


def test_integers_of_numpy_do_not_overflow():
    half = np.array([2**62, 2**62, 2**62, 2**62])
    assert balance_examples(half, 1).costs == (2**64,)


def test_one_giant_example_is_the_bound():
    costs = [1] * 20 + [1000] + [1] * 10
    shares = balance_examples(costs, 4)
    assert max(shares.costs) == shares.bound == shares.largest == 1000
    assert sorted(map(len, shares.ranks)) == [1, 10, 10, 10]
    assert shares.mean == 1030 / 4 and shares.imbalance == 1000 / (1030 / 4)


def test_fewer_examples_than_ranks_leave_ranks_without_one():
    shares = balance_examples([5, 9], 4)
    assert sorted(shares.ranks) == [(), (), (0,), (1,)]
    assert (shares.mean, shares.bound) == (3.5, 9)
    empty = balance_examples([], 3)
    assert (empty.ranks, empty.costs, empty.imbalance) == (((), (), ()), (0, 0, 0), 1)


def test_examples_that_cost_nothing_still_give_every_rank_one():
    shares = balance_examples([0, 0, 0], 3)
    assert sorted(shares.ranks) == [(0,), (1,), (2,)] and shares.imbalance == 1


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        balance_examples([1, 2], 0)
    with pytest.raises(ValueError, match="example 1 of the batch costs below 0"):
        balance_examples([1, -2], 2)


def flops(prompt, chosen, rejected, share_prompt: bool):
    """Work of a model with 1.2 billion block weights, 16 layers of width 2,048 and 100,352 words, counted in full."""
    triangle = lambda n: n * (n + 1) // 2  # noqa: E731
    once = 1 if share_prompt else 0
    rows = 2 * prompt + chosen + rejected - once * prompt
    pairs = triangle(prompt + chosen) + triangle(prompt + rejected) - once * triangle(prompt)
    return 2 * 1_200_000_000 * rows + 4 * 16 * 2048 * pairs + 2 * 100_352 * 2048 * (chosen + rejected)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("per_rank", [8, 16, 32])
@pytest.mark.parametrize("name", QUANTILES)
def test_ranks_are_alike_on_real_lengths(name, per_rank, share):
    for ranks in RANKS:
        costs = flops(*draw(name, ranks * per_rank, seed=ranks).T, share).tolist()
        assert balance_examples(costs, ranks).imbalance < 1.03, ranks


@pytest.mark.parametrize("name", QUANTILES)
def test_few_examples_a_rank_are_close_to_the_bound(name):
    for ranks in RANKS[2:]:
        shares = balance_examples(flops(*draw(name, ranks * 4, seed=ranks).T, True).tolist(), ranks)
        assert max(shares.costs) < 1.03 * shares.bound, ranks


@pytest.mark.skipif(not HH.exists(), reason="no real data: set TUNINGFORK_DATA to a folder that has it")
@pytest.mark.parametrize("path", [HH, DPO_EN], ids=lambda path: path.name)
def test_ranks_are_alike_on_real_files(path):
    """Words count in place of tokens."""
    lengths = []
    for example in read_examples(path, as_text=False).examples:
        turns = [example.prompt, *example.answers]
        lengths.append([sum(len(turn.content.split()) for turn in part) for part in turns])
    rng = np.random.default_rng(0)
    for ranks in (2, 8, 64, 1024):
        drawn = np.array(lengths)[rng.integers(0, len(lengths), 32 * ranks)]
        assert balance_examples(flops(*drawn.T, True).tolist(), ranks).imbalance < 1.03, ranks
