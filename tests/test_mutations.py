"""Mutations stay ones of this code: each finds its place, and tests of the names that it gives are there."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, Mutation, NotFound, nodes, place


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_has_its_place_and_its_tests(mutation):
    path, source = place(mutation)
    assert source != path.read_text()
    assert nodes(mutation)


def test_names_are_its_own():
    names = [mutation.name for mutation in MUTATIONS]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        (Mutation("gone", "no such code anywhere", "", ("test_names_are_its_own",)), "stands 0 times"),
        (Mutation("many", "return None", "", ("test_names_are_its_own",)), "not once"),
        (Mutation("elsewhere", "if spoilt:", "", (), within="train_step"), "0 times in train_step"),
    ],
)
def test_what_has_no_place_is_named(mutation, words):
    with pytest.raises(NotFound, match=words):
        place(mutation)


def test_a_test_that_is_not_there_is_named():
    with pytest.raises(NotFound, match="no test test_of_nothing"):
        nodes(Mutation("untested", "if spoilt:", "", ("test_of_nothing",)))
