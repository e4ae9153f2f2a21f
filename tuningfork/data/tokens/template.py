"""Example -> rendered text: what each sequence says, where its prompt ends, and which characters count in the loss.

A sequence's text is what the chat template prints of its whole conversation, as the model meets it. What of it was said
by the turns to learn is found in `spans.py`; what the template does not print costs the row (`left_out.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import jinja2
from transformers import PreTrainedTokenizerBase

from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.left_out import LEAVES_OUT, check_left_out
from tuningfork.data.tokens.printing import (
    LONGEST,
    LONGEST_ROW,
    LONGEST_TEMPLATE,
    MEND,
    REFUSES,
    TOO_LONG,
    Printer,
    at_work,
    common_prefix,
)
from tuningfork.data.tokens.spans import REOPENS, REWRITES, Finder, Located, Span, evened
from tuningfork.errors import DataError
from tuningfork.records import Example, Message, Source, Turns

__all__ = ["LEAVES_OUT", "REFUSES", "REOPENS", "REWRITES", "RenderedExample", "Span", "check_template", "render"]


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """An example as text. `texts[i]` is the whole sequence of answer i: prompt, then answer.

    The prompt is the first `boundary` characters of every text, the generation prompt included. `spans[i]` are the
    characters of `texts[i]` that count; the first may begin before the boundary, where all answers begin as the
    generation prompt goes on, and what of it ends up in the prompt does not count. `plain` text is no template's: BOS
    and EOS are not in it yet. `notes` say what is worth knowing, in short phrases. `tokens` are the ids of every text
    and the characters that each covers, where they are not the tokenizer's own reading of it.
    """

    source: Source
    boundary: int
    texts: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    plain: bool = False
    notes: tuple[str, ...] = ()
    tokens: tuple[tuple[list[int], list[Span]], ...] = ()


def render(
    example: Example, tokenizer: PreTrainedTokenizerBase, train_on: Literal["last", "all_assistant"] = "all_assistant"
) -> RenderedExample:
    """Print an example: turns by the tokenizer's chat template, plain text as it is.

    An assistant turn counts with its end-of-turn marker, without the white space that the template puts behind it. A
    text ends where its last assistant turn ends. With train_on "last" no other turn of an answer counts. The content of
    a turn that only calls is no text, or null where the template prints the calls only so.

    Raises:
        Unusable: the template cannot print this conversation, or leaves out what it holds.
        DataError: it does not come to an end.
    """
    if isinstance(example.prompt, str):
        boundary = len(example.prompt)
        _check_whole(boundary * len(example.answers) + sum(map(len, example.answers)))
        texts = tuple(_encodable(f"{example.prompt}{answer}") for answer in example.answers)
        return RenderedExample(example.source, boundary, texts, tuple(((boundary, len(t)),) for t in texts), plain=True)
    answers, arguments = cast(tuple[Turns, ...], example.answers), dict(example.template)
    printer = Printer(tokenizer, arguments)
    work = partial(_conversations, example.source, example.prompt, answers, train_on, printer)
    return at_work(printer, work, example.source)


def _conversations(
    source: Source, prompt: Turns, answers: tuple[Turns, ...], train_on: Literal["last", "all_assistant"],
    printer: Printer,
) -> RenderedExample:  # fmt: skip
    """What is rendered of conversations, calls that stand alone with no text or with null beside them."""
    try:
        return _rendered(source, prompt, answers, train_on, printer)
    except Unusable as unusable:
        if unusable.reason not in (REFUSES, LEAVES_OUT) or not any(map(_calls_only, (prompt, *answers))):
            raise
        try:
            return _rendered(source, prompt, answers, train_on, replace(printer, silence=None))
        except Unusable as other:  # it prints the calls, but not all else
            raise (other if other.reason == LEAVES_OUT else unusable) from None


def _calls_only(turns: Turns) -> bool:
    """Whether there is a turn that calls without a word."""
    return any(not turn.content and turn.extra.get("tool_calls") for turn in turns)


def _rendered(
    source: Source, prompt: Turns, answers: tuple[Turns, ...], train_on: Literal["last", "all_assistant"],
    printer: Printer,
) -> RenderedExample:  # fmt: skip
    notes: set[str] = set()
    located, texts, boundaries = [], [], []
    opened = printer(prompt, open_turn=True)
    for name, answer in zip(_names(len(answers)), answers, strict=True):
        turns = (*prompt, *answer)
        last = max(place for place, turn in enumerate(turns) if turn.role == "assistant")
        own = [last] if train_on == "last" else _places(turns, len(prompt))
        wanted = [place for place in own if turns[place].counts]
        sides = ["in the prompt"] * len(prompt) + [f"in {name}"] * len(answer)
        notes.update(check_left_out(turns, wanted, sides, printer))
        finder = Finder(turns, printer)
        found = {place: finder.find(place) for place in dict.fromkeys((*wanted, last))}
        end = found[last].stop
        boundaries.append(min(common_prefix(opened, finder.whole), end))
        texts.append(_encodable(finder.whole[:end]))
        _check_whole(sum(map(len, texts)))
        located.append(Located(finder, [found[place] for place in wanted]))
        said = {turn.note for turn in found.values() if turn.note}
        notes |= said or ({REOPENS} if boundaries[-1] < len(opened) else set())
    spans = tuple(tuple(span for turn in turns for span in turn.spans) for turns in evened(located))
    return RenderedExample(source, min(boundaries), tuple(texts), spans, notes=tuple(sorted(notes)))


def _places(turns: Turns, first: int) -> list[int]:
    """Where the assistant speaks, from a place on."""
    return [place for place in range(first, len(turns)) if turns[place].role == "assistant"]


def _names(answers: int) -> Sequence[str]:
    """What a message calls the answers of a row."""
    if answers == 2:
        return ("the chosen answer", "the rejected answer")
    return ("the answer",) if answers == 1 else [f"answer {n}" for n in range(1, answers + 1)]


def _encodable(text: str) -> str:
    """The text. Raises Unusable where it is longer than any that can be encoded."""
    if len(text) > LONGEST:
        raise Unusable(TOO_LONG, f"prompt and answer have {len(text):,} characters, {LONGEST:,} at most")
    return text


def _check_whole(characters: int) -> None:
    """Raise Unusable where a row's texts are longer together than any that can be encoded."""
    if characters > LONGEST_ROW:
        raise Unusable(
            TOO_LONG, f"the prompt with each of its answers has {characters:,} characters, {LONGEST_ROW:,} at most"
        )


