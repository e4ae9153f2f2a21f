"""Whether a template prints all that a conversation holds: words, thoughts, calls, tools, documents, other fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.marks import CALL, END_OF_THOUGHTS, WITHIN, Mark, Marks, content_parts
from tuningfork.data.tokens.printing import Printer
from tuningfork.records import Message, Turns

LEAVES_OUT = "the chat template leaves out a field"
EARLIER_THOUGHTS = "the chat template leaves out thoughts of earlier turns"  # a note
UNPRINTED = "fields of messages that the chat template does not print: {}"  # a note
_SPOKEN = ("tool_calls", "reasoning_content")
_ANSWERED = ("tool_call_id", "name")  # of a tool's turn, for templates that say which call it answers
# Of a tokenizer: what plain conversations have whose words its template prints, all of them.
_printed: WeakKeyDictionary[PreTrainedTokenizerBase, set[tuple[Any, ...]]] = WeakKeyDictionary()


def check_left_out(turns: Turns, wanted: Sequence[int], sides: Sequence[str], printer: Printer) -> list[str]:
    """Notes on what is left out on purpose. Raises Unusable where the template does not print all that there is.

    `wanted` are the places of the turns that count, `sides` says of each place where in the row it is. What the model
    only reads may lose its thoughts once other turns follow, as it does for a model that answers.
    """
    notes = _check_said(turns, wanted, sides, printer)
    for place, turn in enumerate(turns):
        if turn.extra.get("tool_calls") and not _with_arguments(turn):
            less = (*turns[:place], _without(turn, "tool_calls"))
            if printer(turns[: place + 1]) == printer.tried(less):
                raise Unusable(LEAVES_OUT, f"tool_calls of message {place + 1}, {sides[place]}")
    for name in sorted({name for turn in turns for name in turn.extra if name not in _known(turn)}):
        if printer(turns) == printer.tried(tuple(_without(turn, name) for turn in turns)):
            notes.append(UNPRINTED.format(name))
    for given in ("tools", "documents"):
        if given in printer.arguments:
            rest = {name: value for name, value in printer.arguments.items() if name != given}
            if printer(turns) == replace(printer, arguments=rest).tried(turns):
                raise Unusable(LEAVES_OUT, given)
    return notes


def _check_said(turns: Turns, wanted: Sequence[int], sides: Sequence[str], printer: Printer) -> list[str]:
    """Look for numbers in place of all that is said, by a role which the template may not know, or beside the words.

    What has been shown for plain turns holds for all conversations that are alike but for their words; others, of
    which templates look at more, are looked at one by one.
    """
    plain = not any(turn.extra for turn in turns) and not {"tools", "documents"} & printer.arguments.keys()
    known = _printed.setdefault(printer.tokenizer, set())
    alike: tuple[Any, ...] = ()
    if plain:
        kinds = tuple((turn.role, *(bool(part.strip()) for part in content_parts(turn))) for turn in turns)
        alike = (str(printer.tokenizer.chat_template), kinds, repr(printer.arguments), printer.silence)
    if alike in known:
        return []
    marks = Marks(turns, printer.arguments)
    text = printer.tried(marks.turns)
    # One by one: a template that refuses a number reads what it stands for, such as a tool's JSON.
    suspects = marks.all if text is None else marks.missing(text)
    if plain and not suspects:
        known.add(alike)
    suspects = [mark for mark in suspects if mark.field != CALL]  # of which _with_arguments tells
    gone = [mark for mark in suspects if _is_gone(mark, marks, mark.place in wanted, printer, sides)]
    return [EARLIER_THOUGHTS] if gone else []


def _is_gone(mark: Mark, marks: Marks, counts: bool, printer: Printer, sides: Sequence[str]) -> bool:
    """Whether thoughts of a turn that does not count are not printed. Raises Unusable where anything else is not.

    Words beside a call may be thoughts, which are left out on purpose once the answer is there.
    """
    turn = marks.given[mark.place]
    text = printer.tried(marks.only([mark.place]))
    if text is None or mark.text in text:
        return False
    passing = not counts and (mark.field != "content" or bool(turn.extra.get("tool_calls")))
    if passing and mark.field != WITHIN:  # the template must print them while their turn is the last
        upto = printer.tried(marks.only([mark.place])[: mark.place + 1])
        passing = upto is None or mark.text in upto
    if passing:
        return True
    where = {"content": f", of role {turn.role}", WITHIN: f", before its {END_OF_THOUGHTS}"}.get(mark.field, "")
    raise Unusable(LEAVES_OUT, f"{mark.field} of message {mark.place + 1}{where}, {sides[mark.place]}")


def _with_arguments(turn: Message) -> bool:
    """Whether each of a turn's calls has arguments."""
    inner = (
        call.get("function") if isinstance(call.get("function"), dict) else call for call in turn.extra["tool_calls"]
    )
    return all(call.get("arguments") not in (None, "", {}) for call in inner)


def _known(turn: Message) -> tuple[str, ...]:
    return (*_SPOKEN, *(_ANSWERED if turn.role == "tool" else ()))


def _without(turn: Message, name: str) -> Message:
    return replace(turn, extra={key: value for key, value in turn.extra.items() if key != name})
