"""Tools and calls: every way to write them comes to the one that chat templates take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.data.rows import PAIR, drop, one, read_examples, user, write
from tuningfork.data.examples.row_reader import NULLS
from tuningfork.data.examples.tools import (
    call_list,
    template_arguments,
    tool_list,
    with_object_arguments,
    with_text_arguments,
)
from tuningfork.data.examples.values import Unusable
from tuningfork.records import Message

BARE = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": BARE}


@pytest.mark.parametrize("tool", [BARE, {"type": "function", **BARE}, TOOL, {"function": BARE}])
@pytest.mark.parametrize("written", [list, json.dumps])
def test_bare_functions_are_wrapped(tool: Any, written: Any, tmp_path: Path) -> None:
    assert tool_list(written([tool]), "tools") == [TOOL]
    for key in ("tools", "functions"):
        assert one(tmp_path, {**PAIR, key: written([tool])}).template == {"tools": [TOOL]}


def test_tools_of_another_kind_stay_as_they_are() -> None:
    for tool in ({"type": "web_search", "name": "s"}, {"x": 1}):
        assert tool_list([tool], "tools") == [tool]


def test_tools_given_twice_must_be_the_same(tmp_path: Path) -> None:
    assert one(tmp_path, {**PAIR, "tools": [BARE], "functions": [TOOL]}).template == {"tools": [TOOL]}
    found = drop(tmp_path, {**PAIR, "tools": [BARE], "functions": [{"name": "g"}]})
    assert found == ("unsupported field", "tools and functions are both filled, and differ")


def test_tools_among_the_arguments_of_the_template_are_tools(tmp_path: Path) -> None:
    for beside in ({}, {"tools": [TOOL]}, {"functions": [BARE]}):
        given = {**PAIR, "chat_template_kwargs": {"tools": [BARE], "x": 1}, **beside}
        assert one(tmp_path, given).template == {"x": 1, "tools": [TOOL]}
    found = drop(tmp_path, {**PAIR, "chat_template_kwargs": {"tools": [BARE]}, "tools": [{"name": "g"}]})
    assert found == ("unsupported field", "tools and chat_template_kwargs.tools are both filled, and differ")


@pytest.mark.parametrize("key", ["tools", "documents"])
def test_lists_among_the_arguments_of_the_template_are_lists_of_objects(key: str, tmp_path: Path) -> None:
    found = drop(tmp_path, {**PAIR, "chat_template_kwargs": {key: 5}})
    assert found == ("wrong type", f"chat_template_kwargs.{key} is a number, expected a list of objects")
    documents = [{"title": "t", "text": "x"}]
    assert one(tmp_path, {**PAIR, "chat_template_kwargs": {"documents": documents}}).template == {
        "documents": documents
    }


@pytest.mark.parametrize("other", [{"default": True}, {"default": 1.0}, {"default": 1, "x": 1}])
def test_tools_that_are_printed_differently_differ(other: dict[str, Any], tmp_path: Path) -> None:
    """Python holds 1, 1.0 and true for equal, and objects in whatever order."""
    first = {"name": "f", "parameters": {"default": 1, "y": 2}}
    second = {"name": "f", "parameters": {**other, "y": 2}}
    swapped = {"name": "f", "parameters": {"y": 2, "default": 1}}
    for tool in (second, swapped):
        found = drop(tmp_path, {**PAIR, "tools": [first], "functions": [tool]})
        assert found == ("unsupported field", "tools and functions are both filled, and differ")


def test_bare_calls_are_wrapped_and_keep_their_id() -> None:
    wrapped = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert call_list([{"id": "1", "name": "f", "arguments": {"x": 1}}], "c") == [wrapped]
    assert call_list(wrapped, "c") == call_list([wrapped], "c") == call_list(json.dumps([wrapped]), "c") == [wrapped]


@pytest.mark.parametrize(
    ("given", "as_object", "as_text"),
    [
        ('{"x":1}', {"x": 1}, '{"x":1}'),
        ({"x": "é"}, {"x": "é"}, '{"x": "é"}'),
        ("[1]", "[1]", "[1]"),
        ("f(x", "f(x", "f(x"),
        (None, None, None),
    ],
)
def test_arguments_as_objects_and_as_text(given: Any, as_object: Any, as_text: Any) -> None:
    for wrap in (lambda arguments: {"function": {"arguments": arguments}}, lambda arguments: {"arguments": arguments}):
        assert with_object_arguments([wrap(given)]) == [wrap(as_object)]
        assert with_text_arguments([wrap(given)]) == [wrap(as_text)]
    assert with_object_arguments([{"name": "f"}]) == with_text_arguments([{"name": "f"}]) == [{"name": "f"}]


# ---- nulls

TWO_TOOLS = [
    {"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}},
    {"name": "g", "parameters": {"properties": {"n": {"type": "integer", "enum": [1, 2]}}}},
]
CALLS = [
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"city": "x"}}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "g", "arguments": {"n": 1}}]},
    {"role": "tool", "content": "8"},
]


@pytest.mark.parametrize("saved", [False, True])
def test_nulls_that_fill_up_a_table_are_no_part_of_tools_and_calls(saved: bool, tmp_path: Path) -> None:
    kwargs = [{"enable_thinking": False}, {"other": 1}]
    row = {**PAIR, "prompt": [user("q"), *CALLS], "tools": TWO_TOOLS}
    rows = [{**row, "chat_template_kwargs": given} for given in kwargs]
    table, path = pa.Table.from_pylist(rows), tmp_path / "t.parquet"
    if saved:
        path = tmp_path / "saved"
        datasets.Dataset(table).save_to_disk(path)
    else:
        pyarrow.parquet.write_table(table, path)
    result = read_examples(path, as_text=False)
    wrapped = [{"type": "function", "function": tool} for tool in TWO_TOOLS]
    assert [e.template for e in result.examples] == [{**given, "tools": wrapped} for given in kwargs]
    for example in result.examples:
        calls = [m.extra["tool_calls"] for m in example.prompt if isinstance(m, Message) and "tool_calls" in m.extra]
        assert calls == [
            [{"type": "function", "function": {"name": "f", "arguments": {"city": "x"}}}],
            [{"type": "function", "function": {"name": "g", "arguments": {"n": 1}}}],
        ]
    assert result.notes == {}


def test_nulls_of_a_json_file_are_values_where_keys_are_the_files_own(tmp_path: Path) -> None:
    """A default of null is a default; a null beside a name says that there is none."""
    schema = {"properties": {"x": {"default": None}}}
    tool = {"type": None, "function": {"name": "f", "description": None, "parameters": schema}}
    path = write(tmp_path, [{**PAIR, "tools": [tool], "chat_template_kwargs": {"a": None, "b": 1}}])
    result = read_examples(path, as_text=False)
    (example,) = result.examples
    assert example.template == {
        "b": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
    }
    assert result.notes == {NULLS: [example.source]}
    call = {"id": None, "name": "f", "arguments": {"x": None}}
    assert call_list([call], "c") == [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]


def test_no_documents_are_none_given() -> None:
    assert template_arguments({"chat_template_kwargs": {"documents": [], "a": 1}}) == {"a": 1}


# ---- nothing, and what is broken


@pytest.mark.parametrize("nothing", [None, [], "", " ", "null", "[]", "{}"])
def test_no_tools_in_any_writing(nothing: Any) -> None:
    for key in ("tools", "functions", "rejected_tools", "chat_template_kwargs"):
        assert template_arguments({key: nothing}) == {}
    assert template_arguments({"chat_template_kwargs": {"tools": nothing, "documents": nothing}}) == {}
    assert call_list(nothing, "c") == []


@pytest.mark.parametrize("arguments", ["", " \n"])
def test_arguments_that_are_an_empty_text_are_none(arguments: str) -> None:
    empty = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert call_list([{"name": "f", "arguments": arguments}], "c") == empty
    assert call_list([{"function": {"name": "f", "arguments": arguments}}], "c") == empty


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"function": {"name": "f", "arguments": '{"x": 1'}}, "c[1].function.arguments is not JSON (Expecting ',' "),
        ({"name": "f", "arguments": "x"}, "c[1].arguments is not JSON (Expecting value"),
        ({"name": "f", "arguments": "[1]"}, "c[1].arguments is a list, expected an object"),
        ({"name": "f", "arguments": json.dumps('{"x": 1}')}, "c[1].arguments is a string, expected an object"),
        ({"function": {"name": "f", "arguments": 3}}, "c[1].function.arguments is a number, expected an object"),
    ],
)
def test_broken_arguments_are_named_with_their_place(call: Any, words: str) -> None:
    fine = {"name": "f", "arguments": '{"x": 1}'}
    with pytest.raises(Unusable) as caught:
        call_list([fine, call], "c")
    assert caught.value.reason == "broken arguments of a call" and caught.value.detail.startswith(words)
    with pytest.raises(Unusable) as caught:
        call_list(call, "c")
    assert caught.value.detail.startswith(words.replace("[1]", "", 1))
