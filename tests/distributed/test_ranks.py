"""Ranks: one process has everything and agrees with itself; shares of many are found by each alone."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import random_examples, tiny_policy
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks

EXAMPLES = random_examples([(n + 1, (2 * n + 1, 3)) for n in range(23)])


def test_one_process_is_all_there_is() -> None:
    assert ONE_PROCESS.first and ONE_PROCESS.mine(EXAMPLES, lambda example: pytest.fail("asked for a cost")) is EXAMPLES
    share = torch.tensor(1.5, dtype=torch.float64)
    assert ONE_PROCESS.sum(share) is share
    assert ONE_PROCESS.any(True) and not ONE_PROCESS.any(False)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_example_is_on_one_rank_in_the_order_of_the_step(size: int) -> None:
    shares = [Ranks(rank, size).mine(EXAMPLES, lambda example: example.unique_tokens**2) for rank in range(size)]
    assert sorted(example.id for share in shares for example in share) == sorted(example.id for example in EXAMPLES)
    for share in shares:
        places = [EXAMPLES.index(example) for example in share]
        assert places == sorted(places)
    costs = [sum(example.unique_tokens**2 for example in share) for share in shares]
    assert max(costs) < 1.05 * sum(costs) / size
    assert [Ranks(rank, size).first for rank in range(size)] == [True] + [False] * (size - 1)


def test_what_needs_the_others_is_refused_rather_than_answered_for_one() -> None:
    many = Ranks(1, 4)
    with pytest.raises(NotImplementedError, match="4 ranks"):
        many.sum(torch.ones(()))
    with pytest.raises(NotImplementedError, match="4 ranks"):
        many.any(False)
    with pytest.raises(NotImplementedError, match="4 ranks"):
        parallelize(tiny_policy(), "none", compiled=False, ranks=many)


def test_a_policy_is_made_ready_in_one_place() -> None:
    policy = tiny_policy()
    parallelize(policy, "block", compiled=False, ranks=ONE_PROCESS)
    assert policy.activation_memory == "block" and not policy.compiled
    parallelize(policy, "none", compiled=True, ranks=ONE_PROCESS)
    assert policy.activation_memory == "none" and policy.compiled
