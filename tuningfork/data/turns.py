"""Values of a row -> turns of a conversation, or text; and two conversations -> what they share and where they part.

Whatever is wrong with a value raises Unusable, which costs its row and no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tuningfork.data.read import Row, kind_of
from tuningfork.records import Message, Turns

# Fields that change what is trained on and that no part of this house knows. Ignoring one would train on something else
# than the file says, so a row that fills it is dropped. Other extra fields (scores, ids) are none of our business.
UNSUPPORTED = ("images", "image", "videos", "video", "audios", "audio", "documents")
NEUTRAL: tuple[Any, ...] = (None, "", [], {})  # values with which such a field changes nothing

# Fields of a message beside role and content that chat templates print, by the role that may fill them.
PRINTED = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id", "name")}

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"},
}
ANSWER_MARK = "\n\nAssistant:"
TURN_MARK = re.compile(r"\n\n(Human|Assistant):")


class Unusable(Exception):
    """One row cannot be trained on. `reason` is one of a few short phrases, `detail` says what was found where."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def fields(row: Row, keys: Iterable[str], place: str = "") -> list[Any]:
    """The values of the keys, none of them null, in a row or in the message at a place in it."""
    found = []
    for key in keys:
        if key not in row:
            raise Unusable("missing field", f"no {place}{key}; found {', '.join(row) or 'none'}")
        if row[key] is None:
            raise Unusable("null field", f"{place}{key} is null")
        found.append(row[key])
    for key in UNSUPPORTED:
        if row.get(key) not in NEUTRAL:
            raise Unusable("unsupported field", f"{place}{key} is filled; it would change what is trained on")
    return found


def string(value: Any, field: str) -> str:
    """The value, which must be text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise Unusable("wrong type", f"{field} is {kind_of(value)}, expected a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unusable("broken text", f"{field} has half a surrogate pair at character {error.start + 1}") from None
    return value


def number(value: Any, field: str) -> float:
    """The value, which must be a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        shown = repr(value) if isinstance(value, int | float) else kind_of(value)
        raise Unusable("wrong type", f"{field} is {shown[:40]}, expected a finite number")
    return float(value)


