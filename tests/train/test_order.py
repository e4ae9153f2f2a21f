"""The order that a run has, and the one it could have instead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.tiny import random_pairs
from tuningfork.train.config import TrainConfig
from tuningfork.train.order import compared_with, doubts, order_of

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


def test_documents_and_their_first_pieces_are_no_group_though_all_begin_with_bos() -> None:
    examples = random_pairs(6)
    begun = [replace(example, prompt_ids=np.array([1], np.int32)) for example in examples[:3]]
    followed = [replace(example, prompt_ids=example.prompt_ids[:0]) for example in examples[3:5]]
    documents = order_of([*begun, *followed, examples[5]], replace(CONFIG, order="grouped"))
    assert documents.groups is not None and documents.groups.alone


def test_a_grouped_run_without_trees_is_doubted() -> None:
    grouped, examples = replace(CONFIG, order="grouped"), random_pairs(4)
    assert doubts(examples, grouped, 9, "tree") == [] == doubts(examples, CONFIG, 9, "none")
    [said] = doubts(examples, grouped, 9, "prompt")
    assert said.startswith("train.order is grouped, but pack.share is prompt, with which examples have nothing in comm")


def test_a_step_that_is_smaller_than_examples_and_a_warm_up_beyond_the_run_are_doubted() -> None:
    examples = random_pairs(6)
    sizes = sorted(example.plain_tokens for example in examples)
    by_tokens = replace(CONFIG, examples_per_step=32, tokens_per_step=sizes[-2], warmup_steps=9)
    small, long = doubts(examples, by_tokens, 9)
    assert small == (
        f"train.tokens_per_step is {sizes[-2]}, but {sum(size > sizes[-2] for size in sizes)} example has more tokens, "
        f"up to {sizes[-1]}: it is a step of its own"
    )
    assert long.startswith("train.warmup_steps is 9, but the run has 9 steps: the learning rate rises to the end")
    assert doubts(examples, replace(by_tokens, tokens_per_step=sizes[-1]), 10) == [] == doubts(examples, CONFIG, 1)
