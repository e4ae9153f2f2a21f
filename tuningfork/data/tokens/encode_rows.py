"""A batch of rows -> tokens, and an account of what became of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from tuningfork.accounts import Size
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.groups import with_group
from tuningfork.data.examples.roles import MessageNames, roles_for
from tuningfork.data.examples.row_reader import ReadRow, RowReader
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tables.rows import Row
from tuningfork.data.token_table import Columns, columns_of
from tuningfork.data.tokens.as_text import AsText
from tuningfork.data.tokens.bounded import OutOfTime, bounded
from tuningfork.data.tokens.control_tokens import AS_TEXT, KEPT, RENDERED, WRITTEN, ControlTokens, is_document
from tuningfork.data.tokens.printing import Printer, at_work, message_fields
from tuningfork.data.tokens.stream import JOINED, check_can_be_joined
from tuningfork.data.tokens.template import RenderedExample, render
from tuningfork.data.tokens.tokenize import Encoded, Encoder
from tuningfork.data.tokens.truncate import CUT_PIECES, can_be_pieces, pieces_of, size_of, truncate
from tuningfork.errors import DataError
from tuningfork.records import Example, Source, TokenExample

RowBatch = list[tuple[int, Row]]
"""Rows with their numbers."""


class _Words(NamedTuple):
    """An example, without end markers that the template writes again; notes of these; and each control token that its
    words spell with where they do, which are not looked for where text is taken as it is."""

    example: Example
    notes: list[str]
    found: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """What became of a batch of rows: its examples as columns, and an account of the others."""

    read: int  # rows
    columns: Columns
    dropped: list[tuple[int, str, str]]  # row, reason, detail
    notes: list[tuple[str, int]]  # what is worth knowing of a row in use, and which
    not_read: list[tuple[str, int]]  # a filled field that nothing reads, and in which row
    sizes: dict[int, Size]  # row -> of an example over max_length, cut or left out
    widths: np.ndarray  # int64 [L] of each token its bytes of text, where it is to be joined into a stream; else empty


class RowEncoder:
    """Reads, prints, encodes, truncates and checks batches of rows. Raises DataError for an unfit tokenizer.

    `group_by` says what examples keep of their rows for their order, see `with_group`; None for nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, group_by: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.group_by = group_by
        self.encoder = Encoder(tokenizer, config.template)
        self.control = ControlTokens(tokenizer, chat=config.template == "chat")
        self.as_text = AsText(tokenizer, self.control)
        self.config = config
        roles, given = config.roles or {}, tokenizer.chat_template
        self.names = at_work(
            Printer(tokenizer, {}), lambda: MessageNames(roles_for(given, roles), message_fields(tokenizer))
        )

    def __call__(self, rows: RowBatch, reader: RowReader) -> EncodedBatch:
        """What becomes of the rows. Raises DataError where none of the table can be used."""
        batch = EncodedBatch(len(rows), {}, [], [], [], {}, np.zeros(0, np.int64))
        used: list[TokenExample] = []
        widths: list[np.ndarray] = [batch.widths]
        bos, joins = self.tokenizer.bos_token_id, self.config.over_length == "stream"
        for names, encoded in self._encode(rows, reader, batch):
            row = encoded.example.source.row
            if encoded.example.longest > self.config.max_length and not joins:
                batch.sizes[row] = size_of(encoded.example, bos)
            try:
                examples, cuts = self._cut(encoded.example, names)
                for example in examples:
                    _check(example, names)
                if joins:
                    check_can_be_joined(encoded.example)
                    widths += [np.zeros(len(encoded.example.prompt_ids), np.int64), encoded.widths[0]]
            except Unusable as unusable:
                batch.dropped.append((row, unusable.reason, unusable.detail))
                continue
            used += _measured(examples, encoded.widths)
            batch.notes.extend((note, row) for note in (*encoded.notes, *cuts))
        return replace(batch, columns=columns_of(used), widths=np.concatenate(widths))

    def _cut(self, example: TokenExample, names: list[str]) -> tuple[list[TokenExample], tuple[str, ...]]:
        """What an example comes to within max_length, and what was done to it. Raises Unusable."""
        config = self.config
        if config.over_length == "stream":
            return [example], (JOINED,)
        if config.over_length == "pieces" and example.longest > config.max_length and can_be_pieces(example):
            return pieces_of(example, config.max_length), (CUT_PIECES,)
        cut, notes = truncate(example, config.max_length, config.over_length, self.tokenizer.bos_token_id, names)
        return [cut], notes

    def _encode(self, rows: RowBatch, reader: RowReader, batch: EncodedBatch) -> list[tuple[list[str], Encoded]]:
        """Read, render and encode; what rows say beside the text goes along, and the names of their answers."""
        kept: list[tuple[Example, list[str]]] = []
        rendered: list[RenderedExample] = []
        for number, row in rows:
            try:
                read, words = self._read(number, row, reader)
                printed, notes = self._print(words)
            except Unusable as unusable:
                batch.dropped.append((number, unusable.reason, unusable.detail))
                continue
            rendered.append(printed)
            kept.append((read.example, read.names))
            batch.notes.extend((note, number) for note in (*read.notes, *notes))
            batch.not_read.extend((name, number) for name in read.not_read)
        found: list[tuple[list[str], Encoded]] = []
        for (example, names), encoded in zip(kept, self.encoder.encode(rendered), strict=True):
            if isinstance(encoded, Unusable):
                batch.dropped.append((example.source.row, encoded.reason, encoded.detail))
                continue
            said = replace(
                encoded.example,
                label=example.label,
                weight=example.weight,
                margin=example.margin,
                group=example.group,
            )
            found.append((names, encoded._replace(example=said)))
        return found

    def _read(self, number: int, row: Row, reader: RowReader) -> tuple[ReadRow, _Words]:
        """What a row says. Raises Unusable, and DataError where that takes too long or names no group."""

        def read() -> tuple[ReadRow, _Words]:
            found = reader(number, row)
            if self.group_by is not None:
                found = with_group(found, row, self.group_by)
            if self.config.answers == "best":
                found = found.best()
            example, notes = self.control.with_one_end(found.example)
            as_it_is = isinstance(example.prompt, str) and self._wanted(example) in (None, "keep")
            return found, _Words(example, notes, [] if as_it_is else self.control.in_words(example))

        try:
            return bounded(read, memory_too=False)
        except OutOfTime as error:
            raise DataError(
                f"{Source(reader.path, number)}: the row is not read within {error}. Look at what it holds, and "
                "remove it."
            ) from None

    def _wanted(self, example: Example) -> str | None:
        """What becomes of control tokens that an example spells: what the setting says. Where it says nothing, those of
        a document are characters of its text; a plain prompt or answer may have been rendered before, and is as it is.
        """
        return self.config.control_tokens or ("as_text" if is_document(example) else None)

    def _print(self, words: _Words) -> tuple[RenderedExample, list[str]]:
        """The example as text, and notes of the control tokens that its own words spell."""

        def printed(example: Example) -> RenderedExample:
            return render(example, self.tokenizer, self.config.train_on)

        example, notes, found = words
        wanted = self._wanted(example)
        if not found:
            return printed(example), notes
        written = [f"{token} in {place}" for token, place in found]
        if wanted == "drop":
            raise Unusable(WRITTEN, ", ".join(written))
        if wanted == "as_text":
            return self.as_text(example, printed), [*notes, *(f"{AS_TEXT}: {words}" for words in written)]
        notes += [f"{KEPT}: {words}" for words in written]
        return printed(example), [*notes, RENDERED] if self.control.looks_rendered(example) else notes


