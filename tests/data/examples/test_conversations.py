"""Conversations written as text, answers that repeat their prompt, and the fields of messages."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bounds import within
from tests.data.rows import HH, PAIR, assistant, drop, one, read_examples, turns, user, write
from tuningfork.data.examples.conversations import before_last_said, read_turns
from tuningfork.data.examples.conversations import read_turns as message_turns
from tuningfork.data.examples.roles import MessageNames, roles_for
from tuningfork.data.examples.row_reader import BEGIN_ALIKE, CUT_REPEATED
from tuningfork.data.examples.unpack import ANSWERS_AS_JSON, JSON_AS_TEXT, PROMPT_AS_JSON, SOME_AS_JSON
from tuningfork.data.examples.values import Unusable
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
    assert example.prompt == turns(user(text))
    assert list(result.notes) == ([JSON_AS_TEXT] if text == '{"role": 1, "content": "x"}' else [])
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
        ({"prompt": "q", "chosen": '{"x": "a"}', "rejected": ' {"x": 1}'}, "q", ['{"x": "a"}', ' {"x": 1}'],
         [JSON_AS_TEXT]),
        ({"prompt": "q", "chosen": '{"text": "a"}', "rejected": "{b}"}, "q", ['{"text": "a"}', "{b}"], []),
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


# ---- roles


@pytest.mark.parametrize("name", ["model", "bot", "chatbot", "gpt"])
def test_the_assistant_under_other_names(name: str, tmp_path: Path) -> None:
    row = {"prompt": [user("q")], "chosen": {"role": name, "content": "a"}, "rejected": [assistant("b")]}
    result = read_examples(write(tmp_path, [row]), False)
    assert result.examples[0].answers == (turns(assistant("a")), turns(assistant("b")))
    assert list(result.notes) == ([] if name == "gpt" else [f"role {name} as assistant"])


CALLED = {"name": "f", "arguments": {"x": 1}}
CALL = {"type": "function", "function": CALLED}


@pytest.mark.parametrize("role", ["tool_call", "function_call"])
def test_calls_that_stand_as_turns_belong_to_the_turn_before(role: str, tmp_path: Path) -> None:
    call = {"role": role, "content": json.dumps(CALLED)}
    for turn in (assistant("x"), call):
        result = [turn, call, {"role": "environment", "content": "7"}, assistant("a")]
        row = {"prompt": [user("q")], "chosen": result, "rejected": "b"}
        first, told, last = one(tmp_path, row).answers[0]
        calls = [CALL] if turn is not call else [CALL, CALL]
        assert first == Message("assistant", "x" if turn is not call else "", {"tool_calls": calls})
        assert (told, last) == (Message("tool", "7"), Message("assistant", "a"))


def test_a_tools_turn_keeps_the_name_that_its_template_asks_for() -> None:
    said = [user("q"), {"role": "environment", "content": "7", "tool_call_id": "1"}]
    asks = (
        "{% if message['role'] == 'environment' %}x{% endif %}",
        "{% if message.role in ['tool', \"environment\"] %}x{% endif %}",
        {"default": "x", "tool_use": "{% if role == 'environment' %}"},
    )
    for template in asks:
        assert read_turns(said, "p", "user", MessageNames(roles_for(template, {})))[1].role == "environment"
    told = read_turns(said, "p", "user", MessageNames(roles_for(asks[0], {})))[1]
    assert told.extra == {"tool_call_id": "1"}
    others = ("{{ '<environment>' + message['role'] }}", "{% if message.role == 'tool' and x == 'environment' %}", None)
    for other in others:
        assert read_turns(said, "p", "user", MessageNames(roles_for(other, {})))[1].role == "tool"
    given = MessageNames(roles_for(asks[0], {"environment": "user"}))
    assert read_turns([said[0], {"role": "environment", "content": "7"}], "p", "user", given)[1].role == "user"


def test_an_unknown_role_is_named_with_what_to_set(tmp_path: Path) -> None:
    reason, detail = drop(tmp_path, {"prompt": [{"role": "User", "content": "q"}], "chosen": "a", "rejected": "b"})
    assert reason == "unknown role" and detail.startswith("prompt[0].role is 'User'; known are system, developer, ")
    assert detail.endswith("such as data.roles: {User: user}")


# ---- parts of content


@pytest.mark.parametrize("kind", ["reasoning", "thinking", "think"])
@pytest.mark.parametrize("key", ["reasoning", "thinking", "think", "text", "value", "content"])
def test_parts_that_are_thoughts(kind: str, key: str, tmp_path: Path) -> None:
    content = [{"type": kind, key: "h"}, {"type": kind, key: "m"}, {"type": "text", "text": "a"}]
    assert answered(tmp_path, content=content) == Message("assistant", "a", {"reasoning_content": "hm"})


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", None])
def test_parts_that_are_text(kind: str | None, tmp_path: Path) -> None:
    """Under any of its names, and twice where both say the same; a column of parts fills up with empty text."""
    parts = [{"type": kind, "text": "a", "value": "a"}, {"type": kind, "content": "b", "text": "", "reasoning": None}]
    assert answered(tmp_path, content=parts) == Message("assistant", "ab")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "tool_call", "value": json.dumps(CALLED)},
        {"type": "tool_call", "tool_call": CALLED},
        {"type": "tool_call", **CALLED},
        {"type": "function_call", "function": CALLED},
        {"type": "tool_use", "name": CALLED["name"], "input": CALLED["arguments"]},
    ],
)
def test_parts_that_are_calls(part: Any, tmp_path: Path) -> None:
    content = [{"type": "text", "value": "a"}, part, part]
    assert answered(tmp_path, content=content) == Message("assistant", "a", {"tool_calls": [CALL, CALL]})
    assert answered(tmp_path, content=[part]) == Message("assistant", "", {"tool_calls": [CALL]})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"content": [{"type": "text", "text": "a", "value": "b"}]},
            "chosen[0].content[0] has text and value filled; a part says one thing",
        ),
        (
            {"content": [{"type": "text", "text": "a", "tool_call": CALLED}]},
            "chosen[0].content[0] has text and tool_call filled",
        ),
        ({"content": [{"type": "tool_call", **CALLED, "text": "a"}]}, "chosen[0].content[0].text is a string that is"),
        (
            {"content": [{"type": "tool_call", **CALLED, "reasoning": "h"}]},
            "chosen[0].content[0] has reasoning filled",
        ),
        (
            {"content": [{"type": "reasoning", "summary": ["h"]}]},
            "no chosen[0].content[0].reasoning; found type, summary",
        ),
        ({"content": [{"type": "image_url", "text": "a"}]}, "chosen[0].content[0] is of type 'image_url'; known are "),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "h"}]},
            "chosen[0].content[1] is a part of type reasoning behind one of type text",
        ),
        (
            {"content": [{"type": "tool_call", "value": '{"name": "f"'}]},
            "chosen[0].content[0].value is a string that is not JSON",
        ),
        (
            {"content": [{"type": "tool_call", **CALLED}], "tool_calls": [CALLED]},
            "chosen[0] writes its calls twice: tool_calls, content",
        ),
        (
            {"content": [{"type": "reasoning", "value": "h"}, {"type": "text", "text": "a"}], "reasoning": "i"},
            "chosen[0] says its thoughts twice, and they differ",
        ),
    ],
)
def test_parts_that_no_message_has_cost_the_row(message: Any, words: str, tmp_path: Path) -> None:
    row = {"prompt": [user("q")], "chosen": {"role": "assistant", **message}, "rejected": "b"}
    assert drop(tmp_path, row)[1].startswith(words)


def test_only_the_assistant_thinks_and_calls(tmp_path: Path) -> None:
    thought = {"role": "user", "content": [{"type": "thinking", "thinking": "h"}, {"type": "text", "text": "q"}]}
    reason, detail = drop(tmp_path, {"prompt": [thought], "chosen": "a", "rejected": "b"})
    assert (reason, detail.partition(" is ")[0]) == ("unsupported field", "prompt[0].content, reasoning_content")


# ---- objects that hold messages


@pytest.mark.parametrize("written", [dict, json.dumps])
@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize("tools", [[], None, [{"name": "f"}]])
def test_an_object_that_holds_messages(written: Any, key: str, tools: Any, tmp_path: Path) -> None:
    def side(text: str) -> Any:
        return written({key: [user("q"), assistant(text)], "tools": tools})

    for row in (
        {"chosen": side("a"), "rejected": side("b")},
        {"prompt": written({key: [user("q")], "tools": tools}), "chosen": "a", "rejected": "b"},
        {"messages": written({key: [user("q"), assistant("a")], "tools": tools}), "rejected_response": "b"},
    ):
        example = one(tmp_path, row)
        assert (example.prompt, example.answers) == (turns(user("q")), (turns(assistant("a")), turns(assistant("b"))))
        assert bool(example.template.get("tools")) == bool(tools)


def test_what_an_object_holds_beside_messages_is_used_or_named(tmp_path: Path) -> None:
    def side(text: str, **beside: Any) -> Any:
        return {"messages": [user("q"), assistant(text)], **beside}

    result = read_examples(write(tmp_path, [{"chosen": side("a", id=3), "rejected": side("b")}]), False)
    assert list(result.notes) == ["fields that are not read: chosen.id"]
    for beside, words in (
        ({"tools": [{"name": "f"}]}, "the answers have different tools"),
        ({"system": "s"}, "rejected.system is filled; write it beside rejected"),
        ({"images": ["x"]}, "rejected.images is filled"),
    ):
        reason, detail = drop(tmp_path, {"chosen": side("a"), "rejected": side("b", **beside)})
        assert reason == "unsupported field" and detail.startswith(words)


def test_very_many_messages_are_gone_through_once(tmp_path: Path) -> None:
    call = json.dumps({"name": "f", "arguments": {}})
    calls = [{"from": "function_call", "value": call}] * 20_000
    roles = roles_for(None, {})
    with within(30):
        [turn] = message_turns(calls, "chosen", "assistant")
        assert len(turn.extra["tool_calls"]) == 20_000
        assert before_last_said([{"role": "assistant"}] * 100_000, roles) == 0
        assert before_last_said([{"role": "user"}, *[{"role": "assistant"}] * 50_000], roles) == 1
        with pytest.raises(Unusable, match="unknown role"):
            message_turns([{"role": "x" * 3_000_000, "content": "q"}], "prompt", "user")


def test_more_answers_than_are_compared(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answers": [str(place) for place in range(count)]} for count in (1000, 1001)]
    found = read_examples(write(tmp_path, rows), as_text=True)
    assert [len(example.answers) for example in found.examples] == [1000]
    [dropped] = found.dropped
    assert (dropped.reason, dropped.detail) == ("too many answers", "answers is a list of 1,001, 1,000 at most")
