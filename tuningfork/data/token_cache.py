"""One table -> its token examples and an account of its rows: from the token cache, or made and kept there.

An entry of the cache is a folder named by a hash of all that decides what is in it: the table's bytes, the tokenizer
and its template, the settings, the versions of the libraries and this room's own source. So an entry is never stale:
what has changed has another name. Entries are whole or absent, and their bytes are checked when they are opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from tuningfork import records
from tuningfork.data import token_table
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.formats import FORMS
from tuningfork.data.examples.infer_format import open_table
from tuningfork.data.examples.row_reader import fields_not_read
from tuningfork.data.tables.read import digest_of
from tuningfork.data.token_table import Columns, TokenTable
from tuningfork.data.tokens.encode_rows import ChunkEncoder
from tuningfork.data.tokens.template_date import at_date
from tuningfork.data.tokens.workers import Workers, check_started
from tuningfork.errors import DataError, RunFolderError
from tuningfork.files import (
    DIGESTS,
    check_plain,
    check_sealed,
    clear_abandoned,
    exclusive,
    explained,
    read_plain,
    remove,
    seal,
    whole_folder,
)
from tuningfork.records import Size

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all) of a table."""
Notice = Callable[[str], None]
"""Called with a sentence for the user."""

ACCOUNT = "account.json"
_LARGEST_ACCOUNT = 4 << 30  # bytes: it names every row that was dropped
ELSEWHERE = "set data.cache to another folder, or to null for none."
CURE = f"Make room or permit it; or {ELSEWHERE}"
CHANGED = "{table}: changed while it was read. Run again once it is whole."
SETTINGS = (
    "format",
    "columns",
    "roles",
    "train_on",
    "max_length",
    "over_length",
    "control_tokens",
    "template",
)  # those that decide what becomes of a row
LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets")


_ACCOUNT = TypeAdapter(
    tuple[
        str,
        int,
        list[str],
        list[tuple[int, str, str]],
        dict[str, list[int]],
        list[tuple[int, int, list[int], int]],
    ]
)


@dataclass(slots=True)
class TableAccount:
    """What became of a table's rows: rows_read = examples + dropped. Rows are named by their numbers."""

    form: str
    rows_read: int
    fields: list[str]  # all that rows have, by the file's own names
    dropped: list[tuple[int, str, str]] = field(default_factory=list)  # row, reason, detail; in the order of the rows
    notes: dict[str, list[int]] = field(default_factory=dict)  # what is worth knowing of rows that are used
    sizes: dict[int, Size] = field(default_factory=dict)  # of examples over max_length, cut or left out

    def as_json(self) -> str:
        sizes = [[row, size.prompt, size.answers, size.opening] for row, size in self.sizes.items()]
        return json.dumps([self.form, self.rows_read, self.fields, self.dropped, self.notes, sizes])

    @classmethod
    def from_json(cls, text: str) -> TableAccount:
        """What `as_json` wrote. Raises ValueError."""
        form, rows_read, fields, dropped, notes, sizes = _ACCOUNT.validate_json(text)
        known = {row: Size(prompt, tuple(answers), opening) for row, prompt, answers, opening in sizes}
        return cls(form, rows_read, fields, dropped, notes, known)


