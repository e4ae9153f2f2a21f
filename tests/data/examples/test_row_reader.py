"""Rows: every row becomes an example or a listed drop."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.rows import HH, PAIR, assistant, drop, one, read_examples, turns, user, write
from tuningfork.errors import DataError
from tuningfork.records import Example, Source


def test_strings_become_turns(tmp_path: Path) -> None:
    example = one(tmp_path, {"prompt": "q", "chosen": " a", "rejected": "b"})
    assert example.prompt == turns(user("q"))
    assert example.answers == (turns(assistant(" a")), turns(assistant("b")))
    assert example.source == Source(str(tmp_path / "pairs.jsonl"), 1)


def test_explicit_messages(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": ""}, user("q")]
    example = one(tmp_path, {"prompt": prompt, "chosen": [assistant("a")], "rejected": [assistant("b")]})
    assert example.prompt == turns(*prompt)
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))
    full = {"prompt": prompt, "chosen": [*prompt, assistant("a")], "rejected": [*prompt, assistant("b")]}
    assert one(tmp_path, full) == example
    assert one(tmp_path, {"prompt": prompt, "chosen": "a", "rejected": assistant("b")}) == example


def test_implicit_prompt_is_the_common_start(tmp_path: Path) -> None:
    start = [user("q"), assistant("x"), user("r")]
    row = {"chosen": [*start, assistant("a"), user("s"), assistant("c")], "rejected": [*start, assistant("b")]}
    example = one(tmp_path, row)
    assert example.prompt == turns(*start)
    assert example.answers == (turns(*row["chosen"][3:]), turns(assistant("b")))


def test_implicit_prompt_is_cut_back_to_where_both_go_on_with_the_assistant(tmp_path: Path) -> None:
    # The conversations part at a user turn, so the last common assistant turn is part of both answers.
    row = {
        "chosen": [user("q"), assistant("x"), user("r"), assistant("a")],
        "rejected": [user("q"), assistant("x"), user("s"), assistant("b")],
    }
    example = one(tmp_path, row)
    assert example.prompt == turns(user("q"))
    assert example.answers == (turns(*row["chosen"][1:]), turns(*row["rejected"][1:]))
    # One conversation is the start of the other.
    longer = {"chosen": row["chosen"], "rejected": row["chosen"][:2]}
    assert one(tmp_path, longer).answers == (turns(*row["chosen"][1:]), turns(assistant("x")))


def test_a_prompt_string_beside_full_conversations(tmp_path: Path) -> None:
    for start in ([user("q")], [{"role": "system", "content": "s"}, user("q")], [user("q"), assistant("x"), user("r")]):
        row = {"prompt": "q", "chosen": [*start, assistant("a")], "rejected": [*start, assistant("b")], "score": 5}
        example = one(tmp_path, row)
        assert example.prompt == turns(*start)
        assert example.answers == (turns(assistant("a")), turns(assistant("b")))
    row = {"prompt": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]}
    assert one(tmp_path, row).prompt == turns(user("q"))


def test_conversations_with_from_and_value(tmp_path: Path) -> None:
    row = {
        "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    example = one(tmp_path, row)
    assert example.prompt == turns({"role": "system", "content": "s"}, user("q"))
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))


def test_transcripts(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant: Hello:\n\n- x\n\nHuman: More\n\nAssistant:"
    row = {"chosen": f"{start} yes ", "rejected": f"{start} no"}
    example = one(tmp_path, row)
    assert example.prompt == turns(user("Hi"), assistant("Hello:\n\n- x"), user("More"))
    assert example.answers == (turns(assistant("yes")), turns(assistant("no")))
    as_text = one(tmp_path, row, as_text=True)
    assert (as_text.prompt, as_text.answers) == (start, (" yes ", " no"))


def test_strings_stay_as_they_are_without_a_template(tmp_path: Path) -> None:
    example = one(tmp_path, {"prompt": "", "chosen": " a\n", "rejected": "b"}, as_text=True)
    assert (example.prompt, example.answers) == ("", (" a\n", "b"))


def test_messages_need_a_template(tmp_path: Path) -> None:
    path = write(tmp_path, [{"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}])
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: field 'chosen' holds messages.*data\.template: chat"):
        read_examples(path, as_text=True)


def test_parquet_messages(tmp_path: Path) -> None:
    rows = [
        {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")], "id": 1},
        {"prompt": [user("q")], "chosen": None, "rejected": [assistant("b")], "id": 2},
    ]
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    result = read_examples(path, as_text=False)
    assert result.examples == [
        Example(Source(str(path), 1), turns(user("q")), (turns(assistant("a")), turns(assistant("b"))))
    ]
    assert [(d.row, d.reason) for d in result.dropped] == [(2, "null field")]


# ---- rows that are dropped

CALL = {**assistant("a"), "tool_calls": [{"name": "f"}]}


def nested(levels: int) -> dict[str, Any]:
    """So many objects within each other."""
    made: dict[str, Any] = {"a": 1}
    for _ in range(levels - 1):
        made = {"a": made}
    return made


def test_a_hundred_levels_are_no_trouble(tmp_path: Path) -> None:
    row = {**PAIR, "tools": [nested(99)], "chat_template_kwargs": nested(100)}
    assert one(tmp_path, row).template == {"tools": [nested(99)], **nested(100)}


def called(arguments: Any) -> dict[str, Any]:
    return {**assistant("a"), "tool_calls": [{"name": "f", "arguments": arguments}]}


BAD_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "missing": ({"prompt": "q", "chosen": "a"}, "missing field", "no rejected; found prompt, chosen"),
    "no fields": ({"prompt": "q"}, "missing field", "no chosen"),
    "null": ({**PAIR, "chosen": None}, "null field", "chosen is null"),
    "number": ({**PAIR, "rejected": 3}, "wrong type", "'rejected' is a number, expected a string or a list"),
    "number in list": ({**PAIR, "chosen": [3]}, "wrong type", "chosen[0] is a number, expected a message"),
    "content parts": ({**PAIR, "chosen": [assistant([])]}, "wrong type", "chosen[0].content is a list without"),  # type: ignore[arg-type]
    "no content": ({**PAIR, "chosen": [{"role": "assistant"}]}, "missing field", "no chosen[0].content"),
    "null content": ({**PAIR, "chosen": [assistant(None)]}, "null field", "chosen[0].content is null"),  # type: ignore[arg-type]
    "empty": ({**PAIR, "rejected": ""}, "empty answer", "rejected"),
    "both blank": ({**PAIR, "chosen": " \n", "rejected": "\t"}, "empty answer", "chosen and rejected"),
    "blank turn": ({**PAIR, "chosen": [assistant("a"), user("u"), assistant(" ")]}, "empty answer", "chosen"),
    "empty prompt": ({**PAIR, "prompt": " "}, "empty message", "message 1 of the prompt, of role user"),
    "empty list": ({**PAIR, "rejected": []}, "empty messages", "'rejected'"),
    "role": ({**PAIR, "chosen": [{"role": "critic", "content": "x"}]}, "unknown role", "chosen[0].role is 'critic'"),
    "tool first": ({**PAIR, "chosen": [{"role": "tool", "content": "x"}, assistant("a")]},
                   "answer starts with another role", "'chosen' starts with a tool turn"),
    "equal": ({**PAIR, "chosen": "b"}, "chosen equals rejected", ""),
    "user last": ({**PAIR, "chosen": [assistant("a"), user("u")]}, "last turn not assistant", "ends with a user"),
    "user first": ({**PAIR, "chosen": [user("z"), assistant("a")]}, "answer starts with another role", "'chosen'"),
    "image": ({**PAIR, "images": ["a.png"]}, "unsupported field", "images is filled"),
    "image part": ({**PAIR, "chosen": [assistant([{"type": "image"}])]}, "unsupported content", "of type 'image'"),  # type: ignore[list-item]
    "calls": ({**PAIR, "chosen": [{**assistant("a"), "tool_calls": "[f("}]}, "wrong type", "tool_calls is a string"),
    "call": ({"prompt": "q", "chosen": [{"from": "function_call", "value": "{}"}], "rejected": "b"},
             "wrong type", "chosen[0].value is no call with name and arguments"),
    "call of nothing": ({**PAIR, "chosen": [{"from": "function_call", "value": '{"function": 3}'}]},
                        "wrong type", "chosen[0].value is no call with name and arguments"),
    "loss weight": ({**PAIR, "chosen": [{**assistant("a"), "loss_weight": 0.5}]}, "unsupported field", "is 0.5"),
    "loss on a user": ({"prompt": [{**user("q"), "loss_weight": 1}], "chosen": "a", "rejected": "b"},
                       "unsupported field", "prompt[0].loss_weight is 1 for role user"),
    "weight": ({**PAIR, "weight": "2"}, "wrong type", "weight is a string, expected a finite number"),
    "negative weight": ({**PAIR, "weight": -1}, "negative weight", "-1"),
    "no weight": ({**PAIR, "weight": 0}, "weight 0", ""),
    "margin": ({**PAIR, "margin": True}, "wrong type", "margin is True, expected a finite number"),
    "tools": ({**PAIR, "tools": "[1]"}, "wrong type", "tools is a list, expected a list of objects"),
    "arguments": ({**PAIR, "chat_template_kwargs": [1]}, "wrong type", "chat_template_kwargs is a list"),
    "a tool of 101 levels": ({**PAIR, "tools": [nested(100)]}, "nested too deeply", "tools has more than 100 levels"),
    "a tool's half character": ({**PAIR, "tools": [{"name": "a\ud83d"}]}, "broken text", "tools has half a surrogate"),
    "a key's half character": ({**PAIR, "tools": [{"\ud83d": "a"}]}, "broken text", "tools has half a surrogate"),
    "deep arguments": ({**PAIR, "chosen": [called({"x": nested(99)})]}, "nested too deeply", "chosen[0].tool_calls"),
    "deep text": ({**PAIR, "chosen": [called(json.dumps(nested(99)))]}, "nested too deeply", "chosen[0].tool_calls"),
    "deep kwargs": ({**PAIR, "chat_template_kwargs": nested(101)}, "nested too deeply", "chat_template_kwargs has"),
    "nan": ({**PAIR, "weight": float("nan")}, "wrong type", "weight is nan, expected a finite number"),
    "inf": ({**PAIR, "margin": float("-inf")}, "wrong type", "margin is -inf, expected a finite number"),
    "digits": ({**PAIR, "weight": 10**400}, "wrong type", f"weight is 1{'0' * 39}... (401 digits), expected a"),
    "prompt's surrogate": ({**PAIR, "prompt": "\udc00"}, "broken text", "prompt has half a surrogate"),
    "names": ({"prompt": "q", "x" * 10**6: 1}, "missing field", f"no chosen; found prompt, {'x' * 292}"),
    "systems": ({**PAIR, "prompt": [{"role": "system", "content": "s"}, user("q")], "system": "Be brief."},
                "two system messages", "differ"),
    "surrogate": ({**PAIR, "chosen": "ab\ud83d"}, "broken text", "chosen has half a surrogate pair at character 3"),
    "implicit equal": ({"chosen": [user("q"), assistant("a")]} | {"rejected": [user("q"), assistant("a")]},
                       "chosen equals rejected", ""),
    "implicit differ": ({"chosen": [user("q"), assistant("a")]} | {"rejected": [user("r"), assistant("b")]},
                        "prompts differ", "do not part at an assistant turn"),
    "no prompt": ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "empty prompt", ""),
    "not a transcript": ({"chosen": "hello", "rejected": "there"}, "not a transcript", "need a 'prompt' beside"),
    "text before": ({"chosen": "x" + HH.format(1, 2), "rejected": HH.format(1, 3)}, "not a transcript", "'chosen'"),
    "transcripts differ": ({"chosen": HH.format(1, 2), "rejected": HH.format(3, 4)}, "prompts differ", "22 characters"),
    "transcript empty": ({"chosen": HH.format(1, 2), "rejected": HH.format(1, "")}, "empty answer", "rejected"),
    "human last": ({"chosen": HH.format(1, 2), "rejected": HH.format(1, "2\n\nHuman: 3")},
                   "last turn not assistant", "'rejected' ends with a Human turn"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_dropped_and_listed(case: str, tmp_path: Path) -> None:
    row, reason, detail = BAD_ROWS[case]
    found = drop(tmp_path, row)
    assert found[0] == reason and detail in found[1], found


TEXT_CASES = "missing,null,both blank,equal,surrogate,transcript empty,human last,transcripts differ,not a transcript"


@pytest.mark.parametrize("case", TEXT_CASES.split(","))
def test_plain_text_rows_are_dropped_alike(case: str, tmp_path: Path) -> None:
    row, reason, _ = BAD_ROWS[case]
    assert drop(tmp_path, row, as_text=True)[0] == reason
    if case == "missing":
        assert drop(tmp_path, {**PAIR, "chosen": 3}, as_text=True) == (
            "wrong type",
            "chosen is a number, expected a string",
        )


def test_fields_without_effect_are_no_trouble(tmp_path: Path) -> None:
    message = {**assistant("a"), "tool_calls": None, "weight": 1, "name": "x"}
    row = {"prompt": "q", "chosen": [message], "rejected": "b", "system": "", "tools": [], "score_chosen": 7}
    assert one(tmp_path, row).answers[0] == turns(assistant("a"))


def test_a_field_may_change_its_type_from_row_to_row(tmp_path: Path) -> None:
    rows = [
        {**PAIR, "score": 1},
        {**PAIR, "score": "high"},
        {**PAIR, "chosen": [assistant("a")]},
        {**PAIR, "chosen": 5},
    ]
    result = read_examples(write(tmp_path, rows), as_text=False)
    assert result.examples[0].answers == result.examples[1].answers == result.examples[2].answers
    assert [(d.row, d.reason) for d in result.dropped] == [(4, "wrong type")]


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    rows = [row for row, _, _ in BAD_ROWS.values() if "prompt" in row] + [PAIR] * 5
    result = read_examples(write(tmp_path, rows), as_text=False)
    numbers = [e.source.row for e in result.examples] + [d.row for d in result.dropped]
    assert sorted(numbers) == list(range(1, len(rows) + 1)) and result.rows_read == len(rows)
    assert Counter(d.reason for d in result.dropped)["empty answer"] == 3
    assert len(result.examples) == 5


# ---- what a row says beside its prompt and answers


def test_what_a_row_says_beside_its_text(tmp_path: Path) -> None:
    row = {**PAIR, "weight": 0.5, "margin": 2, "chat_template_kwargs": {"enable_thinking": False}, "system": "s"}
    example = one(tmp_path, row)
    assert (example.weight, example.margin, example.template) == (0.5, 2.0, {"enable_thinking": False})
    assert example.prompt == turns({"role": "system", "content": "s"}, user("q"))
    same = [{"role": "system", "content": "s"}, user("q")]
    assert one(tmp_path, {**row, "prompt": same}).prompt == turns(*same)
    for key in ("system", "tools", "chat_template_kwargs"):  # nothing would print it
        assert drop(tmp_path, {**PAIR, key: [1]}, as_text=True)[0] == "unsupported field"


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_an_empty_system_field_is_none_and_an_empty_message_is_one(key: str, tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    assert one(tmp_path, {**PAIR, key: "s"}).prompt == turns(system, user("q"))
    for empty in ("", " \n", None):
        assert one(tmp_path, {**PAIR, key: empty}).prompt == turns(user("q"))
    kept = [{**system, "content": ""}, user("q")]
    assert one(tmp_path, {**PAIR, "prompt": kept, key: ""}).prompt == turns(*kept)
    assert drop(tmp_path, {**PAIR, key: "s"}, as_text=True)[0] == "unsupported field"
    found = drop(tmp_path, {**PAIR, "system": "s", "system_prompt": "t"})
    assert found == ("two system messages", "system and system_prompt differ")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_field_beside_a_first_message_says_the_same_once_or_is_refused(role: str, tmp_path: Path) -> None:
    """Developer is another name for the role; the message keeps its own."""
    opening = {"role": role, "content": "s"}
    rows: list[dict[str, Any]] = [
        {**PAIR, "prompt": [opening, user("q")]},
        {"chosen": [opening, user("q"), assistant("a")], "rejected": [opening, user("q"), assistant("b")]},
        {**PAIR, "history": [opening, user("x"), assistant("y")]},
    ]
    for row in rows:
        prompt = one(tmp_path, row).prompt
        assert prompt[:1] == turns(opening)
        for key in ("system", "system_prompt"):
            assert one(tmp_path, {**row, key: "s"}).prompt == one(tmp_path, {**row, key: " "}).prompt == prompt
            found = drop(tmp_path, {**row, key: "t"})
            assert found == ("two system messages", f"{key} and the first message, of role {role}, differ")
    both = [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, user("q")]
    for said in ("s", "d"):
        assert one(tmp_path, {**PAIR, "prompt": both, "system": said}).prompt == turns(*both)
    empty = [{"role": role, "content": ""}, user("q")]
    assert one(tmp_path, {**PAIR, "prompt": empty}).prompt == turns(*empty)


@pytest.mark.parametrize("written", [list, json.dumps])
def test_a_history_is_the_turns_before_the_prompt(written: Any, tmp_path: Path) -> None:
    before = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
    system = {"role": "system", "content": "s"}
    for history in ([["q1", "a1"], ["q2", "a2"]], before):
        row = {**PAIR, "history": written(history), "system": "s"}
        assert one(tmp_path, row).prompt == turns(system, *before, user("q"))
    alpaca = {"instruction": "Add.", "input": "1", "chosen": "a", "rejected": "b", "history": written([["q1", "a1"]])}
    assert one(tmp_path, alpaca).prompt == turns(*before[:2], user("Add.\n1"))


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({"history": [["q1"]]}, "wrong type", "history is a list, expected a list of [user, assistant]"),
        ({"history": "Once upon a time"}, "wrong type", "history is a string that is not JSON"),
        ({"history": [["q1", ""]]}, "empty message", "message 2 of the prompt, of role assistant"),
        ({"history": [["q1", 3]]}, "wrong type", "history, assistant is a number"),
        ({"history": [["q1", "a1"]], "prompt": [user("x"), assistant("y"), user("q")]}, "unsupported field", "several"),
        ({"instruction": "Be brief."}, "unsupported field", "instruction is filled, and what is read does not hold it"),
        ({"input": "1 2"}, "unsupported field", "input is filled"),
        ({"question": ["q"]}, "unsupported field", "question is filled"),
    ],
)
def test_what_would_change_the_prompt_is_not_passed_over(
    change: dict[str, Any], reason: str, detail: str, tmp_path: Path
) -> None:
    found = drop(tmp_path, {**PAIR, **change})
    assert found[0] == reason and detail in found[1], found


def test_what_the_prompt_holds_may_stand_beside_it(tmp_path: Path) -> None:
    """It is read, to compare it, and so no field that is not read."""
    asked = {"instruction": "Add.", "input": "1 2 ", "question": "Add.\n1 2", "query": "Add"}
    rows = [{**PAIR, "prompt": "Add.\n1 2", **asked}, {**PAIR, "prompt": [user("Add.\n1 2")], **asked}]
    result = read_examples(write(tmp_path, rows), as_text=False)
    assert [example.prompt for example in result.examples] == [turns(user("Add.\n1 2"))] * 2 and result.notes == {}
    text = {"text": "Add: 1 2 is 3", "instruction": "Add", "input": "1 2"}
    result = read_examples(write(tmp_path, [text]), as_text=True)
    assert result.examples[0].answers == ("Add: 1 2 is 3",) and result.notes == {}


@pytest.mark.parametrize("as_text", [False, True])
def test_a_document_has_nothing_beside_it_but_its_weight(as_text: bool, tmp_path: Path) -> None:
    """What would be wrong beside a prompt is a field that is not read."""
    row = {"text": "Once.", "weight": 2, "margin": "wide", "tools": "[", "system": "s", "history": 3}
    path = write(tmp_path, [row, {"text": " \n"}, {"text": "Once.", "question": "Twice?"}])
    result = read_examples(path, as_text)
    assert result.examples == [Example(Source(str(path), 1), "", ("Once.",), weight=2.0)]
    assert [*result.notes] == ["fields that are not read: margin, tools, system, history"]
    held = "question is filled, and what is read does not hold it; put it there or remove the field"
    found = [(row.reason, row.detail) for row in result.dropped]
    assert found == [("empty answer", "text"), ("unsupported field", held)]


def test_fields_that_nothing_reads_are_noted_by_name(tmp_path: Path) -> None:
    named = [{**assistant("a"), "name": "x"}]
    rows = [{**PAIR, "id": 7, "source": "", "score": None}, PAIR, {**PAIR, "chosen": named, "id": 8, "weight": 2}]
    path = write(tmp_path, [*rows, {**PAIR, "chosen": None, "dropped": 1}])
    found = [Source(str(path), row) for row in (1, 3)]
    assert read_examples(path, False).notes == {"fields that are not read: id, chosen[].name": found}
    tool = {"role": "tool", "content": "7", "name": "f", "from": ["x"], "id": "1"}
    talk = write(tmp_path, [{"messages": [user("q"), assistant("a"), tool, assistant("b")]}])
    assert list(read_examples(talk, False).notes) == ["fields that are not read: messages[].id"]
    wide = write(tmp_path, [{**PAIR, **{f"c{i}": i + 1 for i in range(23)}}])
    (note,) = read_examples(wide, False).notes
    assert note == f"fields that are not read: {', '.join(f'c{i}' for i in range(20))} and 3 more"