def check_size(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError where a chat template is longer than any is: it is looked through before it is run."""
    given = tokenizer.chat_template
    longest = max(map(len, map(str, given.values() if isinstance(given, dict) else [given])), default=0)
    if longest > LONGEST_TEMPLATE:
        raise DataError(
            f"{tokenizer.name_or_path or 'the tokenizer'}: the chat template has {longest:,} characters, "
            f"{LONGEST_TEMPLATE:,} at most. {MEND}"
        )


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError unless the tokenizer has one chat template to use, which can be read and comes to an end."""
    try:
        found, why = bool(tokenizer.get_chat_template()), "it is empty"
    except ValueError as error:  # none at all, or several by name and none of them the default
        found, why = False, str(error).split("!")[0]
    if not found:
        raise DataError(
            f"The tokenizer {tokenizer.name_or_path or '(unnamed)'} has no chat template to use ({why}). Give "
            "one as a file, data.template: file.jinja, such as that of the model's own chat version; or, where prompts "
            "and answers are plain strings, set data.template: none to train on them as they are."
        )
    printer = Printer(tokenizer, {})
    try:
        at_work(printer, lambda: printer((Message("user", "a"), Message("assistant", "b"))))
    except Unusable as unusable:  # it may well want another conversation than this one
        if isinstance(unusable.__cause__, SyntaxError | jinja2.TemplateSyntaxError):
            raise DataError(
                f"{printer.name}: the chat template cannot be read: {unusable.detail}. {MEND}"
            ) from unusable
        if unusable.reason == TOO_LONG:
            raise DataError(f"{printer.name}: {unusable.detail}, of two words. {MEND}") from unusable
