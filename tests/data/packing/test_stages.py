"""An order made of parts: each part's examples and steps, one behind the other."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from tuningfork.data.packing.loader import EpochOrder
from tuningfork.data.packing.stages import staged

SHORT, LONG = np.full(40, 5), np.full(20, 10)


def order(max_steps: int = 12):
    """4 steps on pieces of 5 tokens, the rest on pieces of 10; 50 tokens a step."""
    return staged(np.concatenate([SHORT, LONG]), [40, 20], [4], tokens_per_step=50, seed=7, max_steps=max_steps)


def test_steps_are_those_of_each_part_counted_through() -> None:
    found = order()
    first = EpochOrder.by_tokens(SHORT, 50, 7, 1.0, 4)
    rest = EpochOrder.by_tokens(LONG, 50, 7, 1.0, 8)
    assert (found.total_steps, found.examples, found.total_examples) == (12, 60, 4 * 10 + 8 * 5)
    assert [found.indices(step) for step in range(4)] == [first.indices(step) for step in range(4)]
    assert [found.indices(step) for step in range(4, 12)] == [[40 + i for i in rest.indices(step)] for step in range(8)]
    sizes = np.concatenate([SHORT, LONG])
    assert {int(sizes[found.indices(step)].sum()) for step in range(12)} == {50}
    assert sorted(chain(*(found.indices(step) for step in range(4)))) == list(range(40))
    assert found.epoch_after(3) == 1.0
    assert [found.epoch_after(step) for step in (1, 5, 11)] == pytest.approx([0.5, 1.5, 3.0])


def test_a_longer_run_has_the_same_steps_and_more_behind_them() -> None:
    whole, longer = order(), order(15)
    assert [longer.indices(step) for step in range(12)] == [whole.indices(step) for step in range(12)]
    assert longer.total_steps == 15 and min(longer.indices(14)) >= 40


def test_what_is_used_is_what_the_steps_have() -> None:
    found = staged(np.concatenate([SHORT, LONG]), [40, 20], [1], tokens_per_step=50, seed=7, max_steps=3)
    assert found.used_indices().tolist() == sorted(chain(*(found.indices(step) for step in range(3))))
