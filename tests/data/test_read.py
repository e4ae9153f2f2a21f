"""Files and rows: every row becomes an example or a listed drop, and every bad file a message that helps."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuningfork.data.forms import read_examples
from tuningfork.data.read import read_rows
from tuningfork.errors import DataError
from tuningfork.records import Example, Message, Source

HH = "\n\nHuman: {}\n\nAssistant: {}"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def write(folder: Path, rows: list[Any], name: str = "pairs.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(*messages: dict[str, str]) -> tuple[Message, ...]:
    return tuple(Message(m["role"], m["content"]) for m in messages)


def one(folder: Path, row: dict[str, Any], as_text: bool = False) -> Example:
    result = read_examples(write(folder, [row]), as_text)
    assert result.dropped == []
    return result.examples[0]


def drop(folder: Path, row: dict[str, Any], as_text: bool = False) -> tuple[str, str]:
    """Reason and detail for a bad row that lies behind a good one, which settles the file's form."""
    good = {
        tuple: {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        str: {"chosen": HH.format("q", "a"), "rejected": HH.format("q", "b")},
    }
    first = {"prompt": "q", "chosen": "a", "rejected": "b"}
    if "prompt" not in row:
        first = good[str] if isinstance(row.get("chosen"), str) else good[tuple]
    result = read_examples(write(folder, [first, row]), as_text)
    assert [e.source.row for e in result.examples] == [1] and result.rows_read == 2
    (dropped,) = result.dropped
    assert dropped.row == 2 and dropped.file == str(folder / "pairs.jsonl")
    return dropped.reason, dropped.detail


# ---- files


def test_plain_and_zipped_files_of_every_kind_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "c", "rejected": "r", "score": i} for i in range(3)]
    lines = write(tmp_path, rows)
    array = tmp_path / "array.json"
    array.write_text(json.dumps(rows, indent=1))
    lines_in_json = write(tmp_path, rows, "lines.json")
    parquet = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), parquet)
    for path in (lines, array, lines_in_json, parquet):
        zipped = tmp_path / f"{path.name}.gz"
        zipped.write_bytes(gzip.compress(path.read_bytes()))
        assert read_rows(path) == read_rows(zipped) == [(1, rows[0]), (2, rows[1]), (3, rows[2])], path


def test_strings_are_the_files_own(tmp_path: Path) -> None:
    """Column type guessing would make timestamps, numbers or line breaks of these."""
    for text in ("2020-01-01", "2020-01-01 10:00:00", "12", "null", "NaN", "a\u2028b\x85c", "tab\there", "\U0001f600"):
        rows = [{"prompt": text, "chosen": text, "rejected": f"{text}."}] * 2
        assert [row for _, row in read_rows(write(tmp_path, rows))] == rows
        path = tmp_path / "raw.jsonl"
        path.write_text(json.dumps(rows[0], ensure_ascii=False) + "\r\n", encoding="utf-8")
        assert read_rows(path) == [(1, rows[0])]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_any_text_survives(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "any.jsonl"
    path.write_text("\n".join(json.dumps({"a": t}, ensure_ascii=False) for t in texts), encoding="utf-8", newline="")
    assert [row["a"] for _, row in read_rows(path)] == texts


def test_big_numbers_nulls_and_missing_fields_stay_apart(tmp_path: Path) -> None:
    rows = [{"a": 123456789012345678901234567890}, {"a": None}, {"b": [{"c": 1}, {"d": "x"}]}, {}]
    assert [row for _, row in read_rows(write(tmp_path, rows))] == rows


def test_row_numbers_are_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('\n{"a": 1}\n\n  \n{"a": 2}\n')
    assert read_rows(path) == [(2, {"a": 1}), (5, {"a": 2})]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "x"}\n')
    assert read_rows(path) == [(1, {"a": "x"})]


def test_a_name_is_never_a_pattern(tmp_path: Path) -> None:
    write(tmp_path, [{"a": "other"}], "pairs1.jsonl")
    for name in ("pairs[1].jsonl", "pairs*.jsonl", "a::b.jsonl", "with space#%20.jsonl"):
        assert read_rows(write(tmp_path, [{"a": name}], name)) == [(1, {"a": name})]


