"""The formats that rows have: which field is the prompt, which are the answers, and which of them is the better one.

A file has one of the formats below, told apart by the fields that its rows fill; of several that fit, the one that
stands first in FORMATS. `data.format` names one instead. A format only says which field is what; what prompts and
answers may look like is the same for all of them (`data/examples/row_reader.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tuningfork.data.examples.values import Unusable, filled, number, parsed_json, required_fields, string
from tuningfork.data.tables.rows import Row, kind_of

MOST_ANSWERS = 1000  # of a row: each is compared with every other

Named = tuple[str, Any]
"""A field's name, as messages call it, and its value."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a format found in a row, values as they are.

    Without a prompt of its own, that is what the answers have in common: they are whole conversations or transcripts.
    """

    prompt: Named | None
    answers: list[Named]  # the best first
    label: bool | None = None
    tools: tuple[Named, ...] = ()  # with the places where they stand, beside those that any row may have
    document: bool = False
    beside: tuple[str, ...] = ()  # names of filled fields beside the answers, within the same objects
    answered: bool = False  # the prompt goes on with the best answer, which is not among the answers

    @property
    def asked(self) -> str:
        """The prompt's text; empty where it has none or is no string."""
        return self.prompt[1] if self.prompt is not None and isinstance(self.prompt[1], str) else ""

    @property
    def repeat_prompt(self) -> bool:
        """Whether all answers are strings that go on behind the whole prompt."""
        return bool(self.asked.strip()) and all(
            isinstance(answer, str) and answer.startswith(self.asked) and len(answer) > len(self.asked)
            for _, answer in self.answers
        )


def _reads_any(row: Row) -> str:
    """For formats of which any row can be read by itself."""
    return ""


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write examples down: the fields that a row must fill, and what they are.

    `refusal` says what in a row shows that the whole file means something else, if anything does. `more` are fields
    that the format reads where they are filled. `numbers` are fields whose values are numbers or truth values, which a
    CSV file spells as text.
    """

    keys: tuple[str, ...]
    parts: Callable[[Row], Parts]
    refusal: Callable[[Row], str] = _reads_any
    more: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompt: str | None, *answers: str, document: bool = False) -> Format:
        """A format whose prompt, if it has one of its own, and answers are the fields of these names."""
        keys = answers if prompt is None else (prompt, *answers)

        def parts(row: Row) -> Parts:
            named = list(zip(keys, required_fields(row, keys), strict=True))
            return Parts(None, named, document=document) if prompt is None else Parts(named[0], named[1:])

        return cls(keys, parts)

    @classmethod
    def judged(
        cls, prompt: str, one: str, other: str, verdict: str, better: Mapping[int, int | None], says: str
    ) -> Format:
        """A format with two answers and a field that judges them. `better` maps its values to the place of the better
        answer, or to None for a tie; `says` tells a user what the values mean."""
        keys = (prompt, one, other, verdict)

        def parts(row: Row) -> Parts:
            asked, *answers, found = required_fields(row, keys)
            if isinstance(found, bool) or not isinstance(found, int | float) or found not in better:
                raise Unusable("unknown label", f"{verdict} is {found!r}"[:80] + f"; {says}")
            first = better[int(found)]
            if first is None:
                raise Unusable("answers tie", f"{verdict} is {found}")
            named = list(zip((one, other), answers, strict=True))
            return Parts((prompt, asked), named if first == 0 else named[::-1])

        return cls(keys, parts, numbers=(verdict,))

    def fits(self, row: Row) -> bool:
        """Whether a row fills the fields of this format; in a table of several, the others' are there and null."""
        return all(row.get(key) is not None for key in self.keys)


def _with_input(row: Row) -> Named:
    """The prompt of an instruction and the input beside it, either of which may be empty."""
    texts = [string(row[key], key) for key in ("instruction", "input") if filled(row, key)]
    return "instruction", "\n".join(text for text in texts if text.strip())


def _instructed(*answers: str) -> Format:
    keys = ("instruction", *answers)

    def parts(row: Row) -> Parts:
        return Parts(_with_input(row), list(zip(keys, required_fields(row, keys), strict=True))[1:])

    return Format(keys, parts, more=("input",))


def _openai(row: Row) -> Parts:
    keys = ("input", "preferred_output", "non_preferred_output")
    given, *answers = required_fields(row, keys)
    given = parsed_json(given, "input")
    if not isinstance(given, dict):
        raise Unusable("wrong type", f"input is {kind_of(given)}, expected an object with messages")
    (messages,) = required_fields(given, ("messages",), "input.")
    tools = (("input.tools", given.get("tools")),)
    return Parts(("input.messages", messages), list(zip(keys[1:], answers, strict=True)), tools=tools)


LABELLED = Format.judged("input", "output_1", "output_2", "label", {1: 0, 2: 1}, "it names the better output, 1 or 2")


