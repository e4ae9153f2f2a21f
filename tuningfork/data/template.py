"""Example -> rendered text: what each sequence says, where its prompt ends, and which characters count in the loss.

A chat template prints whole conversations and does not tell which characters came from which turn. So a conversation is
printed up to each assistant turn and again after it; what the second printing adds is that turn. This holds only while
every printing continues the one before, which is checked: a template that rewrites earlier turns has no such places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jinja2
from transformers import PreTrainedTokenizerBase

from tuningfork.data.forms import Unusable
from tuningfork.errors import DataError
from tuningfork.records import Example, Source, Turns

Span = tuple[int, int]
"""Characters [start, stop) of a text."""


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """An example as text. `texts[i]` is the whole sequence of answer i: prompt, then answer.

    The prompt is the first `border` characters of every text, the generation prompt included. `spans[i]` are the
    characters of `texts[i]` that count, none of them before the border.
    """

    source: Source
    border: int
    texts: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> RenderedExample:
    """Print an example: turns by the tokenizer's chat template, plain text as it is.

    An assistant turn counts with its end-of-turn marker, without the white space that the template puts behind it. A
    text ends where its last counted turn ends. Raises Unusable where the template cannot print this conversation.
    """
    if isinstance(example.prompt, str):
        border = len(example.prompt)
        texts = tuple(f"{example.prompt}{answer}" for answer in example.answers)
        return RenderedExample(example.source, border, texts, tuple(((border, len(text)),) for text in texts))
    prompt = _print(example.prompt, tokenizer, open_turn=True)
    answers = cast(tuple[Turns, ...], example.answers)
    printed = [_answer(example.prompt, prompt, answer, tokenizer) for answer in answers]
    texts, spans = tuple(text for text, _ in printed), tuple(tuple(spans) for _, spans in printed)
    return RenderedExample(example.source, len(prompt), texts, spans)


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError unless the tokenizer has one chat template to use."""
    try:
        found, why = bool(tokenizer.get_chat_template()), "it is empty"
    except ValueError as error:  # none at all, or several by name and none of them the default
        found, why = False, str(error).split("!")[0]
    if not found:
        raise DataError(
            f"The tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template to use ({why}). Set "
            "data.template: none to train on plain strings as they are, or add a chat_template to the tokenizer."
        )


def _answer(before: Turns, prompt: str, answer: Turns, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """One answer's whole text and the spans of its assistant turns, each found as what printing it adds."""
    turns, text, spans = before, prompt, []
    for message in answer:
        if message.role == "assistant":
            opened = _print(turns, tokenizer, open_turn=True) if turns is not before else prompt
            closed = _print((*turns, message), tokenizer, open_turn=False)
            if not (opened.startswith(text) and closed.startswith(opened)):
                raise Unusable("the chat template rewrites earlier turns", f"at message {len(turns) + 1}")
            spans.append((len(opened), len(opened) + _counted(closed[len(opened) :], message.content)))
            text = closed
        turns = (*turns, message)
    return text[: spans[-1][1]], spans


def _counted(piece: str, content: str) -> int:
    """Length of a printed turn without the white space behind its end marker; white space of its own content stays."""
    at = piece.rfind(content)
    return max(len(piece.rstrip()), at + len(content) if at >= 0 else 0)


def _print(turns: Turns, tokenizer: PreTrainedTokenizerBase, open_turn: bool) -> str:
    """The conversation as the template prints it; open_turn adds the generation prompt."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn))
    except (jinja2.TemplateError, TypeError) as error:
        raise Unusable("the chat template refuses the conversation", str(error)) from error
