"""Rows -> examples: every row becomes an Example or is Unusable for a reason.

A row that cannot be used is dropped and listed; a file that cannot be used is a DataError. Nothing that would change
what the model sees is passed over: it is used, or its row is dropped, and fields that are not read are noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple

from tuningfork.data.examples.checks import ASKED, check_example
from tuningfork.data.examples.conversations import (
    after_prompt,
    is_transcript,
    read_turns,
    renamed_roles,
    split_at_answer,
    split_at_fork,
    split_opening,
    split_transcripts,
    transcript_turns,
    unread_fields,
)
from tuningfork.data.examples.formats import FORMATS, Format, Named, Parts, format_of
from tuningfork.data.examples.roles import MessageNames
from tuningfork.data.examples.tools import holds_null, template_arguments
from tuningfork.data.examples.unpack import (
    JSON_AS_TEXT,
    SOME_AS_JSON,
    Unpacked,
    is_object,
    unpacked_parts,
    without_repeated_prompt,
)
from tuningfork.data.examples.values import SHOWN, Unusable, filled, number, optional_json, string, unbroken
from tuningfork.data.tables.rows import Row, kind_of
from tuningfork.errors import DataError
from tuningfork.records import Example, Message, Source, Turns

SYSTEM = ("system", "system_prompt")  # either holds the system message
REJECTED_SYSTEM = "rejected_system"  # the one of the rejected answer, which has the same prompt
SCORES = (
    *(("score_chosen", "score_rejected"), ("chosen_score", "rejected_score")),
    *(("rating_chosen", "rating_rejected"), ("chosen_rating", "rejected_rating"), ("chosen-rating", "rejected-rating")),
)
# Fields that every format reads.
COMMON_FIELDS = {
    *(*SYSTEM, REJECTED_SYSTEM, "history", "tools", "functions", "rejected_tools", "chat_template_kwargs"),
    *("weight", "margin"),
    *(name for pair in SCORES for name in pair),
}
ROW_ONLY = frozenset(
    (*SYSTEM, REJECTED_SYSTEM, "history", "rejected_tools", "chat_template_kwargs", "weight", "margin")
)
CUT_REPEATED = "answers repeat the prompt: cut off"
BEGIN_ALIKE = "all answers begin with the whole prompt"
UPSIDE_DOWN = "chosen is not scored higher"
NO_SCORE = "the score of an answer is no number"
NULLS = "null within tools or calls, which a template may print"
UNREAD_SHOWN = 20  # names in the note of fields that are not read


class ReadRow(NamedTuple):
    """A row's example, what is worth knowing of it, the names of filled fields that nothing reads, and the answers' own
    names, in their order."""

    example: Example
    notes: list[str]
    not_read: list[str]
    names: list[str]

    def best(self) -> ReadRow:
        """The same with the best answer alone, and no margin to answers that are gone."""
        example = replace(self.example, answers=self.example.answers[:1], margin=None)
        return self._replace(example=example, names=self.names[:1])


@dataclass(frozen=True, slots=True)
class RowReader:
    """Makes examples of a table's rows, of each by itself; the answers of each are in order, the best first.

    as_text=False: prompts and answers are turns; a string becomes one user or one assistant turn. as_text=True: they
    are the file's own strings; a file with messages is refused. Documents are text either way.
    """

    path: str
    format: str  # of the table's rows
    mixed: bool  # a row that looks like another format is one that its user did not expect
    repeat_prompts: bool  # see TableFormat
    as_text: bool
    names: MessageNames = field(default_factory=MessageNames)  # in messages

    def __call__(self, number: int, row: Row) -> ReadRow:
        """The row of this number. Raises Unusable for this row, and DataError where no row can be used."""
        format = FORMATS[self.format]
        parts = self._parts(row)
        repeats = self.repeat_prompts or is_transcript(parts.asked)
        cut = without_repeated_prompt(parts) if repeats else parts
        example = _example(Source(self.path, number), row, format, cut, self.as_text, self.names)
        notes = list(_notes(row, parts, cut, example, self.names))
        not_read = list(_not_read(row, format, parts, self.names))
        return ReadRow(example, notes, not_read, [name for name, _ in parts.answers])

    def _parts(self, row: Row) -> Unpacked:
        """What the table's format finds in a row."""
        format = FORMATS[self.format]
        own = format_of(row) if self.mixed else None
        if own not in (None, self.format) and format.fits(row):
            raise Unusable(
                "another format than the file",
                f"the row looks like {own}, most of the file like {self.format}; split the file, or set data.format",
            )
        for key in (*COMMON_FIELDS, *ASKED, *format.more):
            unbroken(row.get(key))
        parts = unpacked_parts(format.parts(row), self.names.roles, ROW_ONLY)
        if self.as_text and parts.notes and parts.notes != (SOME_AS_JSON,):
            raise Unusable("messages without a chat template", f"{parts.notes[0]} where data.template is not none")
        return parts