def _labelled(row: Row) -> Parts:
    parts = LABELLED.parts(row)
    if filled(row, "instruction"):
        return Parts(_with_input(row), parts.answers)
    return parts


def _counts_from_zero(row: Row) -> str:
    if row.get("label") == 0 and not isinstance(row["label"], bool):
        return (
            "has label 0, so labels count from 0 here and a 1 would name the second output. Write 1 for output_1 and "
            "2 for output_2."
        )
    return ""


def _label(label: Any, answer: str) -> bool:
    if not isinstance(label, bool):
        raise Unusable(
            "unknown label",
            f"label is {label!r}"[:80] + f"; write true for {answer} that is wanted, false for one that is not",
        )
    return label


def _tagged(row: Row) -> str:
    """LLaMA-Factory's label of single answers, beside fields of answers to imitate."""
    if not filled(row, "kto_tag"):
        return ""
    whole = filled(row, "conversations")
    fields = "conversations: messages" if whole else "instruction: prompt, output: completion"
    return (
        "has a kto_tag, so these are answers with a label, and not all to imitate. Read them so with data.columns: "
        f"{{{fields}, kto_tag: label}}"
    )


def _unpaired(row: Row) -> Parts:
    prompt, completion, label = required_fields(row, ("prompt", "completion", "label"))
    return Parts(("prompt", prompt), [("completion", completion)], label=_label(label, "a completion"))


def _unpaired_messages(row: Row) -> Parts:
    messages, label = required_fields(row, ("messages", "label"))
    return Parts(None, [("messages", messages)], label=_label(label, "an answer"))


def _after_messages(row: Row) -> Parts:
    """Messages are the prompt, but where they are one of two whole conversations beside them."""
    keys = ("messages", "chosen", "rejected")
    messages, *answers = required_fields(row, keys)
    named = list(zip(keys[1:], answers, strict=True))
    return Parts(None if messages in answers else ("messages", messages), named)


def _rejected_response(row: Row) -> Parts:
    """ms-swift: another end of the conversation, in place of the assistant's turns that end it."""
    messages, rejected = required_fields(row, ("messages", "rejected_response"))
    return Parts(("messages", messages), [("rejected_response", rejected)], answered=True)


def _ranking(row: Row) -> Parts:
    prompt, answers = required_fields(row, ("prompt", "answers"))
    named = _at_least_two(answers, "answers", "the best first")
    for key in ("rank", "ranks"):
        if filled(row, key):
            raise Unusable("unsupported field", f"{key} is filled; give answers from best to worst, or scores")
    if filled(row, "scores"):
        return Parts(("prompt", prompt), _sorted(named, "scores", _scores(row["scores"], len(named))))
    if any(isinstance(answer, dict) and "answer" in answer for _, answer in named):
        return _by_rank(("prompt", prompt), named, "answer")
    return Parts(("prompt", prompt), named)


def _completions(row: Row) -> Parts:
    """NeMo-RL: messages, and what may follow them, each with its rank."""
    context, found = required_fields(row, ("context", "completions"))
    return _by_rank(("context", context), _at_least_two(found, "completions", "with ranks"), "completion")


def _at_least_two(value: Any, field: str, how: str) -> list[Named]:
    """What a list or its JSON holds, each by its place. Raises Unusable where that is nothing to compare."""
    value = parsed_json(value, field)
    if not isinstance(value, list) or len(value) < 2:
        found = f"a list of {len(value)}" if isinstance(value, list) else kind_of(value)
        raise Unusable("wrong type", f"{field} is {found}, expected a list of at least two, {how}")
    if len(value) > MOST_ANSWERS:
        raise Unusable("too many answers", f"{field} is a list of {len(value):,}, {MOST_ANSWERS:,} at most")
    return [(f"{field}[{i}]", item) for i, item in enumerate(value)]


def _by_rank(prompt: Named, named: list[Named], key: str) -> Parts:
    """Answers that are each within an object with its rank, the lowest rank first."""
    ranked, ranks, beside = [], [], dict[str, None]()
    for name, item in named:
        if not isinstance(item, dict):
            raise Unusable("wrong type", f"{name} is {kind_of(item)}, expected an object with {key} and rank")
        answer, rank = required_fields(item, (key, "rank"), f"{name}.")
        ranked.append((f"{name}.{key}", answer))
        ranks.append(number(rank, f"{name}.rank"))
        others = (other for other in item if other not in (key, "rank") and filled(item, other))
        beside |= dict.fromkeys(f"{name.partition('[')[0]}[].{other}" for other in others)
    return Parts(prompt, _sorted(ranked, "ranks", ranks, lowest_first=True), beside=tuple(beside))


