"""Example -> rendered text: what each sequence says, where its prompt ends, and which characters count in the loss.

A sequence's text is what the chat template prints of its whole conversation, as the model meets it. The template does
not tell which characters came from which turn, so two ways find them. A conversation printed up to a turn, and again
with it, shows what the turn added; that holds while each printing continues the one before. A template that prints
earlier turns otherwise once others follow (thinking is left out of all but the last) has no such places: there, the
turn's content is exchanged for a marker, and what the two whole printings share on both sides of it is not the turn's.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from tuningfork.data.tools import THOUGHTS, with_object_arguments, with_text_arguments
from tuningfork.data.values import Unusable, string
from tuningfork.errors import DataError
from tuningfork.records import Example, Message, Source, Turns

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

REFUSES = "the chat template refuses the conversation"
LEAVES_OUT = "the chat template leaves out a field"
REWRITES = "the chat template prints earlier turns otherwise"
REOPENS = "the generation prompt is not how the turn is printed"
# What the functions that print take themselves, and do not hand to the template; the messages they hand to it.
_HOW_TO_PRINT = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
    "messages",
} - {"tools", "documents"}
LONGEST = 10_000_000
"""Characters of one text. The tokenizer takes up to 300 bytes of memory for each, so more could end the whole run."""
# Of a tokenizer: what plain conversations have whose words its template prints, all of them.
_printed: WeakKeyDictionary[PreTrainedTokenizerBase, set[tuple[Any, ...]]] = WeakKeyDictionary()
END_OF_THOUGHTS = "</think>"  # in the content of a turn
_MARKER = "\u2063tuningfork\u2063"  # invisible separators: no template takes it apart, no content has it


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """An example as text. `texts[i]` is the whole sequence of answer i: prompt, then answer.

    The prompt is the first `border` characters of every text, the generation prompt included. `spans[i]` are the
    characters of `texts[i]` that count; the first may begin before the border, where all answers begin as the
    generation prompt goes on, and what of it ends up in the prompt does not count. `plain` text is no template's: BOS
    and EOS are not in it yet. `notes` say what is worth knowing, in short phrases. `tokens` are the ids of every text
    and the characters that each covers, where they are not the tokenizer's own reading of it.
    """

    source: Source
    border: int
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
    a turn that only calls is no text, or null where the template prints the calls only so. Raises Unusable where the
    template cannot print this conversation, or leaves out what it holds.
    """
    if isinstance(example.prompt, str):
        border = len(example.prompt)
        texts = tuple(_encodable(f"{example.prompt}{answer}") for answer in example.answers)
        return RenderedExample(example.source, border, texts, tuple(((border, len(t)),) for t in texts), plain=True)
    answers, arguments = cast(tuple[Turns, ...], example.answers), dict(example.template)
    printer = _Printer(tokenizer, arguments)
    try:
        return _rendered(example.source, example.prompt, answers, train_on, printer)
    except Unusable as unusable:
        if unusable.reason not in (REFUSES, LEAVES_OUT) or not any(map(_calls_only, (example.prompt, *answers))):
            raise
        try:
            return _rendered(example.source, example.prompt, answers, train_on, replace(printer, silence=None))
        except Unusable as other:  # it prints the calls, but not all else
            raise (other if other.reason == LEAVES_OUT else unusable) from None


def _calls_only(turns: Turns) -> bool:
    """Whether there is a turn that calls without a word."""
    return any(not turn.content and turn.extra.get("tool_calls") for turn in turns)


def _rendered(
    source: Source, prompt: Turns, answers: tuple[Turns, ...], train_on: Literal["last", "all_assistant"],
    printer: _Printer,
) -> RenderedExample:  # fmt: skip
    printer.check_nothing_is_left_out([(*prompt, *answer) for answer in answers])
    opened = printer(prompt, open_turn=True)
    printed = [_answer(prompt, opened, answer, train_on, printer) for answer in answers]
    border = min(answer.border for answer in printed)
    texts = tuple(answer.text for answer in printed)
    spans = tuple(answer.spans for answer in printed)
    notes = {note for answer in printed for note in answer.notes}
    return RenderedExample(source, border, texts, spans, notes=tuple(sorted(notes)))


