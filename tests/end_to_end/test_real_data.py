"""Real preference files through the whole trainer: every row used, or dropped for a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tuningfork
from tests.end_to_end.workbench import Job, make_model

ROOT = Path(tuningfork.__file__).resolve().parents[1]
DATA = Path(os.environ.get("TUNINGFORK_DATA", ROOT.parent / "shared" / "data"))
HH = DATA / "hh_rlhf_helpful_base_test.jsonl.gz"
DPO_EN = DATA / "llamafactory_dpo_en_demo.jsonl.gz"


def on_real_data(job: Job, path: Path, max_length: int, positions: int = 8192) -> Job:
    if not path.exists():
        pytest.skip(f"no {path.name}: set TUNINGFORK_DATA to a folder that has it")
    make_model(job.folder / "long-model", max_position_embeddings=positions)
    job = job.but({"model.path": job.folder / "long-model", "data.train": path, "data.max_length": max_length})
    return job.but({"pack.tokens": 2 * max_length, "train.max_steps": 2})


def assert_accounted(job: Job, rows: int) -> dict[str, int]:
    report = job.report()
    assert report["rows_read"] == rows == report["used"] + sum(report["dropped"].values())
    dropped = [row["row"] for row in report["dropped_rows"]]
    assert len(dropped) == len(set(dropped)) == rows - report["used"] and all(1 <= row <= rows for row in dropped)
    assert [line["examples"] for line in job.metrics()] == [4, 4]
    return report["dropped"]


def assert_exact(job: Job, shown: str) -> None:
    assert "step-0 check: margin exactly 0 for all 4 pairs" in shown
    assert job.metrics()[0]["rewards/margin"] == 0.0


def test_all_of_hh_helpful_base(job: Job) -> None:
    """2,354 rows = used + dropped, each reason as often as counting in the file by other means gives it."""
    job = on_real_data(job, HH, max_length=3000)
    outcome = job.done()
    dropped = assert_accounted(job, 2354)
    too_long = dropped.pop("longer than max_length")
    assert dropped == {"prompts differ": 9, "empty answer": 4, "chosen equals rejected": 2}
    assert 0 < too_long < 60  # of bytes, nearly; the tokenizer has learnt little
    assert_exact(job, outcome.out)


def test_dpo_en_demo(job: Job) -> None:
    """300 rows in another format: none is dropped but for its length."""
    job = on_real_data(job, DPO_EN, max_length=2000)
    outcome = job.done()
    assert set(assert_accounted(job, 300)) == {"longer than max_length"}
    assert job.report()["used"] > 100
    assert_exact(job, outcome.out)


@pytest.mark.parametrize(
    ("name", "rows", "used"),
    [
        ("hh_rlhf_helpful_base_test", 2354, 2354 - 9 - 4 - 2),
        ("llamafactory_dpo_en_demo", 300, 300),
        ("llmbar", 419, 419),
        ("llamafactory_v1_dpo_demo", 10, 10),
    ],
)
def test_the_report_on_each_file(job: Job, name: str, rows: int, used: int) -> None:
    """Through `tuningfork data`, with room for the longest: no row is dropped for its length."""
    job = on_real_data(job, DATA / f"{name}.jsonl.gz", max_length=30_000, positions=30_000)
    job.but({"train.examples_per_step": 2}).done("data")
    train = json.loads((job.run / "data" / "data_report.json").read_text())["train"]
    assert (train["rows_read"], train["used"], sum(train["dropped"].values())) == (rows, used, rows - used)