def _scores(scores: Any, answers: int) -> list[float]:
    scores = parsed_json(scores, "scores")
    if not isinstance(scores, list) or len(scores) != answers:
        found = f"a list of {len(scores)}" if isinstance(scores, list) else kind_of(scores)
        raise Unusable("wrong type", f"scores is {found}, expected one number for each of {answers} answers")
    return [number(score, f"scores[{i}]") for i, score in enumerate(scores)]


def _sorted(named: list[Named], field: str, scores: list[float], lowest_first: bool = False) -> list[Named]:
    """The answers by their scores, the best first."""
    if len(set(scores)) < len(scores):
        raise Unusable("answers tie", f"{field} {[f'{score:g}' for score in scores]} put two answers on one rank")
    return [named[i] for i in sorted(range(len(named)), key=lambda i: scores[i], reverse=not lowest_first)]


STRENGTHS = {strength: None if strength == 0 else int(strength > 0) for strength in range(-3, 4)}
STRENGTH = "from -3, the first answer is much better, to 3, the second is"
HELPSTEER2 = Format.judged("prompt", "response_1", "response_2", "preference_strength", STRENGTHS, STRENGTH)


RESPONSES = Format.of("prompt", "chosen_response", "rejected_response")


def _unmarked(format: Format) -> Format:
    """The format, for files in which some prompts are whole conversations that NeMo's marks part."""

    def parts(row: Row) -> Parts:
        found = format.parts(row)
        if "<extra_id_1>" in found.asked:
            raise Unusable("turns within a string", "prompt has turns marked by <extra_id_1>; write it as messages")
        return found

    return replace(format, parts=parts)


FORMATS: dict[str, Format] = {
    "sharegpt": Format.of("conversations", "chosen", "rejected"),  # messages {from, value}
    "pairs": Format.of("prompt", "chosen", "rejected"),  # strings, messages, or whole conversations as answers
    "instruction": _instructed("chosen", "rejected"),  # and input
    "question": Format.of("question", "chosen", "rejected"),  # orca_dpo_pairs
    "input": Format.of("input", "chosen", "rejected"),
    "message_lists": Format.of(None, "chosen_messages", "rejected_messages"),  # two whole conversations
    "rejected_messages": Format.of(None, "messages", "rejected_messages"),  # ms-swift: the chosen one first
    "rejected_response": Format(("messages", "rejected_response"), _rejected_response),  # in place of the last turns
    "query": Format.of("query", "response", "rejected_response"),
    "responses": _unmarked(RESPONSES),  # NeMo-Aligner
    "instruction_responses": _instructed("chosen_response", "rejected_response"),  # distilabel
    "messages_pairs": Format(("messages", "chosen", "rejected"), _after_messages),  # the prompt as messages
    "openai": Format(("input", "preferred_output", "non_preferred_output"), _openai),  # input: messages and tools
    "labelled": replace(LABELLED, parts=_labelled, refusal=_counts_from_zero, more=("instruction",)),  # label: 1 or 2
    "helpsteer2": _unmarked(HELPSTEER2),
    "helpsteer3": Format.judged("context", "response1", "response2", "overall_preference", STRENGTHS, STRENGTH),
    "saferlhf": Format.judged("prompt", "response_0", "response_1", "better_response_id", {0: 0, 1: 1},
                              "it names the better response, 0 or 1"),
    "shp": Format.judged("history", "human_ref_A", "human_ref_B", "labels", {1: 0, 0: 1},
                         "1 means that human_ref_A is better, 0 that human_ref_B is"),
    "conversations": Format.of(None, "chosen", "rejected"),  # two whole conversations or Human/Assistant transcripts
    "ranking": Format(("prompt", "answers"), _ranking, more=("scores",)),  # best first, with scores, or {answer, rank}
    "completions": Format(("context", "completions"), _completions),  # NeMo-RL: {completion, rank}, lowest rank best
    "unpaired": Format(("prompt", "completion", "label"), _unpaired, numbers=("label",)),  # true, or false: not wanted
    "unpaired_messages": Format(("messages", "label"), _unpaired_messages, numbers=("label",)),  # one conversation
    "completion": Format.of("prompt", "completion"),  # one answer to imitate
    "instruction_output": replace(_instructed("output"), refusal=_tagged),  # Alpaca; and input
    "messages": Format.of(None, "messages"),  # one conversation to imitate
    "sharegpt_messages": replace(Format.of(None, "conversations"), refusal=_tagged),  # messages {from, value}
    "text": Format.of(None, "text", document=True),
}  # fmt: skip


def format_of(row: Row) -> str | None:
    """The first format whose fields a row fills."""
    return first_format(frozenset(key for key, value in row.items() if value is not None))


@lru_cache(maxsize=1000)  # the rows of a file fill the same few sets of fields
def first_format(there: frozenset[str]) -> str | None:
    """The first format all of whose fields are among these."""
    return next((name for name, format in FORMATS.items() if there.issuperset(format.keys)), None)
