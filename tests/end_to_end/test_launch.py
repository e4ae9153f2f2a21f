"""Several processes that fail alike say it once. Each is a Python of its own, which imports everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.workbench import Job

ROOT = Path(__file__).parents[2]


def test_what_is_wrong_is_said_once(job: Job) -> None:
    """By two processes that find it only when they have met, and by no word of the launcher's own."""
    missing = job.but(data={"train": job.folder / "nothing.jsonl"})
    command = [sys.executable, "-m", "tuningfork", "launch", "--processes", "2", *missing.arguments("train")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=job.folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("tuningfork: ") and done.stderr.count("\n") == 1, done.stderr
    assert "nothing.jsonl" in done.stderr and done.stdout.count("loading PyTorch") == 1


def test_a_tensor_group_trains_as_one_process_does(job: Job) -> None:
    """From the folder to the export: the step-0 check finds the reference's very bits, and losses are those of
    one process up to rounding, of which AdamW makes more where a gradient is next to nothing."""
    split = job.but(parallel={"tensor": 2}, output={"dir": job.folder / "split"})
    command = [sys.executable, "-m", "tuningfork", "launch", "--processes", "2", *split.arguments("train")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=job.folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step-0 check: margin exactly 0" in done.stdout
    job.done()
    ours, alone = split.exported(), job.exported()
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: tensor.shape for n, tensor in alone.items()}
    for here, there in zip(split.metrics(), job.metrics(), strict=True):
        assert here["tokens"] == there["tokens"] and here["loss"] == pytest.approx(there["loss"], rel=1e-4)
