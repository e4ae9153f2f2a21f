"""Rows -> examples: every row becomes an Example or a DroppedRow with its reason.

A file has one of the forms below, told apart by the fields of its rows, the most specific first; `data.format` names
one instead. A form only says which field is what; what prompts and answers may look like is the same for all of them.
A row that cannot be used is dropped and listed; a file that cannot be used is a DataError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from tuningfork.data.read import Row, kind_of, read_rows
from tuningfork.data.turns import (
    NEUTRAL,
    Unusable,
    fields,
    fork,
    number,
    parsed,
    split_transcripts,
    string,
    transcript_turns,
    turns,
)
from tuningfork.errors import DataError
from tuningfork.records import DroppedRow, Example, Message, Source, Turns

Named = tuple[str, Any]
"""A field's name, as messages call it, and its value."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a form found in a row, values as they are.

    Without a prompt of its own, that is what the answers have in common: they are whole conversations or transcripts.
    """

    prompt: Named | None
    answers: list[Named]  # the best first
    label: bool | None = None
    tools: Any = None
    document: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write examples down: the fields that a row must have, what they are, and a look at the whole file."""

    keys: tuple[str, ...]
    parts: Callable[[Row], Parts]
    check: Callable[[str | Path, Sequence[tuple[int, Row]]], None] = lambda path, rows: None

    @classmethod
    def of(cls, prompt: str | None, *answers: str, document: bool = False) -> Form:
        """A form whose prompt, if it has one of its own, and answers are the fields of these names."""
        keys = answers if prompt is None else (prompt, *answers)

        def parts(row: Row) -> Parts:
            named = list(zip(keys, fields(row, keys), strict=True))
            return Parts(None if prompt is None else named.pop(0), named, document=document)

        return cls(keys, parts)


def _instruction(row: Row) -> Parts:
    keys = ("instruction", "chosen", "rejected")
    instruction, *answers = fields(row, keys)
    more = row.get("input")
    prompt = string(instruction, "instruction") + (f"\n{string(more, 'input')}" if more not in NEUTRAL else "")
    if row.get("history") not in NEUTRAL:
        raise Unusable("unsupported field", "history is filled; write the turns as messages instead")
    return Parts(("instruction", prompt), list(zip(keys[1:], answers, strict=True)))


def _openai(row: Row) -> Parts:
    keys = ("input", "preferred_output", "non_preferred_output")
    given, *answers = fields(row, keys)
    if not isinstance(given, dict):
        raise Unusable("wrong type", f"input is {kind_of(given)}, expected an object with messages")
    (messages,) = fields(given, ("messages",), "input.")
    return Parts(
        ("input.messages", messages), list(zip(keys[1:], answers, strict=True)), tools=given.get("tools")
    )  # fmt: skip


def _labelled(row: Row) -> Parts:
    keys = ("output_1", "output_2")
    prompt, *answers, label = fields(row, ("input", *keys, "label"))
    if label not in (1, 2) or isinstance(label, bool):
        raise Unusable("unknown label", f"label is {label!r}; it names the better output, 1 or 2")
    named = list(zip(keys, answers, strict=True))
    return Parts(("input", prompt), named if label == 1 else named[::-1])


def _unpaired(row: Row) -> Parts:
    prompt, completion, label = fields(row, ("prompt", "completion", "label"))
    if not isinstance(label, bool):
        raise Unusable("unknown label", f"label is {kind_of(label)}, expected true or false")
    return Parts(("prompt", prompt), [("completion", completion)], label=label)


