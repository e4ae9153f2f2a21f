"""Token slots, attention and steps, against slow counts that follow the definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.summary.workbench import sizes
from tests.tiny import random_examples, random_pairs
from tuningfork.data.packing.loader import EpochOrder, build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.packing.tree import Share
from tuningfork.data.summary import cost
from tuningfork.data.summary.cost import FirstSteps, count_cost, padded_slots, plan_run
from tuningfork.data.summary.records import Cost, RunPlan
from tuningfork.records import Segment, TokenExample


def order_of(examples: list[TokenExample], per_step: int, epochs: float = 1.0) -> EpochOrder:
    return EpochOrder.plan(len(examples), per_step, 3, epochs, None)


def limits_of(tokens: int = 128, share: Share = "prompt") -> PackLimits:
    return PackLimits.plan(tokens, share, compiled=False)


def cost_of(examples: list[TokenExample], order: EpochOrder, limits: PackLimits) -> Cost:
    epoch = replace(order, total_examples=len(examples))
    return count_cost(examples, sizes(examples), FirstSteps(examples, epoch), limits)


def plan_of(examples: list[TokenExample], order: EpochOrder, limits: PackLimits) -> RunPlan:
    return plan_run(sizes(examples), order, FirstSteps(examples, order), limits)


@settings(max_examples=40, deadline=None)
@given(
    examples=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=6),
    batch=st.integers(1, 7),
)
def test_padding_is_the_mean_over_all_orders(examples: list[tuple[int, int]], batch: int) -> None:
    """Of examples with any longest sequence and number of sequences."""

    def slots(order: tuple[tuple[int, int], ...]) -> int:
        batches = [order[start : start + batch] for start in range(0, len(order), batch)]
        return sum(sum(n for _, n in members) * max(length for length, _ in members) for members in batches)

    every = [slots(order) for order in permutations(examples)]
    longest, sequences = np.array(examples).T
    assert padded_slots(longest, sequences, batch) == pytest.approx(sum(every) / len(every))


def test_padding_by_hand() -> None:
    # batches of two of 1, 2, 6: {1,2}+{6}, {1,6}+{2}, {2,6}+{1}, each as likely: 8+12, 24+4, 24+2 slots
    assert padded_slots(np.array([1, 2, 6]), np.array([2, 2, 2]), 2) == pytest.approx((20 + 28 + 26) / 3)
    assert padded_slots(np.array([5, 3]), np.array([2, 2]), 8) == 20  # one batch of two pairs


def test_padding_of_a_large_file_is_what_shuffling_finds() -> None:
    rng = np.random.default_rng(0)
    longest = rng.integers(1, 1000, 40_003)
    shuffled = []
    for _ in range(5):
        rng.shuffle(longest)
        full = longest[:40_000].reshape(-1, 8).max(axis=1).sum() * 16
        shuffled.append(full + 2 * 3 * longest[40_000:].max())
    assert padded_slots(longest, np.full(40_003, 2), 8) == pytest.approx(np.mean(shuffled), rel=0.002)


def test_tokens_and_attention_by_hand() -> None:
    examples = random_examples([(3, (2, 1)), (0, (1, 4))])
    found = cost_of(examples, order_of(examples, 2), limits_of())
    assert (found.tokens, found.unique_tokens) == (6 + 3 + 5, 3 + 3 + 5)
    assert found.tokens_saved == pytest.approx(3 / 14)
    assert found.counted_tokens == 3 + 3  # the first token of an answer without a prompt has no predictor
    # alone: sequences of 5, 4, 1, 4 tokens see 15 + 10 + 1 + 10; shared, the prompt's 6 pairs are there once
    assert (found.attention_pairs, found.attention_pairs_shared) == (36, 30)
    assert found.attention_saved == pytest.approx(6 / 36)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 20), st.lists(st.integers(1, 12), min_size=1, max_size=3)), min_size=1, max_size=8
    )
)
def test_shared_attention_is_what_the_layout_lets_see(shapes: list[tuple[int, list[int]]]) -> None:
    """Counted from the segments of real packs: rows that see themselves causally, and their ancestors before."""
    examples = random_examples(shapes)
    order = order_of(examples, 4)
    seen = {}
    for share in ("prompt", "none"):
        seen[share] = 0
        for pack in build_packs(examples, limits_of(128, share)):
            for segment in (Segment(*entry) for entry in pack.layout.segments.tolist()):
                if segment.start < pack.used_slots:
                    rows = segment.end - segment.start
                    seen[share] += rows * (rows + 1) // 2 + rows * segment.first_position
    found = cost_of(examples, order, limits_of())
    assert (found.attention_pairs_shared, found.attention_pairs) == (seen["prompt"], seen["none"])


@pytest.mark.parametrize("share", ["none", "prompt", "tree"])
def test_layouts_and_plan_are_those_of_the_loader(share: Share) -> None:
    """Packs of every step of the run, and of the first epoch for its layouts, made as the trainer makes them."""
    examples = random_pairs(23, longest=40)
    order, limits = order_of(examples, 5, epochs=2.5), limits_of(160, share)

    def packed(order: EpochOrder) -> tuple[int, int, int]:
        """Packs, rows and rows with a token."""
        steps = [[examples[i] for i in order.indices(step)] for step in range(order.total_steps)]
        packs = [pack for members in steps for pack in build_packs(members, limits)]
        return len(packs), sum(len(pack.input_ids) for pack in packs), sum(pack.used_slots for pack in packs)

    number, rows, used = packed(order)
    plan = plan_of(examples, order, limits)
    assert (plan.examples, plan.steps_per_epoch, plan.steps, plan.steps_packed) == (23, 4.6, 12, 12)  # 58 pairs of 2.5
    assert plan.epochs == pytest.approx(58 / 23)
    assert (plan.packs, plan.packs_per_step, plan.packs_per_epoch) == (number, number / 12, round(number * 23 / 58))
    assert plan.slots == rows and plan.pad_share == pytest.approx(1 - used / rows)
    in_all = [examples[i] for step in range(order.total_steps) for i in order.indices(step)]
    assert plan.tokens == sum(len(one.prompt_ids) + len(answer.ids) for one in in_all for answer in one.answers)

    _, rows, used = packed(EpochOrder.plan(23, 5, 3, 1.0, None))
    layouts = {layout.name: layout for layout in cost_of(examples, order, limits).layouts}
    assert list(layouts) == ["padded", "packed", "shared"]
    shared = layouts["shared"]
    if share == "prompt":
        assert (shared.slots, shared.padding) == (rows, rows - used)
    assert shared.prompt_again == 0 and layouts["packed"].prompt_again == shared.prompt
    for layout in layouts.values():
        parts = layout.prompt + layout.prompt_again + layout.chosen + layout.rejected + layout.padding
        assert parts == layout.slots and layout.pad_share == pytest.approx(layout.padding / layout.slots)
    longest = np.array([example.longest for example in examples])
    assert layouts["padded"].slots == round(padded_slots(longest, np.full(23, 2), 8))


def test_packed_by_hand() -> None:
    """Sequences of 70, 60, 61 and 6 rows need two packs; whichever takes the 6, each rounds up to 128 rows."""
    examples = random_examples([(20, (50, 40)), (5, (56, 1))])
    layouts = cost_of(examples, order_of(examples, 2), limits_of(128)).layouts
    assert (layouts[1].slots, layouts[1].padding) == (256, 256 - 197)
    # the prompts once: 110 and 62 rows, which need a pack each, of 128 and 64 rows
    assert (layouts[2].slots, layouts[2].padding) == (192, 192 - 172)


def test_less_than_an_epoch_and_a_fixed_number_of_steps() -> None:
    examples = random_pairs(20)
    half = plan_of(examples, EpochOrder.plan(20, 4, 0, 0.5, None), limits_of())
    assert (half.steps, half.epochs, half.steps_per_epoch) == (3, 0.5, 5.0)
    long = plan_of(examples, EpochOrder.plan(20, 4, 0, 1.0, 50), limits_of())
    assert (long.steps, long.epochs) == (50, 10.0)
    assert long.tokens == 10 * sum(example.plain_tokens for example in examples)


def test_of_very_many_steps_the_first_speak_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = random_pairs(400, longest=30)
    order = order_of(examples, 4)
    exact = plan_of(examples, order, limits_of())
    monkeypatch.setattr(cost, "MOST_PACKED", 101)  # examples: 26 steps of 4
    some = plan_of(examples, order, limits_of())
    assert (exact.steps_packed, some.steps_packed) == (100, 26)
    assert some.packs_per_epoch == pytest.approx(exact.packs_per_epoch, rel=0.1)
    assert some.slots == pytest.approx(exact.slots, rel=0.1) and some.steps == exact.steps
