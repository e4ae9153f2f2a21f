"""A disk that refuses: the message says so, what was there is whole, and --resume completes once there is room."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.workbench import Child, Job, job_in, state_of, unequal
from tuningfork.models.hf import export
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.writer import RunWriter
from tuningfork.report.sinks.tensorboard import TensorBoard
from tuningfork.train import checkpoint, run

MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={8 * MIB}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a tmpfs cannot be mounted here, which takes root's rights")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leave not a byte."""
    with (disk / "ballast").open("ab", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                pass


def make_room(disk: Path) -> None:
    (disk / "ballast").unlink()


# Where the disk is full: the function that writes, which call of it, and what the message must name.
PLACES: dict[str, tuple[Any, str, int, str]] = {
    "the reference": (ReferenceStore, "flush", 1, "/rows-"),
    "a later checkpoint": (checkpoint, "save", 3, "checkpoints/step-6"),
    "the summary": (run, "write_json", 2, "summary.json"),
    "the export": (export, "save", 1, "run/model"),
}


def full_at(disk: Path, place: str) -> None:
    owner, name, call, _ = PLACES[place]
    real, count = getattr(owner, name), iter(range(1, 10_000))

    def filling(*args: Any, **kwargs: Any) -> Any:
        if next(count) == call:
            fill(disk)
        return real(*args, **kwargs)

    setattr(owner, name, filling)


@pytest.mark.parametrize("place", PLACES)
def test_a_disk_that_is_full(job: Job, disk: Path, finished_small: Job, place: str) -> None:
    """Status 2, no traceback, the file and the reason named; the checkpoint before is whole; the command completes."""
    job = job.but({"output.dir": disk / "run", "output.save_every": 2, "reference.cache": disk / "cache"})
    outcome = Child(job.arguments("train"), job.folder, partial(full_at, disk, place)).wait()
    assert outcome.status == 2, outcome.err
    assert "Traceback" not in outcome.err and outcome.err.startswith("tuningfork: ")
    assert "No space left on device" in outcome.err and PLACES[place][3] in outcome.err and "--resume" in outcome.err
    for path in (job.run / "checkpoints").glob("step-*"):
        state_of(path)
    make_room(disk)
    options = ["--resume"] if (job.run / "config.yaml").exists() else []
    outcome = Child(job.arguments("train", *options), job.folder).wait()
    assert outcome.status == 0, outcome.err
    assert unequal(job.exported(), finished_small.exported()) == []
    assert [line["step"] for line in job.metrics()] == list(range(1, 11))
    assert {path.name for path in finished_small.run.iterdir()} == {path.name for path in job.run.iterdir()}


def full_metrics() -> None:
    """metrics.jsonl stands on a device that is always full."""
    begin = RunWriter.__init__

    def beginning(self: RunWriter, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._metrics.close()
        self._metrics = Path("/dev/full").open("a")  # noqa: SIM115

    RunWriter.__init__ = beginning  # type: ignore[method-assign]


def test_a_line_of_metrics_that_cannot_be_written(job: Job) -> None:
    """Status 2, no traceback; the folder and the reason are named."""
    outcome = Child(job.arguments("train"), job.folder, full_metrics).wait()
    assert outcome.status == 2 and "Traceback" not in outcome.err, outcome.err
    assert str(job.run) in outcome.err and "No space left on device" in outcome.err
    job.done("train", "--resume")


def full_board() -> None:
    """TensorBoard's file is on a disk that fills up with the numbers of the sixth step."""
    write = TensorBoard.write

    def writing(self: TensorBoard, step: int, numbers: Any) -> None:
        if step == 6:
            self._records._writer = Path("/dev/full").open("wb")  # noqa: SIM115
        write(self, step, numbers)

    TensorBoard.write = writing  # type: ignore[method-assign]


def test_a_sink_that_fails_costs_no_step_and_is_named_at_once_and_at_the_end(job: Job, finished_small: Job) -> None:
    outcome = Child(job.arguments("train"), job.folder, full_board).wait()
    assert outcome.status == 0 and "Traceback" not in outcome.err, outcome.err
    for said in (outcome.out, (job.run / "log.txt").read_text()):
        failed, lacks = (line for line in said.splitlines() if line.startswith("!"))
        assert failed.startswith("! output.sinks: tensorboard failed at step 6 ([Errno 28] No space left on device)")
        assert lacks == "! tensorboard lacks the numbers from step 6 on; metrics.jsonl has them"
    assert [line["step"] for line in job.metrics()] == list(range(1, 11))
    assert unequal(job.exported(), finished_small.exported()) == []
    events = EventAccumulator(str(job.run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def finished_small(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> Job:
    """The job of ten steps, unbroken."""
    job = job_in(tmp_path_factory.mktemp("small"), shelf).but({"output.save_every": 2})
    assert Child(job.arguments("train"), job.folder).wait().status == 0
    return job


def limit_files_at(owner: Any, call: int) -> None:
    """From the n-th time on that something is saved, no file may grow beyond 64 KiB."""
    real, count = owner.save, iter(range(1, 100))

    def saving(*args: Any) -> Any:
        if next(count) == call:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        return real(*args)

    owner.save = saving


def limit_third_checkpoint() -> None:
    limit_files_at(checkpoint, 3)


def limit_export() -> None:
    limit_files_at(export, 1)


def test_a_file_that_may_not_grow(job: Job, finished_small: Job) -> None:
    """A limit instead of a full disk, which needs no rights: the checkpoint is named, the one before is whole."""
    job = job.but({"output.save_every": 2})
    outcome = Child(job.arguments("train"), job.folder, limit_third_checkpoint).wait()
    assert outcome.status == 2 and "Traceback" not in outcome.err
    assert "checkpoints/step-6 cannot be written: File too large" in outcome.err and "--resume" in outcome.err
    assert job.checkpoints() == ["step-2", "step-4"]
    job.done("train", "--resume")
    assert unequal(job.exported(), finished_small.exported()) == []


def test_exported_weights_that_may_not_grow(job: Job, finished_small: Job) -> None:
    """config.json still goes through, the weights do not: the model folder is named, nothing half written stays."""
    job = job.but({"output.save_every": 2})
    outcome = Child(job.arguments("train"), job.folder, limit_export).wait()
    assert not (job.run / "model").exists() and not list(job.run.glob(".model.*"))
    assert outcome.status == 2 and "Traceback" not in outcome.err, outcome.err
    assert str(job.run / "model") in outcome.err and "--resume" in outcome.err
    job.done("train", "--resume")
    assert unequal(job.exported(), finished_small.exported()) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EBADF])
def test_a_file_system_without_locks(job: Job, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Network file systems may refuse flock, and NFS does so for a folder: a run goes on without a lock."""

    def refusing(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    # Only our own calls: the data library locks its cache, which stands elsewhere.
    ours = SimpleNamespace(flock=refusing, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr("tuningfork.files.fcntl", ours)
    job.but({"train.max_steps": 1}).done()


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def test_a_disk_that_cannot_be_written_at_all(job: Job, disk: Path) -> None:
    """Mounted read-only: run folder or cache is named."""
    read_only(disk)
    message = job.but({"output.dir": disk / "run"}).refused()
    assert f"{disk}/run" in message and "Read-only file system" in message
    message = job.but({"reference.cache": disk / "cache"}).refused()
    assert f"{disk}/cache" in message and "Read-only file system" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write(job: Job) -> None:
    """The run folder is named with the reason."""
    (job.folder / "locked").mkdir(mode=0o500)
    message = job.but({"output.dir": job.folder / "locked" / "run"}).refused()
    assert "locked" in message and "Permission denied" in message


@pytest.mark.parametrize("key, value", [("output.dir", "file/run"), ("reference.cache", "file/cache")])
def test_a_path_that_leads_through_a_file(job: Job, key: str, value: str) -> None:
    """Named, without a traceback."""
    (job.folder / "file").write_text("precious")
    assert value in job.but({key: job.folder / value}).refused()
    assert (job.folder / "file").read_text() == "precious"
