"""What rows say beside prompt and answers: scores, weights and margins."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.rows import PAIR, read_examples, write
from tuningfork.data.examples.row_reader import NO_SCORE, UPSIDE_DOWN
from tuningfork.records import Source


def test_scores_the_wrong_way_round_are_noted(tmp_path: Path) -> None:
    scores = [(5, 1), (3, 3), (1, 2.5), (None, 1)]
    rows = [{**PAIR, "score_chosen": chosen, "score_rejected": rejected} for chosen, rejected in scores]
    path = write(tmp_path, rows)
    found = [Source(str(path), row) for row in (2, 3)]
    assert read_examples(path, False).notes == {UPSIDE_DOWN: found}


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [("chosen_score", "rejected_score"), ("rating_chosen", "rating_rejected"), ("chosen_rating", "rejected_rating"),
     ("chosen-rating", "rejected-rating")],
)  # fmt: skip
def test_scores_have_several_names_and_are_only_noted(chosen: str, rejected: str, tmp_path: Path) -> None:
    """Nobody trains on them, so no row is lost for one; but one that is no number is not passed over in silence."""
    pairs = [
        (2, 1),
        ("1.5", "2"),
        (3, 3.0),
        (None, 5),
        ("high", 9),
        (True, 5),
        (float("nan"), 5),
        ([4], {}),
        (-1, "NaN"),
    ]
    path = write(tmp_path, [{**PAIR, chosen: one, rejected: other} for one, other in pairs])
    result = read_examples(path, False)
    found = {note: [source.row for source in rows] for note, rows in result.notes.items()}
    assert len(result.examples) == 9 and found == {UPSIDE_DOWN: [2, 3], NO_SCORE: [5, 6, 7, 8, 9]}


def test_a_document_has_no_use_for_what_conversations_have(tmp_path: Path) -> None:
    rows = [{"text": "a", "weight": 2, "system": "s"}, {"text": "b", "margin": 1, "tools": []}, {"text": "c"}]
    result = read_examples(write(tmp_path, rows), False)
    assert [example.weight for example in result.examples] == [2, 1, 1]
    (found,) = result.notes.items()
    assert (found[0], [source.row for source in found[1]]) == ("fields that are not read: system, margin", [1, 2])


def test_decimals_of_a_table_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    numbers = pa.array([Decimal("0.5"), Decimal("1.5")], pa.decimal128(5, 2))
    columns = {"weight": numbers, "margin": numbers, "score_chosen": numbers, "score_rejected": [1.0, 1.0]}
    pyarrow.parquet.write_table(pa.table({**{k: [v] * 2 for k, v in PAIR.items()}, **columns}), path)
    result = read_examples(path, False)
    assert [(example.weight, example.margin) for example in result.examples] == [(0.5, 0.5), (1.5, 1.5)]
    assert {note: [source.row for source in rows] for note, rows in result.notes.items()} == {UPSIDE_DOWN: [1]}
