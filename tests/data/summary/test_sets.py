"""What a data set of one table or several holds, counted by hand; one token a byte, and one that ends each answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.summary.workbench import pair, summary_of, summary_of_files, write
from tuningfork.data.config import DataConfig
from tuningfork.data.summary.records import MixPart, Note, Numbers
from tuningfork.data.tokens.truncate import CUT_ANSWERS, CUT_ONE_SIDE
from tuningfork.records import Source


def test_lengths_and_limits_are_those_before_the_cut(tmp_path: Path) -> None:
    """Whole sequences of 4 + 6, 4 + 3, 2 + 2 and 12 + 2 tokens, at a limit of 8."""
    rows = [pair("aaaa", "bbbbb", "cc"), pair("dd", "e", "f"), pair("g" * 12, "h", "i")]
    cut = summary_of(tmp_path, rows, max_length=8, over_length="truncate_answers").train
    assert (cut.used, cut.cut, cut.dropped) == (2, 1, {"prompt leaves no room for an answer": 1})
    assert (cut.lengths["sequence"].max, cut.lengths["sequence"].total) == (10, 10 + 7 + 4 + 4)
    assert cut.length_bias is not None and (cut.length_bias.longer, cut.length_bias.mean) == (1, 1.5)  # 3 and 0
    at = next(row for row in cut.truncation if row.recipe)
    # 6 - 4 tokens of the one, and all of 12 + 2 and 12 + 2 of the other
    assert (at.max_length, at.rows_cut, at.rows_lost, at.tokens_lost) == (8, 1, 1, 2 + 28)
    assert at.rows_cut_share == at.rows_lost_share == pytest.approx(1 / 3)
    first = Note(1, [Source(str(tmp_path / "train.jsonl"), 1)])
    assert cut.notes == {CUT_ANSWERS: first, CUT_ONE_SIDE: first}


def test_the_cost_is_that_of_what_is_trained_on(tmp_path: Path) -> None:
    rows = [pair("aaaa", "bbbbb", "cc")]
    cost = summary_of(tmp_path, rows, max_length=8, over_length="truncate_answers").cost
    assert (cost.tokens, cost.unique_tokens) == (4 + 4 + 4 + 3, 4 + 4 + 3)  # of 6 and 3 answer tokens 4 and 3 are left


def mixed(folder: Path) -> DataConfig:
    """Six rows in two tables of one source, one of them empty and one of weight 0; and eight of another form."""
    (folder / "a").mkdir()
    write(folder / "a" / "one.jsonl", [pair("p1", "a", "b"), pair("p2", "a", "b") | {"weight": 3}])
    write(
        folder / "a" / "two.jsonl",
        [
            pair("p1", "a", "b") | {"margin": 1.5},
            pair("p1", "b", "a"),
            pair("p4", "", "b"),
            pair("p5", "a", "b") | {"weight": 0},
        ],
    )
    labelled = [{"input": f"q{i}", "output_1": "a", "output_2": "b", "label": 2} for i in range(8)]
    write(folder / "b.jsonl", labelled)
    return DataConfig([str(folder / "a"), str(folder / "b.jsonl")], template="none", max_length=64)


def test_every_table_has_its_part(tmp_path: Path) -> None:
    config = mixed(tmp_path)
    config.shares = [2, 1]
    summary = summary_of_files(config)
    found, one, two, b = summary.train, *(str(tmp_path / name) for name in ("a/one.jsonl", "a/two.jsonl", "b.jsonl"))
    assert (found.name, found.rows_read, found.used) == ("training data", 14, 6)
    assert [
        (t.file, t.source, t.form, t.rows_read, t.used, t.dropped, t.left_out, t.used_share) for t in found.tables
    ] == [
        (one, str(tmp_path / "a"), "pairs", 2, 2, 0, 0, pytest.approx(2 / 6)),
        (two, str(tmp_path / "a"), "pairs", 4, 2, 1, 1, pytest.approx(2 / 6)),
        (b, b, "labelled", 8, 2, 0, 6, pytest.approx(2 / 6)),
    ]
    assert [t.tokens for t in found.tables] == [16, 16, 16]  # 2 rows of two sequences of 2 + 2
    assert (found.dropped, found.left_out) == ({"empty answer": 1}, {"left out of the mix": 6, "weight 0": 1})
    assert [(row.file, row.row) for row in found.dropped_rows] == [(two, 3)]
    assert (found.weights, found.margins) == (Numbers(1, 3.0, 3.0, 3.0), Numbers(1, 1.5, 1.5, 1.5))
    # across the tables: row 1 of two says again what row 1 of one says, and its row 2 the opposite
    assert found.repeats.duplicates == [[Source(one, 1), Source(two, 1)]]
    assert found.repeats.conflicts == [[[Source(one, 1), Source(two, 1)], [Source(two, 2)]]]
    assert summary.mix is not None and summary.mix.by == "shares"
    assert summary.mix.parts == [
        MixPart(str(tmp_path / "a"), 2, 4, 4, pytest.approx(4 / 6)),
        MixPart(b, 1, 8, 2, pytest.approx(2 / 6)),
    ]


def test_limits_are_those_of_the_whole_sources(tmp_path: Path) -> None:
    """Also of the rows that a mix leaves out, else a small part of a large file would make its long rows look many."""
    config = mixed(tmp_path)
    config.counts = [1, 1]
    config.max_length = 3  # all sequences have 4 tokens
    config.over_length = "truncate_answers"
    summary = summary_of_files(config)
    at = next(row for row in summary.train.truncation if row.recipe)
    assert (summary.train.used, at.rows_cut, at.rows_cut_share, at.tokens_lost) == (2, 12, 1.0, 24)


def test_what_the_recipe_asks_for_is_no_finding(tmp_path: Path) -> None:
    """A mix leaves rows out, and a weight of 0 asks for it; an empty answer is a fault all the same."""
    config = mixed(tmp_path)
    config.counts = [1, 1]
    [dropped, *others] = [finding for finding in summary_of_files(config).findings if finding.strict]
    assert dropped.text == "training data: 1 row is dropped: empty answer (1)" and others == []
    assert dropped.rows == [Source(str(tmp_path / "a" / "two.jsonl"), 3)]
    config.train, config.counts = str(tmp_path / "b.jsonl"), [3]
    summary = summary_of_files(config)
    assert (summary.train.used, summary.train.left_out, summary.strict) == (3, {"left out of the mix": 5}, [])


def test_a_folder_of_splits_says_what_was_taken(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        write(tmp_path / f"{name}.jsonl", [pair(name, "a", "b")])
    summary = summary_of_files(DataConfig(str(tmp_path), eval=str(tmp_path), template="none", max_length=64))
    assert summary.eval is not None and summary.leaks is not None and summary.leaks.prompt_rows == 0
    taken = [(s.name, [Path(file).name for file in s.passed_over]) for s in (summary.train, summary.eval)]
    assert taken == [
        ("train.jsonl", ["test.jsonl", "validation.jsonl"]),
        ("validation.jsonl", ["test.jsonl", "train.jsonl"]),
    ]
