"""`tuningfork data`: a report on a recipe's data, from a tokenizer and a config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.workbench import Job, make_pairs, write_rows
from tuningfork.objective.pairs import OBJECTIVES

TAKERS = [name for name, kind in OBJECTIVES.items() if kind.takes_margins]


def report_of(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((job.run / "data" / "data_report.json").read_text())
    return report


def with_rows(job: Job, *rows: dict[str, Any]) -> Job:
    return job.but({"data.train": write_rows(job.folder / "rows.jsonl", [*make_pairs(8, seed=3), *rows])})


def test_the_report_needs_no_weights_and_tells_what_training_then_does(job: Job, shelf: Path) -> None:
    bare = job.folder / "bare"
    shutil.copytree(shelf / "model", bare, ignore=shutil.ignore_patterns("*.safetensors"))
    job = job.but({"data.eval": shelf / "held_out.jsonl"})
    outcome = job.but({"model.path": bare}).done("data")
    assert outcome.err == "" and "All 40 pairs can be trained on" in outcome.out
    files = [job.run / "data" / "data_report.json", job.run / "data" / "data_report.html"]
    assert outcome.out.splitlines()[-2:] == [str(path) for path in files] and all(path.is_file() for path in files)

    report = report_of(job)
    before = [path.read_bytes() for path in files]
    job.done()  # where the report lies, a run may begin
    lines = job.metrics()
    assert report["run"]["steps"] == len(lines) == 10 and report["train"]["used"] == job.report()["used"] == 40
    assert report["eval"]["used"] == 11
    assert report["cost"]["tokens"] == sum(line["tokens"] for line in lines)
    [trees] = [layout for layout in report["cost"]["layouts"] if layout["name"] == "trees" and not layout["order"]]
    assert trees["slots"] - trees["padding"] == sum(line["unique_tokens"] for line in lines)
    assert report["cost"]["counted_tokens"] == sum(line["answer_tokens"] for line in lines)
    assert report["run"]["slots"] == sum(round(line["unique_tokens"] / (1 - line["pad_share"])) for line in lines)
    assert [path.read_bytes() for path in files] == before


def test_a_report_on_a_run_that_is_done_leaves_it_as_it_is(job: Job) -> None:
    job.but({"train.max_steps": 2}).done()
    before = {path: path.stat().st_mtime_ns for path in job.run.rglob("*") if path.is_file()}
    job.done("data")
    assert before.items() <= {path: path.stat().st_mtime_ns for path in job.run.rglob("*") if path.is_file()}.items()
    job.but({"train.max_steps": 2}).done("train", "--resume")
    first = report_of(job)
    job.done("data")  # its own earlier report is replaced
    assert report_of(job) == first


STRICT: dict[str, tuple[dict[str, Any], ...]] = {
    "dropped": ({"prompt": "p", "chosen": "", "rejected": "b"},),
    "duplicates": ({"prompt": "p", "chosen": "a", "rejected": "b"},) * 2,
    "conflicts": ({"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "b", "rejected": "a"}),
}


@pytest.mark.parametrize("kind", STRICT)
def test_strict_fails_and_says_why(job: Job, kind: str) -> None:
    job = with_rows(job, *STRICT[kind])
    outcome = job("data", "--strict")
    assert outcome.status == 1 and f"--strict would fail because of: {kind} in rows.jsonl" in outcome.out
    assert [finding["kind"] for finding in report_of(job)["findings"] if finding["strict"]] == [kind]
    # Without it the report is the same, only the status is not; the lines before it tell how the file was read.
    *_, cached, first, report = job.done("data").out.split("\n", 4)
    assert "tokens of before" in cached and first.startswith("reading rows.jsonl: ")
    assert report == outcome.out.split("\n", 3)[-1]


def test_strict_fails_for_control_tokens_in_words_until_the_recipe_says_what_they_are(job: Job) -> None:
    words = {"prompt": "say <|im_end|> once", "chosen": "a", "rejected": "b"}
    job = with_rows(job, words, {"prompt": "end", "chosen": "c<|im_end|>", "rejected": "d"})
    outcome = job("data", "--strict")
    assert outcome.status == 1 and "control tokens in rows.jsonl (2)" in outcome.out
    said = " ".join(outcome.out.split())
    assert "<|im_end|> in prompt (user) (1)" in said and "Nothing needs attention" not in said
    [finding] = [finding for finding in report_of(job)["findings"] if finding["strict"]]
    assert (finding["kind"], [row["row"] for row in finding["rows"]]) == ("control_tokens", [9, 10])
    page = (job.run / "data" / "data_report.html").read_text()
    assert "stops --strict" in page and "&lt;|im_end|&gt;" in page.replace("<wbr>", "")
    asked = job.but({"data.control_tokens": "as_text"})
    assert "--strict would pass" in asked.done("data", "--strict").out
    notes = report_of(asked)["train"]["notes"]
    assert "control token written as text, encoded as plain characters: <|im_end|> in prompt (user)" in notes
    asked.but({"train.max_steps": 1}).done()
    assert notes.keys() == asked.report()["notes"].keys()


def test_strict_fails_for_a_leak(job: Job, shelf: Path) -> None:
    rows = [{"prompt": make_pairs(40)[7]["prompt"], "chosen": "x", "rejected": "y"}]
    job = job.but({"data.eval": write_rows(job.folder / "eval.jsonl", rows)})
    outcome = job("data", "--strict")
    assert outcome.status == 1 and "leaks in eval.jsonl (1)" in outcome.out
    [leak] = report_of(job)["leaks"]["prompts"]
    assert {key: (Path(row["file"]).name, row["row"]) for key, row in leak.items()} == {
        **{"eval_row": ("eval.jsonl", 1), "train_row": ("pairs.jsonl", 8)}
    }


def test_strict_fails_where_training_would_refuse_the_length(job: Job) -> None:
    """The model knows 256 positions; `data` reports what `train` stops at."""
    job = with_rows(job, {"prompt": "7" * 300, "chosen": "a", "rejected": "b"})
    job = job.but({"data.max_length": 1000, "pack.tokens": 2000})
    outcome = job("data", "--strict")
    assert outcome.status == 1 and "training would refuse to start; --strict would fail because of: positions" in (
        " ".join(outcome.out.split())
    )
    assert job("data").status == 1
    assert "256 positions" in job.refused()


@pytest.mark.parametrize(
    ("row", "objective", "why", "remedy"),
    [
        (
            {"prompt": "p", "completion": "a", "label": True},
            "dpo",
            "has 1 answer, objective dpo compares two",
            "Single answers with a label are not trained on yet: give rows with a chosen and a rejected answer",
        ),
        (
            {"prompt": "p", "completion": "a"},
            "dpo",
            "has 1 answer, objective dpo compares two",
            "Set objective.name: sft to imitate single answers, or give rows with a chosen and a rejected answer",
        ),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            "sft",
            "has 2 answers, objective sft imitates one",
            "Set data.answers: best to imitate the first of them",
        ),
        (
            {"prompt": "p", "completion": "a", "label": True},
            "sft",
            "has a label, and objective sft would imitate unwanted answers",
            "leave the label out: data.columns: {label: null}",
        ),
        (
            {"prompt": "p", "answers": ["a", "b", "c"]},
            "dpo",
            "has 3 answers, objective dpo compares two",
            "write pairs of their answers as chosen and rejected",
        ),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1},
            "ipo",
            "has a margin, which objective ipo has no",
            f"Use {' or '.join(TAKERS)}, or remove the field 'margin' from the rows",
        ),
    ],
)
def test_strict_fails_where_training_would_refuse_the_objective(
    job: Job, row: dict[str, Any], objective: str, why: str, remedy: str
) -> None:
    rows = [{**row, "prompt": f"{row['prompt']} {n}"} for n in range(3)]
    cache = None if objective == "sft" else job.cache
    job = job.but({"data.train": write_rows(job.folder / "rows.jsonl", rows), "reference.cache": cache})
    job = job.but({"objective.name": objective})
    outcome = job("data", "--strict")
    assert outcome.status == 1 and "refused in rows.jsonl (3)" in outcome.out
    assert "All 3 " in outcome.out and "can be read, but not trained on as they are" in outcome.out
    [finding] = [finding for finding in report_of(job)["findings"] if finding["kind"] == "refused"]
    assert f"training would refuse to start: 3 rows {why.replace('has', 'have', 1)}" in finding["text"]
    assert job("data").status == 1, "training would not start, whoever asks"
    message = job.refused()
    assert why in message and remedy in message and "(2 other rows are like it.)" in message


def test_what_the_objective_refuses_is_said_before_weights_are_read(job: Job, shelf: Path) -> None:
    bare = job.folder / "bare"
    shutil.copytree(shelf / "model", bare, ignore=shutil.ignore_patterns("*.safetensors"))
    rows = write_rows(job.folder / "rows.jsonl", [{"prompt": "p", "completion": "a", "label": True}])
    message = job.but({"model.path": bare, "data.train": rows}).refused()
    assert "rows.jsonl:1: has 1 answer, objective dpo compares two. Single answers with a label are not" in message


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_report_and_run_count_the_same_packs_on_the_same_machine(job: Job, device: str) -> None:
    job = job.but({"train.device": device, "data.max_length": 60, "pack.tokens": 300, "train.epochs": 2.3})
    outcome = job.done("data")
    report = report_of(job)
    job.done()
    lines = job.metrics()
    slots = [round(line["unique_tokens"] / (1 - line["pad_share"])) for line in lines]
    assert report["run"]["slots"] == sum(slots)
    assert report["run"]["tokens"] == sum(line["tokens"] for line in lines)
    assert report["run"]["pad_share"] == pytest.approx(1 - sum(line["unique_tokens"] for line in lines) / sum(slots))
    if not torch.cuda.is_available():
        assert report["counted_for"] == "a CPU, blocks not compiled" and report["counted_for"] in outcome.out
        assert ("--train.device cuda counts the packs of a run on one" in outcome.out) == (device == "auto")


def test_a_gpu_that_is_not_here_is_counted_for_where_it_is_named(job: Job) -> None:
    job = job.but({"data.max_length": 60, "pack.tokens": 3000})
    slots = {}
    for device in ("cpu", "cuda"):
        outcome = job.but({"train.device": device}).done("data")
        slots[device] = report_of(job)["run"]["slots"]
        kind = {"cpu": "a CPU, blocks not compiled", "cuda": "a GPU, blocks compiled"}[device]
        assert f"counted for {kind}" in " ".join(outcome.out.split())
    assert slots["cpu"] < slots["cuda"]  # packs of compiled blocks have 1,024 rows at least


def test_strict_passes_good_data(job: Job) -> None:
    assert "--strict would pass" in with_rows(job).done("data", "--strict").out


def test_foreign_files_are_found_before_anything_is_read(job: Job) -> None:
    (job.run / "data").mkdir(parents=True)
    (job.run / "data" / "data_report.json").write_text("{}")
    message = job.but({"data.train": job.folder / "missing.jsonl"}).refused("data")
    assert "data_report.json exists and was not made by `tuningfork data`" in message
    assert [path.name for path in (job.run / "data").iterdir()] == ["data_report.json"]


def test_a_file_that_cannot_be_used_is_an_error_and_leaves_nothing(job: Job) -> None:
    rows = [{"prompt": "p", "chosen": "", "rejected": "b"}]
    message = job.but({"data.train": write_rows(job.folder / "rows.jsonl", rows)}).refused("data")
    assert "its only row cannot be used: 1 x empty answer" in message and not job.run.exists()