def fields_not_read(names: Sequence[str]) -> str:
    """The note of a table's fields that nothing reads."""
    more = f" and {len(names) - UNREAD_SHOWN} more" if len(names) > UNREAD_SHOWN else ""
    return f"fields that are not read: {', '.join(names[:UNREAD_SHOWN])}{more}"


def _example(source: Source, row: Row, format: Format, parts: Unpacked, as_text: bool, names: MessageNames) -> Example:
    # A document is by itself: it has no turns that a system message or tools could be for.
    beside = {} if parts.document else {key: value for key, value in row.items() if key not in format.keys}
    prompt: str | Turns
    answers: list[Any]  # as the prompt: all strings, or all turns
    if parts.document:
        prompt, answers = "", [string(value, name) for name, value in parts.answers]
    elif as_text:
        prompt, answers = _text_parts(source, parts, beside)
    else:
        prompt, answers = _turn_parts(parts, beside, names)
    check_example(row, format, parts, prompt, answers)
    return Example(
        source,
        prompt,
        tuple(answers),
        label=parts.label,
        weight=_weight(row),
        margin=None if beside.get("margin") is None else number(beside["margin"], "margin"),
        template={} if as_text else template_arguments(beside, parts.tools),
    )


def _text_parts(source: Source, parts: Parts, row: Row) -> tuple[str, list[str]]:
    """Prompt and answers as the file's own strings."""
    values = _given(parts)
    for name, value in values:
        if isinstance(value, list | dict):
            raise DataError(
                f"{source}: field {name!r} holds messages, which need a chat template. Set data.template: "
                "chat, or file.jinja where the tokenizer has none of its own; or give prompts and answers as strings."
            )
    for key in (*SYSTEM, REJECTED_SYSTEM, "history", "tools", "functions", "chat_template_kwargs"):
        if filled(row, key):
            raise Unusable("unsupported field", f"{key} is filled, and there is no chat template to print it")
    if parts.prompt is None:
        prompt, answers = split_transcripts(parts.answers)
    else:
        prompt, *answers = [string(value, name) for name, value in values]
        if longer := [name for name, value in parts.answers if is_transcript(value)]:
            raise Unusable("prompts differ", f"{longer[0]} is a whole transcript that does not begin with the prompt")
    return prompt, answers


def _turn_parts(parts: Parts, row: Row, names: MessageNames) -> tuple[Turns, list[Turns]]:
    """Prompt and answers as turns."""
    values = parts.answers
    if parts.prompt is None and all(isinstance(value, str) for _, value in values):
        text, answers = split_transcripts(values)
        found: list[Turns] = [(Message("assistant", answer.strip()),) for answer in answers]
        prompt = transcript_turns(text)
    elif parts.prompt is None:
        conversations = [read_turns(value, name, "assistant", names) for name, value in values]
        prompt, found = split_at_fork(conversations) if len(conversations) > 1 else split_at_answer(conversations[0])
    else:
        name, asked = parts.prompt
        if is_transcript(asked):  # spaces around a turn are the format's
            values = [(name, value.strip() if isinstance(value, str) else value) for name, value in values]
        conversations = [read_turns(value, name, "assistant", names) for name, value in values]
        prompt = read_turns(asked, name, "user", names)
        one_turn = isinstance(asked, str) and not is_transcript(asked)
        prompt, found = after_prompt(prompt, conversations, one_turn)
    prompt = _with_system(_with_history(prompt, row, names), row)
    if not prompt and (others := [key for key in row if key not in (*COMMON_FIELDS, *ASKED) and filled(row, key)]):
        raise Unusable(
            "empty prompt",
            f"the answers have no turn before them. If another field holds the prompt ({', '.join(others)[:SHOWN]}), "
            "say so, such as data.columns: {...: prompt}",
        )
    if filled(row, REJECTED_SYSTEM) and all(turn.content != row[REJECTED_SYSTEM] for turn in split_opening(prompt)[0]):
        raise Unusable(
            "two system messages", f"{REJECTED_SYSTEM} is not the one of the prompt, which both answers have"
        )
    return prompt, found