def _ranking(row: Row) -> Parts:
    prompt, answers = fields(row, ("prompt", "answers"))
    if not isinstance(answers, list) or len(answers) < 2:
        found = f"a list of {len(answers)}" if isinstance(answers, list) else kind_of(answers)
        raise Unusable("wrong type", f"answers is {found}, expected a list of at least two, the best first")
    for key in ("rank", "ranks"):
        if row.get(key) not in NEUTRAL:
            raise Unusable("unsupported field", f"{key} is filled; give answers from best to worst, or scores")
    named = [(f"answers[{i}]", answer) for i, answer in enumerate(answers)]
    if row.get("scores") is not None:
        scores = row["scores"]
        if not isinstance(scores, list) or len(scores) != len(named):
            found = f"a list of {len(scores)}" if isinstance(scores, list) else kind_of(scores)
            raise Unusable("wrong type", f"scores is {found}, expected one number for each of {len(named)} answers")
        ranks = [number(score, f"scores[{i}]") for i, score in enumerate(scores)]
        if len(set(ranks)) < len(ranks):
            raise Unusable("answers tie", f"scores {ranks} put two answers on one rank")
        named = [named[i] for i in sorted(range(len(named)), key=lambda i: -ranks[i])]
    return Parts(("prompt", prompt), named)


def _check_labels(path: str | Path, rows: Sequence[tuple[int, Row]]) -> None:
    """Raise DataError where labels count from 0: a 1 would then name the other output."""
    for place, row in rows:
        if row.get("label") == 0 and not isinstance(row["label"], bool):
            raise DataError(
                f"{path}: row {place} has label 0, so labels count from 0 here and a 1 would name the second output. "
                "Write 1 for output_1 and 2 for output_2."
            )


FORMS: dict[str, Form] = {
    "sharegpt": Form.of("conversations", "chosen", "rejected"),  # messages {from, value}
    "pairs": Form.of("prompt", "chosen", "rejected"),  # strings, messages, or whole conversations as answers
    "instruction": Form(("instruction", "chosen", "rejected"), _instruction),  # an input may stand beside it
    "message_lists": Form.of(None, "chosen_messages", "rejected_messages"),  # two whole conversations
    "openai": Form(("input", "preferred_output", "non_preferred_output"), _openai),  # input: messages and tools
    "labelled": Form(("input", "output_1", "output_2", "label"), _labelled, _check_labels),  # 1 or 2: the better one
    "conversations": Form.of(None, "chosen", "rejected"),  # two whole conversations or Human/Assistant transcripts
    "ranking": Form(("prompt", "answers"), _ranking),  # from best to worst, or with scores
    "unpaired": Form(("prompt", "completion", "label"), _unpaired),  # true or false: is the completion wanted?
    "completion": Form.of("prompt", "completion"),  # one answer to imitate
    "messages": Form.of(None, "messages"),  # one conversation to imitate
    "text": Form.of(None, "text", document=True),
}


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of a file's rows: rows_read = len(examples) + len(dropped)."""

    form: str
    examples: list[Example]
    dropped: list[DroppedRow]
    rows_read: int
    notes: dict[str, list[Source]] = field(default_factory=dict)  # what is worth knowing of rows -> which


def read_examples(path: str | Path, as_text: bool, form: str = "auto") -> ReadResult:
    """Read a file of examples; the answers of each are in order, the best first.

    as_text=False: prompts and answers are turns; a string becomes one user or one assistant turn. as_text=True: they
    are the file's own strings; a file with messages is refused. Documents are text either way. `form`: a name of FORMS.
    Raises DataError where the whole file is unusable.
    """
    rows = read_rows(path)
    name = _form(path, [row for _, row in rows], form)
    FORMS[name].check(path, rows)
    result = ReadResult(name, [], [], len(rows))
    for row_number, row in rows:
        source = Source(str(path), row_number)
        try:
            result.examples.append(_example(source, row, FORMS[name], as_text))
        except Unusable as unusable:
            result.dropped.append(DroppedRow(source.file, row_number, unusable.reason, unusable.detail))
            continue
        for note in _notes(row):
            result.notes.setdefault(note, []).append(source)
    return result