def parsed(value: Any, field: str) -> Any:
    """The value, or what its JSON says where it is a string: columns of a table often hold lists as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(string(value, field))
    except (ValueError, RecursionError) as error:
        raise Unusable("wrong type", f"{field} is a string that is not JSON ({error})") from None


def turns(value: Any, field: str, role: str) -> Turns:
    """A string, one message or a list of messages as turns; a string is one turn of `role`."""
    if isinstance(value, str):
        return (Message(role, string(value, field)),)
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise Unusable("wrong type", f"field {field!r} is {kind_of(value)}, expected a string or a list of messages")
    if not messages:
        raise Unusable("empty messages", f"field {field!r} is an empty list")
    return tuple(_message(message, f"{field}[{i}]") for i, message in enumerate(messages))


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, dict):
        raise Unusable("wrong type", f"{field} is {kind_of(message)}, expected a message with role and content")
    keys = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    if message.get("tool_calls") not in NEUTRAL and message.get(keys[1]) is None:
        message = {**message, keys[1]: ""}  # a call needs no words
    given, content = fields(message, keys, f"{field}.")
    given = string(given, f"{field}.{keys[0]}")
    if given not in ROLES:
        raise Unusable("unknown role", f"{field}.{keys[0]} is {given!r}; known are {', '.join(ROLES)}")
    role = ROLES[given]
    printed = {key: message[key] for key in PRINTED.get(role, ()) if message.get(key) not in NEUTRAL}
    text = _content(content, f"{field}.{keys[1]}")
    if given == "function_call":
        text, printed = "", {"tool_calls": _calls(text, f"{field}.{keys[1]}")}
    if "tool_calls" in printed:
        printed["tool_calls"] = parsed(printed["tool_calls"], f"{field}.tool_calls")
    if "reasoning_content" in printed:
        string(printed["reasoning_content"], f"{field}.reasoning_content")
    return Message(role, text, printed, _counts(message, role, field))


def _content(content: Any, field: str) -> str:
    """Text, or a list of text parts {type: text, text | value} one after the other."""
    if not isinstance(content, list):
        return string(content, field)
    if not content:
        raise Unusable("wrong type", f"{field} is a list without parts, expected text")
    texts = []
    for i, part in enumerate(content):
        place = f"{field}[{i}]"
        if not isinstance(part, dict):
            raise Unusable("wrong type", f"{place} is {kind_of(part)}, expected a part of type text")
        if part.get("type", "text") != "text":
            raise Unusable("unsupported content", f"{place} is of type {part['type']!r}; only text can be trained on")
        texts.append(string(*((part[key], f"{place}.{key}") if (key := _text_key(part)) else (None, place))))
    return "".join(texts)


def _text_key(part: dict[str, Any]) -> str | None:
    return next((key for key in ("text", "value") if key in part), None)


def _calls(text: str, field: str) -> list[dict[str, Any]]:
    """ShareGPT's function_call turn, JSON {name, arguments} or a list of them, as chat templates take calls."""
    found = parsed(text, field)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise Unusable("wrong type", f"{field} is no call with name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _counts(message: Row, role: str, field: str) -> bool:
    """Whether a message's own loss weight lets it count; other turns than the assistant's never do."""
    key = next((key for key in ("loss_weight", "weight") if message.get(key) is not None), None)
    if key is None:
        return True
    weight = number(message[key], f"{field}.{key}")
    if weight not in (0.0, 1.0) or (weight == 1.0 and key == "loss_weight" and role != "assistant"):
        raise Unusable("unsupported field", f"{field}.{key} is {weight:g} for a {role} turn; it can be 0, or 1 for an "
                       "assistant turn")  # fmt: skip
    return weight == 1.0


def fork(conversations: Sequence[Turns]) -> tuple[Turns, list[Turns]]:
    """Conversations -> (prompt, answers): cut as late as all agree and all go on with the assistant."""
    shortest = min(map(len, conversations))
    same = next((i for i in range(shortest) if any(c[i] != conversations[0][i] for c in conversations)), shortest)
    while same >= 0 and not all(len(c) > same and c[same].role == "assistant" for c in conversations):
        same -= 1
    if same < 0:
        raise Unusable("prompts differ", "the conversations do not part at an assistant turn")
    return conversations[0][:same], [c[same:] for c in conversations]


def is_transcript(value: Any) -> bool:
    """Whether a value reads "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    return isinstance(value, str) and value.startswith("\n\nHuman:") and ANSWER_MARK in value


def split_transcripts(transcripts: Sequence[tuple[str, Any]]) -> tuple[str, list[str]]:
    """Named transcripts -> (prompt, answers); the prompt ends with the last assistant mark."""
    prompts, answers = [], []
    for name, value in transcripts:
        text = string(value, name)
        prompt, mark, answer = text.rpartition(ANSWER_MARK)
        if not is_transcript(text):
            hint = "plain strings need a 'prompt' field beside them"
            raise Unusable("not a transcript", f"{name!r} is no '\\n\\nHuman: ...\\n\\nAssistant: ...'; {hint}")
        if TURN_MARK.search(answer):
            raise Unusable("last turn not assistant", f"{name!r} ends with a Human turn")
        prompts.append(prompt + mark)
        answers.append(answer)
    if any(prompt != prompts[0] for prompt in prompts):
        named = zip(transcripts, prompts, strict=True)
        ends = [f"{name}: {len(prompt)} characters, ending {prompt[-60:]!r}" for (name, _), prompt in named]
        raise Unusable("prompts differ", "; ".join(ends))
    return prompts[0], answers


def transcript_turns(prompt: str) -> Turns:
    """The turns of a transcript's prompt, which ends with an assistant mark; spaces around each are the format's."""
    marks = TURN_MARK.split(prompt.removesuffix(ANSWER_MARK))[1:]  # role, content, role, content, ...
    roles = ["user" if mark == "Human" else "assistant" for mark in marks[::2]]
    return tuple(Message(role, content.strip()) for role, content in zip(roles, marks[1::2], strict=True))
