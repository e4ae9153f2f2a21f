"""The content of a message: text, or a list of parts -> text, and what the assistant thought before it and called."""

from __future__ import annotations

from typing import Any

from tuningfork.data.examples.tools import THOUGHTS, spoken_call
from tuningfork.data.examples.values import SHOWN, Unusable, filled, string
from tuningfork.data.tables.rows import kind_of
from tuningfork.records import same

# Types of parts in the order in which every template prints what they say, with the keys that may hold it.
PARTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("reasoning", "thinking", "think"), ("reasoning", "thinking", "think", "text", "value", "content")),
    (("text", "input_text", "output_text"), ("text", "value", "content")),
    (("tool_call", "function_call", "tool_use"), ("tool_call", "function_call", "value", "text")),
)
THOUGHT, TEXT, CALL = range(3)
SAID = tuple(dict.fromkeys(key for _, keys in PARTS for key in keys))


def content_of(content: Any, field: str) -> tuple[str, dict[str, Any]]:
    """The text, and the fields of a message that other parts stand for: its thoughts and its calls.

    Parts of one type are put together. Raises Unusable for a part of another type, and for parts in an order that no
    message has: a template prints thoughts before the text, and calls behind it.
    """
    if not isinstance(content, list):
        return string(content, field), {}
    if not content:
        raise Unusable("wrong type", f"{field} is a list without parts, expected text")
    texts: dict[int, list[str]] = {THOUGHT: [], TEXT: []}
    calls: list[dict[str, Any]] = []
    before = THOUGHT
    for i, part in enumerate(content):
        place = f"{field}[{i}]"
        if not isinstance(part, dict):
            raise Unusable("wrong type", f"{place} is {kind_of(part)}, expected a part of type text")
        kind = _kind(part, place)
        if kind < before:
            first, second = PARTS[before][0][0], PARTS[kind][0][0]
            raise Unusable("unsupported content", f"{place} is a part of type {second} behind one of type {first}")
        before = kind
        key = _said_in(part, kind, place)
        if kind == CALL:
            calls += spoken_call(_call(part) if key is None else part[key], f"{place}.{key}" if key else place)
        elif key is None:
            raise Unusable("missing field", f"no {place}.{PARTS[kind][1][0]}; found {', '.join(part)[:SHOWN]}")
        else:
            texts[kind].append(string(part[key], f"{place}.{key}"))
    thoughts = "".join(texts[THOUGHT])
    found: dict[str, Any] = {THOUGHTS[0]: thoughts} if thoughts else {}
    return "".join(texts[TEXT]), found | ({"tool_calls": calls} if calls else {})


def _said_in(part: dict[str, Any], kind: int, place: str) -> str | None:
    """The field that holds what a part says. Raises Unusable where another one says something else."""
    own = [key for key in PARTS[kind][1] if part.get(key) is not None]
    key = next((key for key in own if filled(part, key)), own[0] if own else None)
    others = [other for other in SAID if filled(part, other) and (key is None or not same(part[other], part[key]))]
    if others:
        first = "" if key is None else f"{key} and "
        raise Unusable("unsupported content", f"{place} has {first}{others[0]} filled; a part says one thing")
    return key


def _call(part: dict[str, Any]) -> dict[str, Any]:
    """The call that a part itself is; a part of type tool_use calls the arguments its input."""
    renamed = {"input": "arguments"} if part.get("type") == "tool_use" else {}
    return {renamed.get(name, name): value for name, value in part.items() if name != "type"}


def _kind(part: dict[str, Any], place: str) -> int:
    given = "text" if part.get("type") is None else part["type"]
    for kind, (names, _) in enumerate(PARTS):
        if given in names:
            return kind
    known = ", ".join(name for names, _ in PARTS for name in names)
    raise Unusable("unsupported content", f"{place} is of type {repr(given)[:SHOWN]}; known are {known}")
