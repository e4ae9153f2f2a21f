"""A step's batch: what is counted of its packs, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tuningfork.data.packing.layout import build_pack
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import Source, TokenAnswer, TokenExample
from tuningfork.train.batch import StepBatch


def answer(*ids: int, holes: tuple[int, ...] = ()) -> TokenAnswer:
    return TokenAnswer(np.array(ids, dtype=np.int32), np.array([i not in holes for i in range(len(ids))]))


PROMPT = np.array([3, 4, 5, 6], dtype=np.int32)
COMMON = answer(7, 8, 9, holes=(1,))
FIRST = TokenExample(Source("pairs", 1), PROMPT, (COMMON, answer(10, 11)))
SECOND = TokenExample(Source("pairs", 2), PROMPT, (COMMON, answer(12, 8, 9, 13, 14)))
THIRD = TokenExample(Source("pairs", 3), PROMPT, (answer(10, 11), COMMON))


@pytest.mark.parametrize(
    ("share", "unique", "logit_rows"),
    [
        # sequences of 7, 6, 7 and 9 tokens, and 6 and 7 in a pack of their own; of these count 2, 2, 2, 5, 2 and 2
        ("none", 29 + 13, 11 + 4),
        ("prompt", (4 + 3 + 2) + (4 + 3 + 5) + (4 + 2 + 3), 11 + 4),
        ("tree", (4 + 3 + 2 + 5) + (4 + 2 + 3), 2 + 2 + 5 + 4),
    ],
)
def test_a_batch_has_the_tokens_counted_by_hand(share, unique, logit_rows):
    packs = [build_pack([FIRST, SECOND], 40, share), build_pack([THIRD], 16, share)]
    batch = StepBatch.of(packs, ObjectiveConfig().build(), np.zeros(6))
    assert batch.tokens == 29 + 13
    assert batch.unique_tokens == unique
    assert batch.answer_tokens == 11 + 4
    assert batch.logit_rows == logit_rows
    assert batch.rows == 56
    assert batch.answers.lengths.tolist() == [2, 2, 2, 5, 2, 2]


def test_answers_are_named_and_handed_out_by_pack():
    packs = [build_pack([FIRST, SECOND], 40, "tree"), build_pack([THIRD], 16, "tree")]
    batch = StepBatch.of(packs, ObjectiveConfig().build(), -np.arange(6.0))
    assert [batch.answer_name(place) for place in (0, 3, 5)] == [
        "answer 0 of pairs:1",
        "answer 1 of pairs:2",
        "answer 1 of pairs:3",
    ]
    handed = [(pack, answers.reference.tolist()) for pack, answers in batch.with_answers(batch.answers)]
    assert [pack is own for (pack, _), own in zip(handed, packs, strict=True)] == [True, True]
    assert [reference for _, reference in handed] == [[0, -1, -2, -3], [-4, -5]]
