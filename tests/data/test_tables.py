"""The token cache: what it keeps is what would be made, whatever changes has another name, and damage is seen."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_store import told
from tests.data.tiny_tokenizers import CHATML, INST, byte_bpe
from tuningfork.data import chunks, tables
from tuningfork.data.config import DataConfig
from tuningfork.data.tables import TableReader
from tuningfork.errors import DataError, RunFolderError

CONFIG = DataConfig(max_length=60)
ROWS = [
    {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5, "id": 4},
    {"prompt": "q", "chosen": "", "rejected": "b"},  # dropped as it is read
    {"prompt": "q", "chosen": "a" * 90, "rejected": "b"},  # dropped as it is encoded
    {"prompt": "r", "chosen": "c", "rejected": "d", "weight": 2},
]


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


class Opened:
    """Opens a table and remembers what was said, and whether rows were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path | None) -> None:
        self.cache, self.said, self.made = cache, [], 0
        make = tables._make

        def counted(*args: Any) -> Any:
            self.made += 1
            return make(*args)

        monkeypatch.setattr(tables, "_make", counted)

    def __call__(self, table: str, tokenizer: Any = None, config: DataConfig = CONFIG) -> Any:
        reader = TableReader(tokenizer or byte_bpe(chat_template=CHATML), config, self.cache, self.said.append)
        examples, account = reader.open(table)
        return [told(e) for e in examples], account


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Opened:
    return Opened(monkeypatch, tmp_path / "cache")


