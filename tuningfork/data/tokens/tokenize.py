"""Rendered text -> token ids: prompt once, each answer after it, and a mask over the tokens that count.

A sequence has the ids of its whole text, since tokens can merge across the boundary of prompt and answer; where it is
encoded in two parts, that gives the same (`split_points.py`). The shared prompt is then what an example's sequences
have in common before the boundary, and what the boundary cuts through belongs to the answer. Whether a token counts is
decided by its characters, never by its id, so a pad token that is also the end token loses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from tuningfork.data.examples.values import Unusable
from tuningfork.data.token_table import TokenTable
from tuningfork.data.tokens.bounded import OutOfTime
from tuningfork.data.tokens.in_time import in_time
from tuningfork.data.tokens.split_points import SplitPoints
from tuningfork.data.tokens.template import RenderedExample, Span, check_template
from tuningfork.errors import DataError, is_panic
from tuningfork.records import Source, TokenAnswer, TokenExample
from tuningfork.wording import first_line

BATCH = 4_000_000  # characters encoded in one call: what the tokenizer returns takes many times their memory
FAILS = "the tokenizer fails"
SECONDS = 10.0  # of processor time for one call, and for each letter of its texts; those in use take a 20th of that
SECONDS_A_LETTER = 20e-6
MERGES = (  # a note
    "tokens merge across the boundary of prompt and answer, and belong to the answer then; a space at the end of a "
    "prompt, or of a template's generation prompt, does so: take it out"
)


class Encoded(NamedTuple):
    """An example as tokens, what is worth knowing of it, in short phrases, and what its answers' tokens stand for."""

    example: TokenExample
    notes: tuple[str, ...]
    widths: tuple[np.ndarray, ...]  # int64 [a] of each answer: UTF-8 bytes of text, which add up to those of the whole


