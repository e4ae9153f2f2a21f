"""Conversations written as text, answers that repeat their prompt, and the fields of messages."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import HH, PAIR, assistant, drop, one, read_examples, turns, user, write
from tuningfork.data.examples import ANSWERS_AS_JSON, BEGIN_ALIKE, CUT_REPEATED, PROMPT_AS_JSON, SOME_AS_JSON
from tuningfork.records import Message

SYSTEM = {"role": "system", "content": "s"}


# ---- transcripts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("\n\nHuman: q\n\nAssistant:", [user("q")]),
        ("\n\nHuman: q\n\nAssistant: ", [user("q")]),
        ("Human: q\n\nAssistant:", [user("q")]),
        ("\n\nHuman: q", [user("q")]),
        ("\n\nHuman: q\n\nAssistant: x\n\nHuman: r\n\nAssistant:", [user("q"), assistant("x"), user("r")]),
        ("\n\nHuman: q\n\nAssistant: x\n\nHuman: r", [user("q"), assistant("x"), user("r")]),
        ("Human: hi\n\nAssistant: yo\n\nSum this up.", [user("Human: hi\n\nAssistant: yo\n\nSum this up.")]),
        ("About \n\nHuman: and more", [user("About \n\nHuman: and more")]),
    ],
)
def test_a_transcript_in_a_prompt_is_read_as_turns(prompt: str, expected: list[Any], tmp_path: Path) -> None:
    example = one(tmp_path, {"prompt": prompt, "chosen": "a", "rejected": "b"})
    assert example.prompt == turns(*expected)
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))


def test_spaces_around_a_transcripts_answers_are_the_formats(tmp_path: Path) -> None:
    row = {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a\n", "rejected": " b"}
    assert one(tmp_path, row).answers == (turns(assistant("a")), turns(assistant("b")))
    as_text = one(tmp_path, row, as_text=True)
    assert (as_text.prompt, as_text.answers) == (row["prompt"], (" a\n", " b"))


@pytest.mark.parametrize("prompt", ["\n\nHuman: q\n\nAssistant:", "q"])
def test_whole_transcripts_beside_their_prompt(prompt: str, tmp_path: Path) -> None:
    row = {"prompt": prompt, "chosen": HH.format("q", "a"), "rejected": HH.format("q", "b")}
    example = one(tmp_path, row)
    assert example.prompt == turns(user("q"))
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))


def test_whole_transcripts_as_text_are_cut_behind_their_prompt_or_refused(tmp_path: Path) -> None:
    prompt = "\n\nHuman: q\n\nAssistant:"
    row = {"prompt": prompt, "chosen": f"{prompt} a", "rejected": f"{prompt} b"}
    example = one(tmp_path, row, as_text=True)
    assert (example.prompt, example.answers) == (prompt, (" a", " b"))
    assert drop(tmp_path, {**row, "prompt": "q"}, as_text=True)[0] == "prompts differ"
    assert drop(tmp_path, {**row, "chosen": " a"})[0] == "only some answers repeat the prompt"


# ---- answers that repeat the prompt


def test_strings_that_repeat_the_prompt_are_cut_where_a_file_does_so(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": f"q{i} a", "rejected": f"q{i} b"} for i in range(3)]
    path = write(tmp_path, [*rows, {"prompt": "r", "chosen": "r a", "rejected": "c"}])
    for as_text in (False, True):
        result = read_examples(path, as_text)
        expected = [(turns(assistant(" a")), turns(assistant(" b"))), (" a", " b")][as_text]
        assert [example.answers for example in result.examples] == [expected] * 3
        assert [(d.row, d.reason) for d in result.dropped] == [(4, "only some answers repeat the prompt")]
        assert {note: [s.row for s in found] for note, found in result.notes.items()} == {CUT_REPEATED: [1, 2, 3]}


def test_answers_that_begin_like_the_prompt_by_chance_stay_whole(tmp_path: Path) -> None:
    rows = [{"prompt": "Hello", "chosen": "Hello!", "rejected": "Hello there"}, PAIR, PAIR]
    result = read_examples(write(tmp_path, rows), False)
    assert result.examples[0].answers == (turns(assistant("Hello!")), turns(assistant("Hello there")))
    assert {note: [s.row for s in found] for note, found in result.notes.items()} == {BEGIN_ALIKE: [1]}


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_rows_do_not_tell_that_answers_repeat_their_prompts(rows: int, tmp_path: Path) -> None:
    alike = {"prompt": "Hello", "chosen": "Hello!", "rejected": "Hello there"}
    result = read_examples(write(tmp_path, [alike] * rows), True)
    assert result.examples[0].answers == (("!", " there") if rows > 2 else ("Hello!", "Hello there"))
    assert list(result.notes) == [CUT_REPEATED if rows > 2 else BEGIN_ALIKE]


@pytest.mark.parametrize(
    ("prompt", "start", "expected"),
    [
        ([user("q")], [user("q")], [user("q")]),
        ([SYSTEM, user("q")], [user("q")], [SYSTEM, user("q")]),
        ([user("q")], [SYSTEM, user("q")], [SYSTEM, user("q")]),
        ([SYSTEM, user("q")], [{**SYSTEM, "role": "developer"}, user("q")], [SYSTEM, user("q")]),
        ("q ", [user("q")], [user("q")]),
        ("r", [user("q"), assistant("x"), user("r")], [user("q"), assistant("x"), user("r")]),
    ],
)
def test_whole_conversations_beside_their_prompt(
    prompt: Any, start: list[Any], expected: list[Any], tmp_path: Path
) -> None:
    row = {"prompt": prompt, "chosen": [*start, assistant("a")], "rejected": [*start, assistant("b")]}
    example = one(tmp_path, row)
    assert example.prompt == turns(*expected)
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))


def test_a_completion_may_be_the_whole_conversation(tmp_path: Path) -> None:
    example = one(tmp_path, {"prompt": "q", "completion": [user("q"), assistant("a")]})
    assert (example.prompt, example.answers) == (turns(user("q")), (turns(assistant("a")),))


@pytest.mark.parametrize(
    ("prompt", "start", "reason"),
    [
        ("z", [user("q")], "prompts differ"),
        ([user("z")], [user("q")], "answer starts with another role"),
        ([{**SYSTEM, "content": "t"}, user("q")], [SYSTEM, user("q")], "two system messages"),
    ],
)
def test_conversations_of_another_prompt_are_refused(
    prompt: Any, start: list[Any], reason: str, tmp_path: Path
) -> None:
    row = {"prompt": prompt, "chosen": [*start, assistant("a")], "rejected": [*start, assistant("b")]}
    assert drop(tmp_path, row)[0] == reason


def test_a_prompt_that_ends_with_the_assistant_is_refused(tmp_path: Path) -> None:
    """By hand: the answer would be the assistant's second turn in a row. Strings as they are can be continued."""
    said = [user("q"), assistant("x")]
    rows: list[dict[str, Any]] = [
        {"prompt": said, "chosen": "a", "rejected": "b"},
        {"chosen": [*said, assistant("a")], "rejected": [*said, assistant("b")]},
        {"prompt": "\n\nHuman: q\n\nAssistant: x\n\nAssistant:", "chosen": "a", "rejected": "b"},
    ]
    for row in rows:
        reason, detail = drop(tmp_path, row)
        assert reason == "prompt ends with an assistant turn" and "data.template: none" in detail
    tool = [*said[:1], {**assistant(""), "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "7"}]
    assert one(tmp_path, {"prompt": tool, "chosen": "a", "rejected": "b"}).prompt[-1] == Message("tool", "7")


# ---- values that Python holds for equal

ALIKE = (
    {"n": 1},
    {"n": True},
    {"n": 1.0},
    {"n": [{"x": 0}]},
    {"n": [{"x": False}]},
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
)


def called(arguments: Any) -> list[Any]:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}
    return [user("q"), call, {"role": "tool", "content": "7"}]


@pytest.mark.parametrize(("first", "second"), [*itertools.product(ALIKE, repeat=2)])
def test_turns_that_are_printed_differently_are_no_common_prompt(first: Any, second: Any, tmp_path: Path) -> None:
    """By hand: conversations with the same call part behind the tool, and those with another one at the call."""
    example = one(tmp_path, {"chosen": [*called(first), assistant("a")], "rejected": [*called(second), assistant("b")]})
    shared = 3 if first is second else 1
    assert len(example.prompt) == shared and [len(answer) for answer in example.answers] == [4 - shared] * 2
    row = {
        "prompt": called(first),
        "chosen": [*called(second), assistant("a")],
        "rejected": [*called(second), assistant("b")],
    }
    if first is second:
        assert one(tmp_path, row).answers == (turns(assistant("a")), turns(assistant("b")))
    else:  # they do not repeat the prompt
        assert drop(tmp_path, row)[0] == "answer starts with another role"


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(ALIKE, 2)])
def test_answers_that_are_printed_differently_are_two(first: Any, second: Any, tmp_path: Path) -> None:
    example = one(tmp_path, {"prompt": "q", "chosen": called(first)[1:2], "rejected": called(second)[1:2]})
    found = [answer[0].extra["tool_calls"][0]["function"]["arguments"] for answer in example.answers]  # type: ignore[union-attr]
    assert list(map(json.dumps, found)) == [json.dumps(first), json.dumps(second)]
    same = {"prompt": "q", "chosen": called(first)[1:2], "rejected": called(dict(first))[1:2]}
    assert drop(tmp_path, same)[0] == "chosen equals rejected"


