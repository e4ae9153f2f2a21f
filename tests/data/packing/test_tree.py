"""Trees of what examples begin with in common: every sequence whole, and no cut that is not worth it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.packing.alike import SHARES, alike, check_forest, common, example_of, paths, sequences, tokens_of
from tests.tiny import random_examples
from tuningfork.data.packing.tree import SMALLEST_STEM, Forest, Trie, grow
from tuningfork.records import ROOT, TokenExample

STEMS = st.sampled_from([1, 2, 5, SMALLEST_STEM])


def whole(trie: Trie) -> Forest:
    return trie.of(range(len(trie.examples)))


def drawn(forest: Forest) -> list[tuple[int, int, list[int]]]:
    return [(node.parent, node.position, node.ids.tolist()) for node in forest.nodes]


@settings(max_examples=150)
@given(examples=alike(), share=st.sampled_from(SHARES), stem=STEMS)
def test_every_sequence_is_its_paths_tokens_and_nodes_lie_depth_first(examples, share, stem):
    trie = grow(examples, share, stem)
    forest = whole(trie)
    check_forest(forest, examples)
    assert forest.rows == trie.lengths.sum() == sum(len(node.ids) for node in forest.nodes)


@settings(max_examples=150)
@given(examples=alike(), stem=STEMS)
def test_more_sharing_never_takes_more_rows(examples, stem):
    none, prompt, tree = (whole(grow(examples, share, stem)).rows for share in SHARES)
    assert none == sum(map(len, (s for example in examples for s in sequences(example))))
    assert prompt == none - sum(len(e.prompt_ids) * (len(e.answers) - 1) for e in examples)
    assert tree <= prompt <= none
    # Nor does any example by itself, whatever the others have made of the trees.
    trie = grow(examples, "tree", stem)
    assert all(trie.of([n]).rows <= example.unique_tokens for n, example in enumerate(examples))


@settings(max_examples=100)
@given(examples=alike())
def test_with_every_cut_allowed_each_beginning_is_there_once(examples):
    """A row for each thing that some sequence begins with, and no node more than those places make at which paths part
    or end."""
    forest = whole(grow(examples, "tree", smallest_stem=1))
    every = {s for example in examples for s in sequences(example)}
    beginnings = {s[:n] for s in every for n in range(1, len(s) + 1)}
    assert forest.rows == len(beginnings)
    forks = {b for b in beginnings if len({c for c in beginnings if len(c) == len(b) + 1 and c[: len(b)] == b}) > 1}
    assert {tokens_of(forest, path) for path in paths(forest)} == every | forks
    assert len(forest.nodes) == len(every | forks)


def part_there(example: TokenExample, stem: tuple[int, ...]) -> bool:
    """Whether two answers of an example have exactly this beginning in common."""
    own = [s for s in sequences(example) if s[: len(stem)] == stem]
    return any(common(one, other) == len(stem) for n, one in enumerate(own) for other in own[:n])


@settings(max_examples=150)
@given(examples=alike(), stem=STEMS)
def test_a_cut_saves_enough_or_answers_of_one_example_part_there(examples, stem):
    forest = whole(grow(examples, "tree", stem))
    parents = [node.parent for node in forest.nodes]
    ends = {leaf for leaves in forest.leaves for leaf in leaves}
    for n, path in enumerate(paths(forest)):
        branches = parents.count(n) + (n in ends)
        if n in parents and len(forest.nodes[n].ids) * (branches - 1) < stem:
            assert any(part_there(example, tokens_of(forest, path)) for example in examples)


def test_what_is_passed_over_is_a_branch_more_for_what_stays():
    """Two and two of four sequences have one more token in common, which is worth no cut; the 20 of all are."""
    examples = [example_of(row, [*range(20), 50 + row // 2], [60 + row]) for row in range(4)]
    forest = whole(grow(examples, "tree"))
    ends = [[50 + row // 2, 60 + row] for row in range(4)]
    assert drawn(forest) == [(ROOT, 0, [*range(20)]), *((0, 20, end) for end in ends)]


@settings(max_examples=150)
@given(examples=alike(), share=st.sampled_from(SHARES), stem=STEMS, data=st.data())
def test_some_of_the_examples_have_the_rows_of_their_nodes_and_no_other(examples, share, stem, data):
    trie = grow(examples, share, stem)
    everyone = range(len(examples))
    members = data.draw(st.lists(st.sampled_from(everyone), unique=True))
    forest = trie.of(members)
    check_forest(forest, [examples[n] for n in members])
    needs: list[set[int]] = [set() for _ in examples]
    for example, node in zip(trie.example_of.tolist(), trie.leaf.tolist(), strict=True):
        while node != ROOT:
            needs[example].add(node)
            node = int(trie.parent[node])
    assert forest.rows == trie.lengths[sorted(set().union(*(needs[n] for n in members)))].sum()
    nodes, users = trie.users()
    assert [*zip(nodes.tolist(), users.tolist(), strict=True)] == sorted(
        (node, n) for n in everyone for node in needs[n]
    )


@settings(max_examples=100)
@given(examples=alike(), stem=STEMS, random=st.randoms())
def test_trees_are_the_same_in_whatever_order_the_examples_come(examples, stem, random):
    """And the same examples again have no row of their own."""
    forest = whole(grow(examples, "tree", stem))
    shuffled = [*examples, *random.sample(examples, min(2, len(examples)))]
    random.shuffle(shuffled)
    again = whole(grow(examples[::-1], "tree", stem))
    assert drawn(again) == drawn(forest)
    assert again.leaves == forest.leaves[::-1]
    assert drawn(whole(grow(shuffled, "tree", stem))) == drawn(forest)


@settings(max_examples=100)
@given(parts=st.lists(alike(4), max_size=4), share=st.sampled_from(SHARES))
def test_forests_side_by_side_are_as_they_were(parts, share):
    forests = [whole(grow(examples, share)) for examples in parts]
    joined = Forest.joined(forests)
    check_forest(joined, [example for examples in parts for example in examples])
    assert joined.rows == sum(forest.rows for forest in forests)
    assert len(joined.nodes) == sum(len(forest.nodes) for forest in forests)


@pytest.mark.parametrize("share", ["prompt", "tree"])
@pytest.mark.parametrize("p", [0, 1, 33])
@pytest.mark.parametrize("k", range(1, 10))
def test_any_number_of_answers_of_a_prompt(k, p, share):
    """Of distinct first tokens, so that they have nothing else in common."""
    answers = [[100 + n, *range(n)] for n in range(k)]
    forest = whole(grow([example_of(1, range(p), *answers)], share))
    if p == 0 or k == 1:
        assert drawn(forest) == [(ROOT, 0, [*range(p), *answer]) for answer in answers]
        assert forest.leaves == [[*range(k)]]
    else:
        assert drawn(forest) == [(ROOT, 0, [*range(p)]), *((0, p, answer) for answer in answers)]
        assert forest.leaves == [[*range(1, k + 1)]]


def test_the_three_ways_by_hand():
    """The answer of the first example is the history of the second, whose answers begin alike."""
    first = example_of(1, [1] * 40, [2] * 40, [3])
    second = example_of(2, [1] * 40 + [2] * 40, [4, 5], [4, 6])
    none, prompt, tree = (whole(grow([first, second], share)) for share in SHARES)
    ones, twos = [1] * 40, [2] * 40
    assert drawn(none) == [
        *((ROOT, 0, [*ones, *twos]), (ROOT, 0, [*ones, 3])),
        *((ROOT, 0, [*ones, *twos, 4, 5]), (ROOT, 0, [*ones, *twos, 4, 6])),
    ]
    assert none.leaves == [[0, 1], [2, 3]]
    assert drawn(prompt) == [
        *((ROOT, 0, ones), (0, 40, twos), (0, 40, [3])),
        *((ROOT, 0, [*ones, *twos]), (3, 80, [4, 5]), (3, 80, [4, 6])),
    ]
    assert prompt.leaves == [[1, 2], [4, 5]]
    assert drawn(tree) == [
        (ROOT, 0, ones),
        (0, 40, twos),  # the first answer, and what the second example's have before them
        (1, 80, [4]),  # they part here, so this stays though it saves one row
        *((2, 81, [5]), (2, 81, [6])),
        (0, 40, [3]),
    ]
    assert tree.leaves == [[1, 5], [3, 4]]


@pytest.mark.parametrize(("others", "shared"), [(1, False), (2, True)])
def test_a_stem_is_shared_from_that_many_rows_on(others, shared):
    """Of 16 rows one is not worth a cut, and two are."""
    examples = [example_of(row, range(16), [50 + row]) for row in range(others + 1)]
    forest = whole(grow(examples, "tree"))
    answers = [[50 + row] for row in range(others + 1)]
    if shared:
        assert drawn(forest) == [(ROOT, 0, [*range(16)]), *((0, 16, answer) for answer in answers)]
    else:
        assert drawn(forest) == [(ROOT, 0, [*range(16), *answer]) for answer in answers]


def test_the_answers_of_one_example_share_their_prompt_however_short():
    examples = [example_of(1, [7], [1, 2], [3, 4]), example_of(2, [7], [1, 2, 5]), example_of(3, [], [1], [2])]
    forest = whole(grow(examples, "tree"))
    assert drawn(forest) == [
        *((ROOT, 0, [1]), (ROOT, 0, [2])),
        *((ROOT, 0, [7]), (2, 1, [1, 2]), (2, 1, [1, 2, 5]), (2, 1, [3, 4])),
    ]
    assert forest.leaves == [[3, 5], [4], [0, 1]]


@pytest.mark.parametrize("share", SHARES)
def test_sequences_without_a_token_end_nowhere(share):
    examples = [example_of(1, [], [], [1]), example_of(2, [2], [])]
    forest = whole(grow(examples, share))
    assert drawn(forest) == [(ROOT, 0, [1]), (ROOT, 0, [2])]
    assert forest.leaves == [[ROOT, 0], [1]]
    assert drawn(grow([], share).of([])) == []


def test_ids_of_any_size_are_sorted_and_kept():
    """Ids above 255 sort by their value, and not by the bytes in which a machine has them."""
    ids = [1, 255, 256, 257, 65_536, 2**24, 2**31 - 1]
    examples = [example_of(row, [9] * 40, [token]) for row, token in enumerate(reversed(ids))]
    forest = whole(grow(examples, "tree"))
    assert [node.ids.tolist() for node in forest.nodes] == [[9] * 40, *([token] for token in ids)]


def test_random_examples_share_their_prompts_alone():
    examples = random_examples([(40, (20, 30)), (50, (9,)), (33, (12, 8, 5))], vocab=50_000)
    prompt, tree = (whole(grow(examples, share)) for share in ("prompt", "tree"))
    assert tree.rows == prompt.rows
    assert np.bincount([len(node.ids) for node in tree.nodes]).sum() == 2 + 1 + 3 + 2  # one answer needs no cut