class Encoder:
    """Encodes rendered examples with one tokenizer.

    A template's text is all there is, BOS and end markers included. Plain text gets a BOS in front where the tokenizer
    itself would put one, and its EOS, which counts, behind each answer. Raises DataError for an unfit tokenizer, which
    is one without a chat template where `template` is "chat".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"The tokenizer {tokenizer.name_or_path or '(unnamed)'} is a slow one ({type(tokenizer).__name__}) and "
                "cannot tell which characters a token covers. Use a model folder with a tokenizer.json."
            )
        if template == "chat":
            check_template(tokenizer)
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        with naming(tokenizer):
            first = self._empty(tokenizer).input_ids[:1]
            self.bos = _ids([bos] if bos is not None and first == [bos] else [])
        self.eos = _ids([eos] if eos is not None else [])
        self.tokenizer = tokenizer
        self.split_points = SplitPoints(tokenizer)

    def __call__(self, examples: Sequence[RenderedExample]) -> list[TokenExample]:
        """Encode examples, many in one call of the tokenizer. Raises Unusable for one of them as `encode` tells it."""
        found = []
        for encoded in self.encode(examples):
            if isinstance(encoded, Unusable):
                raise encoded
            found.append(encoded.example)
        return found

    def encode(self, examples: Sequence[RenderedExample]) -> list[Encoded | Unusable]:
        """Encode examples, many in one call of the tokenizer, with what is worth knowing of each; why it cannot be used
        where the tokenizer fails at it."""
        return [encoded for batch in _batches(examples) for encoded in self._tried(batch)]

    def _tried(self, examples: Sequence[RenderedExample]) -> list[Encoded | Unusable]:
        """Encode examples in one call; where that fails, each by itself, so that one costs no other.

        Raises DataError for one that the tokenizer does not come to an end with in time.
        """
        try:
            with naming(self.tokenizer):
                return [*self._encode(examples)]
        except DataError as error:
            if len(examples) == 1:
                return [Unusable(FAILS, str(error))]
        except OutOfTime as error:
            if len(examples) > 1:
                with _one_by_one():
                    for example in examples:  # of which one alone takes too long, and raises
                        self._tried([example])
            raise too_slow(self.tokenizer, examples[0].source, error) from None
        return [encoded for example in examples for encoded in self._tried([example])]

    @staticmethod
    def _empty(tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
        """An empty text, as the tokenizer reads it. Raises DataError where it does not come to an end."""
        call: Any = tokenizer
        try:
            return in_time(lambda: call(""), allowed([]))  # type: ignore[no-any-return]
        except OutOfTime as error:
            raise DataError(
                f"{_name(tokenizer)} does not come to an end with an empty text within {error}. Use the model's own "
                "tokenizer."
            ) from None

    def _encode(self, examples: Sequence[RenderedExample]) -> list[Encoded]:
        given = iter([[_Sequence.of(*read) for read in example.tokens] for example in examples if example.tokens])
        others = iter(self._read([example for example in examples if not example.tokens]))
        return [self._split(example, next(given if example.tokens else others)) for example in examples]

    def _read(self, examples: Sequence[RenderedExample]) -> Iterator[list[_Sequence]]:
        """The sequences of each example, as the tokenizer reads them."""
        cuts = [self.split_points.last(e.texts[0], e.boundary) if len(e.texts) > 1 else 0 for e in examples]
        parts = [_parts(example, cut) for example, cut in zip(examples, cuts, strict=True)]
        texts = [text for start, rests in parts for text in (*start, *rests)]
        call: Any = self.tokenizer
        encode = partial(
            call,
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        with _no_post_processing(self.tokenizer):
            encoded = in_time(encode, allowed(texts))
        made = map(_Sequence.of, encoded["input_ids"], encoded["offset_mapping"])
        for cut, (start, rests) in zip(cuts, parts, strict=True):
            starts = [next(made) for _ in start]
            yield [_joined(*starts, next(made).moved(cut)) for _ in rests]

    def _split(self, example: RenderedExample, sequences: list[_Sequence]) -> Encoded:
        """Cut an example's sequences behind the prompt tokens that all of them share."""
        bos, eos = (self.bos, self.eos) if example.plain else (_ids([]), _ids([]))
        p = min(sequence.tokens_before(example.boundary) for sequence in sequences)
        for other in sequences[1:]:
            differ = np.flatnonzero(sequences[0].ids[:p] != other.ids[:p])
            p = int(differ[0]) if len(differ) else p
        given = all(np.array_equal(sequence.ids[:1], bos) for sequence in sequences)
        prompt_ids = sequences[0].ids[:p] if given else np.concatenate([bos, sequences[0].ids[:p]])
        answers = tuple(_answer(s, p, spans, eos) for s, spans in zip(sequences, example.spans, strict=True))
        widths = tuple(_widths(s, t, p, a) for s, t, a in zip(sequences, example.texts, answers, strict=True))
        merged = any(p < len(s.ids) and s.starts[p] < example.boundary for s in sequences)
        notes = (*example.notes, MERGES) if merged else example.notes
        return Encoded(TokenExample(example.source, prompt_ids, answers), notes, widths)


def _parts(example: RenderedExample, cut: int) -> tuple[list[str], list[str]]:
    """What all of an example's texts begin with, up to the cut, and what each of them has behind it."""
    return [example.texts[0][:cut]] if cut else [], [text[cut:] for text in example.texts]


def _batches(examples: Sequence[RenderedExample]) -> Iterator[list[RenderedExample]]:
    """Examples whose texts together have no more than BATCH characters; a longer one stands alone."""
    batch: list[RenderedExample] = []
    size = 0
    for example in examples:
        length = sum(map(len, example.texts))
        if batch and size + length > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(example)
        size += length
    if batch:
        yield batch


def allowed(texts: Sequence[str]) -> float:
    """The seconds that the tokenizer may take to read texts: tokenizers in use take a millionth for a letter."""
    return SECONDS + SECONDS_A_LETTER * sum(map(len, texts))


def too_slow(tokenizer: PreTrainedTokenizerBase, source: Source, error: OutOfTime) -> DataError:
    """That a tokenizer has not read a row's texts in the time that it is allowed."""
    return DataError(
        f"{source}: {_name(tokenizer)} does not come to an end with it within {error}: an expression of it tries too "
        "many ways to read a text. Remove the row, or use the model's own tokenizer."
    )


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Calls of the tokenizer need none of its own threads, all of which may be at a text that does not end."""
    name = "TOKENIZERS_PARALLELISM"
    before, os.environ[name] = os.environ.get(name), "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _no_post_processing(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Post-processing may trim white space from a token's offsets, which would hide that it reaches over a boundary. It
    also adds special tokens, and those are not wanted here. Afterwards the tokenizer is as it was; a copy of a large
    one would take seconds.

    Where a call is left alone (`in_time`) the tokenizer stays without: to change it would wait for that call.
    """
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    if (kept := backend.post_processor) is not None:
        backend.post_processor = None
    left_alone = True
    try:
        yield
        left_alone = False
    except BaseException as error:
        left_alone = not (isinstance(error, Exception) or is_panic(error))
        raise
    finally:
        if kept is not None and not left_alone:
            backend.post_processor = kept


