"""Fields and roles under other names: data.columns and data.roles, what they refuse, and what the template reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.rows import PAIR, assistant, read_examples, user, write
from tests.data.tiny_tokenizers import word_level
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.field_names import OURS, check_columns, check_renames_used
from tuningfork.data.examples.roles import MessageNames, check_roles
from tuningfork.data.prepare import check_names_used, prepare_examples
from tuningfork.data.tokens.printing import message_fields
from tuningfork.errors import ConfigError, DataError
from tuningfork.records import Message

WORDS = ["?", "user", "assistant", "q", "a", "b"]
PLAIN = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
THEIRS = {"question_text": "q", "better": "a", "worse": "b"}
COLUMNS = {"question_text": "prompt", "better": "chosen", "worse": "rejected"}


def test_columns_are_read_under_our_names_before_the_format_is_told(tmp_path: Path) -> None:
    ours = read_examples(write(tmp_path, [PAIR, PAIR], "ours.jsonl"), False)
    theirs = read_examples(write(tmp_path, [THEIRS, THEIRS], "theirs.jsonl"), False, columns=COLUMNS)
    assert theirs.format == ours.format == "pairs" and theirs.notes == {}
    assert [(e.prompt, e.answers) for e in theirs.examples] == [(e.prompt, e.answers) for e in ours.examples]


def test_columns_may_change_places(tmp_path: Path) -> None:
    swapped = {"chosen": "rejected", "rejected": "chosen"}
    (example,) = read_examples(write(tmp_path, [PAIR]), False, columns=swapped).examples
    assert [answer[0].content for answer in example.answers] == ["b", "a"]  # type: ignore[union-attr]


def test_a_column_beside_the_field_that_it_is_to_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs.jsonl: row 2 fills 'prompt' and also 'question', which data.columns"):
        rows = [{**PAIR, "question": None}, {**PAIR, "question": "other"}]
        read_examples(write(tmp_path, rows), False, columns={"question": "prompt"})


def test_a_row_with_the_field_under_our_name_is_read_too(tmp_path: Path) -> None:
    found = read_examples(write(tmp_path, [THEIRS, PAIR, {**THEIRS, "prompt": None}]), False, columns=COLUMNS)
    assert len(found.examples) == 3 and found.dropped == []


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a": "promt"}, "{a: promt} names no field that is read; did you mean prompt?"),
        ({"a": "zzzzzz"}, f"formats read {', '.join(OURS[:4])}"),
        ({"a": "prompt", "b": "prompt"}, "a and b are both to be prompt"),
    ],
)
def test_columns_that_no_format_reads_are_refused_with_the_nearest(columns: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_columns(columns)
    assert words in str(caught.value)


def test_roles_that_are_none_of_ours_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"\{bot: asistant\} names no role of ours; did you mean assistant\?"):
        check_roles({"bot": "asistant"})


def test_columns_and_roles_that_no_row_has_are_refused_with_the_nearest() -> None:
    fields = ["question", "chosen", "rejected"]
    check_renames_used(
        {"question": "prompt"}, {"agent": "assistant", "human": "user"}, fields, ["role agent as assistant"], True
    )
    with pytest.raises(ConfigError, match=r"no row has a field 'quesion'; did you mean question\?"):
        check_renames_used({"quesion": "prompt"}, {}, fields, [], True)
    with pytest.raises(ConfigError, match="no message has the role 'agnet'"):
        check_renames_used({}, {"agnet": "assistant"}, fields, ["role agent as assistant"], True)
    check_renames_used({}, {"agnet": "assistant"}, fields, [], False)  # a row that was dropped may have had it


def test_a_run_reads_columns_and_roles_and_keeps_them_in_its_cache(tmp_path: Path) -> None:
    told = {"question_text": [{"role": "customer", "content": "q"}], "better": "a", "worse": "b"}
    path = write(tmp_path, [told] * 3)
    config = DataConfig(columns=COLUMNS, roles={"customer": "user"}, date="2026-01-31")
    tokenizer = word_level(WORDS, PLAIN)
    for _ in range(2):  # made, and then from the cache
        examples, report = prepare_examples(path, tokenizer, config, 1000, cache=tmp_path / "cache")
        assert len(examples) == 3 and list(report.notes) == ["role customer as user"]
        check_names_used(config, report)
        with pytest.raises(ConfigError, match="no row has a field 'bettr'; did you mean better"):
            check_names_used(replace(config, columns={"bettr": "chosen"}), report)
    with pytest.raises(DataError, match="customer"):
        prepare_examples(path, tokenizer, replace(config, roles=None), 1000, cache=tmp_path / "cache")


def test_a_format_that_is_not_known_is_met_with_the_nearest_two_and_how_to_name_fields(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_examples(write(tmp_path, [THEIRS]), False, columns={"question_text": "prompt", "beter": "chosen"})
    said = str(caught.value)
    assert "Fields found: better, prompt, worse." in said
    assert "data.columns names 'beter', which no row has" in said
    assert "Nearest are pairs (prompt, chosen, rejected) lacks chosen and rejected; " in said
    assert said.endswith("such as data.columns: {better: ..., worse: ...}, with chosen and rejected for the dots.")
    with pytest.raises(DataError) as caught:
        read_examples(write(tmp_path, [{name.upper(): value for name, value in PAIR.items()}]), False)
    assert "Nearest are pairs (prompt, chosen, rejected)" in str(caught.value)


@pytest.mark.parametrize("name", ["input.messages", "input[0]", "input/messages"])
def test_columns_name_whole_fields_and_say_so(name: str, tmp_path: Path) -> None:
    row = {"input": {"messages": [user("q")]}, "better": "a", "worse": "b"}
    words = "it names whole fields such as input, not what is within them"
    with pytest.raises(DataError, match=words):
        read_examples(write(tmp_path, [row]), False, columns={name: "prompt"})
    with pytest.raises(ConfigError, match=words):
        check_renames_used({name: "prompt"}, {}, row, [], complete=True)
    with pytest.raises(ConfigError, match="names no field that is read"):
        check_columns({"asked": name})
    plain = {name: "q", "chosen": "a", "rejected": "b"}  # a name like any other, where a field has it
    assert read_examples(write(tmp_path, [plain]), False, columns={name: "prompt"}).format == "pairs"


# ---- fields of messages that the chat template reads

READS = "{% for m in messages %}{{ m.name or m.role }} {{ m['functions'] }} {{ m.get('tool_plan') }}{% endfor %}"


def test_filled_fields_that_the_template_reads_go_along(tmp_path: Path) -> None:
    tokenizer = word_level(WORDS, READS)
    names = MessageNames(fields=message_fields(tokenizer))
    assert {"name", "functions", "tool_plan"} <= names.fields and "mood" not in names.fields
    asked = [{"role": "system", "content": "s", "functions": "[f]"}, {**user("q"), "name": "guest", "mood": "good"}]
    row = {"prompt": asked, "chosen": [{**assistant("a"), "tool_plan": "plan"}], "rejected": [assistant("b")]}
    found = read_examples(write(tmp_path, [row]), False, names=names)
    (example,) = found.examples
    assert [turn.extra for turn in example.prompt if isinstance(turn, Message)] == [
        {"functions": "[f]"},
        {"name": "guest"},
    ]
    assert [answer[0].extra for answer in example.answers] == [{"tool_plan": "plan"}, {}]  # type: ignore[union-attr]
    assert list(found.notes) == ["fields that are not read: prompt[].mood"]
    unread = read_examples(write(tmp_path, [row]), False)
    assert list(unread.notes) == [
        "fields that are not read: prompt[].functions, prompt[].name, prompt[].mood, chosen[].tool_plan"
    ]


def test_names_the_wrong_way_round_are_turned(tmp_path: Path) -> None:
    path = write(tmp_path, [{"query": "q", "good": "a", "bad": "b"}])
    given: dict[str, str | None] = {"prompt": "query", "chosen": "good", "rejected": "bad"}
    right = "the file's own names stand first. Write it the other way round: "
    with pytest.raises(ConfigError, match="names no field that is read; ") as caught:
        check_columns(given)
    assert str(caught.value).endswith(f"{right}{{query: prompt, good: chosen, bad: rejected}}.")
    with pytest.raises(DataError) as refused:
        read_examples(path, False, columns={"prompt": "query"})
    assert str(refused.value).endswith(f"In data.columns, {right}{{query: prompt}}.")
    with pytest.raises(ConfigError) as unused:
        check_renames_used({"prompt": "query"}, {}, ["query", "good"], [], True)
    assert str(unused.value).endswith(f"{right}{{query: prompt}}.")
    with pytest.raises(ConfigError) as other:
        check_renames_used({"prompt": "query"}, {}, ["good"], [], True)
    assert "other way round" not in str(other.value)


def test_fields_that_are_like_none_are_met_with_the_plainest_format(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_examples(write(tmp_path, [{"query": "q", "good": "a", "bad": "b"}]), False)
    said = str(caught.value)
    assert "Nearest are pairs (prompt, chosen, rejected) lacks" in said
    assert said.endswith("say so, such as data.columns: {...: prompt, ...: chosen, ...: rejected}.")
    (tmp_path / "pairs.csv").write_text("How are you?,well,bad\nAnd you?,fine,hm\n")
    with pytest.raises(DataError, match="The first line of the file is taken for its header: if it is a row, write"):
        read_examples(tmp_path / "pairs.csv", False)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (["prompt", "rejected"], "Nearest are pairs (prompt, chosen, rejected) lacks chosen; "),
        (["question", "good", "bad"], "data.columns: {bad: ..., good: ...}, with chosen and rejected for the dots."),
        (["question", "good", "bad", "id"], "data.columns: {...: chosen, ...: rejected}."),
        (["prompt", "chosen", "worse"], "data.columns: {worse: rejected}."),
    ],
)
def test_the_nearest_form_reads_what_is_there_and_free_fields_are_named(
    fields: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        read_examples(write(tmp_path, [{name: f"text of {name}" for name in fields}]), False)
    assert said in str(caught.value)