def _encodable(text: str) -> str:
    """The text. Raises Unusable where it is longer than any that can be encoded."""
    if len(text) > LONGEST:
        raise Unusable(
            "too long to be encoded", f"prompt and answer have {len(text):,} characters, {LONGEST:,} at most"
        )
    return text


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


@dataclass(eq=False)
class _Printer:
    """The chat template, with what an example tells it beside the messages.

    `silence` is the content of an assistant's turn that only calls: no text; or null, by which DeepSeek's templates
    tell a call. Without its call such a turn has it all the same, so that a null in print is not taken for the call.
    """

    tokenizer: PreTrainedTokenizerBase
    arguments: dict[str, Any]
    silence: str | None = ""

    def __post_init__(self) -> None:
        if taken := sorted(_HOW_TO_PRINT & self.arguments.keys()):
            raise Unusable("unsupported field", f"chat_template_kwargs.{taken[0]} is no argument of a template")
        self.printed: dict[tuple[Turns, bool], str] = {}  # one turn's end is often another's beginning

    def __call__(self, turns: Turns, open_turn: bool = False) -> str:
        """The conversation as the template prints it; open_turn adds the generation prompt."""
        if (turns, open_turn) not in self.printed:
            self.printed[turns, open_turn] = self._print(turns, open_turn)
        return self.printed[turns, open_turn]

    @cached_property
    def special(self) -> list[str]:
        """The texts of the tokenizer's added tokens: thousands for some, so not asked for where they do not matter."""
        return [token.content for token in self.tokenizer.added_tokens_decoder.values()]

    @cached_property
    def thought(self) -> str:
        """The name that this template has for an assistant's thoughts; the usual one where it has none."""
        template = self.tokenizer.get_chat_template(tools=self.arguments.get("tools"))
        names = (name for name in THOUGHTS if re.search(rf"\.{name}\b|['\"]{name}['\"]", template))
        return next(names, THOUGHTS[0])

    def _print(self, turns: Turns, open_turn: bool) -> str:
        refused: Exception | None = None
        for messages in self._messages(turns):
            try:
                return _encodable(string(self._apply(messages, open_turn), "what the chat template prints"))
            except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
                refused = refused or error
        raise Unusable(REFUSES, str(refused)[:300]) from refused

    def _apply(self, messages: list[dict[str, Any]], open_turn: bool) -> Any:
        if self.silence is not None:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_turn, **self.arguments
            )
        # The same without its first step, which takes nulls out of messages.
        printed: Any = render_jinja_template(
            [messages],
            chat_template=self.tokenizer.get_chat_template(tools=self.arguments.get("tools")),
            add_generation_prompt=open_turn,
            **(self.tokenizer.special_tokens_map | self.arguments),
        )
        return printed[0][0]

    def _messages(self, turns: Turns) -> Iterator[list[dict[str, Any]]]:
        """The turns as the template takes them. Arguments of calls are objects for most templates, which write JSON of
        them. Those that put text together cannot take an object, and get JSON text."""
        called = any("tool_calls" in turn.extra for turn in turns)
        for change in (with_object_arguments, with_text_arguments) if called else (None,):
            messages = []
            for turn in turns:
                extra = {self.thought if key == THOUGHTS[0] else key: value for key, value in turn.extra.items()}
                if change is not None and "tool_calls" in extra:
                    extra["tool_calls"] = change(extra["tool_calls"])
                content = self.silence if turn.role == "assistant" and not turn.content else turn.content
                messages.append({"role": turn.role, "content": content, **extra})
            yield messages

    def marker(self, tail: str, after: str) -> int:
        """Length of the end marker in `after`, which stands behind a turn, where `tail` closes it as the last one.

        That is what they have in common, up to a special token that they have not; or else one special token, where
        another one closes the conversation.
        """
        end = _common(tail.rstrip(), after)
        for token in self.special:
            at = tail.find(token, max(0, end - len(token) + 1))
            if 0 <= at < end < at + len(token):
                end = at
        first = [max((t for t in self.special if text.startswith(t)), key=len, default="") for text in (tail, after)]
        return len(tail[:end].rstrip()) or (len(first[1]) if all(first) else 0)

    def header(self, opened: str, closed: str) -> int:
        """Length of the next turn's header at the end of a printing that was not asked for one: 0 for most templates.

        Where a printing with a generation prompt and one without end alike, and in a special token with a role behind
        it, the template puts that header behind every conversation.
        """
        pairs = zip(reversed(opened), reversed(closed), strict=False)
        alike = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(opened), len(closed)))
        end = closed[len(closed) - alike :]
        role = end.rfind("assistant")
        marks = [token for token in self.special if end[:role].endswith(token)] if role > 0 else []
        return len(end) - role + len(max(marks, key=len)) if marks else 0

    def check_nothing_is_left_out(self, conversations: list[Turns]) -> None:
        """Raise Unusable where the template does not print all that there is: words, calls, tools, documents."""
        for turns in conversations:
            self._check_words(turns)
            self._check_last_thoughts(turns)
            for place, turn in enumerate(turns):
                for name in turn.extra:
                    less = Message(turn.role, turn.content, {k: v for k, v in turn.extra.items() if k != name})
                    # Up to this turn: thinking of an earlier turn may be left out on purpose.
                    if name in ("tool_calls", "reasoning_content") and self((*turns[:place], turn)) == self._if_printed(
                        (*turns[:place], less)
                    ):
                        raise Unusable(LEAVES_OUT, f"{name} of message {place + 1}")
        for given in ("tools", "documents"):
            if given in self.arguments:
                rest = {name: value for name, value in self.arguments.items() if name != given}
                if self(conversations[0]) == replace(self, arguments=rest)._if_printed(conversations[0]):
                    raise Unusable(LEAVES_OUT, given)

    def _check_words(self, turns: Turns) -> None:
        """Raise Unusable where what a turn says is not printed, as that of a role which the template does not know.

        Numbers in place of all words show it. What has been shown for plain turns holds for all conversations that are
        alike but for their words; others, of which templates look at more, are looked at one by one.
        """
        plain = not any(turn.extra for turn in turns) and not {"tools", "documents"} & self.arguments.keys()
        known = _printed.setdefault(self.tokenizer, set())
        alike: tuple[Any, ...] = ()
        if plain:
            kinds = tuple((turn.role, bool(turn.content.strip())) for turn in turns)
            alike = (str(self.tokenizer.chat_template), kinds, repr(self.arguments), self.silence)
        if alike in known:
            return
        said = [place for place, turn in enumerate(turns) if turn.content.strip()]
        calling = [place for place in said if turns[place].extra.get("tool_calls")]
        others = [place for place in said if place not in calling]
        missing = self._unprinted_of(turns, others)
        if plain and missing == []:
            known.add(alike)
        # One by one: a template that refuses a number reads what it stands for, such as a tool's JSON.
        suspects = others if missing is None else missing
        # Up to their turn: words beside a call may be thoughts, which are left out on purpose once the answer is there.
        upto = dict.fromkeys(suspects, turns) | {place: turns[: place + 1] for place in calling}
        for place in sorted(upto):
            if self._unprinted_of(upto[place], [place]):
                role = turns[place].role
                raise Unusable(LEAVES_OUT, f"content of message {place + 1}, of role {role}")

    def _unprinted_of(self, turns: Turns, places: list[int]) -> list[int] | None:
        """Those of the turns at these places that are not printed; None where the template refuses a number there."""
        number = self._number(turns)  # with as many digits for each place, so that no mark is within another
        marks = {place: f"{number}{place:06}" for place in places}
        marked = (replace(turn, content=marks.get(place, turn.content)) for place, turn in enumerate(turns))
        text = self._if_printed(tuple(marked))
        return None if text is None else [place for place, mark in marks.items() if mark not in text]

    def _check_last_thoughts(self, turns: Turns) -> None:
        """Raise Unusable where the template cuts thoughts out of what the last turn says, as templates do of earlier
        turns: they would not be learned."""
        thoughts, end, after = turns[-1].content.rpartition(END_OF_THOUGHTS)
        opening = thoughts[: thoughts.find(">") + 1] if thoughts.lstrip().startswith("<") else ""
        if not thoughts.removeprefix(opening).strip():
            return
        number = self._number(turns)
        text = self._if_printed((*turns[:-1], replace(turns[-1], content=f"{opening}{number}{end}{after}")))
        if text is not None and number not in text:
            raise Unusable(LEAVES_OUT, f"thoughts of message {len(turns)}, before its {END_OF_THOUGHTS}")

    def _number(self, turns: Turns) -> str:
        """Digits that the conversation does not have. They are the same in capitals and in JSON."""
        given = repr((turns, self.arguments))
        return next(number for n in count(731552) if (number := str(n)) not in given)

    def _if_printed(self, turns: Turns) -> str | None:
        """The conversation as the template prints it, or None where it refuses it."""
        try:
            return self(turns)
        except Unusable:
            return None


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    border: int  # characters that are the prompt's
    spans: tuple[Span, ...]
    notes: tuple[str, ...]


