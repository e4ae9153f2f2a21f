"""A step's packs on ranks: each example once, as many packs everywhere, and no more work than there is to do."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lengths import QUANTILES, draw, examples_of
from tests.data.packing.alike import SHARES, alike, check_forest, example_of
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import PackLimits, pack_evenly, pack_of, portions_of
from tuningfork.data.packing.portions import Portion
from tuningfork.data.packing.tree import Share, grow
from tuningfork.distributed.plan import ALIKE, StepPlan, plan_step
from tuningfork.records import TokenExample


def limits_of(tokens: int, share: Share = "prompt") -> PackLimits:
    return PackLimits.plan(tokens, share, compiled=False)


def cost(portion: Portion) -> int:
    return 3 * portion.rows + portion.logit_rows


def pairs(*rows: int) -> list[TokenExample]:
    """Examples that need so many rows each and share nothing, with one counted token each."""
    return [example_of(n, range(1000 * n, 1000 * n + size - 1), [7]) for n, size in enumerate(rows)]


def planned(rows: list[int], tokens: int, ranks: int) -> StepPlan:
    limits = limits_of(tokens)
    return plan_step(portions_of(pairs(*rows), limits), limits, ranks, cost)


def one_tree(branches: int, stem: int = 40, answer: int = 60) -> list[TokenExample]:
    return [example_of(n, [1] * stem, [10 + n] * answer) for n in range(branches)]


def on_ranks(plan: StepPlan) -> list[list[Portion]]:
    """The portions of each rank, of all its packs."""
    return [[portion for pack in own for portion in pack] for own in plan.packs]


def packs_of(plan: StepPlan) -> int:
    """That every rank runs."""
    [packs] = {len(own) for own in plan.packs}
    return packs


def check(plan: StepPlan, examples: list[TokenExample], limits: PackLimits, ranks: int) -> None:
    bins = plan.bins
    assert len(bins) == ranks and len({len(own) for own in bins}) == 1
    laid = Counter(id(example) for own in bins for pack in own for example in pack.examples)
    assert laid == Counter(map(id, examples))
    for rank, own in enumerate(bins):
        costs = [sum(map(cost, pack)) for pack in plan.packs[rank]]
        assert costs == sorted(costs, reverse=True) and sum(costs) == plan.costs[rank]
        for pack in own:
            assert pack.forest.rows <= limits.tokens and pack.slots == limits.slots(pack.forest.rows)
            check_forest(pack.forest, pack.examples)
    assert plan.imbalance == pytest.approx(max(plan.costs) / np.mean(plan.costs)) or not examples


@settings(max_examples=150)
@given(
    examples=alike(16), share=st.sampled_from(SHARES), ranks=st.integers(2, 6), room=st.sampled_from([0, 0.05, 0.3, 2])
)
def test_each_example_is_laid_once_and_all_ranks_run_as_many_packs(examples, share, ranks, room):
    sizes = [example.plain_tokens if share == "none" else example.unique_tokens for example in examples]
    limits = limits_of(max(sizes) + int(room * sum(sizes)), share)
    plan = plan_step(portions_of(examples, limits), limits, ranks, cost)
    check(plan, examples, limits, ranks)
    again = plan_step(portions_of(examples, limits), limits, ranks, cost)
    assert [[portion.members for portion in own] for own in on_ranks(again)] == [
        [portion.members for portion in own] for own in on_ranks(plan)
    ]


@settings(max_examples=100)
@given(examples=alike(16), share=st.sampled_from(SHARES), room=st.sampled_from([0, 0.05, 0.3, 2]))
def test_one_rank_has_what_pack_evenly_makes_and_no_cost_is_asked_for(examples, share, room):
    sizes = [example.plain_tokens if share == "none" else example.unique_tokens for example in examples]
    limits = limits_of(max(sizes) + int(room * sum(sizes)), share)
    portions = portions_of(examples, limits)
    plan = plan_step(portions, limits, 1, lambda _: pytest.fail("the cost was asked for"))
    [own], expected = plan.bins, pack_evenly(portions, limits)
    assert plan.imbalance == 1
    for found, wanted in zip(own, expected, strict=True):
        assert found.slots == wanted.slots and found.forest.leaves == wanted.forest.leaves
        assert all(one is other for one, other in zip(found.examples, wanted.examples, strict=True))


@settings(max_examples=150)
@given(rows=st.lists(st.integers(2, 20), min_size=1, max_size=7), ranks=st.integers(2, 3), tokens=st.integers(20, 40))
def test_packs_are_as_few_as_in_the_best_of_all_plans_or_one_more(rows, ranks, tokens):
    """Against every way to put examples into packs of all ranks. Best fit needs no more than 11/9 of the fewest packs,
    and here there are at most seven."""
    plan = planned(rows, tokens, ranks)
    best = next(
        packs
        for packs in range(1, len(rows) + 1)
        if any(
            all(
                sum(size for size, at in zip(rows, places, strict=True) if at == pack) <= tokens
                for pack in range(ranks * packs)
            )
            for places in product(range(min(ranks * packs, len(rows))), repeat=len(rows))
        )
    )
    assert best <= packs_of(plan) <= best + 1


def test_no_rank_needs_a_second_pack_where_all_can_do_with_one():
    """By cost alone, in which attention or logit rows count, one rank would get more rows than a pack has."""
    limits = limits_of(1024)
    portions = portions_of(pairs(400, 400, 400, 400, 400, 24), limits)
    dear = {id(portion): 10 if portion.rows == 400 else 30 for portion in portions}
    plan = plan_step(portions, limits, 3, lambda portion: dear[id(portion)])
    # 30 | 10 10 10 | 10 10 were alike, but three of 400 rows need two packs.
    assert packs_of(plan) == 1 and sorted(plan.costs) == [20, 20, 40]


def test_packs_are_filled_over_all_ranks_where_dealing_by_cost_finds_no_room():
    """Costliest first puts 6 and 6 on two ranks, then 4 4, and 5 5 nowhere: only 6 4 | 5 5 fills both packs."""
    limits = limits_of(100)
    portions = portions_of(pairs(60, 50, 50, 40), limits)
    order = {60: 4, 40: 3, 50: 2}
    plan = plan_step(portions, limits, 2, lambda portion: order[portion.rows])
    assert packs_of(plan) == 1
    assert sorted(sorted(portion.rows for portion in own) for own in on_ranks(plan)) == [[40, 60], [50, 50]]


def test_a_rank_without_examples_runs_empty_packs():
    plan = planned([30, 20], 64, 4)
    check(
        plan, [example for own in on_ranks(plan) for portion in own for example in portion.examples], limits_of(64), 4
    )
    assert packs_of(plan) == 1 and sorted(len(own[0].examples) for own in plan.bins) == [0, 0, 1, 1]
    assert planned([], 64, 3).bins == [[], [], []] and planned([], 64, 3).imbalance == 1


def test_packs_are_alike_and_not_only_ranks():
    """Two ranks need two packs each for 40 40, and the third has 10 eight times: 40 and 40, not 60 and 20."""
    limits = limits_of(64)
    portions = portions_of(pairs(40, 40, 40, 40, *[10] * 8), limits)
    plan = plan_step(portions, limits, 3, cost)
    assert packs_of(plan) == 2
    assert all([pack.forest.rows for pack in own] == [40, 40] for own in plan.bins)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_empty_pack_is_padding_alone(compiled):
    limits = PackLimits.plan(2048, "tree", compiled)
    found = pack_of([], limits)
    assert found.slots == limits.smallest and not found.examples and found.forest.rows == 0
    pack = lay(found.examples, found.forest, found.slots)
    assert len(pack.input_ids) == limits.smallest and not pack.input_ids.any()
    assert len(pack.layout.position_of_row) == limits.smallest
    for column in (pack.logit_rows, pack.targets, pack.logit_row_of_counted, pack.answer_of_counted):
        assert column.shape == (0,) and column.dtype == torch.int64
    assert not pack.answer_lengths and not pack.examples and not pack.spans and not pack.groups
    assert pack_of([], PackLimits.plan(512, "tree", compiled)).slots == min(512, limits.smallest)


def test_a_tree_that_fits_a_pack_is_parted_into_a_part_for_each_rank():
    examples, limits = one_tree(16), limits_of(4096, "tree")
    portions = portions_of(examples, limits)
    assert len(portions) == 1
    plan = plan_step(portions, limits, 4, cost)
    check(plan, examples, limits, 4)
    assert packs_of(plan) == 1 and plan.imbalance == 1
    assert [[portion.rows for portion in own] for own in on_ranks(plan)] == [[40 + 4 * 60]] * 4


def test_a_tree_is_parted_no_further_than_ranks_gain_by_it():
    """Of 7 branches on 2 ranks: 4 and 3, as fine as it goes. A stem that is nearly all there is stays whole."""
    limits = limits_of(4096, "tree")
    plan = plan_step(portions_of(one_tree(7), limits), limits, 2, cost)
    assert sorted(portion.rows for own in on_ranks(plan) for portion in own) == [40 + 3 * 60, 40 + 4 * 60]
    stem = portions_of(one_tree(4, stem=2000, answer=3), limits)
    plan = plan_step(stem, limits, 2, cost)
    assert sorted(map(len, on_ranks(plan))) == [0, 1] and plan.imbalance == 2


def test_small_trees_are_parted_where_ranks_are_not_alike_without():
    """Three trees on two ranks: no tree costs more than a rank's fair share, but one of them has to be halved."""
    limits = limits_of(4096, "tree")
    examples = [
        example_of(10 * tree + n, [tree] * 40, [10 + 10 * tree + n] * 60) for tree in range(3) for n in range(8)
    ]
    portions = portions_of(examples, limits)
    assert [portion.rows for portion in portions] == [520] * 3
    plan = plan_step(portions, limits, 2, cost)
    check(plan, examples, limits, 2)
    assert plan.imbalance <= ALIKE
    assert max(sum(portion.rows for portion in own) for own in on_ranks(plan)) < 900