@contextmanager
def naming(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Turn whatever the tokenizer's library fails with into a DataError that names the tokenizer."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise DataError(f"{_name(tokenizer)} cannot read it ({first_line(error)[:200]})") from error


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"tokenizer.json of {tokenizer.name_or_path or '(unnamed)'}"


def _ids(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def _answer(sequence: _Sequence, p: int, spans: Sequence[Span], eos: np.ndarray) -> TokenAnswer:
    ids, mask = sequence.ids[p:], sequence.covered(spans)[p:]
    if not np.array_equal(ids[-1:], eos):
        ids, mask = np.concatenate([ids, eos]), np.concatenate([mask, np.ones(len(eos), dtype=bool)])
    return TokenAnswer(ids, mask)


def _widths(sequence: _Sequence, text: str, p: int, answer: TokenAnswer) -> np.ndarray:
    """int64 [a]: UTF-8 bytes of the text from where the tokens before one end to where it ends itself. Of a character
    that several tokens make, the first has them; an EOS that was put behind the text has none."""
    ends = np.maximum.accumulate(sequence.stops)
    if not text.isascii():
        letters = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ends = np.cumsum([0, *(1 + (letters >= 0x80) + (letters >= 0x800) + (letters >= 0x10000))])[ends]
    widths = np.zeros(len(answer.ids), np.int64)
    widths[: len(ends) - p] = np.diff(ends, prepend=0)[p:]
    return widths


class _Sequence(NamedTuple):
    """One encoded text: `ids` int32 [n], `starts` and `stops` int64 [n], the characters that each token covers."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, ids: list[int], offsets: list[tuple[int, int]]) -> _Sequence:
        return cls(_ids(ids), *np.array(offsets, dtype=np.int64).reshape(-1, 2).T)

    def moved(self, characters: int) -> _Sequence:
        """The tokens as they stand in a text that has this many characters in front."""
        return _Sequence(self.ids, self.starts + characters, self.stops + characters)

    def tokens_before(self, boundary: int) -> int:
        """How many leading tokens end at or before the boundary."""
        beyond = np.flatnonzero(self.stops > boundary)
        return int(beyond[0]) if len(beyond) else len(self.ids)

    def covered(self, spans: Sequence[Span]) -> np.ndarray:
        """bool [n]: which tokens lie, even partly, in one of the spans."""
        found = np.zeros(len(self.ids), dtype=bool)
        for start, stop in spans:
            found |= (self.starts < stop) & (self.stops > start)
        return found


def _joined(*parts: _Sequence) -> _Sequence:
    return parts[0] if len(parts) == 1 else _Sequence(*map(np.concatenate, zip(*parts, strict=True)))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise DataError where the tokenizer has ids that the model's embedding, of vocab_size rows, has not."""
    name, vocabulary = tokenizer.name_or_path or "(unnamed)", tokenizer.get_vocab()
    if not vocabulary:
        raise DataError(f"The tokenizer {name} has no tokens. Use the model's own tokenizer.")
    token = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[token] >= vocab_size:
        raise DataError(
            f"The tokenizer {name} has token {token!r} with id {vocabulary[token]}, but the model embeds only the ids "
            f"below {vocab_size}. Use the model's own tokenizer, or resize the model's embeddings and save it."
        )


def check_ids(table: TokenTable, vocab_size: int) -> None:
    """Raise DataError where a row has an id that the model's embedding, of vocab_size rows, has not.

    A vocabulary need not tell all ids, for a tokenizer may give a word another one than the vocabulary says; and
    a token cache could have been written by anybody.
    """
    ids = table.columns["ids"]
    if not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    wrong = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise DataError(
        f"{table.source_of(wrong)} has the token id {ids[wrong]}, but the model embeds only the ids from 0 to "
        f"{vocab_size - 1}. Use the model's own tokenizer; if that is in use, set data.cache to another folder."
    )