def test_what_a_tool_answers_to_is_a_value_that_can_be_printed(tmp_path: Path) -> None:
    deep: Any = "1"
    for _ in range(101):
        deep = [deep]
    for value, reason in ((deep, "nested too deeply"), ("a\ud83d", "broken text")):
        prompt = [*called({})[:2], {"role": "tool", "content": "7", "tool_call_id": value}]
        found = drop(tmp_path, {**PAIR, "prompt": prompt})
        assert found[0] == reason and "prompt[2].tool_call_id has" in found[1]


# ---- messages as JSON text


@pytest.mark.parametrize("keys", [("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")])
def test_messages_written_as_json_text(keys: tuple[str, ...], tmp_path: Path) -> None:
    by, holds, asks, answers = keys
    row = {
        "prompt": json.dumps([{by: asks, holds: "q"}]),
        "chosen": json.dumps([{holds: "a", by: answers}], indent=1),
        "rejected": json.dumps({by: answers, holds: "b"}),
    }
    example = one(tmp_path, row)
    assert example.prompt == turns(user("q"))
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))
    as_text = read_examples(write(tmp_path, [PAIR, row]), as_text=True)
    assert [(found.row, found.reason) for found in as_text.dropped] == [(2, "messages without a chat template")]
    whole = {key: json.dumps([user("q"), assistant(key)]) for key in ("chosen", "rejected")}
    example = one(tmp_path, whole)
    assert (example.prompt, example.answers[0]) == (turns(user("q")), turns(assistant("chosen")))


