"""Prompts and answers that hold their messages one level further in: as JSON text, in an object, behind the prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from tuningfork.data.examples.conversations import NAMED_BY, before_last_said
from tuningfork.data.examples.formats import Named, Parts
from tuningfork.data.examples.roles import ROLES, Roles
from tuningfork.data.examples.values import Unusable, filled, optional_json, required_fields
from tuningfork.data.tables.json_values import loads
from tuningfork.data.tables.rows import kind_of
from tuningfork.records import same

PROMPT_AS_JSON = "the prompt is messages written as JSON text: read as messages"
ANSWERS_AS_JSON = "the answers are messages written as JSON text: read as messages"
SOME_AS_JSON = "only some answers are messages, written as JSON text: read as text"
JSON_AS_TEXT = "every answer is the JSON text of an object that is no message: read as text"
LISTS = ("messages", "conversations", "conversation")  # fields of an object that hold its messages
TOOLS = ("tools", "functions")  # and its tools


@dataclass(frozen=True, slots=True)
class Unpacked(Parts):
    """Parts with messages for all that stands for them. `notes` say of which, `not_read` names fields around them."""

    notes: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()


def unpacked_parts(parts: Parts, roles: Roles, row_fields: frozenset[str]) -> Unpacked:
    """The parts of a row with messages for their JSON text and for objects that hold them.

    Columns of a table often hold messages as text; but an answer may be JSON because JSON was asked for. So answers
    beside a prompt are messages only where all of them are. Without one they can be nothing else. `row_fields` are
    those that a row may fill beside its messages, which change what the model sees: an object may not, but for tools.
    """
    if parts.document:
        return Unpacked(None, parts.answers, document=True)
    notes = []
    prompt = parts.prompt
    if prompt is not None:
        prompt = prompt[0], unpacked(prompt[1], prompt[0], roles)
        if prompt[1] is not parts.prompt[1]:  # type: ignore[index]
            notes.append(PROMPT_AS_JSON)
    answers = [(name, unpacked(value, name, roles)) for name, value in parts.answers]
    if any(one is not other for (_, one), (_, other) in zip(answers, parts.answers, strict=True)):
        mixed = prompt is not None and any(isinstance(value, str) for _, value in answers)
        notes.append(SOME_AS_JSON if mixed else ANSWERS_AS_JSON)
        answers = parts.answers if mixed else answers
    opened = {name: _opened(name, value, row_fields) for name, value in [*([prompt] if prompt else []), *answers]}
    sides = [opened[name].tools for name, _ in answers]
    if any(not same([value for _, value in side], [value for _, value in sides[0]]) for side in sides):
        raise Unusable("unsupported field", "the answers have different tools; all of a row have the same ones")
    tools = (*parts.tools, *(opened[prompt[0]].tools if prompt else ()), *sides[0])
    if wrong := [name for name in parts.beside if name.rpartition(".")[2] in row_fields.union(TOOLS)]:
        raise Unusable("unsupported field", f"{wrong[0]} is filled; all answers have the row's own: write it there")
    not_read = (*parts.beside, *(name for found in opened.values() for name in found.not_read))
    if prompt is not None:
        prompt = prompt[0], opened[prompt[0]].messages
    answers = [(name, opened[name].messages) for name, _ in answers]
    if parts.answered and prompt is not None:
        prompt, answers = _with_best(prompt, answers, roles)
    return Unpacked(prompt, answers, parts.label, tools, notes=tuple(notes), not_read=not_read)


def without_repeated_prompt(parts: Unpacked) -> Unpacked:
    """The answers without the prompt in front. Raises Unusable where only some of them have it."""
    prompt = parts.asked
    if parts.repeat_prompt:
        return replace(parts, answers=[(name, answer[len(prompt) :]) for name, answer in parts.answers])
    if prompt.strip() and any(isinstance(a, str) and a.startswith(prompt) for _, a in parts.answers):
        raise Unusable("only some answers repeat the prompt", "all of them must, or none")
    return parts


def unpacked(value: Any, field: str, roles: Roles = ROLES) -> Any:
    """The value, or the messages, or the object with messages, that it is the JSON text of.

    Raises Unusable where the text is a list of messages in Python's writing, which is not JSON.
    """
    if not isinstance(value, str) or not (text := value.strip()).startswith(("[", "{")):
        return value
    try:
        found = loads(text)
    except (ValueError, RecursionError) as error:
        listed = re.match(r"\[\s*\{", text) and re.search(r"\}\s*\]$", text)
        inside = re.match(rf"\{{\s*'({'|'.join(LISTS)})'\s*:", text)
        if (listed or inside) and any(all(re.search(rf"'{key}'\s*:", text) for key in keys) for keys in NAMED_BY):
            raise Unusable(
                "messages that are not JSON",
                f"{field} is messages as Python prints them ({error}); write them with json.dumps",
            ) from None
        return value
    held = _held(found)
    messages = held if held is not None else found if isinstance(found, list) else [found]
    return found if messages and all(_looks_like_a_message(message, roles) for message in messages) else value


def is_object(value: Any) -> bool:
    """Whether this is the JSON text of an object."""
    if not isinstance(value, str) or not value.strip().startswith("{"):
        return False
    try:
        loads(value)
    except (ValueError, RecursionError):
        return False
    return True


def _looks_like_a_message(value: Any, roles: Roles) -> bool:
    """Whether this is surely a message: a known role, and something said. Answers may be JSON of other kinds."""
    if not isinstance(value, dict):
        return False
    role, content = NAMED_BY[0] if value.get("role") is not None else NAMED_BY[1]
    known = isinstance(value.get(role), str) and value[role] in roles
    return known and (content in value or filled(value, "tool_calls"))


def _held(value: Any) -> list[Any] | None:
    """The messages of an object that holds them; None for any other value."""
    if not isinstance(value, dict) or any(value.get(role) is not None for role, _ in NAMED_BY):
        return None
    return next((value[key] for key in LISTS if isinstance(value.get(key), list)), None)


@dataclass(frozen=True, slots=True)
class _Opened:
    messages: Any
    tools: tuple[Named, ...] = ()  # those that are filled
    not_read: tuple[str, ...] = ()


def _opened(name: str, value: Any, row_fields: frozenset[str]) -> _Opened:
    """An object that holds messages and tools; any other value is messages itself."""
    messages = _held(value)
    if messages is None:
        return _Opened(value)
    required_fields(value, (), f"{name}.")  # raises for what would change what is trained on
    around = [key for key in value if value[key] is not messages and key not in TOOLS and filled(value, key)]
    if wrong := [key for key in around if key in row_fields]:
        raise Unusable("unsupported field", f"{name}.{wrong[0]} is filled; write it beside {name}, as the row's own")
    tools = [(f"{name}.{key}", optional_json(value.get(key), f"{name}.{key}")) for key in TOOLS]
    filled_tools = tuple(named for named in tools if named[1] is not None)
    return _Opened(messages, filled_tools, tuple(f"{name}.{key}" for key in around))


def _with_best(prompt: Named, answers: list[Named], roles: Roles) -> tuple[Named, list[Named]]:
    """A conversation that ends with the best answer, and the other answers -> its start, and all answers."""
    name, messages = prompt
    if not isinstance(messages, list):
        raise Unusable("wrong type", f"{name} is {kind_of(messages)}, expected a list of messages")
    start = before_last_said(messages, roles)
    if start == len(messages):
        raise Unusable("last turn not assistant", f"{name} does not end with the answer that {answers[0][0]} replaces")
    return (name, messages[:start]), [(f"{name}[{start}:]", messages[start:]), *answers]
