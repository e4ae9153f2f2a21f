"""Training on several sources of several formats, mixed, with what their rows say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.end_to_end.workbench import Job, make_pairs, write_rows


def as_labelled(row: dict[str, str]) -> dict[str, object]:
    return {"input": row["prompt"], "output_1": row["rejected"], "output_2": row["chosen"], "label": 2}


@pytest.fixture
def files(job: Job) -> tuple[Path, Path]:
    """Twelve pairs and, in another format, eight others."""
    pairs, labelled = job.folder / "pairs.jsonl", job.folder / "labelled.jsonl"
    write_rows(pairs, make_pairs(12))
    write_rows(labelled, [as_labelled(row) for row in make_pairs(8, seed=3)])
    return pairs, labelled


def test_two_sources_by_shares(job: Job, files: tuple[Path, Path]) -> None:
    job = job.but(data={"train": list(map(str, files)), "shares": [3, 1]})
    job.done()
    found = job.report()
    assert found["formats"] == {str(files[0]): "pairs", str(files[1]): "labelled"}
    assert (found["rows_read"], found["used"]) == (20, 16)  # all twelve of the one, four of the other
    assert found["dropped"] == {"left out of the mix": 4}


def test_the_report_on_a_mix_is_of_what_training_then_takes(job: Job, files: tuple[Path, Path]) -> None:
    job = job.but(data={"train": list(map(str, files)), "shares": [3, 1]})
    out = job.done("data", "--strict").out  # what a mix leaves out is no fault
    assert "All 20 pairs can be trained on; 16 are used" in out and "data.shares 3 : 1" in out
    report = json.loads((job.run / "data" / "data_report.json").read_text())
    assert [(Path(t["file"]).name, t["form"], t["used"], t["left_out"]) for t in report["train"]["tables"]] == [
        ("pairs.jsonl", "pairs", 12, 0),
        ("labelled.jsonl", "labelled", 4, 4),
    ]
    job.done()
    lines = job.metrics()
    assert len(lines) == report["run"]["steps"] == 4
    assert sum(line["tokens"] for line in lines) == report["cost"]["tokens"]


def test_a_folder_of_splits_for_training_and_for_evaluation(job: Job) -> None:
    folder = job.folder / "splits"
    folder.mkdir()
    for name, rows in (("train", make_pairs(12)), ("test", make_pairs(5, seed=3))):
        write_rows(folder / f"{name}.jsonl", rows)
    job = job.but({"data.train": folder, "data.eval": folder})
    job.done()
    found, held_out = job.report(), job.report("eval")
    assert (found["used"], found["passed_over"]) == (12, [str(folder / "test.jsonl")])
    assert (held_out["used"], held_out["passed_over"]) == (5, [str(folder / "train.jsonl")])


def test_a_source_of_a_mix_without_a_usable_row_is_refused_by_name(job: Job, files: tuple[Path, Path]) -> None:
    write_rows(files[1], [{**as_labelled(row), "output_1": ""} for row in make_pairs(2)])
    job = job.but(data={"train": list(map(str, files)), "shares": [3, 1]})
    for command in ("train", "data"):
        message = job.refused(command)
        assert f"{files[1]}: none of its 2 rows can be used: 2 x empty answer (first: row 1" in message


def test_a_format_does_not_matter(job: Job, files: tuple[Path, Path]) -> None:
    """The same pairs in another format give the same run, to the last digit of every loss."""
    again = job.folder / "again.jsonl"
    write_rows(again, [as_labelled(row) for row in make_pairs(12)])
    losses = []
    for name, file in (("a", files[0]), ("b", again)):
        one = job.elsewhere(name).but({"data.train": file})
        one.done()
        losses.append([record["loss"] for record in one.metrics()])
    assert losses[0] == losses[1] and len(losses[0]) == 3  # four pairs a step


def test_weights_change_the_run_and_margins_are_refused_where_they_have_no_place(job: Job) -> None:
    rows = [{**row, "weight": 0.5, "margin": 1.0} for row in make_pairs(8)]
    path = job.folder / "said.jsonl"
    write_rows(path, rows)
    job = job.but({"data.train": path})
    job.done()
    assert job.metrics()[0]["loss"] == pytest.approx(0.5 * math.log1p(math.e), rel=1e-14)  # -log sigmoid(0 - 1), halved
    message = job.elsewhere("ipo").but({"data.train": path, "objective.name": "ipo"}).refused()
    assert "said.jsonl:1: has a margin, which objective ipo has no place for" in message


@pytest.mark.parametrize("command", ["train", "data"])
@pytest.mark.parametrize(("held_out", "word"), [("held.jsonl", "no such file"), ("empty.jsonl", "the file is empty")])
def test_held_out_data_that_is_not_there_is_told_before_other_data_is_read(
    command: str, held_out: str, word: str, job: Job
) -> None:
    (job.folder / "empty.jsonl").touch()
    message = job.but(data={"eval": job.folder / held_out}).refused(command)
    assert f"{job.folder / held_out}: {word}" in message
    assert not (job.folder / "tokens").exists()
