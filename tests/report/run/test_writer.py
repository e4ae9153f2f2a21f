"""What a run leaves on disk survives kills, resumes and full disks."""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tuningfork.errors import NonFiniteError, RunFolderError
from tuningfork.report.run.writer import CHECKSUM, RunWriter, read_metrics


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.got.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed = True


def steps(folder: Path) -> list[int]:
    return [json.loads(text)["step"] for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_on_disk_at_once_and_its_numbers_go_to_every_sink(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    sinks = [Sink(), Sink()]
    with RunWriter(folder) as writer:
        for sink in sinks:
            writer.attach(sink)
        writer.line({"step": 1, "loss": 0.1, "mfu": None})
        writer.log("hello ü \udc80")
        line = '{"step": 1, "loss": 0.1, "mfu": null}'
        checksum = zlib.crc32(line.encode())
        assert (folder / "metrics.jsonl").read_text() == f'{line[:-1]}, "crc32": {checksum}}}\n'
        assert (folder / "log.txt").read_text() == "hello ü \\udc80\n"
        writer.evaluation(1, {"loss": 0.25, "rewards/margin": None}, seconds=0.5)
        assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "log.txt"}
        assert writer.evaluations == {1: {"loss": 0.25, "rewards/margin": None}}
    for sink in sinks:
        assert sink.got == [(1, {"loss": 0.1}), (1, {"eval/loss": 0.25, "eval/seconds": 0.5})] and sink.closed
    evaluation = {"step": 1, "eval/loss": 0.25, "eval/rewards/margin": None, "eval/seconds": 0.5}
    assert read_metrics(folder / "metrics.jsonl") == [{"step": 1, "loss": 0.1, "mfu": None}, evaluation]


def test_the_first_and_the_last_line_of_steps_are_at_hand_and_a_resumed_run_has_them_too(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        assert writer.ends == ()
        writer.evaluation(0, {"loss": 9.0}, seconds=0.5)
        writer.line({"step": 1, "loss": 3.0})
        assert writer.ends == ({"step": 1, "loss": 3.0},)
        writer.line({"step": 2, "loss": 2.0})
        writer.line({"step": 3, "loss": 1.0})
        writer.evaluation(3, {"loss": 8.0}, seconds=0.5)
        assert writer.ends == ({"step": 1, "loss": 3.0}, {"step": 3, "loss": 1.0})
    with RunWriter(tmp_path, resume_at_step=2) as writer:
        assert writer.ends == ({"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0})


def test_a_fresh_run_refuses_a_folder_with_metrics(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    with pytest.raises(RunFolderError, match="Add --resume to continue that run"):
        RunWriter(tmp_path)


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(1, 8):
            writer.line({"step": step, "loss": step / 3})
        writer.log("first")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # torn by a kill

    with RunWriter(tmp_path, resume_at_step=5) as writer:
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": step, "loss": step / 3} for step in range(1, 6)]
        for step in range(6, 9):
            writer.line({"step": step, "loss": 100 + step})
        writer.log("second")

    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (tmp_path / "log.txt").read_text() == "first\nsecond\n"
    assert not list(tmp_path.glob("*.partial"))


def test_resuming_keeps_the_evaluations_up_to_the_checkpoint_or_none(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.evaluation(0, {"loss": 0.7}, 0.1)
        for step in range(1, 4):
            writer.line({"step": step, "loss": 1.0})
            writer.evaluation(step, {"loss": 0.7 - step / 10}, 0.1)
    with RunWriter(tmp_path, resume_at_step=2) as writer:
        assert writer.evaluations == {0: {"loss": 0.7}, 1: {"loss": 0.7 - 1 / 10}, 2: {"loss": 0.7 - 2 / 10}}
    assert steps(tmp_path) == [0, 1, 1, 2, 2]
    with RunWriter(tmp_path, resume_at_step=2, keep_evaluations=False) as writer:
        assert writer.evaluations == {}
    assert steps(tmp_path) == [1, 2]


def test_resuming_before_the_first_checkpoint_or_without_metrics(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.line({"step": 1, "loss": 1.0})
    for folder in (tmp_path, tmp_path / "new"):
        with RunWriter(folder, resume_at_step=0) as writer:
            writer.line({"step": 1, "loss": 2.0})
        assert read_metrics(folder / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize("tail", [b'{"step": 2, "loss"', b'{"step": 2', b"{", b"\0\0\0", b'{"step": 2}'])
def test_only_a_last_line_may_be_torn(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    whole = tail.endswith(b"}")  # the kill came between a line and its newline
    assert read_metrics(path) == [{"step": 1}, {"step": 2}][: 1 + whole]
    with RunWriter(tmp_path, resume_at_step=9) as writer:
        writer.line({"step": 3})
    assert steps(tmp_path) == ([1, 2, 3] if whole else [1, 3])


@pytest.mark.parametrize("bad", ["{torn", "7", '{"loss": 1}', '{"step": null}', ""])
def test_a_damaged_line_elsewhere_is_an_error(tmp_path: Path, bad: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    with pytest.raises(RunFolderError, match="line 2 is no line of metrics"):
        RunWriter(tmp_path, resume_at_step=3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3  # untouched


def test_one_flipped_bit_of_a_line_is_noticed(tmp_path: Path) -> None:
    """Most bits of a digit, flipped, give another digit; and some of a name, another name."""
    with RunWriter(tmp_path) as writer:
        for step in range(1, 4):
            writer.line({"step": step, "loss": 1 / step, "lr": 5e-7, "mfu": None, "tokens/s": 12345})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first, second = whole.find(b"\n") + 1, whole.rfind(b"\n", 0, -1)
    for place in range(first, second):
        for bit in (1, 4):
            spoilt = bytearray(whole)
            spoilt[place] ^= bit
            path.write_bytes(spoilt)
            if b"\n" not in spoilt[place : place + 1]:
                with pytest.raises(RunFolderError, match="line 2 is no line of metrics, or not as it was written"):
                    read_metrics(path)
    path.write_bytes(whole)
    with RunWriter(tmp_path, resume_at_step=3) as writer:
        assert writer.last_step == 3
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line", ['{"step": ' + "[" * 100_000, '{"step": 1e999}', '{"step": 1, "step": 2}', "[1]", "\udcff"]
)
def test_lines_that_would_end_in_a_traceback(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step": 3}}\n', errors="surrogateescape")
    with pytest.raises(RunFolderError, match="line 1 is no line of metrics"):
        read_metrics(path)


@pytest.mark.parametrize("value", ["x", [], {}, True, float("inf"), float("nan"), 10**400])
@pytest.mark.parametrize("key", ["eval/loss", "loss"])
def test_a_line_of_metrics_has_numbers_whatever_its_checksum_says(tmp_path: Path, key: str, value: Any) -> None:
    text = json.dumps({"step": 1, key: value})
    line = f'{text[:-1]}, "{CHECKSUM}": {zlib.crc32(text.encode())}}}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    with pytest.raises(RunFolderError, match=r"line 1 is no line of metrics"):
        RunWriter(tmp_path, resume_at_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == line


def test_lines_that_are_missing_are_known(tmp_path: Path) -> None:
    """As after a power cut, for lines are not flushed to the disk as checkpoints are."""
    with RunWriter(tmp_path) as writer:
        writer.line({"step": 1})
        writer.line({"step": 2})
    for step, last in ((1, 1), (5, 1)):
        with RunWriter(tmp_path, resume_at_step=step) as writer:
            assert writer.last_step == last
    (tmp_path / "metrics.jsonl").unlink()
    with RunWriter(tmp_path, resume_at_step=5) as writer:
        assert writer.last_step == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_refused_before_it_is_written(tmp_path: Path, value: float) -> None:
    with RunWriter(tmp_path) as writer:
        writer.attach(sink := Sink())
        with pytest.raises(NonFiniteError, match=f"step 3: rewards/margin is {value}"):
            writer.line({"step": 3, "rewards/margin": value})
        assert (tmp_path / "metrics.jsonl").read_text() == "" and sink.got == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="file/run cannot be written: Not a directory"):
        RunWriter(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt"])
def test_a_record_that_is_a_link_is_not_written_through(tmp_path: Path, name: str) -> None:
    """A run folder of somebody else, whose log.txt leads to a file of ours."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    (folder / name).symlink_to(elsewhere / "file")
    with pytest.raises(RunFolderError, match=rf"{name} is a link.*Remove it"), RunWriter(folder, 3) as writer:
        writer.log("hello")
    assert (elsewhere / "file").read_text() == "precious" and len(list(elsewhere.iterdir())) == 1
