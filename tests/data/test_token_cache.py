"""The token cache: what it keeps is what would be made, whatever changes has another name, and damage is seen."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_token_table import told
from tests.data.tiny_tokenizers import CHATML, INST, byte_bpe
from tests.test_architecture import ROOT, config_reads, imports, modules
from tuningfork.data import config, token_cache, token_table
from tuningfork.data.config import DataConfig
from tuningfork.data.examples import infer_format
from tuningfork.data.token_cache import TokenTables
from tuningfork.data.tokens.encode_table import TableEncoder
from tuningfork.data.tokens.workers import Workers
from tuningfork.errors import DataError, RunFolderError
from tuningfork.files import DIGESTS, seal

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
        make = TableEncoder.encode

        def counted(*args: Any) -> Any:
            self.made += 1
            return make(*args)

        monkeypatch.setattr(TableEncoder, "encode", counted)

    def __call__(
        self, table: str, tokenizer: Any = None, config: DataConfig = CONFIG, group_by: str | None = None
    ) -> Any:
        tokenizer = tokenizer or byte_bpe(chat_template=CHATML)
        with TokenTables(tokenizer, config, self.cache, self.said.append, group_by) as reader:
            found, account = reader.open(table)
        return [told(example) for example in found], account


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
    found, account = again
    assert [(e[0].file, e[0].row) for e in found] == [(table, 1), (table, 4)]
    assert [e[3:] for e in found] == [(None, 1.0, 0.5, 0), (None, 2.0, None, 0)]
    assert (account.format, account.rows_read) == ("pairs", 4)
    assert [(row, reason) for row, reason, _ in account.dropped] == [(2, "empty answer"), (3, "longer than max_length")]
    assert account.notes == {"fields that are not read: id": [1]}
    assert list(account.sizes) == [3] and account.sizes[3].answers[0] > 90


def test_what_rows_belong_to_is_kept_with_their_tokens(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path, [{**ROWS[0], "id": n // 2} for n in range(6)])
    first, again = opened(table, group_by="id"), opened(table, group_by="id")
    assert first == again == Opened(monkeypatch, None)(table, group_by="id")
    groups = [told[-1] for told in first[0]]
    assert groups[::2] == groups[1::2] and len({*groups}) == 3 and 0 not in groups
    assert {told[-1] for told in opened(table)[0]} == {0}


def test_the_same_bytes_under_another_name_are_found(opened: Opened, tmp_path: Path) -> None:
    opened(write(tmp_path, ROWS))
    found, _ = opened(write(tmp_path, ROWS, "copy.jsonl"))
    assert opened.made == 1 and found[0][0].file.endswith("copy.jsonl")


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
        lambda: opened(table, config=replace(CONFIG, control_tokens="as_text")),
        lambda: opened(table, config=replace(CONFIG, template="none")),
        lambda: opened(table, config=replace(CONFIG, format="pairs")),
        lambda: opened(table, group_by="id"),
        lambda: opened(table, group_by="conversation"),
    ]
    for count, other in enumerate(others, 2):
        write(tmp_path, ROWS)
        other()
        assert opened.made == count, count
    write(tmp_path, ROWS)
    opened(table)
    opened(table, config=replace(CONFIG, workers=1, cache="elsewhere", mix_seed=3))  # decide no token
    assert opened.made == len(others) + 1
    monkeypatch.setattr(token_cache, "version", lambda name: "0")
    opened(table)
    monkeypatch.setattr(token_cache, "_source_digest", lambda: "changed")
    opened(table)
    assert opened.made == len(others) + 3


@pytest.mark.parametrize("form", ["'%d'", "'%d' ~ ''", "form"])
def test_tokens_of_a_template_that_prints_the_date_are_kept_for_that_date(
    form: str, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(date):
        @classmethod
        def today(cls) -> date:
            return date(2024, 2, 29)

    monkeypatch.setattr(config, "date", Clock)
    table = write(tmp_path, ROWS)
    dated = byte_bpe(chat_template="{% set form = '%d' %}{{ strftime_now(" + form + ") }}" + CHATML)
    today, _ = opened(table, dated)
    assert opened.made == 1 and dated.decode(today[0][1]).startswith("29")
    assert opened(table, dated, replace(CONFIG, date="2024-02-29"))[0] == today and opened.made == 1
    other, _ = opened(table, dated, replace(CONFIG, date="2024-03-01"))
    assert opened.made == 2 and dated.decode(other[0][1]).startswith("01")
    for day in ("2024-02-29", "2024-03-01"):  # another template does not ask
        opened(table, None, replace(CONFIG, date=day))
    assert opened.made == 3


@pytest.mark.parametrize(
    "damage",
    [
        *("a bit", "a bit of the account", "cut short", "a file is gone", "no account", "no digests"),
        *("digests are no JSON", "empty"),
    ],
)
def test_a_damaged_entry_is_made_again_and_said(opened: Opened, tmp_path: Path, damage: str) -> None:
    table = write(tmp_path, ROWS)
    first = opened(table)
    (entry,) = (tmp_path / "cache").iterdir()
    ids, account, digests = entry / "ids", entry / token_cache.ACCOUNT, entry / DIGESTS
    if damage.startswith("a bit"):
        file = account if "account" in damage else ids
        content = bytearray(file.read_bytes())
        content[-4] ^= 1
        file.write_bytes(content)
    elif damage == "cut short":
        ids.write_bytes(ids.read_bytes()[:-4])
    elif damage == "digests are no JSON":
        digests.write_text("{")
    elif damage == "empty":
        shutil.rmtree(entry)
        entry.mkdir()
    else:
        {"a file is gone": ids, "no account": account, "no digests": digests}[damage].unlink()
    assert opened(table) == first
    assert opened.made == 2 and opened.said == [f"{entry}: damaged, made again"]


@pytest.mark.parametrize("place", ["a file", "a link", "a link to nothing", "a foreign file in it", "a link in it"])
def test_what_is_not_ours_is_not_removed_for_a_damaged_entry(opened: Opened, tmp_path: Path, place: str) -> None:
    table = write(tmp_path, ROWS)
    opened(table)
    (entry,) = (tmp_path / "cache").iterdir()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes.txt").write_text("precious")
    if place == "a foreign file in it":
        (entry / DIGESTS).unlink()
        shutil.copy(precious / "notes.txt", entry)
    elif place == "a link in it":
        (entry / "ids").unlink()
        (entry / "ids").symlink_to(precious / "notes.txt")
    else:
        shutil.rmtree(entry)
        entry.write_text("precious") if place == "a file" else entry.symlink_to("absent" if "to" in place else precious)
    with pytest.raises(RunFolderError, match=rf"{entry}.* (is a file|is a link|holds 'notes\.txt').*(Move|Remove)"):
        opened(table)
    assert os.path.lexists(entry) and (precious / "notes.txt").read_text() == "precious" and opened.made == 1


def test_a_row_that_is_gone_in_a_later_pass_is_noticed(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is gone through for its format, then for its rows; without a cache nobody hashes it."""
    table, look = write(tmp_path, ROWS), infer_format.infer_format

    def then_cut(*args: Any) -> Any:
        found = look(*args)
        write(tmp_path, ROWS[:3])
        return found

    monkeypatch.setattr(infer_format, "infer_format", then_cut)
    for reader in (Opened(monkeypatch, None), opened):
        write(tmp_path, ROWS)
        with pytest.raises(DataError, match="changed while it was read"):
            reader(table)
    assert not (tmp_path / "cache").exists()


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
    table, encode = write(tmp_path, ROWS), Workers.encode

    def late(*args: Any) -> Any:
        yield from encode(*args)
        write(tmp_path, [*ROWS, ROWS[0]])

    monkeypatch.setattr(Workers, "encode", late)
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
    """And nothing else: the folder may be one that others keep things in."""
    cache = tmp_path / "cache"
    rest, others = cache / f".{'0123' * 8}.tuningfork-{'01234567' * 2}.partial", cache / f"{'0123' * 8}.partial"
    for folder in (rest, others):
        folder.mkdir(parents=True)
        (folder / "ids").write_bytes(b"half")
    (cache / "notes.partial").write_text("a file")
    opened(write(tmp_path, ROWS))
    left = {path.name for path in cache.iterdir()}
    assert len(left) == 3 and (others / "ids").exists() and not rest.exists()


