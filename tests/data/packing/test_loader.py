"""The order of a run: a pure function of (seed, step), in which no example is lost or seen twice in an epoch."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.packing.alike import example_of
from tests.tiny import limits_of, random_examples, random_pairs
from tuningfork.data.packing.loader import EpochOrder, PackLoader, ahead, build_packs, packs_in_windows
from tuningfork.data.packing.pack import PackLimits
from tuningfork.records import PackedBatch, TokenExample


def stream(order: EpochOrder, first: int = 0) -> list[int]:
    return [i for step in range(first, order.total_steps) for i in order.indices(step)]


@settings(max_examples=100)
@given(examples=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), epochs=st.integers(1, 4))
def test_each_epoch_is_a_permutation_and_each_batch_exact(examples, batch, seed, epochs):
    order = EpochOrder.plan(examples, batch, seed, epochs=epochs, max_steps=None)
    seen = stream(order)
    assert len(seen) == examples * epochs
    for epoch in range(epochs):
        assert sorted(seen[epoch * examples : (epoch + 1) * examples]) == list(range(examples))
    sizes = [len(order.indices(step)) for step in range(order.total_steps)]
    assert all(size == batch for size in sizes[:-1])
    assert 1 <= sizes[-1] <= batch
    assert order.epoch_after(order.total_steps - 1) == epochs


@settings(max_examples=60)
@given(
    examples=st.integers(1, 20),
    batch=st.integers(1, 25),
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_a_run_that_is_made_longer_loses_no_example_and_sees_none_twice(examples, batch, lengths):
    """By epochs, again and again, stopped after any of its steps: each epoch is a permutation all the same."""
    seen: list[int] = []
    done_steps, epochs = 0, 0
    for more, stop in lengths:
        epochs += more
        order = EpochOrder.plan(examples, batch, 3, epochs, None, done_steps, len(seen))
        last = min(order.total_steps, done_steps + stop)
        for step in range(done_steps, last):
            assert order.epoch_after(step) == (len(seen) + len(order.indices(step))) / examples
            seen += order.indices(step)
        done_steps = last
    order = EpochOrder.plan(examples, batch, 3, epochs, None, done_steps, len(seen))
    seen += stream(order, done_steps)
    assert len(seen) == examples * epochs
    assert all(sorted(seen[n : n + examples]) == list(range(examples)) for n in range(0, len(seen), examples))
    longer = EpochOrder.plan(examples, batch, 3, epochs, order.total_steps + 2, order.total_steps, len(seen))
    assert [len(longer.indices(step)) for step in range(order.total_steps, longer.total_steps)] == [batch] * 2


@settings(max_examples=60)
@given(examples=st.integers(1, 30), batch=st.integers(1, 40), steps=st.integers(1, 12))
def test_max_steps_overrides_epochs_with_full_batches(examples, batch, steps):
    order = EpochOrder.plan(examples, batch, seed=1, epochs=0.01, max_steps=steps)
    assert order.total_steps == steps
    assert [len(order.indices(step)) for step in range(steps)] == [batch] * steps
    # No example is ahead of another by more than one pass.
    counts = Counter(stream(order))
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(examples)) <= 1


@settings(max_examples=60)
@given(
    examples=st.integers(1, 30),
    batch=st.integers(1, 12),
    epochs=st.floats(0.01, 2.5),
    steps=st.none() | st.integers(1, 6),
)
def test_used_indices_are_exactly_those_that_the_run_meets(examples, batch, epochs, steps):
    order = EpochOrder.plan(examples, batch, seed=2, epochs=epochs, max_steps=steps)
    assert order.used_indices().tolist() == sorted(set(stream(order)))


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    most=st.integers(1, 60),
    epochs=st.integers(1, 3),
    stop=st.integers(0, 9),
)
def test_a_step_by_tokens_is_the_longest_run_of_examples_within_them(sizes, most, epochs, stop):
    """Each epoch is a permutation, also of a run that is stopped and made longer; a step of one may have more."""
    tokens = np.array(sizes)
    order = EpochOrder.by_tokens(tokens, most, 5, epochs, None)
    assert sorted(stream(order)) == sorted(list(range(len(sizes))) * epochs)
    steps = [order.indices(step) for step in range(order.total_steps)]
    for step, after in pairwise([*steps, None]):
        held = int(tokens[step].sum())
        assert held <= most or len(step) == 1
        assert after is None or held + sizes[after[0]] > most
    assert order.epoch_after(order.total_steps - 1) == epochs

    done_steps = min(stop, order.total_steps)
    seen = [place for step in steps[:done_steps] for place in step]
    again = EpochOrder.by_tokens(tokens, most, 5, epochs, None, done_steps, len(seen))
    assert again.cuts == order.cuts
    longer = EpochOrder.by_tokens(tokens, most, 5, epochs + 1, None, done_steps, len(seen))
    everything = seen + stream(longer, done_steps)
    assert sorted(everything) == sorted(list(range(len(sizes))) * (epochs + 1))
    counted = EpochOrder.by_tokens(tokens, most, 5, 0.01, order.total_steps + 2)
    assert counted.total_steps == order.total_steps + 2
    assert [counted.indices(step) for step in range(order.total_steps - 1)] == steps[:-1]


def test_steps_by_tokens_by_hand():
    """Ten tokens a step; the one example of eleven is a step of its own."""
    order = EpochOrder.by_tokens(np.array([4, 4, 2, 4, 4, 11]), 10, 0, 1, None)
    assert [place for step in range(4) for place in order.indices(step)] == [3, 2, 5, 4, 0, 1]
    assert [order.indices(step) for step in range(order.total_steps)] == [[3, 2], [5], [4, 0], [1]]
    assert order.used_indices().tolist() == list(range(6))


def test_epochs_differ_in_order():
    order = EpochOrder.plan(50, 50, seed=0, epochs=3, max_steps=None)
    epochs = [tuple(order.indices(step)) for step in range(3)]
    assert len(set(epochs)) == 3
    assert tuple(range(50)) not in epochs


@pytest.mark.parametrize(
    ("epochs", "total", "steps", "last"),
    [(1, 10, 3, 2), (0.5, 5, 2, 1), (1.5, 15, 4, 3), (2, 20, 5, 4), (0.01, 1, 1, 1), (0.4, 4, 1, 4)],
)
def test_fractional_epochs_by_hand(epochs, total, steps, last):
    """10 examples, 4 a step."""
    order = EpochOrder.plan(10, 4, seed=0, epochs=epochs, max_steps=None)
    assert (order.total_examples, order.total_steps) == (total, steps)
    assert len(order.indices(steps - 1)) == last
    assert [order.epoch_after(s) for s in range(steps)] == [min(4 * (s + 1), total) / 10 for s in range(steps)]


def test_three_examples_and_a_batch_of_thirty_two():
    """open-instruct's small-data crash: every step is there, whole, and nothing is dropped."""
    examples = random_pairs(3)
    order = EpochOrder.plan(3, 32, seed=0, epochs=1, max_steps=None)
    loader = PackLoader(examples, order, limits_of())
    [(step, packs)] = steps_of(loader, 0)
    assert step == 0
    assert Counter(e.id for pack in packs for e in pack.examples) == {e.id: 1 for e in examples}

    order = EpochOrder.plan(3, 32, seed=0, epochs=1, max_steps=2)
    loader = PackLoader(examples, order, limits_of())
    steps = [[e.id for pack in packs for e in pack.examples] for _, packs in steps_of(loader, 0)]
    assert [len(ids) for ids in steps] == [32, 32]
    assert all(10 <= count <= 11 for ids in steps for count in Counter(ids).values())


