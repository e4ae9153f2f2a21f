"""What an example must be once its row is read: filled answers that differ, turns in an order that can be learned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from tuningfork.data.examples.conversations import OPENING
from tuningfork.data.examples.formats import Format, Parts
from tuningfork.data.examples.tools import THOUGHTS
from tuningfork.data.examples.values import Unusable, filled
from tuningfork.data.tables.rows import Row
from tuningfork.records import Message, Turns

ASKED = ("instruction", "input", "question", "query")  # fields that hold what was asked, where no prompt does


def check_example(row: Row, format: Format, parts: Parts, prompt: str | Turns, answers: Sequence[Any]) -> None:
    """Raise Unusable where what was read of a row cannot be trained on.

    An answer is empty or is there twice, turns stand in an order that nobody can learn, or the row asks something that
    the prompt, or the document, does not hold. The answers are strings where the prompt is one, else turns.
    """
    if isinstance(prompt, str):
        _check_filled(parts, [bool(answer.strip()) for answer in answers])
    else:
        _check_turns(parts, prompt, answers)
    said = answers[0] if parts.document else prompt
    _check_asked(row, format, said if isinstance(said, str) else "\n".join(turn.content for turn in said))
    _check_distinct(parts, answers)


def says_something(turn: Message) -> bool:
    """Whether there are words, calls or thoughts: an answer that never comes to its end may be thoughts alone."""
    thoughts = str(turn.extra.get(THOUGHTS[0], ""))
    return bool(turn.content.strip() or turn.extra.get("tool_calls") or thoughts.strip())


def _check_turns(parts: Parts, prompt: Turns, answers: Sequence[Turns]) -> None:
    """Raise Unusable where a prompt and its answers, as turns, cannot be trained on: who speaks, and that they do."""
    if not prompt:
        raise Unusable("empty prompt", "the answers have no turn before them")
    _check_filled(parts, [bool(answer) for answer in answers])
    for (name, _), answer in zip(parts.answers, answers, strict=True):
        if answer[-1].role != "assistant":
            raise Unusable("last turn not assistant", f"{name!r} ends with a {answer[-1].role} turn")
        if answer[0].role != "assistant":
            raise Unusable("answer starts with another role", f"{name!r} starts with a {answer[0].role} turn")
    _check_filled(parts, [all(map(says_something, (m for m in a if m.role == "assistant"))) for a in answers])
    for place, message in enumerate(prompt, 1):
        if message.role not in OPENING and not says_something(message):
            raise Unusable("empty message", f"message {place} of the prompt, of role {message.role}")
    if prompt[-1].role == "assistant":
        raise Unusable(
            "prompt ends with an assistant turn",
            "an answer would be a second one in a row; end the prompt with a user or tool turn, or give text to be "
            "continued as strings with data.template: none",
        )


def _check_filled(parts: Parts, full: Sequence[bool]) -> None:
    """Raise Unusable, naming the answers, where one of them is not `full`."""
    if not all(full):
        empty = [name for (name, _), there in zip(parts.answers, full, strict=True) if not there]
        raise Unusable("empty answer", " and ".join(empty))


def _check_distinct(parts: Parts, answers: Sequence[Turns | str]) -> None:
    """Raise Unusable where two answers are the same."""
    names = [name for name, _ in parts.answers]
    for (first, one), (second, other) in combinations(zip(names, answers, strict=True), 2):
        if one == other:
            reason = "chosen equals rejected" if len(answers) == 2 else "answers are equal"
            raise Unusable(reason, "" if len(answers) == 2 else f"{first} and {second}")


def _check_asked(row: Row, format: Format, prompt: str) -> None:
    """Raise Unusable where a field that usually holds what was asked says something that the prompt does not."""
    for key in ASKED:
        if key not in (*format.keys, *format.more) and filled(row, key):
            value = row[key]
            if not isinstance(value, str) or value.strip() not in prompt:
                raise Unusable(
                    "unsupported field",
                    f"{key} is filled, and what is read does not hold it; put it there or remove the field",
                )
