"""The content of a message: text, or a list of parts -> text, and what the assistant thought before it and called."""

from __future__ import annotations

from typing import Any

from tuningfork.data.json_rows import kind_of
from tuningfork.data.tools import THOUGHTS, spoken_call
from tuningfork.data.values import SHOWN, Unusable, string

# Types of parts in the order in which every template prints what they say, with the keys that may hold it.
PARTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("reasoning", "thinking"), ("reasoning", "thinking", "text", "value")),
    (("text",), ("text", "value")),
    (("tool_call", "function_call"), ("tool_call", "function_call", "value", "text")),
)
THOUGHT, TEXT, CALL = range(3)


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
        there = (key for key in PARTS[kind][1] if part.get(key) is not None)
        key = next(there, None)
        if kind == CALL:
            said = {name: value for name, value in part.items() if name != "type"} if key is None else part[key]
            calls += spoken_call(said, place if key is None else f"{place}.{key}")
        else:
            texts[kind].append(string(*((part[key], f"{place}.{key}") if key else (None, place))))
    thoughts = "".join(texts[THOUGHT])
    found: dict[str, Any] = {THOUGHTS[0]: thoughts} if thoughts else {}
    return "".join(texts[TEXT]), found | ({"tool_calls": calls} if calls else {})


def _kind(part: dict[str, Any], place: str) -> int:
    given = "text" if part.get("type") is None else part["type"]
    for kind, (names, _) in enumerate(PARTS):
        if given in names:
            return kind
    known = ", ".join(name for names, _ in PARTS for name in names)
    raise Unusable("unsupported content", f"{place} is of type {repr(given)[:SHOWN]}; known are {known}")