def steps_of(loader: PackLoader, first: int) -> Iterator[tuple[int, list[PackedBatch]]]:
    """The packs of each step from `first` on, as a run asks for them."""
    return ((step, loader.step(step)) for step in range(first, loader.order.total_steps))


def contents(loader: PackLoader, first: int) -> list[tuple[int, list[list[int]], list[list[str]]]]:
    return [
        (step, [pack.input_ids.tolist() for pack in packs], [[e.id for e in pack.examples] for pack in packs])
        for step, packs in steps_of(loader, first)
    ]


def test_resuming_at_any_step_gives_the_same_stream_in_later_epochs_too():
    """ms-swift#10050: a resume in epoch >= 1 replayed the order of epoch 0."""
    examples = random_pairs(10)
    order = EpochOrder.plan(10, 3, seed=5, epochs=3, max_steps=None)  # 10 steps, boundaries of epochs inside steps

    def fresh() -> PackLoader:
        return PackLoader(examples, order, limits_of(tokens=64))

    whole = contents(fresh(), 0)
    assert [step for step, _, _ in whole] == list(range(10))
    for first in range(11):
        assert contents(fresh(), first) == whole[first:]
    ids = [name for _, _, packs in whole for members in packs for name in members]
    for epoch in range(3):
        in_epoch = {examples[i].id for i in stream(order)[10 * epoch : 10 * (epoch + 1)]}
        assert len(in_epoch) == 10
    assert Counter(ids) == {e.id: 3 for e in examples}


def test_a_stream_can_be_left_early_and_taken_up_again():
    examples = random_pairs(8)
    loader = PackLoader(examples, EpochOrder.plan(8, 2, 0, 2, None), limits_of())
    steps = steps_of(loader, 0)
    assert next(steps)[0] == 0
    steps.close()
    assert [step for step, _ in steps_of(loader, 1)] == [1, 2, 3, 4, 5, 6, 7]


def test_seeds_differ_and_repeat():
    orders = [EpochOrder.plan(30, 30, seed, 1, None) for seed in (0, 1, 2, 0)]
    first, second, third, again = (tuple(order.indices(0)) for order in orders)
    assert first == again
    assert len({first, second, third}) == 3