@pytest.mark.parametrize(
    "text",
    ['[1, 2]', '[{"role": "dba", "content": "x"}]', '{"role": 1, "content": "x"}', "[]", '[{"role": "user"}]', "{x}",
     '[{"role": "user", "content": "q"}] is a list', '[{"from": "Paris", "value": 3}]'],
)  # fmt: skip
def test_other_json_is_text(text: str, tmp_path: Path) -> None:
    result = read_examples(write(tmp_path, [{"prompt": text, "chosen": f"{text} ", "rejected": text}]), False)
    (example,) = result.examples
    assert example.prompt == turns(user(text)) and result.notes == {}
    assert example.answers == (turns(assistant(f"{text} ")), turns(assistant(text)))


SAID = json.dumps(assistant("a"))
TOLD = json.dumps([assistant("b")])


@pytest.mark.parametrize(
    ("row", "prompt", "answers", "notes"),
    [
        ({"prompt": "q", "chosen": SAID, "rejected": TOLD}, "q", ["a", "b"], [ANSWERS_AS_JSON]),
        ({"prompt": json.dumps([user("q")]), "chosen": "a", "rejected": "b"}, "q", ["a", "b"], [PROMPT_AS_JSON]),
        ({"prompt": json.dumps([user("q")]), "completion": SAID}, "q", ["a"], [PROMPT_AS_JSON, ANSWERS_AS_JSON]),
        ({"prompt": "q", "answers": [SAID, "b", "c"]}, "q", [SAID, "b", "c"], [SOME_AS_JSON]),
        ({"prompt": "q", "chosen": "a", "rejected": TOLD}, "q", ["a", TOLD], [SOME_AS_JSON]),
        ({"prompt": "q", "chosen": SAID, "rejected": '{"a": 1}'}, "q", [SAID, '{"a": 1}'], [SOME_AS_JSON]),
        ({"prompt": "q", "chosen": SAID, "rejected": [assistant("b")]}, "q", ["a", "b"], [ANSWERS_AS_JSON]),
        ({"prompt": json.dumps(user("q")), "chosen": SAID, "rejected": "b"}, "q", [SAID, "b"],
         [PROMPT_AS_JSON, SOME_AS_JSON]),
        ({"chosen": [user("q"), assistant("a")], "rejected": json.dumps([user("q"), assistant("b")])}, "q", ["a", "b"],
         [ANSWERS_AS_JSON]),
    ],
)  # fmt: skip
def test_answers_are_messages_as_text_all_or_none(
    row: Any, prompt: str, answers: list[str], notes: list[str], tmp_path: Path
) -> None:
    """By hand. An answer that is asked for as JSON may look like a message; where the other does not, it is text."""
    result = read_examples(write(tmp_path, [row]), as_text=False)
    (example,) = result.examples
    assert example.prompt == turns(user(prompt))
    assert example.answers == tuple(turns(assistant(answer)) for answer in answers)
    assert result.notes == {note: [example.source] for note in notes}


