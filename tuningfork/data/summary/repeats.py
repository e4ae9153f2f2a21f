"""What stands more than once: repeated pairs, pairs that contradict each other, and rows that training and eval share.

Rows are compared as the model meets them, by token ids: what differs only in what a template strips is the same here.
Two rows have the same prompt if their whole prompts are equal, system message and earlier turns included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from tuningfork.records import TokenExample

Key = bytes


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows of one file that repeat or contradict each other. Groups hold row numbers, in the order of the file."""

    distinct_prompts: int
    duplicate_rows: int  # rows that say again what an earlier row says
    duplicates: list[list[int]]  # groups of rows with the same prompt, the same chosen and the same rejected answer
    conflicting_rows: int
    conflicts: list[list[list[int]]]  # [rows that prefer one answer, rows that prefer the other], same two answers


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
    rows_of_pair: dict[tuple[Key, ...], list[int]] = defaultdict(list)
    for example in examples:
        rows_of_pair[(_key(example.prompt_ids), *(_key(answer.ids) for answer in example.answers))].append(
            example.source.row
        )
    duplicates = [rows for rows in rows_of_pair.values() if len(rows) > 1]
    conflicts = []
    for (prompt, *answers), rows in rows_of_pair.items():
        other = rows_of_pair.get((prompt, *reversed(answers)), [])
        if other and rows[0] < other[0]:  # each conflict once, from its first row
            conflicts.append([rows, other])
    return Repeats(
        distinct_prompts=len({prompt for prompt, *_ in rows_of_pair}),
        duplicate_rows=sum(len(rows) - 1 for rows in duplicates),
        duplicates=duplicates,
        conflicting_rows=sum(len(rows) for sides in conflicts for rows in sides),
        conflicts=conflicts,
    )


def find_leaks(train: Sequence[TokenExample], held_out: Sequence[TokenExample]) -> Leaks:
    """Look for what the eval file shares with the training file. An answer is looked for on either side of a pair."""
    first_prompt: dict[Key, int] = {}
    first_answer: dict[tuple[Key, Key], int] = {}
    for example in train:
        prompt, row = _key(example.prompt_ids), example.source.row
        first_prompt.setdefault(prompt, row)
        for answer in example.answers:
            first_answer.setdefault((prompt, _key(answer.ids)), row)
    prompts, answers = [], []
    for example in held_out:
        prompt = _key(example.prompt_ids)
        if prompt not in first_prompt:
            continue
        prompts.append(SharedRow(example.source.row, first_prompt[prompt]))
        found = [first_answer.get((prompt, _key(answer.ids))) for answer in example.answers]
        shared = [row for row in found if row is not None]
        if shared:
            answers.append(SharedRow(example.source.row, min(shared)))
    return Leaks(len(prompts), prompts, len(answers), answers)


def _key(ids: np.ndarray) -> Key:
    """What stands for token ids: 128 bits, since the ids of a large file would fill the memory a second time."""
    return xxhash.xxh3_128_digest(ids.tobytes())
