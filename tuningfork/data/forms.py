"""Rows -> examples: every row becomes an Example or a DroppedRow with its reason.

The rows of a file have one of these forms, told apart by their keys:

    prompt, chosen, rejected          strings, or lists of messages {role, content}, or a prompt string beside full
                                      conversations that repeat it
    chosen, rejected                  two conversations as message lists with a common start, or two transcripts
                                      "\\n\\nHuman: ...\\n\\nAssistant: ..."
    conversations, chosen, rejected   messages {from, value}

A row that cannot be used is dropped and listed; a file that cannot be used is a DataError.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuningfork.data.read import Row, kind_of, read_rows
from tuningfork.errors import DataError
from tuningfork.records import DroppedRow, Example, Message, Source, Turns

# The fields that each form needs, the most specific form first.
FORMS = (("conversations", "chosen", "rejected"), ("prompt", "chosen", "rejected"), ("chosen", "rejected"))
SUPPORTED = "; ".join(", ".join(form) for form in FORMS)

# Fields that change what a chat template prints or which tokens count. Ignoring them would train on something else
# than the file says, so a row that fills one is dropped. Other extra fields (scores, ids) are none of our business.
UNSUPPORTED = ("system", "tools", "images", "tool_calls", "tool_call_id", "reasoning_content", "weight", "loss_weight")
NEUTRAL: tuple[Any, ...] = (None, "", [], {}, 1)  # values with which such a field changes nothing

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
ANSWER_MARK = "\n\nAssistant:"
TURN_MARK = re.compile(r"\n\n(Human|Assistant):")


class Unusable(Exception):
    """One row cannot be trained on. `reason` is one of a few short phrases, `detail` says what was found where."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of a file's rows: rows_read = len(examples) + len(dropped)."""

    examples: list[Example]
    dropped: list[DroppedRow]
    rows_read: int


def read_examples(path: str | Path, as_text: bool) -> ReadResult:
    """Read a preference file; answer 0 of every example is the chosen one.

    as_text=False: prompts and answers are turns; a string becomes one user or one assistant turn. as_text=True: they
    are the file's own strings; a file with messages is refused. Raises DataError where the whole file is unusable.
    """
    rows = read_rows(path)
    form = _form(path, rows)
    examples: list[Example] = []
    dropped: list[DroppedRow] = []
    for number, row in rows:
        source = Source(str(path), number)
        try:
            examples.append(_text_example(source, row, form) if as_text else _chat_example(source, row, form))
        except Unusable as unusable:
            dropped.append(DroppedRow(source.file, number, unusable.reason, unusable.detail))
    return ReadResult(examples, dropped, len(rows))


def _form(path: str | Path, rows: list[tuple[int, Row]]) -> tuple[str, ...]:
    """The form that most rows have; rows that lack one of its fields are dropped later, each by itself."""
    fits = (next((form for form in FORMS if all(key in row for key in form)), None) for _, row in rows)
    counts = Counter(form for form in fits if form is not None)
    if not counts:
        found = ", ".join(sorted({key for _, row in rows for key in row})) or "none"
        raise DataError(f"{path}: no known form of preference data. Fields found: {found}. Supported: {SUPPORTED}.")
    return counts.most_common(1)[0][0]


def _fields(row: Row, keys: tuple[str, ...], place: str = "") -> list[Any]:
    """The values of the keys, none of them null, in a row or in the message at a place in it."""
    for key in keys:
        if key not in row:
            raise Unusable("missing field", f"no {place}{key}; found {', '.join(row) or 'none'}")
        if row[key] is None:
            raise Unusable("null field", f"{place}{key} is null")
    for key in UNSUPPORTED:
        if row.get(key) not in NEUTRAL:
            raise Unusable("unsupported field", f"{place}{key} is filled; it would change what is trained on")
    return [row[key] for key in keys]


def _text_example(source: Source, row: Row, form: tuple[str, ...]) -> Example:
    values = _fields(row, form)
    for key, value in zip(form, values, strict=True):
        if isinstance(value, list | dict):
            raise DataError(
                f"{source}: field {key!r} holds messages, which need a chat template. Set data.template: chat, "
                "or give prompt, chosen and rejected as strings."
            )
    strings = [_string(value, key) for key, value in zip(form, values, strict=True)]
    prompt, *answers = strings if len(form) == 3 else _split_transcripts(*strings)
    if not all(answer.strip() for answer in answers):
        raise Unusable("empty answer", _emptied([bool(answer.strip()) for answer in answers]))
    if answers[0] == answers[1]:
        raise Unusable("chosen equals rejected")
    return Example(source, prompt, tuple(answers))


