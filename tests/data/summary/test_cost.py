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
from tuningfork.data.summary.layouts import Cost
from tuningfork.data.summary.records import RunPlan
from tuningfork.records import Segment, Source, TokenAnswer, TokenExample


def order_of(examples: list[TokenExample], per_step: int, epochs: float = 1.0) -> EpochOrder:
    return EpochOrder.plan(len(examples), per_step, 3, epochs, None)


def limits_of(tokens: int = 128, share: Share = "prompt") -> PackLimits:
    return PackLimits.plan(tokens, share, compiled=False)


def cost_of(examples: list[TokenExample], order: EpochOrder, limits: PackLimits) -> Cost:
    epoch = replace(order, total_examples=len(examples))
    return count_cost(examples, sizes(examples), FirstSteps.of(examples, epoch), limits)


def plan_of(examples: list[TokenExample], order: EpochOrder, limits: PackLimits) -> RunPlan:
    return plan_run(sizes(examples), order, FirstSteps.of(examples, order), limits)


@settings(max_examples=40)
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
    _, packed, shared, trees, together = found.layouts
    assert packed.tokens_saved == 0 and shared.tokens_saved == pytest.approx(3 / 14)
    assert found.counted_tokens == 3 + 3  # the first token of an answer without a prompt has no predictor
    # alone: sequences of 5, 4, 1, 4 tokens see 15 + 10 + 1 + 10; shared, the prompt's 6 pairs are there once
    assert (packed.attention_pairs, shared.attention_pairs) == (36, 30)
    assert packed.attention_saved == 0 and shared.attention_saved == pytest.approx(6 / 36)
    # random tokens have nothing in common, so trees are those of each example
    assert [layout.attention_pairs for layout in (trees, together)] == [30, 30]
    assert [layout.parts for layout in (trees, together)] == [shared.parts, shared.parts]


@settings(max_examples=30)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 20), st.lists(st.integers(1, 12), min_size=1, max_size=3)), min_size=1, max_size=8
    )
)
def test_shared_attention_is_what_the_layout_lets_see(shapes: list[tuple[int, list[int]]]) -> None:
    """Counted from the segments of real packs: rows that see themselves causally, and their ancestors before."""
    examples = random_examples(shapes)
    order = order_of(examples, len(examples))  # one step: what examples of two steps have in common is not shared
    seen = {}
    for share in ("prompt", "none", "tree"):
        seen[share] = 0
        for pack in build_packs(examples, limits_of(128, share)):
            for segment in (Segment(*entry) for entry in pack.layout.segments.tolist()):
                if segment.start < pack.used_slots:
                    rows = segment.end - segment.start
                    seen[share] += rows * (rows + 1) // 2 + rows * segment.first_position
    found = cost_of(examples, order, limits_of())
    pairs = {name: found.layout(name).attention_pairs for name in ("shared", "packed", "trees")}
    assert pairs == {"shared": seen["prompt"], "packed": seen["none"], "trees": seen["tree"]}


@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
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
    assert list(layouts) == ["padded", "packed", "shared", "trees", "together"]
    shared = layouts["shared"]
    if share != "none":  # whose layout is that of a trainer that knows no examples of several answers
        ours = layouts["trees" if share == "tree" else "shared"]
        assert (ours.slots, ours.padding) == (rows, rows - used)
    assert shared.prompt_again == 0 and layouts["packed"].prompt_again == shared.prompt
    for layout in layouts.values():
        assert sum(layout.parts.values()) == layout.slots and layout.pad_share == pytest.approx(
            layout.padding / layout.slots
        )
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


def example_of(row: int, prompt: range, *answers: range) -> TokenExample:
    """An example whose tokens are these numbers."""

    def ids(numbers: range) -> np.ndarray:
        return np.array(numbers, np.int32)

    laid = tuple(TokenAnswer(ids(answer), np.ones(len(answer), bool)) for answer in answers)
    return TokenExample(Source("rows", row), ids(prompt), laid)


