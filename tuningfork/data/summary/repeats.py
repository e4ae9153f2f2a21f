"""What stands more than once: repeated pairs, pairs that contradict each other, and rows that training and eval share.

Rows are compared as the model meets them, by token ids: what differs only in what a template strips is the same here.
Two rows have the same prompt if their whole prompts are equal, system message and earlier turns included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from tuningfork.data.summary.records import Leaks, Repeats, SharedRow
from tuningfork.records import Source, TokenExample

Key = bytes


def find_repeats(examples: Sequence[TokenExample]) -> Repeats:
    """Look for repeated and for contradicting rows among the examples of one data set, in whatever files they are."""
    # (prompt, answers in any order) -> answers in their order, and whether a single one is wanted -> places
    orders: dict[tuple[Key, ...], dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, example in enumerate(examples):
        prompt, answers = _key(example.prompt_ids), tuple(_key(answer.ids) for answer in example.answers)
        orders[(prompt, *sorted(answers))][(answers, example.label)].append(place)
    duplicates = sorted(places for sides in orders.values() for places in sides.values() if len(places) > 1)
    conflicts = [list(sides.values()) for sides in orders.values() if len(sides) > 1]

    def rows(places: list[int]) -> list[Source]:
        return [examples[place].source for place in places]

    return Repeats(
        distinct_prompts=len({prompt for prompt, *_ in orders}),
        duplicate_rows=sum(len(places) - 1 for places in duplicates),
        duplicates=[rows(places) for places in duplicates],
        conflicting_rows=sum(len(places) for sides in conflicts for places in sides),
        conflicts=[[rows(places) for places in sides] for sides in conflicts],
    )


def find_leaks(train: Sequence[TokenExample], held_out: Sequence[TokenExample], bos: int | None = None) -> Leaks:
    """Look for what the held-out rows share with those that are trained on. An answer is looked for in any place.

    Having no prompt, or the tokenizer's `bos` alone, as documents do, is nothing to have in common.
    """
    first_prompt: dict[Key, int] = {}
    first_answer: dict[tuple[Key, Key], int] = {}
    for place, example in enumerate(train):
        prompt = _key(example.prompt_ids)
        first_prompt.setdefault(prompt, place)
        for answer in example.answers:
            first_answer.setdefault((prompt, _key(answer.ids)), place)
    prompts, answers = [], []
    for example in held_out:
        prompt = _key(example.prompt_ids)
        found = [first_answer.get((prompt, _key(answer.ids))) for answer in example.answers]
        shared = [place for place in found if place is not None]
        document = example.prompt_ids.tolist() in ([], [bos])
        first = (min(shared) if shared else None) if document else first_prompt.get(prompt)
        if first is not None:
            prompts.append(SharedRow(example.source, train[first].source))
        if shared:
            answers.append(SharedRow(example.source, train[min(shared)].source))
    return Leaks(len(prompts), prompts, len(answers), answers)


def _key(ids: np.ndarray) -> Key:
    """What stands for token ids: 128 bits, since the ids of a large file would fill the memory a second time."""
    return xxhash.xxh3_128_digest(ids.tobytes())