def test_a_cache_that_cannot_be_written_says_so(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=f"{tmp_path / 'file'} is not a folder.*data.cache"):
        Opened(monkeypatch, tmp_path / "file")(write(tmp_path, ROWS))

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_table, "write_columns", full)
    with pytest.raises(RunFolderError, match=r"cannot be written: No space left.*data.cache"):
        opened(write(tmp_path, ROWS))
    assert not (tmp_path / "cache").exists()


def test_an_entry_that_may_not_be_read_is_no_damage(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not removed: the next run, with the right to read it, has it."""
    table = write(tmp_path, ROWS)
    first = opened(table)

    def closed(folder: Path, names: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "check_sealed", closed)
        with pytest.raises(RunFolderError, match=r"cannot be read: Permission denied.*data.cache"):
            opened(table)
    assert opened(table) == first and opened.made == 1


def _open_slowly(table: str, cache: Path, out: Path) -> None:
    said: list[str] = []
    encode = Workers.encode

    def slow(*args: Any) -> Any:
        (out.parent / f"{out.name} begun").touch()
        time.sleep(1)
        return encode(*args)

    Workers.encode = slow  # type: ignore[method-assign]  # in a process of its own
    with TokenTables(byte_bpe(chat_template=CHATML), CONFIG, cache, said.append) as reader:
        reader.open(table)
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("answers", b"\0" * 8),
        ("prompt", b"\xff" * 8),
        ("ids", b""),
        (token_cache.ACCOUNT, b"[1]"),
        (token_cache.ACCOUNT, b"[" * 100_000),
        (token_cache.ACCOUNT, b'["pairs", 9, [], [], {}, []]'),
        (token_cache.ACCOUNT, b'["none", 2, [], [], {}, []]'),
        (token_cache.ACCOUNT, b'["pairs", 3, [], [[1]], {}, []]'),
    ],
)
def test_what_somebody_else_wrote_with_its_checksums_is_made_again(
    opened: Opened, tmp_path: Path, name: str, content: bytes
) -> None:
    """Whole files that hold what this program never writes."""
    table = write(tmp_path, ROWS)
    first = opened(table)
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / name).write_bytes(content)
    (entry / DIGESTS).unlink()
    seal(entry)
    assert opened(table) == first
    assert opened.made == 2 and opened.said == [f"{entry}: damaged, made again"]


# --- the source in the key -------------------------------------------------------------------------------------------

OUTSIDE = {
    "errors": "classes of errors",
    "wording": "the wording of messages",
    "library_words": "how what libraries log and warn of is shown",
    "files": "opens, locks and writes files; what is in them is the business of those who read them",
    "json_files": "reads what lies beside the tables of a saved data set, which names the files that are hashed",
    "data.config": "the settings, whose values are in the key",
}
"""Modules that decide no token although rows become tokens by way of them, and why."""


def covered() -> set[str]:
    """The modules whose source is in the key."""
    roots = [name.removesuffix(".py").replace("/", ".") for name in token_cache.SOURCE]
    return {module for module in modules() if any(module == root or module.startswith(f"{root}.") for root in roots)}


def closure(module: str) -> set[str]:
    """A module, all of the house that it imports, and what these import."""
    found, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports(name)
    return found


def test_the_key_holds_the_source_that_turns_rows_into_tokens_and_no_other() -> None:
    packages = {module for module in modules() if (ROOT / module.replace(".", "/")).is_dir()}
    needed = closure("data.tokens.encode_table")
    assert needed >= OUTSIDE.keys()
    assert needed - OUTSIDE.keys() == covered() - packages
    assert all((ROOT / name).exists() for name in token_cache.SOURCE)


def test_the_key_holds_every_setting_that_source_reads() -> None:
    """But the number of processes and the day: a template that prints it says which in its own text, see below."""
    reads = {name for module in covered() for kind, name in config_reads(modules()[module]) if kind == "DataConfig"}
    assert reads == {*token_cache.SETTINGS, "workers", "day"}


def test_an_edit_of_what_makes_tokens_changes_the_key_and_no_other_edit_does(tmp_path: Path) -> None:
    copy = tmp_path / "tuningfork"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = token_cache._source_digest(copy)
    assert before == token_cache._source_digest() == token_cache._source_digest(ROOT)

    def after(name: str, text: str = "# edited\n") -> str:
        (copy / name).parent.mkdir(exist_ok=True)
        kept = (copy / name).read_bytes() if (copy / name).exists() else None
        with (copy / name).open("a") as file:
            file.write(text)
        token_cache._source_digest.cache_clear()
        found = token_cache._source_digest(copy)
        if kept is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(kept)
        return found

    for name in ("packing/pack.py", "summary/sets.py", "sources/mix.py", "prepare.py", "config.py", "new.py"):
        assert after(f"data/{name}") == before, name
    readers = ("tables/json_rows.py", "examples/formats.py", "tokens/template.py", "token_table.py")
    edited = [after(f"data/{name}") for name in (*readers, "tables/new.py", "examples/deeper/new.py")]
    edited.append(after("records.py"))
    assert len({before, *edited}) == 1 + len(edited)
    assert after("data/tables/json_rows.py", "") == before
