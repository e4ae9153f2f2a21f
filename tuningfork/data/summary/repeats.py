"""What stands more than once: repeated pairs, pairs that contradict each other, and rows that training and eval share.

Rows are compared as the model meets them, by token ids: what differs only in what a template strips is the same here.
Two rows have the same prompt if their whole prompts are equal, system message and earlier turns included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from tuningfork.records import TokenExample

Key = bytes


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows of one file that repeat or contradict each other. Groups hold row numbers, in the order of the file."""

    distinct_prompts: int
    duplicate_rows: int  # rows that say again what an earlier row says
    duplicates: list[list[int]]  # groups of rows with the same prompt and the same answers in the same order
    conflicting_rows: int
    conflicts: list[list[list[int]]]  # groups of rows with the same prompt and answers, parted by their preference


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A row of the eval file, and the first row of the training file with which it has something in common."""

    eval_row: int
    train_row: int


@dataclass(frozen=True, slots=True)
class Leaks:
    """Rows of the eval file whose prompt is also trained on; and those of them that share an answer to it as well."""

    prompt_rows: int
    prompts: list[SharedRow]
    answer_rows: int
    answers: list[SharedRow]


def find_repeats(examples: Sequence[TokenExample]) -> Repeats:
    """Look for repeated and for contradicting rows among the examples of one file."""
    # (prompt, answers in any order) -> answers in their order, and whether a single one is wanted -> rows
    orders: dict[tuple[Key, ...], dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for example in examples:
        prompt, answers = _key(example.prompt_ids), tuple(_key(answer.ids) for answer in example.answers)
        orders[(prompt, *sorted(answers))][(answers, example.label)].append(example.source.row)
    duplicates = [rows for sides in orders.values() for rows in sides.values() if len(rows) > 1]
    conflicts = [list(sides.values()) for sides in orders.values() if len(sides) > 1]
    return Repeats(
        distinct_prompts=len({prompt for prompt, *_ in orders}),
        duplicate_rows=sum(len(rows) - 1 for rows in duplicates),
        duplicates=sorted(duplicates),
        conflicting_rows=sum(len(rows) for sides in conflicts for rows in sides),
        conflicts=conflicts,
    )


def find_leaks(train: Sequence[TokenExample], held_out: Sequence[TokenExample]) -> Leaks:
    """Look for what the eval file shares with the training file. An answer is looked for in any place."""
    first_prompt: dict[Key, int] = {}
    first_answer: dict[tuple[Key, Key], int] = {}
    for example in train:
        prompt, row = _key(example.prompt_ids), example.source.row
        first_prompt.setdefault(prompt, row)
        for answer in example.answers:
            first_answer.setdefault((prompt, _key(answer.ids)), row)
    prompts, answers = [], []
    for example in held_out:
        prompt, row = _key(example.prompt_ids), example.source.row
        found = [first_answer.get((prompt, _key(answer.ids))) for answer in example.answers]
        shared = [row for row in found if row is not None]
        # Having no prompt is nothing to have in common.
        if prompt in first_prompt and (shared or len(example.prompt_ids)):
            prompts.append(SharedRow(row, first_prompt[prompt]))
        if shared:
            answers.append(SharedRow(row, min(shared)))
    return Leaks(len(prompts), prompts, len(answers), answers)


def _key(ids: np.ndarray) -> Key:
    """What stands for token ids: 128 bits, since the ids of a large file would fill the memory a second time."""
    return xxhash.xxh3_128_digest(ids.tobytes())