def _with_history(prompt: Turns, row: Row, names: MessageNames) -> Turns:
    """The prompt behind the turns of a `history`: [user, assistant] each, or messages."""
    past = optional_json(row.get("history"), "history")
    if past is None:
        return prompt
    if len(prompt) != 1:
        raise Unusable("unsupported field", "history is filled beside a prompt of several turns; write all as messages")
    if isinstance(past, list) and all(isinstance(said, list) and len(said) == 2 for said in past):
        named = [(role, text) for said in past for role, text in zip(("user", "assistant"), said, strict=True)]
        return (*(Message(role, string(text, f"history, {role}")) for role, text in named), *prompt)
    if isinstance(past, list) and all(isinstance(message, dict) for message in past):
        return (*read_turns(past, "history", "user", names), *prompt)
    raise Unusable("wrong type", f"history is {kind_of(past)}, expected a list of [user, assistant] or of messages")


def _with_system(prompt: Turns, row: Row) -> Turns:
    """The prompt with the row's system message in front. An empty field means none; an empty message is one."""
    found = {key: text for key in SYSTEM if filled(row, key) and (text := string(row[key], key)).strip()}
    if not found:
        return prompt
    if len(set(found.values())) > 1:
        raise Unusable("two system messages", f"{' and '.join(found)} differ")
    key, said = next(iter(found.items()))
    opening, _ = split_opening(prompt)
    if opening and all(turn.content != said for turn in opening):
        raise Unusable("two system messages", f"{key} and the first message, of role {opening[0].role}, differ")
    return prompt if opening else (Message("system", said), *prompt)


def _weight(row: Row) -> float:
    if row.get("weight") is None:
        return 1.0
    weight = number(row["weight"], "weight")
    if weight < 0:
        raise Unusable("negative weight", f"weight is {weight:g}")
    if weight == 0:
        raise Unusable("weight 0", "the row asks not to be trained on")
    return weight


def _notes(row: Row, parts: Unpacked, cut: Parts, example: Example, names: MessageNames) -> Iterator[str]:
    """What is worth knowing of a row that is used."""
    rated = () if parts.document else SCORES
    scores = {key: _score(row[key]) for pair in rated for key in pair if row.get(key) is not None}
    rating = {key: score for key, score in scores.items() if score is not None}
    if len(rating) < len(scores):
        yield NO_SCORE
    if any(rating[one] <= rating[other] for one, other in SCORES if one in rating and other in rating):
        yield UPSIDE_DOWN
    yield from parts.notes
    if not parts.document and SOME_AS_JSON not in parts.notes and all(is_object(answer) for _, answer in parts.answers):
        yield JSON_AS_TEXT
    for name in dict.fromkeys(name for _, value in _given(parts) for name in renamed_roles(value, names.roles)):
        yield f"role {name}"
    if cut is not parts:
        yield CUT_REPEATED
    elif parts.repeat_prompt:
        yield BEGIN_ALIKE
    said = [turn.extra for part in (example.prompt, *example.answers) for turn in part if isinstance(turn, Message)]
    if any(map(holds_null, (example.template.get("tools", []), *said))):
        yield NULLS


def _score(value: Any) -> float | None:
    """A score, which may be written as text; None for what is no number, as NaN in a table is none."""
    try:
        found = float(value) if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None
    return None if found is None or found != found else found


def _not_read(row: Row, format: Format, parts: Unpacked, names: MessageNames) -> Iterator[str]:
    """Names of filled fields of a row and of its messages that nothing reads."""
    # What was asked is compared with the prompt, or with the document, which reads no other field but its weight.
    known = {*(("weight",) if parts.document else COMMON_FIELDS), *ASKED, *format.keys, *format.more}
    yield from (key for key in row if key not in known and filled(row, key))
    yield from parts.not_read
    for name, value in _given(parts):
        yield from (f"{name}[].{key}" for key in unread_fields(value, names))


def _given(parts: Parts) -> list[Named]:
    return [*([parts.prompt] if parts.prompt else []), *parts.answers]
