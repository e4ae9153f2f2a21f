"""Sinks as a whole: which there are, how they are opened, and that none of them can cost a run."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from tuningfork.errors import ConfigError, RunFolderError
from tuningfork.report import sinks
from tuningfork.report.sinks import NAMES, Sinks, check_installed, check_names, open_sinks


class Kept:
    """A sink in memory that fails when it gets the numbers of a certain step, or in the end."""

    def __init__(self, failing_at: int = -1, failing_at_end: bool = False) -> None:
        self.failing_at, self.failing_at_end = failing_at, failing_at_end
        self.got: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == self.failing_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.got.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed += 1
        if self.failing_at_end:
            raise RuntimeError("gone")


def refusing(folder: Path, first_step: int) -> Kept:
    raise RuntimeError("nobody answers")


def put(monkeypatch: pytest.MonkeyPatch, name: str, open_sink: object) -> None:
    """Another module of the package."""
    module = ModuleType(f"tuningfork.report.sinks.{name}")
    module.open_sink = open_sink  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sinks, "NAMES", (*sinks.NAMES, name))


@pytest.mark.parametrize("name", NAMES)
def test_every_sink_takes_numbers_and_keeps_to_its_folder(tmp_path: Path, name: str) -> None:
    said: list[str] = []
    opened = open_sinks([name], tmp_path, 1, said.append)
    opened.write(0, {"eval/loss": 0.7})
    opened.write(1, {"loss": 0.5, "lr": 1e-6})
    opened.write(1, {"eval/loss": 0.6})
    opened.close()
    assert said == [] and {path.name for path in tmp_path.iterdir()} <= {name}


@pytest.mark.parametrize("name", NAMES)
def test_no_sink_writes_through_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=rf"{name} is a link"):
        open_sinks([name], tmp_path, 1, print)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_name_is_that_of_a_module() -> None:
    files = {path.stem for path in Path(sinks.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(NAMES) == files and "tensorboard" in files
    check_names([])
    check_names(NAMES)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["tensorbord"], r"'tensorbord', which is no sink; allowed: .*tensorboard.* Did you mean tensorboard\?"),
        (["TensorBoard"], r"Did you mean tensorboard\?"),
        (["tensorboard", "carrier pigeon"], r"'carrier pigeon', which is no sink; allowed: .*tensorboard[^?]*$"),
        (["tensorboard", "tensorboard"], r"names tensorboard 2 times\. Keep one"),
        ([""], r"'', which is no sink"),
        (["__init__"], r"'__init__', which is no sink"),
    ],
)
def test_names_of_no_sink(names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^output\.sinks .*{said}"):
        check_names(names)


@pytest.mark.parametrize("name", ["..files", "tensorboard.evil", "os"])
def test_nothing_but_the_modules_of_the_package_is_imported(tmp_path: Path, name: str) -> None:
    """A recipe may come from a stranger."""
    for attempt in (lambda: check_installed([name]), lambda: open_sinks([name], tmp_path, 1, print)):
        with pytest.raises(ConfigError, match="which is no sink"):
            attempt()


def test_a_library_that_is_missing_is_said_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed(NAMES)
    monkeypatch.delitem(sys.modules, "tuningfork.report.sinks.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ConfigError, match=r"output\.sinks: tensorboard needs a library .*tensorboard.*Install it"):
        check_installed(["tensorboard"])


def test_a_sink_that_cannot_be_opened_is_an_error_and_those_before_it_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, given = Kept(), []

    def opening(folder: Path, first_step: int) -> Kept:
        given.append((folder, first_step))
        return kept

    put(monkeypatch, "kept", opening)
    put(monkeypatch, "refusing", refusing)
    with pytest.raises(ConfigError, match=r"output\.sinks: refusing cannot be opened: nobody answers.*or remove"):
        open_sinks(["kept", "refusing"], tmp_path, 7, print)
    assert given == [(tmp_path / "kept", 7)] and kept.closed == 1


def test_a_sink_that_fails_is_named_twice_and_the_others_go_on() -> None:
    said: list[str] = []
    failing, kept = Kept(failing_at=1200), Kept()
    both = Sinks({"failing": failing, "kept": kept}, said.append)
    for step in (1199, 1200, 1201):
        both.write(step, {"loss": 0.5})
    assert [step for step, _ in failing.got] == [1199] and failing.closed == 1
    assert [step for step, _ in kept.got] == [1199, 1200, 1201] and kept.closed == 0
    [first] = said
    assert first.startswith("! output.sinks: failing failed at step 1,200 ([Errno 28] No space left on device)")
    assert "The run goes on; metrics.jsonl has them all" in first
    both.close()
    assert said[1:] == ["! failing lacks the numbers from step 1,200 on; metrics.jsonl has them"]
    assert (failing.closed, kept.closed) == (1, 1)


def test_a_sink_that_cannot_be_closed_is_named_and_the_others_are_closed() -> None:
    said: list[str] = []
    kept = Kept()
    Sinks({"failing": Kept(failing_at_end=True), "kept": kept}, said.append).close()
    [line] = said
    assert line.startswith("! output.sinks: failing could not be closed (gone)") and kept.closed == 1


def test_an_order_to_stop_is_no_failure_of_a_sink() -> None:
    class Stopped(Kept):
        def write(self, step: int, numbers: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sinks({"stopped": Stopped()}, print).write(1, {})
