"""Chunks of examples in several processes: the same as in one, and no process is left behind or waits for ever."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_token_cache import CONFIG, ROWS, Opened, write
from tests.data.test_token_table import told
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.repeated import slow
from tuningfork.data.examples.row_reader import RowReader
from tuningfork.data.token_cache import TokenTables
from tuningfork.data.tokens import workers
from tuningfork.data.tokens.encode_rows import RowBatch, RowEncoder
from tuningfork.data.tokens.workers import Workers
from tuningfork.errors import DataError, RunFolderError


@pytest.fixture(autouse=True)
def _few_rows_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ROWS_A_PROCESS", 1)


class NoProcesses:
    """Stands for the processes; remembers how many were asked for."""

    def __init__(self, count: int, *rest: Any) -> None:
        self.count = count

    def submit(self, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def shutdown(self, **options: bool) -> None:
        closed.append(self.count)


closed: list[int] = []


def test_a_process_has_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more processes than data.workers, or cores, and than there are rows for in all tables so far. They stay, and
    are started anew only where twice as many are wanted."""
    monkeypatch.setattr(workers, "ROWS_A_PROCESS", 10)
    monkeypatch.setattr(workers, "_cores", lambda: 4)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", NoProcesses)
    encoder = RowEncoder(byte_bpe(chat_template=CHATML), CONFIG)
    reader = RowReader("", "pairs", False, False, False)
    cases: list[tuple[int | None, list[int], list[int]]] = [
        *((None, [19], []), (None, [20], [2]), (None, [500], [4])),
        *((3, [500], [3]), (9, [500], [9]), (9, [20], [2]), (1, [500], [])),
        *((None, [19, 1], [2]), (None, [20, 19, 2, 500], [2, 4]), (8, [5, 5, 5, 5, 19, 1, 500], [2, 4, 8])),
        # many short tables wait for twice as many; one that pays for all of them does not
        *((16, [90, 9999], [9, 16]), (3, [20, 999], [2, 3]), (16, [90, 9, 9, 9, 9], [9]), (16, [90, 80], [9])),
    ]
    for most, lengths, wanted in cases:
        closed.clear()
        pool = Workers(encoder, replace(CONFIG, workers=most))
        for rows in lengths:
            assert list(pool.encode([], rows, reader)) == []
        assert closed == wanted[:-1]
        pool.close()
        assert closed == wanted


def test_processes_that_start_are_not_exchanged_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_begin", time.sleep)  # it fails, and the process with it, if it comes to that
    monkeypatch.setattr(Workers, "_begun", lambda pool: False)
    tables = [
        write(tmp_path, [{**ROWS[0], "prompt": f"question {n}"} for n in range(3)], f"{n}.jsonl") for n in range(3)
    ]
    with TokenTables(byte_bpe(chat_template=CHATML), replace(CONFIG, workers=4), None, print) as reader:
        assert [len(reader.open(table)[0]) for table in tables] == [3, 3, 3]
        first = reader.encoder.workers._processes
        assert len(first) == 3
    assert all(process.exitcode == -signal.SIGTERM for process in first)
    assert not reader.encoder.workers._processes and reader.encoder.workers._pool is None


def test_a_daemon_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script's own multiprocessing.Pool: it may not have children."""
    encoder = RowEncoder(byte_bpe(chat_template=CHATML), CONFIG)
    assert Workers(encoder, replace(CONFIG, workers=4))._most == 4
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert Workers(encoder, replace(CONFIG, workers=4))._most == 1


def _all_begun(pool: Workers) -> bool:
    return not wait(pool._ready, timeout=120).not_done


