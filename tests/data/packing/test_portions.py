"""Portions of examples: whole trees, and parts of a large one that together have as few rows as can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.packing.alike import SHARES, alike, check_forest, example_of, partitions, sequences
from tuningfork.data.packing import portions as module
from tuningfork.data.packing.portions import Portion, joined, part, portion_out
from tuningfork.data.packing.tree import Trie, grow
from tuningfork.records import TokenExample

ROOM = st.integers(0, 60)
"""Rows of a pack beyond those of the largest example: few, so that trees are parted."""


def capacity_of(examples: Sequence[TokenExample], room: int) -> int:
    return max(example.plain_tokens for example in examples) + room


def rows_of(portions: Sequence[Portion]) -> int:
    return sum(portion.rows for portion in portions)


def contents(portions: Sequence[Portion]) -> list[list[list[tuple[int, ...]]]]:
    return [[sequences(example) for example in portion.examples] for portion in portions]


def in_path_order(examples: Sequence[TokenExample]) -> list[int]:
    """By the first of their sequences in the order of tokens."""
    return sorted(range(len(examples)), key=lambda n: min(sequences(examples[n])))


@settings(max_examples=150)
@given(examples=alike(12), share=st.sampled_from(SHARES), room=ROOM)
def test_each_example_is_in_one_portion_that_fits_a_pack(examples, share, room):
    capacity = capacity_of(examples, room)
    portions = portion_out(examples, share, capacity)
    assert sorted(n for portion in portions for n in portion.members) == list(range(len(examples)))
    for portion in portions:
        assert portion.examples == [examples[n] for n in portion.members]
        forest = portion.trie.of(portion.members)
        assert portion.rows == forest.rows <= capacity
        assert portion.spans == [(node.position, len(node.ids)) for node in forest.nodes]
    if share == "tree":
        order = in_path_order(examples)
        assert all(sorted(portion.members, key=order.index) == portion.members for portion in portions)
    else:
        assert [portion.members for portion in portions] == [[n] for n in range(len(examples))]
    assert rows_of(portions) <= sum(
        example.unique_tokens if share != "none" else example.plain_tokens for example in examples
    )


@settings(max_examples=100)
@given(examples=alike(12))
def test_a_portion_is_a_whole_tree_where_it_fits(examples):
    """With room for all, no two portions have a first token in common that is worth a cut, and nothing is parted."""
    portions = portion_out(examples, "tree", sum(example.plain_tokens for example in examples))
    trie = grow(examples, "tree")
    assert rows_of(portions) == trie.lengths.sum()
    nodes, users = trie.users()
    of = {member: n for n, portion in enumerate(portions) for member in portion.members}
    for node in {*nodes.tolist()}:
        assert len({of[user] for user in users[nodes == node].tolist()}) == 1
    # Nor are there fewer: those of a portion hang together.
    for portion in portions:
        reached, together = {portion.members[0]}, set[int]()
        while reached != together:
            together = {*reached}
            shared = {*nodes[np.isin(users, [*together])].tolist()}
            reached = {*users[np.isin(nodes, [*shared])].tolist()} | together
        assert together == {*portion.members}


@settings(max_examples=80)
@given(examples=alike(6), data=st.data())
def test_few_examples_have_the_rows_of_the_best_of_all_ways_to_part_them(examples, data):
    trie = grow(examples, "tree")
    rows = {}
    for chosen in range(1, 1 << len(examples)):
        rows[chosen] = trie.of([n for n in range(len(examples)) if chosen >> n & 1]).rows
    largest = max(rows[1 << n] for n in range(len(examples)))
    capacity = data.draw(st.sampled_from(sorted({size for size in rows.values() if size >= largest})))  # some fill it
    ways = ([rows[sum(1 << n for n in part)] for part in parts] for parts in partitions(range(len(examples))))
    best = min(sum(way) for way in ways if max(way) <= capacity)
    assert rows_of(portion_out(examples, "tree", capacity)) == best


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 10), data=st.data())
def test_a_cut_in_path_order_is_the_best_of_all_cuts(seed, count, data):
    """As few rows as can be, and of these as few portions."""
    examples = one_tree(count, seed)
    trie = grow(examples, "tree")
    order = in_path_order(examples)
    rows = {(i, j): trie.of(order[i:j]).rows for j in range(count + 1) for i in range(j)}
    largest = max(rows[n, n + 1] for n in range(count))
    capacity = data.draw(st.sampled_from(sorted({size for size in rows.values() if size >= largest})))  # some fill it
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, count + 1):  # all ways to cut up to here, by the last of their portions
        fitting = [begin for begin in range(end) if rows[begin, end] <= capacity]
        best.append(min((best[begin][0] + rows[begin, end], best[begin][1] + 1) for begin in fitting))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEW", 0)
        portions = portion_out(examples, "tree", capacity)
    assert (rows_of(portions), len(portions)) == best[-1]
    assert [n for portion in portions for n in portion.members] == order


def one_tree(count: int, seed: int) -> list[TokenExample]:
    """Examples of one tree: conversations that leave each other at some turn, with one to three answers each."""
    random = Random(seed)
    history = [list(range(10, 50))]
    examples = []
    for row in range(count):
        stem = random.choice(history)
        prompt = stem + random.choices(range(50, 90), k=random.choice([0, 20, 60, 120]))
        history.append(prompt)
        answers = [
            [row, n, *random.choices(range(9), k=random.choice([5, 20, 60]))]
            for n in range(random.choice([1, 2, 2, 3]))
        ]
        examples.append(example_of(row, prompt, *answers))
    return examples


def searched(trie: Trie, parts: list[list[int]], capacity: int, tries: int) -> int:
    """Rows of the parts when as many random moves and exchanges of members are tried, and no worse ones are made."""
    random, rows = Random(0), [trie.of(part).rows for part in parts]
    for _ in range(tries):
        one, other = random.sample(range(len(parts)), 2)
        gone = random.sample(parts[one], min(random.choice([1, 1, 2, 3]), len(parts[one])))
        back = random.sample(parts[other], min(random.choice([0, 0, 1, 2]), len(parts[other])))
        first = [n for n in parts[one] if n not in gone] + back
        second = [n for n in parts[other] if n not in back] + gone
        sizes = trie.of(first).rows, trie.of(second).rows
        if max(sizes) <= capacity and sum(sizes) <= rows[one] + rows[other]:
            parts[one], parts[other], rows[one], rows[other] = first, second, *sizes
    return sum(rows)


@pytest.mark.parametrize("count", [30, 60])
@pytest.mark.parametrize("seed", range(3))
def test_a_search_among_larger_trees_finds_hardly_better_parts(seed, count):
    examples = one_tree(count, seed)
    rows = grow(examples, "tree").lengths.sum()
    capacity = max(*(example.unique_tokens for example in examples), rows // 4)
    portions = portion_out(examples, "tree", capacity)
    assert len(portions) > 3
    better = searched(portions[0].trie, [[*portion.members] for portion in portions], capacity, tries=1500)
    assert rows_of(portions) <= 1.03 * better


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), most=st.integers(1, 5), room=ROOM)
def test_more_than_are_cut_at_once_are_cut_some_at_a_time(seed, most, room):
    examples = one_tree(12, seed)
    capacity = capacity_of(examples, room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST", most)
        patch.setattr(module, "_FEW", min(most, 2))
        portions = portion_out(examples, "tree", capacity)
    assert sorted(n for portion in portions for n in portion.members) == list(range(12))
    assert all(portion.trie.of(portion.members).rows == portion.rows <= capacity for portion in portions)
    assert rows_of(portions) <= sum(example.unique_tokens for example in examples)


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), copies=st.integers(1, 3), room=ROOM, random=st.randoms())
def test_the_order_of_examples_changes_no_portion(seed, copies, room, random):
    """Also where some are the same as others: which of them lies where is all that may change."""
    examples = one_tree(9, seed)
    examples += random.choices(examples, k=copies)
    capacity = capacity_of(examples, room)
    portions = contents(portion_out(examples, "tree", capacity))
    assert contents(portion_out(examples, "tree", capacity)) == portions
    shuffled = random.sample(examples, len(examples))
    assert contents(portion_out(shuffled, "tree", capacity)) == portions


@settings(max_examples=80)
@given(first=alike(6), second=alike(6), share=st.sampled_from(SHARES), data=st.data())
def test_portions_that_are_joined_share_what_they_have_in_common_again(first, second, share, data):
    capacity = capacity_of([*first, *second], 0)
    every = [*portion_out(first, share, capacity), *portion_out(second, share, capacity)]
    some = data.draw(st.lists(st.sampled_from(range(len(every))), unique=True, min_size=1))
    portions = [every[n] for n in some]
    examples, forest = joined(portions)
    check_forest(forest, examples)
    assert Counter(map(id, examples)) == Counter(id(example) for portion in portions for example in portion.examples)
    tries = {id(portion.trie): portion.trie for portion in portions}
    members = {
        key: [n for portion in portions if portion.trie is trie for n in portion.members] for key, trie in tries.items()
    }
    assert forest.rows == sum(trie.of(members[key]).rows for key, trie in tries.items()) <= rows_of(portions)
    assert joined([])[0] == [] and joined([])[1].rows == 0


@settings(max_examples=80)
@given(examples=alike(8), share=st.sampled_from(SHARES), data=st.data())
def test_some_of_the_examples_come_in_the_order_of_their_tokens(examples, share, data):
    some = data.draw(st.lists(st.sampled_from(range(len(examples))), unique=True))
    order = in_path_order(examples) if share == "tree" else list(range(len(examples)))
    assert grow(examples, share).in_order(some) == sorted(some, key=order.index)


@settings(max_examples=100)
@given(examples=alike(8), share=st.sampled_from(SHARES), parts=st.integers(1, 9))
def test_a_portion_is_parted_into_parts_alike(examples, share, parts):
    """Against every way to cut it in its order."""
    for portion in portion_out(examples, share, sum(example.plain_tokens for example in examples)):
        found, members, trie = part(portion, parts), portion.members, portion.trie
        assert [n for piece in found for n in piece.members] == members and len(found) <= parts
        assert all(piece.trie is trie and piece.rows == trie.of(piece.members).rows for piece in found)
        ways = (
            max(trie.of(members[first:last]).rows for first, last in pairwise([0, *cuts, len(members)]))
            for count in range(min(parts, len(members)))
            for cuts in combinations(range(1, len(members)), count)
        )
        assert max(piece.rows for piece in found) <= min(ways) * (1 + 1 / 64)


def test_a_tree_that_is_parted_by_hand():
    """Two stems of 50 behind a root of 40, with two examples each: cut between the stems, where 40 rows come twice,
    and not within one."""
    root, stems = [1] * 40, ([2] * 50, [3] * 50)
    # In the file's order the stems take turns.
    examples = [example_of(row, root + stems[row % 2], [4 + row] * 10) for row in range(4)]
    assert [portion.members for portion in portion_out(examples, "tree", 180)] == [[0, 2, 1, 3]]
    portions = portion_out(examples, "tree", 179)
    assert [(portion.members, portion.rows) for portion in portions] == [([0, 2], 110), ([1, 3], 110)]
    assert [portion.rows for portion in portion_out(examples, "tree", 109)] == [100] * 4


def test_answers_of_two_trees_tie_these_together():
    """Without a prompt an example may have a part in several trees, and still shares a pack with itself."""
    one, other = [1] * 40, [2] * 40
    examples = [example_of(1, [], [*one, 3]), example_of(2, [], [*other, 4]), example_of(3, [], [*one, 5], [*other, 6])]
    assert [(portion.members, portion.rows) for portion in portion_out(examples, "tree", 84)] == [([0, 2, 1], 84)]
    [first, second] = portion_out(examples, "tree", 83)
    assert (first.members, first.rows) in [([0, 2], 83), ([2, 1], 83)] or (second.members, second.rows) == ([2, 1], 83)
    assert first.rows + second.rows == 83 + 41


def test_no_examples_make_no_portions():
    assert [portion_out([], share, 10) for share in SHARES] == [[], [], []]
