"""What a mix takes of several sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuningfork.data.sources.mix import mixed_indices
from tuningfork.errors import DataError


def sizes(taken: list[np.ndarray]) -> list[int]:
    return [len(indices) for indices in taken]


def test_shares_take_as_many_as_can_be_without_taking_one_twice() -> None:
    # three parts of one to one of the other: 30 of the first need 10 of the second
    assert sizes(mixed_indices([30, 100], ["a", "b"], [3, 1], None, 0)) == [30, 10]
    assert sizes(mixed_indices([300, 20], ["a", "b"], [0.75, 0.25], None, 0)) == [60, 20]
    assert sizes(mixed_indices([30, 100], ["a", "b"], None, None, 0)) == [30, 100]


def test_counts_are_exact_or_refused() -> None:
    assert sizes(mixed_indices([30, 100], ["a", "b"], None, [30, 7], 0)) == [30, 7]
    with pytest.raises(DataError, match=r"b: data\.counts asks for 101 examples, but only 100 can be used"):
        mixed_indices([30, 100], ["a", "b"], None, [1, 101], 0)


def test_a_share_that_comes_to_no_example_is_refused() -> None:
    # 10 of the second are a part of 4, so a part of 0.1 is a quarter of an example
    with pytest.raises(DataError) as caught:
        mixed_indices([900, 10], ["a.jsonl", "b.jsonl"], [0.1, 4], None, 0)
    assert str(caught.value) == (
        "a.jsonl: data.shares gives it 0.1 beside 4 for b.jsonl, which has 10 examples. That comes to 0.25 of an "
        "example, so none. Raise its share or leave it out."
    )
    assert sizes(mixed_indices([900, 10], ["a", "b"], [0.3, 4], None, 0)) == [1, 10]  # 0.75


@given(st.lists(st.tuples(st.integers(20, 60), st.floats(1, 10)), min_size=1, max_size=4), st.integers(0, 5))
def test_a_mix_takes_nothing_twice_and_depends_on_the_seed_alone(parts: list[tuple[int, float]], seed: int) -> None:
    counts, shares = zip(*parts, strict=True)
    labels = list("abcd"[: len(parts)])
    taken = mixed_indices(counts, labels, shares, None, seed)
    for size, indices in zip(counts, taken, strict=True):
        assert len(set(indices.tolist())) == len(indices) and all(0 <= i < size for i in indices)
        assert list(indices) == sorted(indices)
    assert any(len(indices) == size for size, indices in zip(counts, taken, strict=True))
    again = mixed_indices(counts, labels, shares, None, seed)
    assert all(np.array_equal(a, b) for a, b in zip(taken, again, strict=True))
