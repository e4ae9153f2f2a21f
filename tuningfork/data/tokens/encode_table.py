"""A whole table -> its token examples in columns, and an account of its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from tuningfork.accounts import Size
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.infer_format import open_table
from tuningfork.data.examples.row_reader import fields_not_read
from tuningfork.data.token_table import Columns, rows_in
from tuningfork.data.tokens.encode_rows import RowEncoder
from tuningfork.data.tokens.printing import Printer, at_work
from tuningfork.data.tokens.stream import pieces_of_stream
from tuningfork.data.tokens.template import check_size
from tuningfork.data.tokens.template_date import with_fixed_date
from tuningfork.data.tokens.workers import Workers, check_started
from tuningfork.errors import DataError

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all) of a table."""

CHANGED = "{table}: changed while it was read. Run again once it is whole."

_ACCOUNT = TypeAdapter(
    tuple[
        str,
        int,
        list[str],
        list[tuple[int, str, str]],
        dict[str, list[int]],
        list[tuple[int, int, list[int], int]],
        int,
    ]
)


@dataclass(slots=True)
class TableAccount:
    """What became of a table's rows: each is dropped, or an example, or pieces, its own or of all rows joined. They are
    named by their numbers."""

    format: str
    rows_read: int
    fields: list[str]  # all that rows have, by the file's own names
    dropped: list[tuple[int, str, str]] = field(default_factory=list)  # row, reason, detail; in the order of the rows
    notes: dict[str, list[int]] = field(default_factory=dict)  # what is worth knowing of rows that are used
    sizes: dict[int, Size] = field(default_factory=dict)  # of examples over max_length, cut or left out
    joined: int = 0  # rows that became one stream, in pieces

    def as_json(self) -> str:
        sizes = [[row, size.prompt, size.answers, size.opening] for row, size in self.sizes.items()]
        return json.dumps([self.format, self.rows_read, self.fields, self.dropped, self.notes, sizes, self.joined])

    @classmethod
    def from_json(cls, text: str) -> TableAccount:
        """What `as_json` wrote. Raises ValueError."""
        format, rows_read, fields, dropped, notes, sizes, joined = _ACCOUNT.validate_json(text)
        known = {row: Size(prompt, tuple(answers), opening) for row, prompt, answers, opening in sizes}
        return cls(format, rows_read, fields, dropped, notes, known, joined)


class TableEncoder:
    """Encodes tables with one tokenizer and one set of options; `group_by` says what they keep of their
    rows for their order, see `with_group`.

    The processes that it starts stay until `close`. Raises DataError for an unfit tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, group_by: str | None = None) -> None:
        check_started()
        self.config = config
        check_size(tokenizer)
        self.tokenizer = at_work(Printer(tokenizer, {}), lambda: with_fixed_date(tokenizer, config.day()))
        self.workers = Workers(RowEncoder(self.tokenizer, config, group_by), config)

    def close(self) -> None:
        self.workers.close()

    def encode(self, table: str, progress: Progress | None = None) -> tuple[TableAccount, Iterator[Columns]]:
        """Read and encode a table: a file, a saved data set or a hub name.

        Returns:
            The account of its rows, complete once the columns are drawn; and its examples, block by batch.

        Raises:
            DataError: it cannot be read, here or as the columns are drawn, or changes meanwhile.
        """
        config = self.config
        joins = config.over_length == "stream"
        as_text, names = config.template == "none", self.workers.encoder.names
        rows, found, reader = open_table(table, as_text, config.format, config.columns or {}, names)
        count = found.rows
        account = TableAccount(reader.format, count, found.fields)

        def batches() -> Iterator[tuple[Columns, np.ndarray]]:
            done = kept = 0
            not_read: dict[str, list[int]] = {}
            for batch in self.workers.encode(rows, count, reader):
                yield batch.columns, batch.widths
                kept += rows_in(batch.columns)
                account.dropped += batch.dropped
                account.sizes.update(batch.sizes)
                for note, row in batch.notes:
                    account.notes.setdefault(note, []).append(row)
                for name, row in batch.not_read:
                    not_read.setdefault(name, []).append(row)
                done += batch.read
                if progress is not None:
                    progress(done, count)
            account.dropped.sort(key=lambda row: row[0])
            if not_read:
                account.notes[fields_not_read(list(not_read))] = sorted(set().union(*not_read.values()))
            if kept + len(account.dropped) != count:  # the rows are gone through more than once
                raise DataError(CHANGED.format(table=table))
            account.joined = kept if joins else 0

        if joins:
            return account, pieces_of_stream(batches(), config.max_length)
        return account, (columns for columns, _ in batches())