@pytest.mark.parametrize("count", [slow(2), 3])
def test_any_number_of_processes_gives_the_same(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BATCH", 3)
    monkeypatch.setattr(Workers, "_begun", _all_begun)
    rows = [{**ROWS[0], "prompt": f"question {n}", "id": n % 5} if n % 5 else ROWS[2] for n in range(40)]
    table = write(tmp_path, rows)
    alone = Opened(monkeypatch, None)(table, config=replace(CONFIG, workers=1), group_by="id")
    assert Opened(monkeypatch, None)(table, config=replace(CONFIG, workers=count), group_by="id") == alone
    assert len({told[-1] for told in alone[0]}) == 4
    assert len(alone[0]) == 32 and len(alone[1].dropped) == 8
    # Some batches here, while the processes start, and the others there.
    begun = iter([False, True, True])
    monkeypatch.setattr(Workers, "_begun", lambda pool: next(begun, True) and _all_begun(pool))
    assert Opened(monkeypatch, None)(table, config=replace(CONFIG, workers=count), group_by="id") == alone


def test_processes_that_stay_read_the_next_table_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another format, and names of its own for its rows."""
    pairs = write(tmp_path, [{**ROWS[0], "prompt": f"question {n}"} for n in range(9)])
    texts = write(tmp_path, [{"text": f"some text {n}"} for n in range(9)], "texts.jsonl")
    monkeypatch.setattr(workers, "BATCH", 2)
    monkeypatch.setattr(Workers, "_begun", _all_begun)
    known = []
    for count in (1, 2):
        with TokenTables(byte_bpe(chat_template=CHATML), replace(CONFIG, workers=count), None, print) as reader:
            found = [reader.open(table) for table in (pairs, texts, pairs)]
            assert reader.encoder.workers._pool is None or len(multiprocessing.active_children()) == 2
        known.append([[told(example) for example in examples] for examples, _ in found])
        assert [account.format for _, account in found] == ["pairs", "text", "pairs"]
    assert known[0] == known[1] and [len(examples) for examples in known[0]] == [9, 9, 9]


def _killed(batch: RowBatch, reader: RowReader) -> None:
    if batch:
        os.kill(os.getpid(), 9)


def test_a_killed_process_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_work", _killed)
    monkeypatch.setattr(Workers, "_begun", _all_begun)
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
from tuningfork.data.tokens import workers
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.config import DataConfig

workers.ROWS_A_PROCESS = 1
workers.Workers._begun = lambda pool: not wait(pool._ready, 120).not_done
tokenizer = byte_bpe(chat_template=CHATML)
{guard}prepare_examples(sys.argv[1], tokenizer, DataConfig(workers=2), 300, cache=Path(sys.argv[2]))
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
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])},
    )
    assert told.returncode == (0 if guard else 1), told.stderr
    assert guard or "No process that turns rows into tokens could start" in told.stderr
    assert guard or "A script must ask for its data below `if __name__ == '__main__':`" in told.stderr
    assert (tmp_path / "cache").exists() == bool(guard)


def test_only_a_process_of_ours_must_not_prepare_data_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own pool may read a script that does: it holds no lock of ours."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    workers.check_started()
    monkeypatch.setattr(multiprocessing.current_process(), "_name", workers.OURS)
    with pytest.raises(DataError, match="cannot start"):
        workers.check_started()


@contextmanager
def _at_work(table: str) -> Iterator[None]:
    """Begin to encode in two processes."""
    workers.ROWS_A_PROCESS = 1  # in a process of its own
    with TokenTables(byte_bpe(chat_template=CHATML), replace(CONFIG, workers=2), None, print) as reader:
        _, columns = reader.encoder.encode(table)
        next(columns)
        yield


def _be_interrupted(table: str, out: Path) -> None:
    """Begin to work in processes, and have all of them interrupted as they start; what they say goes to a file."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    file = os.open(out.with_suffix(".aside"), os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    try:
        with _at_work(table):
            os.killpg(0, signal.SIGINT)
            time.sleep(60)
    except KeyboardInterrupt:
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
    with _at_work(table):
        children = [str(child.pid) for child in multiprocessing.active_children()]
        pids.with_suffix(".aside").write_text(" ".join(children))
        pids.with_suffix(".aside").rename(pids)
        time.sleep(600)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see processes")
def test_working_processes_end_with_the_one_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    table = write(tmp_path, [{**ROWS[0], "prompt": f"question {n}"} for n in range(3000)])
    first = multiprocessing.get_context("spawn").Process(target=_keep_at_work, args=(table, pids))
    first.start()
    _until(pids.exists)
    others = pids.read_text().split()
    assert len(others) == 2 and all(Path(f"/proc/{pid}").exists() for pid in others)
    first.kill()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others))


def _until(happened: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
