"""Values of a row -> turns of a conversation, or text; and two conversations -> what they share and where they part.

A conversation is a list of messages, the JSON text of one, or a transcript "\\n\\nHuman: ...\\n\\nAssistant: ...".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from tuningfork.data.examples.content import content_of
from tuningfork.data.examples.roles import CALL, SHAREGPT, MessageNames, Roles, is_assistant, is_tool, named_role
from tuningfork.data.examples.tools import THOUGHTS, call_list, spoken_call, thought_of, writable
from tuningfork.data.examples.values import SHOWN, Unusable, filled, number, required_fields, string
from tuningfork.data.tables.rows import Row, kind_of
from tuningfork.records import Message, Turns

OPENING = ("system", "developer")  # two names for the role of what is said before the conversation
NAMED_BY = (("role", "content"), ("from", "value"))  # the two ways to write a message
SPOKEN = ("tool_calls", "function_call", *THOUGHTS)  # what only an assistant can say beside its content
ANSWERED = ("tool_call_id", "name")  # what a tool's answer says beside its content
READ = {*NAMED_BY[0], *NAMED_BY[1], *SPOKEN, "loss_weight", "weight"}  # fields of any message that are used
PLAIN = MessageNames()
TURN_START = "\n\nHuman:"
ANSWER_MARK = "\n\nAssistant:"
TURN_MARK = re.compile(r"\n\n(Human|Assistant):")


def read_turns(value: Any, field: str, role: str, names: MessageNames = PLAIN) -> Turns:
    """One message, a list of messages, or a transcript; any other string is one turn of `role`.

    A call that stands as a turn of its own, behind the assistant's words or another call, belongs to that turn. Filled
    fields that the chat template reads go along.
    """
    if is_transcript(value):
        return transcript_turns(string(value, field))
    if isinstance(value, str):
        return (Message(role, string(value, field)),)
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise Unusable("wrong type", f"field {field!r} is {kind_of(value)}, expected a string or a list of messages")
    if not messages:
        raise Unusable("empty messages", f"field {field!r} is an empty list")
    found: list[Message] = []
    for i, message in enumerate(messages):
        turn = _message(message, f"{field}[{i}]", names)
        if found and found[-1].role == "assistant" and names.roles.get(str(named_role(message))) == CALL:
            found[-1] = _with_call(found[-1], turn, f"{field}[{i}]")
        else:
            found.append(turn)
    return tuple(found)


def _with_call(turn: Message, call: Message, field: str) -> Message:
    """An assistant's turn with the calls of the turn behind it."""
    if turn.counts != call.counts or (THOUGHTS[0] in turn.extra and THOUGHTS[0] in call.extra):
        raise Unusable("unsupported field", f"{field} goes on with the turn before it, with other thoughts or weight")
    extra = dict(turn.extra)  # of its own: there may be very many calls, each of which is put behind the others
    calls = extra.get("tool_calls", [])
    calls += call.extra["tool_calls"]
    return Message(turn.role, turn.content, {**extra, **call.extra, "tool_calls": calls}, turn.counts)