def test_trees_by_hand() -> None:
    """Two turns of one conversation, and a pair with other tokens.

    row 1   prompt 0..39,  answers 40..79 (40 tokens) and 500..504 (5)
    row 2   prompt 0..99,  which is row 1's prompt, its answer and 20 tokens more, answers 600..609 and 610..619
    row 3   prompt 700..749, answer 800..809
    """
    examples = [
        example_of(1, range(40), range(40, 80), range(500, 505)),
        example_of(2, range(100), range(600, 610), range(610, 620)),
        example_of(3, range(700, 750), range(800, 810)),
    ]
    found = cost_of(examples, order_of(examples, 3), limits_of(320))
    trees = found.layout("trees")
    assert trees.parts == {
        "common_prompt": 40,
        "common_answer": 40,  # row 1's chosen answer, which is row 2's history
        "prompt": 20 + 50,
        "prompt_again": 0,
        "chosen": 10 + 10,
        "rejected": 5 + 10,
        "padding": 192 - 185,
    }
    assert (found.tokens, found.unique_tokens, trees.tokens) == (80 + 45 + 110 + 110 + 60, 85 + 120 + 60, 185)
    assert trees.tokens_saved == pytest.approx(1 - 185 / 405)
    # 100 tokens of one path see 5,050; then 5 behind 40, twice 10 behind 100, and 60 by themselves
    assert trees.attention_pairs == 5050 + (5 * 40 + 15) + 2 * (10 * 100 + 55) + 1830
    assert found.layout("together").parts == trees.parts
    # a step each: nothing is laid next to what begins alike, but all of them together would be
    apart = cost_of(examples, order_of(examples, 1), limits_of(320))
    assert apart.layout("trees").tokens == apart.layout("shared").tokens == 265
    assert apart.layout("trees").common_prompt == 0 and apart.layout("together").tokens == 185


def test_a_common_answer_of_one_example_is_its_first_ones() -> None:
    """Two answers of one prompt with 10 tokens in common; they count as chosen, and nothing is common to several."""
    examples = [example_of(1, range(5), range(10, 25), range(10, 20))]
    trees = cost_of(examples, order_of(examples, 1), limits_of()).layout("trees")
    assert (trees.prompt, trees.chosen, trees.rejected) == (5, 15, 0)
    assert (trees.common_prompt, trees.common_answer) == (0, 0)


def test_the_first_of_very_many_steps_are_scaled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts begin with 64 tokens in common, so each step lays them once; ten times the steps, ten times that."""
    examples = [example_of(row, range(64), range(1000 * row, 1000 * row + 16)) for row in range(1, 41)]
    exact = cost_of(examples, order_of(examples, 2), limits_of(512))
    monkeypatch.setattr(cost, "MOST_PACKED", 4)
    some = cost_of(examples, order_of(examples, 2), limits_of(512))
    assert (exact.examples_packed, some.examples_packed) == (40, 4)
    assert some.layout("trees") == exact.layout("trees")
    assert (some.layout("trees").common_prompt, some.layout("trees").chosen) == (20 * 64, 40 * 16)


def test_orders_to_compare_are_packed_as_well() -> None:
    """In one order the two halves of each prompt share a step, in the other they never do."""
    examples = [
        example_of(n, range(1000 * (n // 2), 1000 * (n // 2) + 50), range(9000 + n, 9001 + n)) for n in range(8)
    ]
    together = FirstSteps([[examples[n], examples[n + 1]] for n in range(0, 8, 2)])
    apart = FirstSteps([[examples[n], examples[n + 4]] for n in range(4)])
    found = count_cost(examples, sizes(examples), apart, limits_of(), {"grouped by prompt": together})
    assert [(layout.name, layout.order, layout.tokens) for layout in found.layouts[-3:]] == [
        ("trees", "", 8 * 51),
        ("trees", "grouped by prompt", 4 * 52),
        ("together", "", 4 * 52),
    ]
    assert found.layout("trees", "grouped by prompt").common_prompt == 4 * 50
