"""What rows belong to: turns of a conversation fall together however they are printed, and rows of a field's value."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.accounts import DataReport
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.groups import ALONE, CONVERSATION, check_group_found
from tuningfork.data.prepare import dataset_digest, prepare_examples
from tuningfork.data.token_table import Subset
from tuningfork.errors import ConfigError, DataError
from tuningfork.records import column

CHAT = DataConfig(max_length=10_000, workers=1)
TEXT = replace(CHAT, template="none")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def read(path: Path, by: str | None, config: DataConfig = CHAT) -> tuple[Subset, DataReport]:
    tokenizer = byte_bpe(chat_template=CHATML + "{% if tools %}{{ tools }}{% endif %}")
    return prepare_examples(path, tokenizer, config, len(tokenizer), group_by=by)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def together(folder: Path, rows: list[dict[str, Any]], by: str, config: DataConfig = CHAT) -> list[list[int]]:
    """The rows of each group, from 0; a row without a group is left out. Every row is used."""
    examples, report = read(write(folder, rows), by, config)
    assert report.used == len(rows), report.dropped_rows
    return parts(column(examples, "group").tolist())


def parts(keys: list[int]) -> list[list[int]]:
    return [[i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys) if key]


def talk(*said: str, start: str = "user") -> list[dict[str, Any]]:
    """Turns that alternate, `start` first."""
    roles = ("user", "assistant") if start == "user" else ("assistant", "user")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]


def pair(asked: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": asked, "chosen": "yes", "rejected": "no", **more}


def system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}]


def test_turns_of_one_conversation_and_its_branches_are_a_group(tmp_path: Path) -> None:
    rows = [
        pair(talk("Hi")),
        pair(talk("Hi", "Hello", "How are you?")),
        pair(talk("Hi", "Go away", "Why?")),
        pair("Hi"),  # a string is a user turn
        pair(talk("Hey", "Hello", "How are you?")),
        pair([*system("Be kind."), *talk("Hi")]),
        pair(talk("Hi", "Hello", "More"), system="Be kind."),
        pair("Hi", system="Be curt."),
    ]
    assert together(tmp_path, rows, CONVERSATION) == [[0, 1, 2, 3], [4], [5, 6], [7]]


def test_tools_are_a_part_of_how_a_conversation_begins_and_other_arguments_are_none(tmp_path: Path) -> None:
    rows = [
        pair("Hi", tools=[WEATHER]),
        pair(talk("Hi", "Hello", "More"), tools=json.dumps([WEATHER])),
        pair("Hi"),
        pair("Hi", chat_template_kwargs={"enable_thinking": False}),
    ]
    assert together(tmp_path, rows, CONVERSATION) == [[0, 1], [2, 3]]


def test_a_conversation_that_the_assistant_opens_is_told_by_what_the_user_answers(tmp_path: Path) -> None:
    greeting = "How can I help you?"
    rows = [
        pair(talk(greeting, "A flight", start="assistant")),
        pair(talk(greeting, "A hotel", start="assistant")),
        pair(talk(greeting, "A flight", "Where to?", "Rome", start="assistant")),
    ]
    assert together(tmp_path, rows, CONVERSATION) == [[0, 2], [1]]


def test_text_without_a_template_is_told_by_the_whole_prompt_and_documents_are_alone(tmp_path: Path) -> None:
    rows = [pair("Once"), pair("Once"), pair("Once upon")]
    assert together(tmp_path, rows, CONVERSATION, TEXT) == [[0, 1], [2]]
    examples, report = prepare_examples(
        [str(write(tmp_path, rows)), str(_documents(tmp_path))], byte_bpe(), TEXT, 260, group_by=CONVERSATION
    )
    assert parts(column(examples, "group").tolist()) == [[0, 1], [2]]
    assert [len(found) for note, found in report.notes.items() if note == f"no prompt: {ALONE}"] == [2]
    with pytest.raises(ConfigError, match=r"train.group_by is conversation, but no row of data.train has a prompt"):
        prepare_examples(_documents(tmp_path), byte_bpe(), TEXT, 260, group_by=CONVERSATION)


def _documents(folder: Path) -> Path:
    path = folder / "documents.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    return path


def test_rows_of_one_value_of_a_field_are_a_group(tmp_path: Path) -> None:
    values = [1, "1", 1.0, True, 0, False, 2**60, 2**60 + 1, "a", "a", 0.5, None, "", "ä\ud800"]
    rows = [pair(f"q {n}", session=value) for n, value in enumerate(values)] + [pair("q")]
    examples, report = read(write(tmp_path, rows), "session")
    keys = column(examples, "group").tolist()
    assert parts(keys) == [[0, 2], [1], [3], [4], [5], [6], [7], [8, 9], [10], [13]]
    assert [n for n, key in enumerate(keys) if not key] == [11, 12, 14]
    noted = {note: [place.row for place in found] for note, found in report.notes.items()}
    assert noted == {f"no session: {ALONE}": [12, 13, 15]}  # and not among the fields that are not read


def test_equal_numbers_of_files_of_any_kind_are_one_value(tmp_path: Path) -> None:
    """JSON has 7 or 7.0, a table with gaps 7.0, another one decimals; NaN is none."""
    table = pa.table(
        {
            **{name: pa.array([f"{name} {n}" for n in range(3)]) for name in ("prompt", "chosen", "rejected")},
            "session": pa.array([7.0, float("nan"), None]),
        }
    )
    pq.write_table(table, tmp_path / "floats.parquet")
    decimals = pa.array([Decimal("7.00"), Decimal("7.25"), None])
    pq.write_table(table.set_column(3, "session", decimals), tmp_path / "decimals.parquet")
    files = [
        str(write(tmp_path, [pair("q", session=7)])),
        *(str(tmp_path / f"{x}.parquet") for x in ("floats", "decimals")),
    ]
    tokenizer = byte_bpe(chat_template=CHATML)
    examples, _ = prepare_examples(files, tokenizer, CHAT, len(tokenizer), group_by="session")
    assert parts(column(examples, "group").tolist()) == [[0, 1, 4], [5]]


def test_a_field_is_named_as_data_columns_has_it(tmp_path: Path) -> None:
    rows = [{"q": "one", "chosen": "a", "rejected": "b"}, {"q": "one", "chosen": "c", "rejected": "d"}]
    renamed = replace(CHAT, columns={"q": "prompt"})
    with pytest.raises(ConfigError, match=r"group_by is 'q'.*data.columns gives it another name"):
        read(write(tmp_path, rows), "q", renamed)


@pytest.mark.parametrize(
    ("value", "words"),
    [(["a"], "a list"), ({"a": 1}, "an object"), (float("inf"), "inf")],
)
def test_a_field_that_names_nothing_is_refused_with_its_row(value: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, [pair("q", session=1), pair("r", session=value)])
    with pytest.raises(DataError, match=rf"^{path}:2: field 'session', .* is {words}; it must be a string"):
        read(path, "session")


def test_a_field_that_no_row_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, [pair("q", session=1)])
    with pytest.raises(ConfigError, match=r"group_by is 'sesion', but no row .*; did you mean session\?"):
        read(path, "sesion")
    with pytest.raises(ConfigError, match=r"there are chosen, prompt, rejected, session\."):
        read(path, "zzzz")
    check_group_found("x", np.array([0, 5], dtype="<u8"), [])


def test_the_group_changes_the_digest_of_what_is_trained_on_and_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """A continued run must have the order that it had, so groups are a part of what it is."""
    one, other = [pair("q", s=1), pair("r", s=1)], [pair("q", s=1), pair("r", s=2)]
    digests = {by: [dataset_digest(read(write(tmp_path, rows), by)[0]) for rows in (one, other)] for by in (None, "s")}
    assert digests[None][0] == digests[None][1]
    assert len({digests[None][0], *digests["s"]}) == 3


def test_tokens_do_not_depend_on_what_rows_are_grouped_by(tmp_path: Path) -> None:
    rows = [pair(talk("Hi", "Hello", "More"), session=3, weight=2.0, margin=0.5)]
    plain, grouped = (read(write(tmp_path, rows), by)[0][0] for by in (None, "session"))
    assert (plain.group, plain.content, plain.weight) == (0, grouped.content, 2.0)
    assert grouped.group != 0 and (grouped.weight, grouped.margin) == (2.0, 0.5)
