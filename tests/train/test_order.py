"""The order that a run has, and the one it could have instead."""

from __future__ import annotations

from dataclasses import replace

from tests.tiny import random_pairs
from tuningfork.train.config import TrainConfig
from tuningfork.train.order import compared_with, order_of

CONFIG = TrainConfig(learning_rate=1e-3, examples_per_step=2)


def test_a_shuffled_run_is_compared_with_one_grouped_by_prompt_where_prompts_repeat() -> None:
    examples = random_pairs(6)
    assert compared_with(examples, CONFIG) == {}
    examples[5] = replace(examples[5], prompt_ids=examples[2].prompt_ids)
    [(name, other)] = compared_with(examples, CONFIG).items()
    assert name == "grouped by prompt"
    seen = [example for step in range(3) for example in other.indices(step)]
    assert sorted(seen) == list(range(6)) and abs(seen.index(2) - seen.index(5)) == 1


def test_a_grouped_run_is_compared_with_a_shuffled_one() -> None:
    examples = random_pairs(6)
    examples[5] = replace(examples[5], prompt_ids=examples[2].prompt_ids)
    grouped = replace(CONFIG, order="grouped")
    assert compared_with(examples, grouped) == {"shuffled": order_of(examples, CONFIG)}
