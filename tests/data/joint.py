"""What an example should become as tokens, found without the code that is tested.

The truth is the tokenizer's own reading of each whole conversation. Which of its characters count is found by printing
it once more with a mark in place of every assistant turn, which shows what lies around each of them. Which characters a
token covers is found from the spelling of the tokens, not from offsets.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from tuningfork.data.tokens.template import render
from tuningfork.data.tokens.tokenize import Encoder
from tuningfork.records import Example, Message, Source, TokenExample, Turns

Span = tuple[int, int]
"""Bytes [start, stop) of a text in UTF-8."""

MARK = "\uf8ff{}\uf8ff"  # stands for an assistant turn; from a private area, which no test uses


def encoded(
    tokenizer: PreTrainedTokenizerBase, prompt: Turns, answers: Sequence[Turns], encoder: Encoder | None = None
) -> TokenExample:
    """What the house makes of an example. Raises Unusable."""
    example = Example(Source("pairs.jsonl", 1), prompt, tuple(answers))
    (made,) = (encoder or Encoder(tokenizer, "chat"))([render(example, tokenizer)])
    return made


@dataclass(frozen=True)
class Style:
    """How a chat template opens and ends assistant turns.

    `opening`: what stands before such a turn without being part of it. `end`: what ends it, and counts; `last_end` if
    the last turn of a conversation ends otherwise.
    """

    opening: str
    end: str
    last_end: str = ""


@dataclass(frozen=True)
class Whole:
    """A conversation as one text with its ids, cut behind the last character that counts."""

    text: str
    ids: list[int]
    spans: list[Span]  # the bytes that each id covers
    counted: list[Span]  # the bytes that count

    @property
    def mask(self) -> list[bool]:
        return [any(a < stop and b > start for start, stop in self.counted) for a, b in self.spans]


def whole(tokenizer: PreTrainedTokenizerBase, style: Style, prompt: Turns, answer: Turns) -> Whole:
    """The tokenizer's own reading of a conversation, and what counts in it. Raises jinja2.TemplateError."""
    text = _normal(tokenizer, printed(tokenizer, (*prompt, *answer)))
    contents = [_normal(tokenizer, turn.content) for turn in answer if turn.role == "assistant"]
    marks = [MARK.format(i) for i in range(len(contents))]
    unused = iter(marks)
    marked = [Message(turn.role, next(unused) if turn.role == "assistant" else turn.content) for turn in answer]
    pieces = re.split("|".join(marks), _normal(tokenizer, printed(tokenizer, (*prompt, *marked))))
    counted, at = [], len(pieces[0])
    assert text.startswith(pieces[0])
    for i, content in enumerate(contents):
        start = at - (len(pieces[i]) - pieces[i].rindex(style.opening) - len(style.opening))
        shapes = (content, content.lstrip("\n"), content.strip())
        shown = next(shape for shape in shapes if text.startswith(shape + pieces[i + 1], at))
        end = style.last_end or style.end if i == len(contents) - 1 else style.end
        assert pieces[i + 1].startswith(end), pieces[i + 1]
        counted.append((start, at + len(shown) + len(end)))
        at += len(shown) + len(pieces[i + 1])
    assert at == len(text)
    ids = tokenizer.apply_chat_template(_plain((*prompt, *answer)), return_dict=False)
    return cut(text, ids, byte_spans(tokenizer, text, ids), [_in_bytes(text, span) for span in counted])


def cut(text: str, ids: list[int], spans: list[Span], counted: list[Span]) -> Whole:
    """Everything up to the last token that counts."""
    n = sum(start < counted[-1][1] for start, _ in spans)
    return Whole(text, ids[:n], spans[:n], counted)


def boundary(tokenizer: PreTrainedTokenizerBase, prompt: Turns, wholes: Sequence[Whole]) -> int:
    """Bytes that are prompt: what the generation prompt and all conversations have in common."""
    generation = _normal(tokenizer, printed(tokenizer, prompt, open_turn=True))
    return min(_common(generation.encode(), whole.text.encode()) for whole in wholes)