def test_one_example_cannot_be_parted():
    plan = planned([500, *[10] * 8], 512, 4)
    assert max(plan.costs) == 3 * 500 + 1 and packs_of(plan) == 1


@settings(max_examples=80)
@given(examples=alike(10), share=st.sampled_from(SHARES), data=st.data())
def test_spans_of_some_examples_are_those_of_their_nodes(examples, share, data):
    trie = grow(examples, share)
    some = data.draw(st.lists(st.sampled_from(range(len(examples))), unique=True))
    assert trie.spans(some) == [(node.position, len(node.ids)) for node in trie.of(some).nodes]


@pytest.mark.parametrize("per_rank", [8, 16])
@pytest.mark.parametrize("name", QUANTILES)
def test_ranks_are_alike_in_as_few_packs_as_their_rows_need(name, per_rank):
    """Real lengths: packs are as few as all rows need when spread evenly."""
    for ranks in (2, 8, 64):
        limits = PackLimits.plan(8192, "prompt", compiled=True)
        examples = examples_of(draw(name, ranks * per_rank, seed=ranks))
        plan = plan_step(portions_of(examples, limits), limits, ranks, cost)
        rows = sum(example.unique_tokens for example in examples)
        assert packs_of(plan) == -(-rows // (ranks * limits.tokens)), ranks
        assert max(plan.costs) <= 1.03 * max(np.mean(plan.costs), *map(cost, portions_of(examples, limits))), ranks


def test_what_cannot_be_planned_is_refused():
    limits = limits_of(64)
    portions = portions_of(pairs(20, 30), limits)
    with pytest.raises(ValueError, match="0 ranks"):
        plan_step(portions, limits, 0, cost)
    with pytest.raises(ValueError, match="costs below 0"):
        plan_step(portions, limits, 2, lambda portion: -portion.rows)


def test_the_order_of_portions_of_like_cost_decides_nothing_but_which_is_which():
    rows = [Random(3).randint(10, 200) for _ in range(64)]
    shuffled = Random(4).sample(rows, len(rows))
    plans = [planned(some, 512, 8) for some in (rows, shuffled)]
    assert sorted(plans[0].costs) == sorted(plans[1].costs) and packs_of(plans[0]) == packs_of(plans[1])
