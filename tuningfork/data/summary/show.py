"""Examples as a model meets them, made readable: every token with its text, its id, and whether it counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from tuningfork.data.summary.records import Part, Piece, ShownExample
from tuningfork.errors import DataError, is_panic
from tuningfork.records import TokenExample
from tuningfork.wording import first_line

HEAD, TAIL = 300, 100  # tokens shown of a long part, from its start and its end


def show_examples(examples: Sequence[TokenExample], tokenizer: PreTrainedTokenizerBase) -> list[ShownExample]:
    """The first example, the one of median length and the longest; each once where they are the same."""
    by_length = sorted(range(len(examples)), key=lambda i: (examples[i].longest, i))
    picked = {"first": 0, "median length": by_length[(len(by_length) - 1) // 2], "longest": by_length[-1]}
    titles: dict[int, list[str]] = {}
    for title, index in picked.items():
        titles.setdefault(index, []).append(title)
    return [_show(" and ".join(names), examples[index], tokenizer) for index, names in titles.items()]


def _show(title: str, example: TokenExample, tokenizer: PreTrainedTokenizerBase) -> ShownExample:
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    parts = [_parts(example, place, tokenizer.backend_tokenizer, special) for place in range(len(example.answers))]
    return ShownExample(title, example.source.file, example.source.row, parts[0][0], [answer for _, answer in parts])


def _parts(example: TokenExample, place: int, backend: Tokenizer, special: set[int]) -> tuple[Part, Part]:
    """The prompt and one answer. They are decoded as one text, since how a token reads depends on what it follows."""
    p, answer = len(example.prompt_ids), example.answers[place]
    ids = [*example.prompt_ids.tolist(), *answer.ids.tolist()]
    counts = [*np.zeros(p, dtype=bool).tolist(), *answer.mask.tolist()]
    counts[:1] = [False]  # nothing predicts the first token of all
    prompt: list[Piece] = []
    rest: list[Piece] = []
    start = 0
    try:
        texts = _texts(ids, backend)
    except BaseException as error:  # of whatever kind the library's are
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise DataError(
            f"{example.source}: the decoder of tokenizer.json cannot write its tokens as text "
            f"({first_line(error)[:200]}). Use the model's own tokenizer."
        ) from error
    for stop, text in texts:
        piece = Piece(ids[start:stop], text, any(counts[start:stop]), any(i in special for i in ids[start:stop]))
        (prompt if stop <= p else rest).append(piece)
        start = stop
    names = {1: ("answer",), 2: ("chosen", "rejected")}.get(len(example.answers))
    name = names[place] if names else f"answer {place + 1}"
    return _part("prompt", prompt, p, 0), _part(name, rest, len(answer.ids), example.answer_tokens(place))


def _texts(ids: Sequence[int], backend: Tokenizer) -> list[tuple[int, str]]:
    """(end of a piece, its text), until all tokens are covered. Bytes that never become a character read as �."""
    stream = DecodeStream(skip_special_tokens=False)
    found, waiting = [], 0
    for stop, token in enumerate(ids, 1):
        text = stream.step(backend, token)
        waiting = 0 if text is not None else waiting + 1
        if text is not None:
            found.append((stop, text))
    if waiting:
        found.append((len(ids), "�"))
    return found


def _part(name: str, pieces: list[Piece], tokens: int, counted: int) -> Part:
    if len(pieces) <= HEAD + TAIL:
        return Part(name, tokens, counted, pieces, 0, [])
    hidden = sum(len(piece.ids) for piece in pieces[HEAD:-TAIL])
    return Part(name, tokens, counted, pieces[:HEAD], hidden, pieces[-TAIL:])
