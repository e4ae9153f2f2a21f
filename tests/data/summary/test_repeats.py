"""Rows that say the same, the opposite, or what the other file says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuningfork.data.summary.records import SharedRow
from tuningfork.data.summary.repeats import find_leaks, find_repeats
from tuningfork.records import Source, TokenAnswer, TokenExample


def pairs(*rows: Sequence[Sequence[int]]) -> list[TokenExample]:
    """Rows of prompt ids and those of the answers, the best first; numbered from 10 in steps of 10."""

    def ids(values: Sequence[int]) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    return [
        TokenExample(
            Source("f", 10 * place), ids(p), tuple(TokenAnswer(ids(a), np.ones(len(a), dtype=bool)) for a in answers)
        )
        for place, (p, *answers) in enumerate(rows, 1)
    ]


def rows(groups: Any) -> Any:
    """Groups of rows, groups of them or shared rows, by their numbers."""
    if isinstance(groups, Source):
        return groups.row
    if isinstance(groups, SharedRow):
        return (groups.eval_row.row, groups.train_row.row)
    return [rows(group) for group in groups]


def test_repeats_and_contradictions() -> None:
    found = find_repeats(
        pairs(
            ([1], [2], [3]),  # 10
            ([1], [2], [3]),  # 20: again
            ([1], [3], [2]),  # 30: the opposite of both
            ([1], [2], [4]),  # 40: another answer
            ([9], [2], [3]),  # 50: another prompt
            ([1], [2], [3]),  # 60: again
            ([9], [3], [2]),  # 70: the opposite of 50
        )
    )
    assert rows(found.duplicates) == [[10, 20, 60]] and found.duplicate_rows == 2
    assert rows(found.conflicts) == [[[10, 20, 60], [30]], [[50], [70]]] and found.conflicting_rows == 6
    assert found.distinct_prompts == 2


def test_rankings_contradict_each_other_in_any_other_order_and_single_answers_never_do() -> None:
    found = find_repeats(
        pairs(
            ([1], [2], [3], [4]),  # 10
            ([1], [2], [4], [3]),  # 20
            ([1], [4], [3], [2]),  # 30
            ([1], [2], [3], [4]),  # 40
            ([1], [2], [3], [5]),  # 50
            ([1], [2]),  # 60
            ([1], [3]),  # 70
            ([1], [2]),  # 80
        )
    )
    assert rows(found.conflicts) == [[[10, 40], [20], [30]]] and found.conflicting_rows == 4
    assert rows(found.duplicates) == [[10, 40], [60, 80]]


@pytest.mark.parametrize(
    "given",
    [
        [([1, 2], [3], [4]), ([1], [2, 3], [4])],  # the same ids, cut elsewhere
        [([1], [2], [3]), ([1], [3], [4])],  # an answer on the other side, against another one
        [([], [2], [3]), ([1], [2], [3])],
        [([1], [256], [3]), ([1], [1], [3])],  # ids that begin with the same byte
    ],
)
def test_what_only_looks_alike_is_no_repeat(given: list[tuple[list[int], list[int], list[int]]]) -> None:
    found = find_repeats(pairs(*given))
    assert (found.duplicates, found.conflicts) == ([], [])


def test_leaks_name_the_first_row_with_the_same_prompt_and_with_the_same_answer() -> None:
    train = pairs(([1], [2], [3]), ([1], [4], [5]), ([6], [2], [3]))
    held_out = pairs(
        ([1], [7], [8]),  # 10: the prompt of 10 and 20
        ([1], [8], [4]),  # 20: with an answer of 20, there the chosen one
        ([2], [2], [3]),  # 30: no prompt of theirs, though answers are
        ([6], [3], [2]),  # 40: everything of 30, the other way round
    )
    found = find_leaks(train, held_out)
    unprompted = find_leaks(pairs(([], [2], [3])), pairs(([], [4], [5]), ([], [1], [2])))
    assert rows(unprompted.prompts) == [(20, 10)]
    assert rows(found.prompts) == [(10, 10), (20, 10), (40, 30)] and found.prompt_rows == 3
    assert rows(found.answers) == [(20, 20), (40, 30)] and found.answer_rows == 2


def test_one_answer_wanted_and_not_wanted_is_a_conflict() -> None:
    same = pairs(*[[[1, 2], [3]]] * 3)
    labelled = [replace(example, label=label) for example, label in zip(same, (True, False, True), strict=True)]
    found = find_repeats(labelled)
    assert rows(found.duplicates) == [[10, 30]] and rows(found.conflicts) == [[[10, 30], [20]]]
    assert (found.conflicting_rows, found.duplicate_rows) == (3, 1)