def shared(wholes: Sequence[Whole], boundary: int) -> list[int]:
    """The ids of the prompt: as many as all conversations start with and lie before the boundary."""
    n = min(sum(stop <= boundary for _, stop in whole.spans) for whole in wholes)
    return wholes[0].ids[: min(n, *(_common(wholes[0].ids, whole.ids) for whole in wholes))]


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items two sequences start with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _normal(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text as the tokenizer normalizes it, where that changes characters."""
    return unicodedata.normalize("NFC", text) if "NFC" in str(tokenizer.backend_tokenizer.normalizer) else text


def printed(tokenizer: PreTrainedTokenizerBase, turns: Turns | list[Message], open_turn: bool = False) -> str:
    return str(tokenizer.apply_chat_template(_plain(turns), tokenize=False, add_generation_prompt=open_turn))


def refused(tokenizer: PreTrainedTokenizerBase, prompt: Turns, answers: Sequence[Turns]) -> bool:
    """Whether the template itself refuses one of the conversations."""
    try:
        for answer in answers:
            printed(tokenizer, (*prompt, *answer))
    except jinja2.TemplateError:
        return True
    return False


def byte_spans(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> list[Span]:
    """The bytes of the text that each token covers, read off the tokens' spelling, which must spell the whole text.

    SentencePiece may put a space of its own in front of a text; as a token of its own it goes with the first character.
    """
    data, spans, at = text.encode(), [], 0
    read = _reader(tokenizer)
    for i in ids:
        stop = read(data, at, int(i))
        assert stop is not None, f"{tokenizer.convert_ids_to_tokens(int(i))!r} is not at byte {at}: {data[at:][:20]!r}"
        spans.append((at, stop if stop > at else at + len(data[at:].decode()[:1].encode())))
        at = stop
    assert at == len(data), f"the tokens leave out {data[at:]!r}"
    return spans


def _reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[bytes, int, int], int | None]:
    """A function (text, place, id) -> where the token ends, or None if it is not what stands at that place.

    Tokens are spelled in GPT-2's alphabet of bytes, or in SentencePiece's ▁ and <0x41>.
    """
    added = tokenizer.added_tokens_decoder
    by_bytes = "ByteLevel" in str(tokenizer.backend_tokenizer.pre_tokenizer)
    letters = {letter: byte for byte, letter in enumerate(_alphabet())}

    def follow(data: bytes, at: int, piece: bytes) -> int | None:
        return at + len(piece) if data.startswith(piece, at) else None

    def read(data: bytes, at: int, i: int) -> int | None:
        if i in added:
            stop = follow(data, at, added[i].content.encode())
            swallows = stop is not None and added[i].rstrip
            return len(data) - len(data[stop:].decode().lstrip().encode()) if swallows else stop
        token = tokenizer.convert_ids_to_tokens(i)
        if by_bytes:
            return follow(data, at, bytes(letters[letter] for letter in token))
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return follow(data, at, bytes([int(token[3:5], 16)]))
        place: int | None = at
        for n, character in enumerate(token):
            if character == "▁" and n == 0 and data[at : at + 1] != b" " and not data.startswith("▁".encode(), at):
                continue
            spellings = (b" ", "▁".encode()) if character == "▁" else (character.encode(),)
            place = next((stop for s in spellings if (stop := follow(data, place, s)) is not None), None)
            if place is None:
                return None
        return place

    return read


def _alphabet() -> list[str]:
    """Byte -> its letter: printable bytes stand for themselves, the others follow from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    letters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


def _plain(turns: Turns | list[Message]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def _in_bytes(text: str, span: Span) -> Span:
    return len(text[: span[0]].encode()), len(text[: span[1]].encode())


def differences(example: TokenExample, wholes: Sequence[Whole], boundary: int) -> list[str]:
    """What is wrong with an example, in words; nothing if it is what it should be."""
    found = []
    prompt = example.prompt_ids.tolist()
    if prompt != shared(wholes, boundary):
        found.append(f"prompt of {len(prompt)} ids, expected {len(shared(wholes, boundary))}")
    for i, (answer, expected) in enumerate(zip(example.answers, wholes, strict=True)):
        ids, mask = [*prompt, *answer.ids.tolist()], [*np.zeros(len(prompt), bool).tolist(), *answer.mask.tolist()]
        if ids != expected.ids:
            found.append(f"answer {i}: ids {ids[-12:]}, expected {expected.ids[-12:]}")
        elif mask != (counted := [m and n >= len(prompt) for n, m in enumerate(expected.mask)]):
            found.append(f"answer {i}: counts {sum(mask)} tokens, expected {sum(counted)}")
    return found