def _message(message: Any, field: str, names: MessageNames) -> Message:
    roles = names.roles
    if not isinstance(message, dict):
        raise Unusable("wrong type", f"{field} is {kind_of(message)}, expected a message with role and content")
    keys = NAMED_BY[1] if message.get("from") is not None and message.get("role") is None else NAMED_BY[0]
    if message.get(keys[1]) is None and any(filled(message, key) for key in SPOKEN):
        message = {**message, keys[1]: ""}  # neither a call nor a thought needs words
    given, content = required_fields(message, keys, f"{field}.")
    given = string(given, f"{field}.{keys[0]}")
    if given not in roles:
        raise Unusable("unknown role", _unknown_role(f"{field}.{keys[0]}", given, roles))
    called = roles[given] == CALL
    role = "assistant" if called else roles[given]
    if called and not isinstance(content, list):
        text, parts = "", {"tool_calls": spoken_call(content, f"{field}.{keys[1]}")}
    else:
        text, parts = content_of(content, f"{field}.{keys[1]}")
    spoken = [*(key for key in SPOKEN if filled(message, key)), *(f"{keys[1]}, {key}" for key in parts)]
    if role != "assistant" and spoken:
        raise Unusable("unsupported field", f"{field}.{spoken[0]} is filled for a {role} turn, not the assistant's")
    beside = (*(ANSWERED if is_tool(role) else ()), *sorted(names.fields - READ))
    extra = {key: writable(message[key], f"{field}.{key}") for key in beside if filled(message, key)}
    calls = [key for key in ("tool_calls", "function_call") if filled(message, key)]
    if len(calls) + ("tool_calls" in parts) > 1:
        raise Unusable("unsupported field", f"{field} writes its calls twice: {', '.join([*calls, keys[1]][:2])}")
    for key in calls:
        if found := call_list(message[key], f"{field}.{key}"):
            extra["tool_calls"] = found
    if (thinking := thought_of(message, field)) is not None:
        if parts.get(THOUGHTS[0], thinking) != thinking:
            raise Unusable("unsupported field", f"{field} says its thoughts twice, and they differ")
        extra[THOUGHTS[0]] = thinking
    return Message(role, text, {**extra, **parts}, _counts(message, role, field))


def _unknown_role(field: str, given: str, roles: Roles) -> str:
    near = difflib.get_close_matches(given[:SHOWN].lower(), roles, n=1)
    ours = roles[near[0]] if near else "user"
    name = given[:SHOWN]
    return (
        f"{field} is {name!r}; known are {', '.join(roles)}. Say what it means by data.roles, such as "
        f"data.roles: {{{name}: {ours}}}"
    )


def renamed_roles(value: Any, roles: Roles) -> list[str]:
    """The roles of messages that are read under another name, each with that name; those of ShareGPT go without."""
    messages = value if isinstance(value, list) else [value]
    named = dict.fromkeys(str(named_role(message)) for message in messages if isinstance(message, dict))
    return [f"{name} as {roles[name]}" for name in named if name not in SHAREGPT and roles.get(name, name) != name]


def unread_fields(value: Any, names: MessageNames = PLAIN) -> list[str]:
    """Names of filled fields of messages that are not used."""
    found: dict[str, None] = {}
    for message in value if isinstance(value, list) else [value]:
        if isinstance(message, dict):
            answered = ANSWERED if is_tool(names.roles.get(str(named_role(message)))) else ()
            others = (key for key in message if key not in READ | names.fields and key not in answered)
            found |= dict.fromkeys(key for key in others if filled(message, key))
    return list(found)


def before_last_said(messages: Sequence[Any], roles: Roles) -> int:
    """How many messages stand before the assistant's turns that end a conversation: all up to the last other turn."""
    said = {i for i, m in enumerate(messages) if isinstance(m, dict) and is_assistant(roles.get(str(named_role(m))))}
    return next((n for n in range(len(messages), 0, -1) if n - 1 not in said), 0)


def _counts(message: Row, role: str, field: str) -> bool:
    """Whether a message's own loss weight lets it count; other turns than the assistant's never do."""
    key = next((key for key in ("loss_weight", "weight") if message.get(key) is not None), None)
    if key is None:
        return True
    weight = number(message[key], f"{field}.{key}")
    if weight not in (0.0, 1.0) or (weight == 1.0 and key == "loss_weight" and role != "assistant"):
        raise Unusable("unsupported field", f"{field}.{key} is {weight:g} for role {role}; it can be 0, or 1 for an "
                       "assistant turn")  # fmt: skip
    return weight == 1.0