def _chat_example(source: Source, row: Row, form: tuple[str, ...]) -> Example:
    *given, chosen, rejected = _fields(row, form)
    if not given and isinstance(chosen, str):
        text, *answers = _split_transcripts(_string(chosen, "chosen"), _string(rejected, "rejected"))
        marks = TURN_MARK.split(text.removesuffix(ANSWER_MARK))[1:]  # role, content, role, content, ...
        roles = ["user" if mark == "Human" else "assistant" for mark in marks[::2]]
        prompt = tuple(Message(role, content.strip()) for role, content in zip(roles, marks[1::2], strict=True))
        return _checked(source, prompt, *((Message("assistant", answer.strip()),) for answer in answers))
    turns = _turns(chosen, "chosen", "assistant"), _turns(rejected, "rejected", "assistant")
    if not given:
        return _checked(source, *_fork(*turns))
    prompt = _turns(given[0], form[0], "user")
    if isinstance(given[0], str) and all(_opens_with(answer, prompt[0]) for answer in turns):
        return _checked(source, *_fork(*turns))
    if all(answer[: len(prompt)] == prompt for answer in turns):
        turns = turns[0][len(prompt) :], turns[1][len(prompt) :]
    return _checked(source, prompt, *turns)


def _opens_with(turns: Turns, user: Message) -> bool:
    """Whether the turns are a whole conversation whose first user turn, maybe behind a system turn, is this one."""
    return next((turn for turn in turns if turn.role != "system"), None) == user


def _checked(source: Source, prompt: Turns, *answers: Turns) -> Example:
    if not prompt:
        raise Unusable("empty prompt", "the answers have no turn before them")
    if not all(answers):
        raise Unusable("empty answer", _emptied([bool(answer) for answer in answers]))
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if answer[-1].role != "assistant":
            raise Unusable("last turn not assistant", f"{name!r} ends with a {answer[-1].role} turn")
        if answer[0].role != "assistant":
            raise Unusable("answer starts with another role", f"{name!r} starts with a {answer[0].role} turn")
    filled = [all(m.content.strip() for m in answer if m.role == "assistant") for answer in answers]
    if not all(filled):
        raise Unusable("empty answer", _emptied(filled))
    for place, message in enumerate(prompt, 1):
        if message.role != "system" and not message.content.strip():
            raise Unusable("empty message", f"message {place} of the prompt, a {message.role} turn")
    if answers[0] == answers[1]:
        raise Unusable("chosen equals rejected")
    return Example(source, prompt, answers)


def _fork(chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns]:
    """Two conversations -> (prompt, chosen, rejected): cut as late as both agree and both go on with the assistant."""
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    cut = min(len(chosen), len(rejected)) if same is None else same
    while cut >= 0 and not all(len(t) > cut and t[cut].role == "assistant" for t in (chosen, rejected)):
        cut -= 1
    if cut < 0:
        raise Unusable("prompts differ", "the two conversations do not part at an assistant turn")
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Two transcripts -> (prompt, chosen, rejected); the prompt ends with the last assistant mark."""
    prompts, answers = [], []
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        prompt, mark, answer = text.rpartition(ANSWER_MARK)
        if not mark or not prompt.startswith("\n\nHuman:"):
            hint = "plain strings need a 'prompt' field beside them"
            raise Unusable("not a transcript", f"{name!r} is no '\\n\\nHuman: ...\\n\\nAssistant: ...'; {hint}")
        if TURN_MARK.search(answer):
            raise Unusable("last turn not assistant", f"{name!r} ends with a Human turn")
        prompts.append(prompt + mark)
        answers.append(answer)
    if prompts[0] != prompts[1]:
        ends = [f"{len(prompt)} characters, ending {prompt[-60:]!r}" for prompt in prompts]
        raise Unusable("prompts differ", f"chosen: {ends[0]}; rejected: {ends[1]}")
    return prompts[0], answers[0], answers[1]


def _turns(value: Any, field: str, role: str) -> Turns:
    """A string, one message or a list of messages as turns; a string is one turn of `role`."""
    if isinstance(value, str):
        return (Message(role, _string(value, field)),)
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
    role, content = (
        _string(value, f"{field}.{key}") for key, value in zip(keys, _fields(message, keys, f"{field}."), strict=True)
    )
    if role not in ROLES:
        raise Unusable("unknown role", f"{field}.{keys[0]} is {role!r}; known are {', '.join(ROLES)}")
    return Message(ROLES[role], content)


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise Unusable("wrong type", f"{field} is {kind_of(value)}, expected a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Unusable("broken text", f"{field} has half a surrogate pair at character {error.start + 1}") from None
    return value


def _emptied(filled: list[bool]) -> str:
    return " and ".join(name for name, full in zip(("chosen", "rejected"), filled, strict=True) if not full)
