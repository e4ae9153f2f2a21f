"""The grouped order: whole, once, exact and pure as the shuffled one, with few of a group together and no more."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuningfork.data.packing.groups import Groups
from tuningfork.data.packing.loader import EpochOrder

KEYS = st.lists(st.integers(0, 6), min_size=1, max_size=40)  # 0: an example that has no key
MOST = st.integers(1, 12)
SEEDS = st.integers(0, 2**32 - 1)


def groups_of(keys: list[int], most: int) -> Groups:
    return Groups.of_keys("prompt", np.array(keys, dtype="<u8"), most)


def order_of(keys: list[int], most: int, seed: int = 0, batch: int = 3, epochs: float = 1.0) -> EpochOrder:
    return EpochOrder.plan(len(keys), batch, seed, epochs, None, groups=groups_of(keys, most))


def stream(order: EpochOrder, first: int = 0) -> list[int]:
    return [i for step in range(first, order.total_steps) for i in order.indices(step)]


def by_hand(keys: list[int], most: int, seed: int, epoch: int) -> list[int]:
    """The definition, one example after another."""
    random = np.random.default_rng([seed, epoch])
    groups: dict[object, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key or f"alone {i}", [])
    for i in random.permutation(len(keys)).tolist():
        groups[keys[i] or f"alone {i}"].append(i)
    pieces = [group[n : n + most] for group in groups.values() for n in range(0, len(group), most)]
    return [i for piece in random.permutation(len(pieces)) for i in pieces[piece]]


@settings(max_examples=200)
@given(keys=KEYS, most=MOST, seed=SEEDS, batch=st.integers(1, 50), epochs=st.integers(1, 3))
def test_each_epoch_is_whole_and_as_defined_and_each_step_exact(keys, most, seed, batch, epochs):
    order = order_of(keys, most, seed, batch, epochs)
    n, seen = len(keys), stream(order)
    for epoch in range(epochs):
        found = seen[epoch * n : (epoch + 1) * n]
        assert sorted(found) == list(range(n))
        assert found == by_hand(keys, most, seed, epoch)
    sizes = [len(order.indices(step)) for step in range(order.total_steps)]
    assert sizes[:-1] == [batch] * (len(sizes) - 1)
    assert sum(sizes) == epochs * n


@settings(max_examples=200)
@given(keys=KEYS, most=MOST, seed=SEEDS)
def test_a_group_lies_in_as_few_pieces_as_can_be(keys, most, seed):
    """Two pieces of one group may come to lie side by side, so a run is some pieces, of which one may be the rest."""
    seen = stream(order_of(keys, most, seed))
    runs: dict[int, list[int]] = {}
    for key, run in groupby(seen, key=lambda i: keys[i]):
        runs.setdefault(key, []).append(len(list(run)))
    for key, size in Counter(keys).items():
        if key == 0:
            continue
        pieces, rest = divmod(size, most)
        assert len(runs[key]) <= pieces + (rest > 0)
        assert all(length % most in (0, rest) for length in runs[key])
        assert sum(length % most != 0 for length in runs[key]) <= 1


def test_no_piece_is_larger_than_asked():
    """Six of a group in pieces of three, and 30 alone: two of 32 pieces lie side by side in one order of 16."""
    runs = []
    for seed in range(160):
        seen = stream(order_of([1] * 6 + [0] * 30, 3, seed))
        runs += [tuple(len(list(run)) for of_group, run in groupby(seen, key=lambda i: i < 6) if of_group)]
    assert {*runs} == {(3, 3), (6,)}
    assert 1 <= runs.count((6,)) <= 25  # 10 expected; five standard deviations are 15


@settings(max_examples=50)
@given(keys=KEYS, seed=SEEDS, batch=st.integers(1, 9), stop=st.integers(0, 40))
def test_a_run_that_goes_on_from_any_step_or_is_made_longer_sees_what_one_run_sees(keys, seed, batch, stop):
    groups = groups_of(keys, 3)
    order = order_of(keys, 3, seed, batch, epochs=2)
    stop = min(stop, order.total_steps)
    seen = [i for step in range(stop) for i in order.indices(step)]
    again = EpochOrder.plan(len(keys), batch, seed, 2, None, stop, len(seen), groups=groups_of(keys, 3))
    assert seen + stream(again, stop) == stream(order)
    longer = EpochOrder.plan(len(keys), batch, seed, 3, None, order.total_steps, 2 * len(keys), groups=groups)
    assert sorted(stream(longer, order.total_steps)) == list(range(len(keys)))


@settings(max_examples=50)
@given(keys=KEYS, most=MOST, epochs=st.floats(0.01, 2.5))
def test_used_indices_are_exactly_those_that_the_run_meets(keys, most, epochs):
    order = order_of(keys, most, epochs=epochs)
    assert order.used_indices().tolist() == sorted(set(stream(order)))


@settings(max_examples=50)
@given(keys=KEYS, most=MOST, seed=SEEDS)
def test_the_order_depends_on_who_belongs_together_and_not_on_the_keys(keys, most, seed):
    others = [key and 2**64 - key for key in keys]
    assert stream(order_of(keys, most, seed)) == stream(order_of(others, most, seed))


def test_groups_of_one_are_shuffled_like_any_others():
    order = order_of([1] * 20 + [2] * 20, 1, batch=40, epochs=2)
    first, second = order.indices(0), order.indices(1)
    assert first != second
    assert len([*groupby(first, key=lambda i: i < 20)]) > 10, "nobody is kept together"


def test_pieces_and_members_are_drawn_evenly():
    """A group of five in pieces of 2, 2 and 1, and three examples alone: six pieces, each as often in front."""
    keys, runs = [7, 7, 7, 7, 7, 0, 0, 0], 4000
    front = np.bincount([order_of(keys, 2, seed, batch=8).indices(0)[0] for seed in range(runs)], minlength=8)
    expected = runs * np.array([3 / 6 / 5] * 5 + [1 / 6] * 3)
    assert (np.abs(front - expected) < 5 * np.sqrt(expected)).all()  # five standard deviations


@pytest.mark.parametrize("examples", [1, 7, 1000])
def test_the_shuffled_order_is_that_of_numpy_to_the_bit(examples):
    order = EpochOrder.plan(examples, 5, 11, 2, None)
    one, two = (np.random.default_rng([11, epoch]).permutation(examples).tolist() for epoch in (0, 1))
    assert stream(order) == one + two


def test_the_shuffled_order_by_numbers():
    """They are those of earlier versions: a run of theirs goes on with them."""
    assert stream(EpochOrder.plan(10, 4, 3, 1, None)) == [9, 6, 0, 2, 1, 4, 7, 5, 3, 8]


def test_an_order_in_which_no_two_examples_belong_together_says_that_it_is_a_shuffle() -> None:
    assert (
        str(groups_of([0, 3, 0, 4], most=2))
        == "grouped by prompt, but no two examples belong together: it is a shuffle"
    )
    assert str(groups_of([0, 3, 0, 3], most=2)) == "grouped by prompt: 3 groups, at most 2 of one together"