def _answer(
    before: Turns, opened: str, answer: Turns, train_on: Literal["last", "all_assistant"], printer: _Printer
) -> _Answer:
    """One answer's whole text, how much of it is the prompt, and the spans of its assistant turns that count."""
    turns = (*before, *answer)
    whole = printer(turns)
    own = [place for place in range(len(before), len(turns)) if turns[place].role == "assistant"]
    found = {place: _turn(turns, place, whole, printer) for place in own}
    wanted = own[-1:] if train_on == "last" else own
    spans = tuple(found[place].span for place in wanted if turns[place].counts)
    end = found[own[-1]].span[1]
    border = min(_common(opened, whole), end)
    notes = [turn.note for turn in found.values() if turn.note]
    if border < len(opened) and not notes:
        notes = [REOPENS]
    return _Answer(whole[:end], border, spans, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Turn:
    span: Span
    note: str = ""


def _turn(turns: Turns, place: int, whole: str, printer: _Printer) -> _Turn:
    """Where an assistant turn lies in the printing of the whole conversation."""
    before, turn = turns[:place], turns[place]
    opened, closed = printer(before, open_turn=True), printer((*before, turn))
    if whole.startswith(closed) and closed.startswith(opened):
        piece = closed[len(opened) : len(closed) - printer.header(opened, closed)]
        return _Turn((len(opened), len(opened) + _counted(piece, turn.content)))
    # How the turn begins and ends where it is the last, of which the whole printing may have less.
    head, tail = _around((*before, turn), place, printer)
    shared, unopened = _common(opened, closed), printer(before)
    parted_late = closed.startswith(unopened) and shared >= len(unopened)  # in the generation prompt, or nowhere
    lead = head[shared:] if parted_late else ""
    start, stop = _content(turns, place, whole, printer)
    stop += printer.marker(tail[: len(tail) - printer.header(opened, closed)], whole[stop:])
    if whole[:start].endswith(lead):
        start -= len(lead)
    return _Turn((start, stop), REOPENS if whole.startswith(closed) else REWRITES)


def _content(turns: Turns, place: int, whole: str, printer: _Printer) -> Span:
    """Where the content of a turn lies in the whole printing: between what a marker in its place leaves unchanged."""
    head, tail = _around(turns, place, printer)
    if not (whole.startswith(head) and whole.endswith(tail) and len(head) + len(tail) <= len(whole)):
        raise Unusable(REWRITES, f"and does not print the content of message {place + 1} as it is")
    return len(head), len(whole) - len(tail)


def _around(turns: Turns, place: int, printer: _Printer) -> tuple[str, str]:
    """What the whole printing has before and behind the content of a turn."""
    if turns[place].extra:
        raise Unusable(REWRITES, f"and message {place + 1} has more than text")
    marked = printer((*turns[:place], Message(turns[place].role, _MARKER), *turns[place + 1 :]))
    if marked.count(_MARKER) != 1:
        raise Unusable(REWRITES, f"and prints the content of message {place + 1} {marked.count(_MARKER)} times")
    head, _, tail = marked.partition(_MARKER)
    return head, tail


def _common(one: str, other: str) -> int:
    """Length of the common start of two texts."""
    pairs = zip(one, other, strict=False)
    return len(one) if other.startswith(one) else next((i for i, (a, b) in enumerate(pairs) if a != b), len(other))


def _counted(piece: str, content: str) -> int:
    """Length of a printed turn without the white space behind its end marker; white space of its own content stays."""
    end = piece.find(content) + len(content)
    return end if content in piece and not piece[end:].strip() else len(piece.rstrip())
