"""Numbers in place of what turns say, with all else as it was: they show where a template prints what, or that it does
not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from tuningfork.data.examples.tools import with_object_arguments
from tuningfork.records import Message, Turns

END_OF_THOUGHTS = "</think>"  # in the content of a turn
WITHIN = "thoughts"  # the field of thoughts that are part of the content
CALL = "call"  # the field of a call without arguments


@dataclass(frozen=True, slots=True)
class Mark:
    """A number that stands for a field of the turn at a place."""

    place: int
    field: str
    text: str


class Marks:
    """Numbers for the fields of a conversation, `turns`: words, thoughts and the arguments of calls.

    Digits are the same in capitals and in JSON. These stand nowhere in the conversation, none is within another, each
    says of which turn and field it is, and none ends as that ends. A number has no more and no less than what it stands
    for: what is empty stays empty, thoughts within a content keep their tags, and an object of arguments its keys. Only
    a call without arguments gets one, which templates may leave out: it shows where the call stands.
    """

    def __init__(self, turns: Turns, arguments: Mapping[str, Any]) -> None:
        given = repr((turns, arguments))
        self.number = next(number for n in count(731552) if (number := str(n)) not in given)
        self.all: list[Mark] = []
        self.turns = tuple(self._marked(place, turn) for place, turn in enumerate(turns))
        self.given = turns

    def only(self, places: Sequence[int]) -> Turns:
        """The conversation with numbers at these places alone."""
        return tuple(self.turns[p] if p in places else turn for p, turn in enumerate(self.given))

    def missing(self, printed: str) -> list[Mark]:
        """The numbers that are not in a printing."""
        return [mark for mark in self.all if mark.text not in printed]

    def _new(self, place: int, field: str, given: object) -> str:
        """A number in place of what is given."""
        last = 7 if str(given).rstrip()[-1:] != "7" else 4
        mark = Mark(place, field, f"{self.number}{len(self.all):07}{last}")
        self.all.append(mark)
        return mark.text

    def _marked(self, place: int, turn: Message) -> Message:
        extra = dict(turn.extra)
        if thoughts := extra.get("reasoning_content"):
            extra["reasoning_content"] = self._new(place, "reasoning_content", thoughts)
        content = self._content(place, turn)
        if extra.get("tool_calls"):
            extra["tool_calls"] = [self._call(place, call) for call in with_object_arguments(extra["tool_calls"])]
        return replace(turn, content=content, extra=extra)

    def _content(self, place: int, turn: Message) -> str:
        opening, thoughts, end, after = content_parts(turn)
        if thoughts.strip():
            thoughts = self._new(place, WITHIN, thoughts)
        if after.strip():
            after = self._new(place, "content", after)
        return f"{opening}{thoughts}{end}{after}"

    def _call(self, place: int, call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(place, call["function"])}
        given = call.get("arguments")
        if given in (None, "", {}):
            return {**call, "arguments": {"key": self._new(place, CALL, "")}}
        if isinstance(given, dict):
            return {**call, "arguments": {key: self._new(place, "tool_calls", value) for key, value in given.items()}}
        return {**call, "arguments": self._new(place, "tool_calls", given)}


def content_parts(turn: Message) -> tuple[str, str, str, str]:
    """A turn's content, cut up: what opens thoughts within it, these, what ends them, and its words."""
    thoughts, end, after = turn.content.rpartition(END_OF_THOUGHTS)
    if turn.role != "assistant" or not end:
        return "", "", "", turn.content
    opening = thoughts[: thoughts.find(">") + 1] if thoughts.lstrip().startswith("<") else ""
    return opening, thoughts.removeprefix(opening), end, after