def _form(path: str | Path, rows: Sequence[Row], asked: str) -> str:
    """The form that most rows have, or the one asked for; rows that lack one of its fields are dropped later."""
    fits = (next((n for n, form in FORMS.items() if all(key in row for key in form.keys)), None) for row in rows)
    counts = Counter(name for name in fits if name is not None)
    if asked != "auto":
        if any(all(key in row for key in FORMS[asked].keys) for row in rows):
            return asked
        hint = f"its rows look like {counts.most_common(1)[0][0]}" if counts else "they have no known form"
        needed = ", ".join(FORMS[asked].keys)
        raise DataError(f"{path}: no row has the fields of data.format {asked}: {needed}; {hint}. {_found(rows)}")
    if not counts:
        supported = "; ".join(f"{', '.join(form.keys)} ({name})" for name, form in FORMS.items())
        raise DataError(f"{path}: no known form of data. {_found(rows)} Supported: {supported}.")
    return counts.most_common(1)[0][0]


def _found(rows: Sequence[Row]) -> str:
    return f"Fields found: {', '.join(sorted({key for row in rows for key in row})[:40]) or 'none'}."


def _example(source: Source, row: Row, form: Form, as_text: bool) -> Example:
    parts = form.parts(row)
    if parts.document:
        text = string(parts.answers[0][1], parts.answers[0][0])
        if not text.strip():
            raise Unusable("empty answer", "text")
        return Example(source, "", (text,), weight=_weight(row))
    found: tuple[Any, list[Any]] = _text_parts(source, parts, row) if as_text else _turn_parts(parts, row)
    prompt, answers = found
    _check_distinct(parts, answers)
    return Example(
        source,
        prompt,
        tuple(answers),
        label=parts.label,
        weight=_weight(row),
        margin=_margin(row),
        template=_template_arguments(parts, row),
    )


def _text_parts(source: Source, parts: Parts, row: Row) -> tuple[str, list[str]]:
    """Prompt and answers as the file's own strings."""
    given = [*([parts.prompt] if parts.prompt else []), *parts.answers]
    for name, value in given:
        if isinstance(value, list | dict):
            raise DataError(
                f"{source}: field {name!r} holds messages, which need a chat template. Set data.template: chat, "
                "or give prompts and answers as strings."
            )
    for key in ("system", "tools", "chat_template_kwargs"):
        if row.get(key) not in NEUTRAL:
            raise Unusable("unsupported field", f"{key} is filled, and there is no chat template to print it")
    if parts.prompt is None:
        prompt, answers = split_transcripts(parts.answers)
    else:
        prompt, *answers = [string(value, name) for name, value in given]
    _check_filled(parts, [bool(answer.strip()) for answer in answers])
    return prompt, answers


def _turn_parts(parts: Parts, row: Row) -> tuple[Turns, list[Turns]]:
    """Prompt and answers as turns."""
    if parts.prompt is None and all(isinstance(value, str) for _, value in parts.answers):
        text, answers = split_transcripts(parts.answers)
        return _checked(parts, transcript_turns(text), [(Message("assistant", a.strip()),) for a in answers])
    conversations = [turns(value, name, "assistant") for name, value in parts.answers]
    if parts.prompt is None:
        prompt, found = fork(conversations) if len(conversations) > 1 else _first_answer(conversations[0])
    else:
        name, value = parts.prompt
        prompt, found = turns(value, name, "user"), conversations
        if isinstance(value, str) and all(_opens_with(answer, prompt[0]) for answer in found):
            prompt, found = fork(found)
        elif all(answer[: len(prompt)] == prompt for answer in found):
            found = [answer[len(prompt) :] for answer in found]
    if row.get("system") not in NEUTRAL:
        system = Message("system", string(row["system"], "system"))
        if prompt and prompt[0].role == "system" and prompt[0] != system:
            raise Unusable("two system messages", "the system field and the first message differ")
        prompt = (system, *(prompt[1:] if prompt and prompt[0].role == "system" else prompt))
    return _checked(parts, prompt, found)