class TableReader:
    """Opens tables with one tokenizer and one set of options; `folder` is the cache, None for none.

    To be used as a context: what processes it starts stay to its end. Raises DataError for an unfit tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, folder: Path | None, notice: Notice
    ) -> None:
        check_started()
        tokenizer = at_date(tokenizer, config.day())
        self.workers = Workers(ChunkEncoder(tokenizer, config), config)
        self.config, self.folder, self.notice = config, folder, notice
        self.origin = "" if folder is None else _origin(tokenizer, config)

    def __enter__(self) -> TableReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.workers.close()

    def open(self, table: str, progress: Progress | None = None) -> tuple[TokenTable, TableAccount]:
        """The examples and the account of a table: a file, a saved data set or a hub name.

        Raises:
            DataError: it cannot be read, or changes meanwhile.
            RunFolderError: the cache cannot be read or written.
        """
        if self.folder is None:
            account, blocks = _make(table, self.workers, self.config, progress)
            return TokenTable(table, token_table.joined(blocks)), account
        before = digest_of(table)
        entry = self.folder / xxhash.xxh3_128_hexdigest(f"{before} {self.origin}".encode())
        found = self._kept(entry, table, progress)
        if found is None:
            waiting = f"{self.folder}: another process writes there; waiting"
            with exclusive(self.folder, lambda: self.notice(waiting), CURE):
                # That process may have made it.
                found = self._kept(entry, table, progress) or self._made(entry, table, before, progress)
        columns, account = found
        return TokenTable(table, columns), account

    def _kept(self, entry: Path, table: str, progress: Progress | None) -> tuple[Columns, TableAccount] | None:
        """What the cache has of a table, if it has it whole."""
        found = _read(entry)
        if found is not None:
            self.notice(f"{table}: tokens of before, from {entry.parent}")
            if progress is not None:
                progress(found[1].rows_read, found[1].rows_read)
        return found

    def _made(self, entry: Path, table: str, before: str, progress: Progress | None) -> tuple[Columns, TableAccount]:
        """The table's tokens, made and kept; no other process is at work in the cache. `before` is the table's hash."""
        with explained(entry.parent, CURE):
            clear_abandoned(entry.parent, held=True)
            if os.path.lexists(entry):
                _check_ours(entry)
                self.notice(f"{entry}: damaged, made again")
                remove(entry)
        with whole_folder(entry, CURE) as aside:
            account, blocks = _make(table, self.workers, self.config, progress)
            token_table.write(aside, blocks)
            (aside / ACCOUNT).write_text(account.as_json())
            seal(aside)
            if digest_of(table) != before:
                raise DataError(CHANGED.format(table=table))
        found = _read(entry)
        if found is None:
            raise RunFolderError(f"{entry}: what was written there is not what can be read. {CURE}")
        return found


def _read(entry: Path) -> tuple[Columns, TableAccount] | None:
    """What an entry of the cache holds; None where there is no whole one. Raises RunFolderError."""
    check_plain(entry, folder=True)
    try:
        check_sealed(entry, (*token_table.TYPES, ACCOUNT))
        columns, account = (
            token_table.mapped(entry),
            TableAccount.from_json(read_plain(entry / ACCOUNT, _LARGEST_ACCOUNT).decode()),
        )
        token_table.check(columns)
        if account.form not in FORMS or account.rows_read != len(columns["row"]) + len(account.dropped):
            raise ValueError(f"{ACCOUNT} is damaged")
        return columns, account
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, TypeError, RecursionError):
        return None
    except OSError as error:
        raise RunFolderError(f"{entry} cannot be read: {error.strerror or error}. Permit it; or {ELSEWHERE}") from error


def _check_ours(entry: Path) -> None:
    """Raise RunFolderError where a damaged entry holds what no entry does: it is removed with all that is in it."""
    if others := sorted({path.name for path in entry.iterdir()} - {*token_table.TYPES, ACCOUNT, DIGESTS}):
        raise RunFolderError(f"{entry} holds {others[0]!r}, which is not ours to remove. Move it away; or {ELSEWHERE}")


def _make(
    table: str, workers: Workers, config: DataConfig, progress: Progress | None
) -> tuple[TableAccount, Iterator[Columns]]:
    """Read and encode a table. The account is complete once the columns are drawn."""
    rows, found, reader = open_table(
        table, config.template == "none", config.format, config.columns or {}, workers.encoder.names
    )
    count = found.rows
    account = TableAccount(reader.form, count, found.fields)

    def columns() -> Iterator[Columns]:
        done = kept = 0
        not_read: dict[str, list[int]] = {}
        for block in workers.encode(rows, count, reader):
            yield block.columns
            kept += len(block.columns["row"])
            account.dropped += block.dropped
            account.sizes.update(block.sizes)
            for note, row in block.notes:
                account.notes.setdefault(note, []).append(row)
            for name, row in block.not_read:
                not_read.setdefault(name, []).append(row)
            done += block.read
            if progress is not None:
                progress(done, count)
        account.dropped.sort(key=lambda row: row[0])
        if not_read:
            account.notes[fields_not_read(list(not_read))] = sorted(set().union(*not_read.values()))
        if kept + len(account.dropped) != count:  # the rows are gone through more than once
            raise DataError(CHANGED.format(table=table))

    return account, columns()


def _origin(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """All that decides what becomes of a table's bytes, as text."""
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    facts = {
        "tokenizer": xxhash.xxh3_128_hexdigest(backend.to_str().encode()),
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split": str(getattr(tokenizer, "split_special_tokens", None)),
        "template": tokenizer.chat_template,
        "settings": {name: getattr(config, name) for name in SETTINGS},
        "libraries": {name: version(name) for name in LIBRARIES},
        "source": _source_digest(),
    }
    return json.dumps(facts, sort_keys=True, default=str)


@cache
def _source_digest() -> str:
    """A hash of the source that turns rows into tokens."""
    files = [Path(records.__file__), *sorted(Path(__file__).parent.rglob("*.py"))]
    return xxhash.xxh3_128_hexdigest(b"\0".join(file.read_bytes() for file in files))
