"""Chunks of examples in several processes: the same as in one, and no process is left behind or waits for ever."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_tables import CONFIG, ROWS, Opened, write
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data import chunks, tables
from tuningfork.data.examples import RowReader
from tuningfork.data.read import Rows
from tuningfork.data.tables import TableReader
from tuningfork.errors import DataError, RunFolderError


@pytest.fixture(autouse=True)
def _few_rows_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ROWS_A_PROCESS", 1)


def test_a_process_has_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more processes than data.workers, or cores, and than there are rows for."""
    asked: list[int] = []
    monkeypatch.setattr(chunks, "ROWS_A_PROCESS", 10)
    monkeypatch.setattr(chunks, "_cores", lambda: 4)
    monkeypatch.setattr(chunks, "_spread", lambda _, workers, *rest: asked.append(workers) or [])
    encoder = chunks.ChunkEncoder(byte_bpe(chat_template=CHATML), CONFIG)
    no_rows, reader = Rows(lambda: []), RowReader("", "pairs", False, False, False)
    for workers, rows in ((None, 19), (None, 20), (None, 500), (3, 500), (9, 500), (9, 20), (1, 500)):
        list(chunks.encode_chunks(no_rows, rows, reader, encoder, replace(CONFIG, workers=workers)))
    assert asked == [2, 4, 3, 9, 2]


def _all_begun(ready: Any) -> bool:
    return not wait(ready, timeout=120).not_done


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_processes_gives_the_same(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 3)
    monkeypatch.setattr(chunks, "_begun", _all_begun)
    rows = [{**ROWS[0], "prompt": f"question {n}"} if n % 5 else ROWS[2] for n in range(40)]
    table = write(tmp_path, rows)
    alone = Opened(monkeypatch, None)(table, config=replace(CONFIG, workers=1))
    assert Opened(monkeypatch, None)(table, config=replace(CONFIG, workers=workers)) == alone
    assert len(alone[0]) == 32 and len(alone[1].dropped) == 8
    # Some chunks here, while the processes start, and the others there.
    begun = iter([False, True, True])
    monkeypatch.setattr(chunks, "_begun", lambda ready: next(begun, True) and _all_begun(ready))
    assert Opened(monkeypatch, None)(table, config=replace(CONFIG, workers=workers)) == alone


def _killed(chunk: chunks.Chunk) -> None:
    if chunk:
        os.kill(os.getpid(), 9)


def test_a_killed_process_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_work", _killed)
    monkeypatch.setattr(chunks, "_begun", _all_begun)
    with pytest.raises(DataError, match=r"was killed.*data.workers to less: 1"):
        Opened(monkeypatch, None)(write(tmp_path, ROWS), config=replace(CONFIG, workers=2))


def test_no_room_and_no_process_are_errors_that_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    table, config = write(tmp_path, ROWS), replace(CONFIG, workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(ProcessPoolExecutor, "submit", refused)
        with pytest.raises(DataError, match=r"refuses another process.*temporarily unavailable.*data.workers"):
            Opened(monkeypatch, tmp_path / "cache")(table, config=config)
    monkeypatch.setattr("tempfile.TemporaryDirectory", refused)
    with pytest.raises(RunFolderError, match=r"cannot be written: Resource.*set TMPDIR"):
        Opened(monkeypatch, tmp_path / "cache")(table, config=config)
    assert not (tmp_path / "cache").exists()


SCRIPT = """
import sys
from concurrent.futures import wait
from pathlib import Path
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data import chunks
from tuningfork.data.audit import prepare
from tuningfork.data.config import DataConfig

chunks.ROWS_A_PROCESS = 1
chunks._begun = lambda ready: not wait(ready, 120).not_done
{guard}prepare(sys.argv[1], byte_bpe(chat_template=CHATML), DataConfig(workers=2), 300, cache=Path(sys.argv[2]))
"""


@pytest.mark.parametrize("guard", ["", "if __name__ == '__main__': "])
def test_a_script_without_a_guard_is_told_and_does_not_wait_for_itself(guard: str, tmp_path: Path) -> None:
    """Its processes read it again and would prepare the data anew, behind the lock of the first one."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    table = write(tmp_path, [{**ROWS[0], "prompt": f"question {n}"} for n in range(40)])
    told = subprocess.run(
        [sys.executable, script, table, tmp_path / "cache"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
    )
    assert told.returncode == (0 if guard else 1), told.stderr
    assert guard or "No process that turns rows into tokens could start" in told.stderr
    assert guard or "A script must ask for its data below `if __name__ == '__main__':`" in told.stderr
    assert (tmp_path / "cache").exists() == bool(guard)


def test_only_a_process_of_ours_must_not_prepare_data_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own pool may read a script that does: it holds no lock of ours."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    chunks.check_started()
    monkeypatch.setenv(chunks.OURS, "1")
    with pytest.raises(DataError, match="cannot start"):
        chunks.check_started()


def _begin_work(table: str) -> Any:
    """Begin to encode in two processes, which end with what is returned."""
    chunks.ROWS_A_PROCESS = 1  # in a process of its own
    reader = TableReader(byte_bpe(chat_template=CHATML), replace(CONFIG, workers=2), None, print)
    _, columns = tables._make(table, reader.encoder, reader.config, None)
    next(columns)
    return columns


def _be_interrupted(table: str, out: Path) -> None:
    """Begin to work in processes, and have all of them interrupted as they start; what they say goes to a file."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    file = os.open(out.with_suffix(".aside"), os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    columns = _begin_work(table)
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        columns.close()
        os.write(2, b"interrupted")
    out.with_suffix(".aside").rename(out)


def test_processes_that_start_do_not_answer_an_interrupt(tmp_path: Path) -> None:
    """The first one ends them."""
    table = write(tmp_path, [{**ROWS[0], "prompt": f"question {n}"} for n in range(3000)])
    first = multiprocessing.get_context("spawn").Process(target=_be_interrupted, args=(table, tmp_path / "out"))
    first.start()
    first.join(120)
    assert first.exitcode == 0 and (tmp_path / "out").read_text() == "interrupted"


def _keep_at_work(table: str, pids: Path) -> None:
    """Encode without end, in two processes whose ids are written down."""
    columns = _begin_work(table)
    children = [str(child.pid) for child in multiprocessing.active_children()]
    pids.with_suffix(".aside").write_text(" ".join(children))
    pids.with_suffix(".aside").rename(pids)
    time.sleep(600)
    columns.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see processes")
def test_working_processes_end_with_the_one_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    table = write(tmp_path, [{**ROWS[0], "prompt": f"question {n}"} for n in range(3000)])
    first = multiprocessing.get_context("spawn").Process(target=_keep_at_work, args=(table, pids))
    first.start()
    _until(pids.exists)
    workers = pids.read_text().split()
    assert len(workers) == 2 and all(Path(f"/proc/{pid}").exists() for pid in workers)
    first.kill()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def _until(happened: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