def test_a_seed_is_not_an_epoch_of_another_seed():
    """With seed + epoch as a random seed, run 1 would be run 0 one epoch later."""
    of_seed = {seed: [tuple(EpochOrder.plan(30, 30, seed, 4, None).indices(s)) for s in range(4)] for seed in range(4)}
    orders = [epoch for epochs in of_seed.values() for epoch in epochs]
    assert len(set(orders)) == len(orders)


def test_global_random_generators_are_left_alone():
    examples = random_pairs(6)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    loader = PackLoader(examples, EpochOrder.plan(6, 4, 3, 2, None), limits_of())
    assert len(list(steps_of(loader, 0))) == 3
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_an_error_in_the_thread_reaches_the_caller():
    examples = random_pairs(4)
    limits = limits_of()
    loader = PackLoader([*examples[:3], None], EpochOrder.plan(4, 1, 0, 1, None), limits)  # type: ignore[list-item]
    with pytest.raises(AttributeError):
        list(ahead(steps_of(loader, 0)))


def test_the_next_item_is_made_in_a_thread_while_the_one_before_is_used():
    """And no more than that one, for they take memory; an error comes where its item is taken, not before."""
    made = {n: threading.Event() for n in range(4)}

    def items():
        for n in made:
            assert threading.current_thread() is not threading.main_thread()
            if n == 3:
                raise ValueError("no third")
            made[n].set()
            yield n

    coming = ahead(items())
    assert not made[0].is_set()
    assert next(coming) == 0 and made[1].wait(10) and not made[2].is_set()
    assert next(coming) == 1 and made[2].wait(10)
    assert next(coming) == 2
    with pytest.raises(ValueError, match="no third"):
        next(coming)
    assert list(ahead(range(5))) == [0, 1, 2, 3, 4] and list(ahead([])) == []


def test_build_packs_lays_out_what_the_packer_chose():
    examples = random_pairs(12)
    limits = limits_of(tokens=128)
    packs = build_packs(examples, limits)
    assert len(packs) > 1
    assert Counter(e.id for pack in packs for e in pack.examples) == Counter(e.id for e in examples)
    assert all(len(pack.input_ids) == limits.slots(pack.used_slots) <= 128 for pack in packs)
    assert sum(pack.used_slots for pack in packs) == sum(e.unique_tokens for e in examples)


def of_two_stems(count: int) -> list[TokenExample]:
    """Examples that take turns at two stems of 60 tokens, with two answers each."""
    return [example_of(row, [1 + row % 2] * 60, [10 + row] * 4, [50 + row] * 3) for row in range(count)]


@pytest.mark.parametrize(("share", "used"), [("none", 8 * 127), ("prompt", 8 * 67), ("tree", 2 * 60 + 8 * 7)])
def test_a_steps_trees_share_its_packs(share, used):
    """Which eight of the examples a step holds chance decides: all, here."""
    loader = PackLoader(of_two_stems(8), EpochOrder.plan(8, 8, 0, 1, None), limits_of(256, share))
    packs = loader.step(0)
    assert sum(pack.used_slots for pack in packs) == used
    assert sorted(e.source.row for pack in packs for e in pack.examples) == list(range(8))


@pytest.mark.parametrize("window", [4, 30, 1024])
def test_packs_in_windows_hold_every_example_once(window):
    examples = random_pairs(100)
    packs = list(packs_in_windows(examples, limits_of(tokens=128), window))
    assert Counter(e.id for pack in packs for e in pack.examples) == Counter(e.id for e in examples)
    assert sum(pack.used_slots for pack in packs) == sum(e.unique_tokens for e in examples)
    assert all(len(pack.input_ids) <= 128 for pack in packs)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("share", ["none", "prompt", "tree"])
def test_a_full_pack_is_filled_up_to_the_quantum_alone(share, compiled):
    examples = random_examples([(10, (20, 24)), (5, (6, 7))])
    rows = sum(e.plain_tokens if share == "none" else e.unique_tokens for e in examples)
    limits = PackLimits.plan(rows, share, compiled)
    [batch] = build_packs(examples, limits)
    assert batch.used_slots == rows and len(batch.input_ids) == rows + -rows % limits.quantum


@pytest.mark.parametrize(("share", "compiled"), [("prompt", True), ("prompt", False), ("none", True)])
def test_packs_have_the_rows_that_the_limits_say(share, compiled):
    examples = random_pairs(40)
    limits = PackLimits.plan(1300, share, compiled)
    packs = build_packs(examples, limits)
    assert [len(pack.input_ids) for pack in packs] == [limits.slots(pack.used_slots) for pack in packs]
    assert {len(pack.input_ids) % limits.quantum for pack in packs} == {0}
    assert sum(pack.used_slots for pack in packs) == sum(
        e.plain_tokens if share == "none" else e.unique_tokens for e in examples
    )
