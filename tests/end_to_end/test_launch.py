"""Several processes that fail alike say it once. Each is a Python of its own, which imports everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
