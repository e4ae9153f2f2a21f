"""A table's token examples and the account of its rows: from the token cache, or made and kept there.

An entry of the cache is a folder named by a hash of all that decides what is in it: the table's bytes, the tokenizer
and its template, the settings, the versions of the libraries, and the source that turns rows into tokens. So an entry
is never stale: what has changed has another name. Entries are whole or absent, and their bytes are checked when they
are opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from tuningfork.data import token_table
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.formats import FORMATS
from tuningfork.data.tables.read import digest_of
from tuningfork.data.token_table import Columns, TokenTable
from tuningfork.data.tokens.encode_table import CHANGED, Progress, TableAccount, TableEncoder
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

Notice = Callable[[str], None]
"""Called with a sentence for the user."""

ACCOUNT = "account.json"
_LARGEST_ACCOUNT = 4 << 30  # bytes: it names every row that was dropped
ELSEWHERE = "set data.cache to another folder, or to null for none."
CURE = f"Make room or permit it; or {ELSEWHERE}"
SETTINGS = (
    "format",
    "columns",
    "roles",
    "answers",
    "train_on",
    "max_length",
    "over_length",
    "control_tokens",
    "template",
)  # those that decide what becomes of a row
LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets")
# What turns rows into tokens, packages with all that is in them. The key holds the source itself, for a version that
# somebody must remember to raise would one day let old tokens pass for new ones, and no test can tell an edit that
# changes a token from one that does not. A test compares this list with what `encode_table` imports.
SOURCE = ("data/tables", "data/examples", "data/tokens", "data/token_table.py", "accounts.py", "records.py")


class TokenTables:
    """Opens tables as token examples, with one tokenizer and one set of options; `folder` is the cache, None for none.
    `group_by` names what examples keep of their rows for their order, see `with_group`.

    To be used as a context: what processes it starts stay to its end. Raises DataError for an unfit tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        folder: Path | None,
        notice: Notice,
        group_by: str | None = None,
    ) -> None:
        self.encoder = TableEncoder(tokenizer, config, group_by)
        self.folder, self.notice = folder, notice
        self.origin = "" if folder is None else _origin(self.encoder.tokenizer, config, group_by)

    def __enter__(self) -> TokenTables:
        return self

    def __exit__(self, *error: object) -> None:
        self.encoder.close()

    def open(self, table: str, progress: Progress | None = None) -> tuple[TokenTable, TableAccount]:
        """The examples and the account of a table: a file, a saved data set or a hub name.

        Raises:
            DataError: it cannot be read, or changes meanwhile.
            RunFolderError: the cache cannot be read or written.
        """
        if self.folder is None:
            account, blocks = self.encoder.encode(table, progress)
            return TokenTable(table, token_table.joined_columns(blocks)), account
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
            account, blocks = self.encoder.encode(table, progress)
            token_table.write_columns(aside, blocks)
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
            token_table.mapped_columns(entry),
            TableAccount.from_json(read_plain(entry / ACCOUNT, _LARGEST_ACCOUNT).decode()),
        )
        token_table.check_consistent(columns)
        rows = account.joined or token_table.rows_in(columns)
        if account.format not in FORMATS or account.rows_read != rows + len(account.dropped):
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


def _origin(tokenizer: PreTrainedTokenizerBase, config: DataConfig, group_by: str | None) -> str:
    """All that decides what becomes of a table's bytes, as text."""
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    facts = {
        "tokenizer": xxhash.xxh3_128_hexdigest(backend.to_str().encode()),
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split": str(getattr(tokenizer, "split_special_tokens", None)),
        "template": tokenizer.chat_template,
        "settings": {name: getattr(config, name) for name in SETTINGS},
        "group_by": group_by,
        "libraries": {name: version(name) for name in LIBRARIES},
        "source": _source_digest(),
    }
    return json.dumps(facts, sort_keys=True, default=str)


@cache
def _source_digest(root: Path = Path(__file__).parents[1]) -> str:
    """A hash of the files of SOURCE, by their names within the package and their bytes."""
    named = [root / name for name in SOURCE]
    digest = xxhash.xxh3_128()
    for file in (file for path in named for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