def test_a_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [PAIR])
    monkeypatch.chdir(tmp_path)
    assert read_examples("pairs.jsonl", as_text=True).examples[0].id == "pairs.jsonl:1"
    with pytest.raises(DataError, match=r"^pair\.jsonl: no such file; did you mean pairs\.jsonl\?$"):
        read_examples("pair.jsonl", as_text=True)


def test_a_changed_file_gives_its_new_content_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work, temporary = tmp_path / "home", tmp_path / "work", tmp_path / "tmp"
    for folder in (home, work, temporary):
        folder.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for value in ("old", "new"):  # the same name, size and, as far as the clock can tell, time
        path = write(work, [{"a": value}])
        table = work / "t.parquet"
        pyarrow.parquet.write_table(pa.table({"a": [value]}), table)
        assert read_rows(path) == read_rows(table) == [(1, {"a": value})]
    assert list(home.iterdir()) == list(temporary.iterdir()) == []


def test_the_library_is_quiet_and_its_settings_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError):
        read_rows(bad)
    read_rows(write(tmp_path, [{"a": 1}]))
    assert capfd.readouterr() == ("", "")
    assert before == (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled())


def _bytes(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def _parquet(damage: Callable[[bytes], bytes], rows: list[Any] | None = None) -> Callable[[Path], Path]:
    table = pa.Table.from_pylist(rows) if rows else pa.table({"prompt": pa.array([], pa.string())})

    def make(folder: Path) -> Path:
        path = folder / "t.parquet"
        pyarrow.parquet.write_table(table, path)
        path.write_bytes(damage(path.read_bytes()))
        return path

    return make


GOOD = b'{"prompt": "p", "chosen": "c", "rejected": "r"}\n'
LONG = b"".join(b'{"prompt": "%d", "chosen": "c", "rejected": "r"}\n' % i for i in range(999))
BAD_FILES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "typo": (
        lambda folder: _bytes("pairs.jsonl", GOOD)(folder).with_name("pair.jsonl"),
        ["did you mean", "pairs.jsonl?"],
    ),
    "no such folder": (lambda folder: folder / "nowhere" / "a.jsonl", ["no such file", "no folder", "nowhere"]),
    "folder": (lambda folder: _bytes("a.jsonl.gz", b"")(folder).parent, ["is a folder", "a.jsonl.gz"]),
    "folder without data": (lambda folder: folder, ["is a folder", "no .jsonl, .json, .parquet file"]),
    "unknown suffix": (_bytes("pairs.csv", b"a,b"), ["unknown suffix '.csv'", ".jsonl, .json, .parquet"]),
    "unknown zipped suffix": (_bytes("pairs.txt.gz", b"a"), ["unknown suffix '.txt'"]),
    "empty": (_bytes("a.jsonl", b""), ["file is empty"]),
    "empty zipped": (_bytes("a.jsonl.gz", gzip.compress(b"")), ["file is empty"]),
    "blank": (_bytes("a.jsonl", b"\n \n"), ["no rows"]),
    "empty array": (_bytes("a.json", b"[]"), ["no rows"]),
    "empty table": (_parquet(lambda data: data), ["no rows"]),
    "malformed": (
        _bytes("a.jsonl", GOOD + b'\n{"prompt": "a" "b"}\n'),
        ["line 3 is not JSON", "column 16", "',' delim"],
    ),
    "cut": (_bytes("a.jsonl", GOOD + GOOD[:20]), ["line 2 is not JSON", "column 17"]),
    "malformed array": (_bytes("a.json", b'[\n{"prompt": 1},\n{"prompt" 1}]'), ["line 3 is not JSON", "column 11"]),
    "field twice": (_bytes("a.jsonl", GOOD + b'{"chosen": "a", "chosen": "b"}'), ["line 2", "'chosen' is given twice"]),
    "deep": (_bytes("a.jsonl", b"[" * 100_000), ["line 1 is not JSON", "recursion"]),
    "not objects": (_bytes("a.jsonl", GOOD + b"[1]\n"), ["line 2 is a list, not an object"]),
    "not objects in an array": (_bytes("a.json", b'[{"a": 1}, "b"]'), ["row 2 is a string, not an object"]),
    "not UTF-8": (
        _bytes("a.jsonl", GOOD * 2 + b'{"prompt": "\xff"}\n'),
        ["line 3 is not UTF-8", "Save the file as UTF-8"],
    ),
    "UTF-16": (_bytes("a.jsonl", GOOD.decode().encode("utf-16")), ["line 1 is not UTF-8"]),
    "gzip cut short": (_bytes("a.jsonl.gz", gzip.compress(LONG)[:-200]), ["gzip data is cut short or damaged"]),
    "gzip damaged": (_bytes("a.jsonl.gz", gzip.compress(LONG)[:60] + b"xxxx"), ["gzip data is cut short or damaged"]),
    "parquet cut short": (_parquet(lambda data: data[:-9], [{"prompt": "p"}]), ["not a whole Parquet file"]),
    "not parquet": (_bytes("a.parquet", GOOD), ["not a whole Parquet file"]),
    "unknown fields": (
        _bytes("a.jsonl", b'{"input": "i", "label": 1}'),
        ["Fields found: input, label", "prompt, chosen, rej"],
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_what_where_and_what_to_do(case: str, tmp_path: Path) -> None:
    make, expected = BAD_FILES[case]
    path = make(tmp_path)
    with pytest.raises(DataError) as caught:
        read_examples(path, as_text=False)
    message = str(caught.value)
    assert message.startswith(str(path)) and all(part in message for part in expected), message


# ---- forms of rows, as turns


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

PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
CALL = {**assistant("a"), "tool_calls": [{"name": "f"}]}
BAD_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "missing": ({"prompt": "q", "chosen": "a"}, "missing field", "no rejected; found prompt, chosen"),
    "no fields": ({"prompt": "q"}, "missing field", "no chosen"),
    "null": ({**PAIR, "chosen": None}, "null field", "chosen is null"),
    "number": ({**PAIR, "rejected": 3}, "wrong type", "'rejected' is a number, expected a string or a list"),
    "number in list": ({**PAIR, "chosen": [3]}, "wrong type", "chosen[0] is a number, expected a message"),
    "content parts": ({**PAIR, "chosen": [assistant([])]}, "wrong type", "chosen[0].content is a list"),  # type: ignore[arg-type]
    "no content": ({**PAIR, "chosen": [{"role": "assistant"}]}, "missing field", "no chosen[0].content"),
    "null content": ({**PAIR, "chosen": [assistant(None)]}, "null field", "chosen[0].content is null"),  # type: ignore[arg-type]
    "empty": ({**PAIR, "rejected": ""}, "empty answer", "rejected"),
    "both blank": ({**PAIR, "chosen": " \n", "rejected": "\t"}, "empty answer", "chosen and rejected"),
    "blank turn": ({**PAIR, "chosen": [assistant("a"), user("u"), assistant(" ")]}, "empty answer", "chosen"),
    "empty prompt": ({**PAIR, "prompt": " "}, "empty message", "message 1 of the prompt, a user turn"),
    "empty list": ({**PAIR, "rejected": []}, "empty messages", "'rejected'"),
    "role": ({**PAIR, "chosen": [{"role": "tool", "content": "x"}]}, "unknown role", "chosen[0].role is 'tool'"),
    "equal": ({**PAIR, "chosen": "b"}, "chosen equals rejected", ""),
    "user last": ({**PAIR, "chosen": [assistant("a"), user("u")]}, "last turn not assistant", "ends with a user"),
    "user first": ({**PAIR, "chosen": [user("z"), assistant("a")]}, "answer starts with another role", "'chosen'"),
    "tool call": ({**PAIR, "chosen": [CALL]}, "unsupported field", "chosen[0].tool_calls is filled"),
    "system": ({**PAIR, "system": "Be brief."}, "unsupported field", "system is filled"),
    "surrogate": ({**PAIR, "chosen": "ab\ud83d"}, "broken text", "chosen has half a surrogate pair at character 3"),
    "implicit equal": ({"chosen": [user("q"), assistant("a")]} | {"rejected": [user("q"), assistant("a")]},
                       "chosen equals rejected", ""),
    "implicit differ": ({"chosen": [user("q"), assistant("a")]} | {"rejected": [user("r"), assistant("b")]},
                        "prompts differ", "do not part at an assistant turn"),
    "no prompt": ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "empty prompt", ""),
    "not a transcript": ({"chosen": "hello", "rejected": "there"}, "not a transcript", "need a 'prompt' field"),
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