def test_what_is_kept_is_what_was_made(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write(tmp_path, ROWS)
    first = opened(table)
    again = opened(table)
    without = Opened(monkeypatch, None)(table)
    assert first == again == without
    assert opened.made == 1 + 1  # the second one was not; the reader without a cache was
    assert opened.said == [f"{table}: tokens of before, from {tmp_path / 'cache'}"]
    examples, account = again
    assert [(e[0].file, e[0].row) for e in examples] == [(table, 1), (table, 4)]
    assert [e[3:] for e in examples] == [(None, 1.0, 0.5), (None, 2.0, None)]
    assert (account.form, account.rows_read) == ("pairs", 4)
    assert [(row, reason) for row, reason, _ in account.dropped] == [(2, "empty answer"), (3, "longer than max_length")]
    assert account.notes == {"fields that are not read: id": [1]}
    assert list(account.sizes) == [3] and account.sizes[3].answers[0] > 90


def test_the_same_bytes_under_another_name_are_found(opened: Opened, tmp_path: Path) -> None:
    opened(write(tmp_path, ROWS))
    examples, _ = opened(write(tmp_path, ROWS, "copy.jsonl"))
    assert opened.made == 1 and examples[0][0].file.endswith("copy.jsonl")


def test_whatever_decides_a_token_makes_another_entry(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, suffix, tokenizer, template, special tokens, every setting, a library, our own source."""
    table = write(tmp_path, ROWS)
    opened(table)
    others = [
        lambda: opened(write(tmp_path, [*ROWS, ROWS[0]])),
        lambda: opened(write(tmp_path, ROWS, "rows.json")),
        lambda: opened(table, byte_bpe([("a", "b")], chat_template=CHATML)),
        lambda: opened(table, byte_bpe(chat_template=INST)),
        lambda: opened(table, byte_bpe(chat_template=CHATML, eos="<|im_end|>")),
        lambda: opened(table, config=replace(CONFIG, max_length=61)),
        lambda: opened(table, config=replace(CONFIG, over_length="truncate_answers")),
        lambda: opened(table, config=replace(CONFIG, train_on="last")),
        lambda: opened(table, config=replace(CONFIG, template="none")),
        lambda: opened(table, config=replace(CONFIG, format="pairs")),
    ]
    for count, other in enumerate(others, 2):
        write(tmp_path, ROWS)
        other()
        assert opened.made == count, count
    write(tmp_path, ROWS)
    opened(table)
    opened(table, config=replace(CONFIG, workers=1, cache="elsewhere", mix_seed=3))  # decide no token
    assert opened.made == len(others) + 1
    monkeypatch.setattr(tables, "version", lambda name: "0")
    opened(table)
    monkeypatch.setattr(tables, "_source_digest", lambda: "changed")
    opened(table)
    assert opened.made == len(others) + 3


def test_a_template_that_prints_the_date_is_read_anew_tomorrow(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date.fromordinal(super().today().toordinal() + 1)

    table = write(tmp_path, ROWS)
    dated = byte_bpe(chat_template="{{ strftime_now('%Y') }}" + CHATML)
    for tokenizer in (None, dated):
        opened(table, tokenizer)
    monkeypatch.setattr(tables.datetime, "date", Tomorrow)
    opened(table)
    assert opened.made == 2
    opened(table, dated)
    assert opened.made == 3


@pytest.mark.parametrize("damage", ["a bit", "cut short", "a file is gone", "no account", "account is no JSON"])
def test_a_damaged_entry_is_made_again_and_said(opened: Opened, tmp_path: Path, damage: str) -> None:
    table = write(tmp_path, ROWS)
    first = opened(table)
    (entry,) = (tmp_path / "cache").iterdir()
    ids, account = entry / "ids", entry / tables.ACCOUNT
    if damage == "a bit":
        ids.write_bytes(bytes([ids.read_bytes()[0] ^ 1]) + ids.read_bytes()[1:])
    elif damage == "cut short":
        ids.write_bytes(ids.read_bytes()[:-4])
    elif damage == "a file is gone":
        ids.unlink()
    else:
        account.unlink() if damage == "no account" else account.write_text("{")
    assert opened(table) == first
    assert opened.made == 2 and opened.said == [f"{entry}: damaged, made again"]


def test_a_table_that_fails_leaves_no_entry(opened: Opened, tmp_path: Path) -> None:
    table = write(tmp_path, ROWS)
    Path(table).write_text(Path(table).read_text() + "{")
    with pytest.raises(DataError, match="line 5 is not JSON"):
        opened(table)
    assert not (tmp_path / "cache").exists()


def test_a_table_that_changes_while_it_is_read_is_refused(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens must not be kept under the name of what it was."""
    table, encode = write(tmp_path, ROWS), tables.encode_chunks

    def late(*args: Any) -> Any:
        yield from encode(*args)
        write(tmp_path, [*ROWS, ROWS[0]])

    monkeypatch.setattr(tables, "encode_chunks", late)
    with pytest.raises(DataError, match="changed while it was read"):
        opened(table)
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_that_splits_special_tokens_has_its_own_entry(opened: Opened, tmp_path: Path) -> None:
    splitting = byte_bpe(chat_template=CHATML)
    splitting.split_special_tokens = True
    table = write(tmp_path, ROWS)
    opened(table)
    opened(table, splitting)
    assert opened.made == 2


def test_what_a_kill_left_behind_is_removed(opened: Opened, tmp_path: Path) -> None:
    rest = tmp_path / "cache" / "0123.partial"
    rest.mkdir(parents=True)
    (rest / "ids").write_bytes(b"half")
    opened(write(tmp_path, ROWS))
    assert not rest.exists()


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=str(tmp_path / "file")):
        Opened(monkeypatch, tmp_path / "file")(write(tmp_path, ROWS))


def _open_slowly(table: str, cache: Path, out: Path) -> None:
    said: list[str] = []
    encode = tables.encode_chunks

    def slow(*args: Any) -> Any:
        (out.parent / f"{out.name} begun").touch()
        time.sleep(1)
        return encode(*args)

    tables.encode_chunks = slow
    TableReader(byte_bpe(chat_template=CHATML), CONFIG, cache, said.append).open(table)
    out.write_text("\n".join(said))


def test_two_processes_make_a_table_once(tmp_path: Path) -> None:
    """The second one waits for the first, says so, and takes what that one kept."""
    table, context = write(tmp_path, ROWS), multiprocessing.get_context("spawn")
    outs = [tmp_path / "one", tmp_path / "two"]
    workers = [context.Process(target=_open_slowly, args=(table, tmp_path / "cache", out)) for out in outs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    begun = [out for out in outs if (tmp_path / f"{out.name} begun").exists()]
    assert len(begun) == 1
    (waited,) = set(outs) - set(begun)
    assert "waiting" in waited.read_text() or "tokens of before" in waited.read_text()
    assert len(list((tmp_path / "cache").iterdir())) == 1


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


def _killed(examples: Any) -> Any:
    os.kill(os.getpid(), 9)


def test_a_killed_process_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_work", _killed)
    monkeypatch.setattr(chunks, "_begun", _all_begun)
    with pytest.raises(DataError, match=r"was killed.*data.workers to less: 1"):
        Opened(monkeypatch, None)(write(tmp_path, ROWS), config=replace(CONFIG, workers=2))


def _keep_at_work(table: str, pids: Path) -> None:
    """Encode without end, in two processes whose ids are written down."""
    reader = TableReader(byte_bpe(chat_template=CHATML), replace(CONFIG, workers=2), None, print)
    _, columns = tables._make(table, reader.encoder, reader.config, None)
    next(columns)
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
    workers = pids.read_text().split()
    assert len(workers) == 2 and all(Path(f"/proc/{pid}").exists() for pid in workers)
    first.kill()
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def _until(happened: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