def split_at_fork(conversations: Sequence[Turns]) -> tuple[Turns, list[Turns]]:
    """Conversations -> (prompt, answers): cut as late as all agree and all go on with the assistant."""
    shortest = min(map(len, conversations))
    same = next((i for i in range(shortest) if any(c[i] != conversations[0][i] for c in conversations)), shortest)
    while same >= 0 and not all(len(c) > same and c[same].role == "assistant" for c in conversations):
        same -= 1
    if same < 0:
        begin = " and ".join(", ".join(turn.role for turn in c[:3]) for c in conversations)
        raise Unusable("prompts differ", f"the conversations do not part at an assistant turn; they begin {begin}")
    return conversations[0][:same], [c[same:] for c in conversations]


def split_at_answer(conversation: Turns) -> tuple[Turns, list[Turns]]:
    """One conversation -> its start, and as its one answer all from its first assistant turn on."""
    first = next((i for i, turn in enumerate(conversation) if turn.role == "assistant"), None)
    if first is None:
        raise Unusable("no assistant turn", f"roles are {', '.join(turn.role for turn in conversation)}")
    return conversation[:first], [conversation[first:]]


def after_prompt(prompt: Turns, answers: list[Turns], one_turn: bool) -> tuple[Turns, list[Turns]]:
    """Prompt and answers, where the answers may be whole conversations that repeat the prompt.

    A prompt of one turn given as text is one of theirs, as data sets keep it beside conversations of several turns:
    then what the conversations share is the prompt. Other prompts are their start, with or without a system turn.
    """
    if one_turn and all(answer[0].role in (*OPENING, "user") for answer in answers):
        start, rest = split_at_fork(answers)
        if any(turn.role == "user" and turn.content.strip() == prompt[0].content.strip() for turn in start):
            return start, rest
        raise Unusable("prompts differ", "the answers are whole conversations, and they share no turn like the prompt")
    system, said = split_opening(prompt)
    repeated = [split_opening(answer) for answer in answers]
    if all(rest[: len(said)] == said and head == repeated[0][0] for head, rest in repeated):
        given = repeated[0][0]
        if system and given and [turn.content for turn in system] != [turn.content for turn in given]:
            raise Unusable("two system messages", "the prompt's and the answers' differ")
        return (system or given) + said, [rest[len(said) :] for _, rest in repeated]
    return prompt, answers


def split_opening(conversation: Turns) -> tuple[Turns, Turns]:
    """The system or developer turns that open a conversation, and the rest."""
    roles = (i for i, turn in enumerate(conversation) if turn.role not in OPENING)
    n = next(roles, len(conversation))
    return conversation[:n], conversation[n:]


def is_transcript(value: Any) -> bool:
    """Whether a value reads "\\n\\nHuman: ...\\n\\nAssistant: ..."; stripped, it must end where the answer begins."""
    if not isinstance(value, str):
        return False
    opened = value.lstrip().startswith(TURN_START.strip()) and value.rstrip().endswith(ANSWER_MARK)
    return value.startswith(TURN_START) or opened


def split_transcripts(transcripts: Sequence[tuple[str, Any]]) -> tuple[str, list[str]]:
    """Named transcripts -> (prompt, answers); the prompt ends with the last assistant mark."""
    prompts, answers = [], []
    for name, value in transcripts:
        text = string(value, name)
        prompt, mark, answer = text.rpartition(ANSWER_MARK)
        if not text.lstrip().startswith(TURN_START.strip()) or not mark:
            hint = "plain strings need a 'prompt' beside them, or data.columns to say which field it is"
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


def transcript_turns(text: str) -> Turns:
    """The turns of a transcript; spaces around each are the format's. A mark of the assistant at its end opens none."""
    marks = TURN_MARK.split("\n\n" + text.strip().removesuffix(ANSWER_MARK).lstrip())[1:]  # role, content, role, ...
    roles = ["user" if mark == "Human" else "assistant" for mark in marks[::2]]
    return tuple(Message(role, content.strip()) for role, content in zip(roles, marks[1::2], strict=True))