def _first_answer(conversation: Turns) -> tuple[Turns, list[Turns]]:
    """One conversation -> its start, and all from its first assistant turn on."""
    first = next((i for i, turn in enumerate(conversation) if turn.role == "assistant"), None)
    if first is None:
        raise Unusable("no assistant turn", f"roles are {', '.join(turn.role for turn in conversation)}")
    return conversation[:first], [conversation[first:]]


def _opens_with(conversation: Turns, user: Message) -> bool:
    """Whether the turns are a whole conversation whose first user turn, maybe behind a system turn, is this one."""
    return next((turn for turn in conversation if turn.role not in ("system", "developer")), None) == user


def _checked(parts: Parts, prompt: Turns, answers: list[Turns]) -> tuple[Turns, list[Turns]]:
    if not prompt:
        raise Unusable("empty prompt", "the answers have no turn before them")
    _check_filled(parts, [bool(answer) for answer in answers])
    for (name, _), answer in zip(parts.answers, answers, strict=True):
        if answer[-1].role != "assistant":
            raise Unusable("last turn not assistant", f"{name!r} ends with a {answer[-1].role} turn")
        if answer[0].role != "assistant":
            raise Unusable("answer starts with another role", f"{name!r} starts with a {answer[0].role} turn")
    _check_filled(parts, [all(map(_says_something, (m for m in a if m.role == "assistant"))) for a in answers])
    for place, message in enumerate(prompt, 1):
        if message.role != "system" and not _says_something(message):
            raise Unusable("empty message", f"message {place} of the prompt, a {message.role} turn")
    return prompt, answers


def _says_something(message: Message) -> bool:
    return bool(message.content.strip() or message.extra.get("tool_calls"))


def _check_filled(parts: Parts, filled: list[bool]) -> None:
    if not all(filled):
        empty = [name for (name, _), full in zip(parts.answers, filled, strict=True) if not full]
        raise Unusable("empty answer", " and ".join(empty))


def _check_distinct(parts: Parts, answers: Sequence[Turns | str]) -> None:
    names = [name for name, _ in parts.answers]
    for (first, one), (second, other) in combinations(zip(names, answers, strict=True), 2):
        if one == other:
            reason = "chosen equals rejected" if len(answers) == 2 else "answers are equal"
            raise Unusable(reason, "" if len(answers) == 2 else f"{first} and {second}")


def _weight(row: Row) -> float:
    if row.get("weight") is None:
        return 1.0
    weight = number(row["weight"], "weight")
    if weight < 0:
        raise Unusable("negative weight", f"weight is {weight:g}")
    if weight == 0:
        raise Unusable("weight 0", "the row asks not to be trained on")
    return weight


def _margin(row: Row) -> float | None:
    return None if row.get("margin") is None else number(row["margin"], "margin")


def _template_arguments(parts: Parts, row: Row) -> dict[str, Any]:
    """What the chat template is told beside the messages: tools, and the row's own arguments."""
    found: dict[str, Any] = {}
    key = "chat_template_kwargs"
    if row.get(key) not in NEUTRAL:
        arguments = parsed(row[key], key)
        if not isinstance(arguments, dict):
            raise Unusable("wrong type", f"{key} is {kind_of(arguments)}, expected an object")
        found |= arguments
    tools = parts.tools if parts.tools not in NEUTRAL else row.get("tools")
    if tools not in NEUTRAL:
        tools = parsed(tools, "tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise Unusable("wrong type", f"tools is {kind_of(tools)}, expected a list of objects")
        if tools:
            found["tools"] = tools
    return found


def _notes(row: Row) -> Iterator[str]:
    """What is worth knowing of a row that is used."""
    chosen, rejected = row.get("score_chosen"), row.get("score_rejected")
    if isinstance(chosen, int | float) and isinstance(rejected, int | float) and chosen <= rejected:
        yield "chosen is not scored higher"