def test_text_that_looks_like_messages_in_part_stays_text_without_a_template(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": SAID, "rejected": "b"}
    assert one(tmp_path, row, as_text=True).answers == (SAID, "b")


@pytest.mark.parametrize("text", [SAID, str([user("q")])])
def test_a_document_is_text_whatever_it_looks_like(text: str, tmp_path: Path) -> None:
    result = read_examples(write(tmp_path, [{"text": text}]), as_text=False)
    assert result.examples[0].answers == (text,) and result.notes == {}


@pytest.mark.parametrize(
    "text",
    [str([user("q")]), "[{'content': 'q', 'role': 'user'}\n {'content': 'a', 'role': 'assistant'}]",
     str([{"from": "human", "value": "q"}])],
)  # fmt: skip
def test_messages_as_python_prints_them_are_refused(text: str, tmp_path: Path) -> None:
    reason, detail = drop(tmp_path, {**PAIR, "prompt": text})
    assert reason == "messages that are not JSON" and "json.dumps" in detail


# ---- fields of messages


def answered(folder: Path, **fields: Any) -> Message:
    """The message that an assistant's message with these fields is read as."""
    row = {"prompt": "q", "chosen": [{"role": "assistant", "content": "a", **fields}], "rejected": "b"}
    (message,) = one(folder, row).answers[0]
    assert isinstance(message, Message)
    return message


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_the_same_under_every_name(name: str, tmp_path: Path) -> None:
    assert answered(tmp_path, **{name: "hm"}) == Message("assistant", "a", {"reasoning_content": "hm"})
    assert answered(tmp_path, **{name: "hm", "thinking": "hm"}).extra == {"reasoning_content": "hm"}
    assert answered(tmp_path, **{name: ""}).extra == {}


def test_a_function_call_is_a_call(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": "{}"}
    expected = Message("assistant", "", {"tool_calls": [{"type": "function", "function": call}]})
    assert answered(tmp_path, content=None, function_call=call) == expected
    assert answered(tmp_path, content=None, tool_calls=[call]) == expected
    assert answered(tmp_path, content=None, tool_calls=json.dumps([call])) == expected
    prompt = [user("q"), {"role": "assistant", "content": None, "function_call": call}]
    row = {**PAIR, "prompt": [*prompt, {"role": "function", "name": "f", "content": "7"}]}
    assert one(tmp_path, row).prompt[1:] == (expected, Message("tool", "7", {"name": "f"}))


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ({**assistant("a"), "thinking": "x", "reasoning": "y"}, "reasoning and thinking, and they differ"),
        ({**assistant("a"), "tool_calls": [{"name": "f"}], "function_call": {"name": "f"}}, "writes its calls twice"),
        ({**user("a"), "tool_calls": [{"name": "f"}]}, "tool_calls is filled for a user turn"),
        ({**user("a"), "thinking": "x"}, "thinking is filled for a user turn"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(message: Any, detail: str, tmp_path: Path) -> None:
    found = drop(tmp_path, {**PAIR, "chosen": [message]})
    assert found[0] == "unsupported field" and detail in found[1], found