def _measured(examples: list[TokenExample], widths: tuple[np.ndarray, ...]) -> list[TokenExample]:
    """What a row came to with the bytes of text that its targets stand for; of several answers nobody asks for them.

    Of pieces, tokens that count lie one behind the other in the document, whose `widths` are given.
    """
    if len(widths) > 1:
        return examples
    found, first = [], 0
    for example in examples:
        [answer] = example.answers
        own = widths[0][first : first + len(answer.ids)]
        targets = answer.mask.copy()
        targets[: len(example.prompt_ids) == 0] = False  # the first token of a document has no predictor
        found.append(replace(example, answers=(replace(answer, text_bytes=int(own[targets].sum())),)))
        first += len(answer.ids) - 1  # the last token is the next piece's first
    return found


def _check(example: TokenExample, names: list[str]) -> None:
    """Raise Unusable where an encoded example cannot be trained on as a whole."""
    for place, name in enumerate(names):
        if example.answer_tokens(place) == 0:
            raise Unusable("no token of an answer counts", name)
    for one, other in combinations(example.answers, 2):
        if np.array_equal(one.ids, other.ids):
            reason = "chosen equals rejected" if len(example.answers) == 2 else "answers are equal"
            raise Unusable(reason, "they differ in the file, but not as the tokens that are left")
