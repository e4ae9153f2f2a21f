"""Tools and calls of tools, as chat templates take them: {"type": "function", "function": {...}}.

Files write them in several ways: bare functions, JSON as text, the arguments of a call as JSON text. A null beside
`name` or `id` means that the field is absent. Within a tool's `parameters` and a call's `arguments` the keys are the
file's own, and a null there is a value like any other, such as a default.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tuningfork.data.examples.values import Unusable, filled, optional_json, parsed_json, string
from tuningfork.data.tables.json_values import loads
from tuningfork.data.tables.rows import Row, kind_of
from tuningfork.records import same

DEEPEST = 100  # levels of lists and objects within each other; templates and workers walk them by recursion
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names for what an assistant thought before it spoke


def template_arguments(row: Row, tools: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
    """What a row tells the chat template beside the messages: its own arguments, and tools.

    `tools` are some that were found in named places, beside those of the row and of its arguments. Raises Unusable
    where a value is of the wrong kind, or where tools are given twice and differ.
    """
    found: dict[str, Any] = {}
    key = "chat_template_kwargs"
    if (arguments := optional_json(row.get(key), key)) is not None:
        if not isinstance(arguments, dict):
            raise Unusable("wrong type", f"{key} is {kind_of(arguments)}, expected an object")
        found |= _without_nulls(writable(arguments, key))
    if (documents := optional_json(found.pop("documents", None), f"{key}.documents")) is not None:
        found["documents"] = _objects(documents, f"{key}.documents")
    places = [*tools, *((name, row.get(name)) for name in ("tools", "functions"))]
    places.append((f"{key}.tools", found.pop("tools", None)))
    lists = [(name, tool_list(value, name)) for name, value in places if optional_json(value, name) is not None]
    for name, other in lists[1:]:
        if not same(other, lists[0][1]):
            raise Unusable("unsupported field", f"{lists[0][0]} and {name} are both filled, and differ")
    if lists:
        found["tools"] = lists[0][1]
    name = "rejected_tools"
    if optional_json(row.get(name), name) is not None and not same(tool_list(row[name], name), found.get("tools")):
        raise Unusable("unsupported field", f"tools and {name} differ; all answers of a row have the same tools")
    return found


def tool_list(value: Any, field: str) -> list[dict[str, Any]]:
    """A list of tools, or its JSON; bare functions are wrapped. Raises Unusable for anything else."""
    return [_wrapped(tool) for tool in _objects(value, field)]


def call_list(value: Any, field: str) -> list[dict[str, Any]]:
    """A call or a list of calls, or their JSON; bare ones are wrapped. Raises Unusable for anything else, and for
    arguments that are no object. Arguments that are an empty text are none: {}."""
    value = optional_json(value, field)
    if value is None:
        return []
    one = isinstance(value, dict)
    calls = _objects([value] if one else value, field)
    checked = [_with_sound_arguments(call, field if one else f"{field}[{i}]") for i, call in enumerate(calls)]
    wrapped = [_wrapped(call) for call in checked]
    writable(with_object_arguments(wrapped), field)
    return wrapped


def _with_sound_arguments(call: dict[str, Any], field: str) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_sound_arguments(call["function"], f"{field}.function")}
    arguments, place = call.get("arguments"), f"{field}.arguments"
    if isinstance(arguments, str) and not arguments.strip():
        return {**call, "arguments": {}}
    if isinstance(arguments, str):
        try:
            arguments = loads(string(arguments, place))
        except (ValueError, RecursionError) as error:
            raise Unusable("broken arguments of a call", f"{place} is not JSON ({error})") from None
    if not isinstance(arguments, dict | None):
        raise Unusable("broken arguments of a call", f"{place} is {kind_of(arguments)}, expected an object")
    return call


def spoken_call(value: Any, field: str) -> list[dict[str, Any]]:
    """A turn or a part of content that is a call: {name, arguments}, or a list of them, or the JSON of either."""
    calls = call_list(value, field)
    said = [call.get("function") for call in calls]
    if not said or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in said):
        raise Unusable("wrong type", f"{field} is no call with name and arguments")
    return calls


def with_object_arguments(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls with arguments that are the JSON text of an object as that object: most templates write JSON."""
    return [_with_arguments(call, _as_object) for call in calls]


def with_text_arguments(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls with arguments as JSON text, the file's own where it has text."""
    return [_with_arguments(call, _as_text) for call in calls]


def holds_null(value: Any) -> bool:
    """Whether there is a null anywhere in a value, however deep."""
    left = [value]
    while left:
        value = left.pop()
        if value is None:
            return True
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return False


def thought_of(message: Row, field: str) -> str | None:
    """What an assistant's message says it thought, under any of its names. Raises Unusable where two differ."""
    said = {key: string(message[key], f"{field}.{key}") for key in THOUGHTS if filled(message, key)}
    if len(set(said.values())) > 1:
        raise Unusable("unsupported field", f"{field} has {' and '.join(said)}, and they differ")
    return next(iter(said.values()), None)


def _objects(value: Any, field: str) -> list[dict[str, Any]]:
    value = parsed_json(value, field)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Unusable("wrong type", f"{field} is {kind_of(value)}, expected a list of objects")
    writable(value, field)
    return value


def writable(value: Any, field: str) -> Any:
    """The value. Raises Unusable where it has text that UTF-8 cannot hold, or more levels than any template walks."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += (*item, *item.values())
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                string(item, field)
        if not inner:
            return value
        level = inner
    raise Unusable("nested too deeply", f"{field} has more than {DEEPEST} levels of lists and objects")


def _wrapped(item: dict[str, Any]) -> dict[str, Any]:
    """A tool or a call of the form {type: function, function: {...}}; one of another type stays as it is."""
    item = _without_nulls(item)
    if isinstance(item.get("function"), dict):
        typed = item if "type" in item else {"type": "function", **item}
        return {**typed, "function": _without_nulls(item["function"])}
    if "name" in item and item.get("type", "function") == "function":
        around = {key: item[key] for key in ("id",) if key in item}
        inner = {key: value for key, value in item.items() if key not in ("id", "type")}
        return {**around, "type": "function", "function": inner}
    return item


def _without_nulls(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value is not None}


def _with_arguments(call: dict[str, Any], change: Any) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
