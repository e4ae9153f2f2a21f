"""Formats: which field of a row is what, and which format a file has."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tests.data.rows import PAIR, assistant, read_examples, turns, user, write
from tests.test_architecture import modules
from tuningfork.data.config import DataConfig
from tuningfork.data.examples import infer_format
from tuningfork.data.examples.formats import FORMATS
from tuningfork.errors import DataError
from tuningfork.records import Example, Message


def other(folder: Path, row: dict[str, Any], format: str, as_text: bool = False) -> Example:
    """The example of a file's one row, whose format is told by its fields and can be asked for."""
    path = write(folder, [row])
    result = read_examples(path, as_text)
    assert result.format == format and result.dropped == []
    assert read_examples(path, as_text, format).examples == result.examples
    return result.examples[0]


def test_a_format_is_declared_in_one_place() -> None:
    """A recipe can name each, and no other file of the data room names one that is not a field's name, too."""
    assert set(get_args(get_type_hints(DataConfig)["format"])) == {"auto", *FORMATS}
    fields = {name for format in FORMATS.values() for name in (*format.keys, *format.more)}
    own = FORMATS.keys() - fields - {infer_format.PLAINEST}
    assert {"helpsteer2", "sharegpt", "unpaired"} <= own
    for module, tree in modules().items():
        if module.startswith("data.") and module != "data.examples.formats":
            said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            assert not said & own, module


def test_fields_that_are_numbers_in_csv() -> None:
    assert [
        *("better_response_id", "label", "labels", "margin"),
        *("overall_preference", "preference_strength", "weight"),
    ] == infer_format.NUMBERS


def test_a_labelled_row_puts_the_better_output_first(tmp_path: Path) -> None:
    row = {"input": "q", "output_1": "a", "output_2": "b", "label": 2, "subset": "x"}
    example = other(tmp_path, row, "labelled")
    assert (example.prompt, example.answers) == (turns(user("q")), (turns(assistant("b")), turns(assistant("a"))))
    assert other(tmp_path, {**row, "label": 1}, "labelled").answers[0] == turns(assistant("a"))
    assert other(tmp_path, row, "labelled", as_text=True).answers == ("b", "a")
    with pytest.raises(DataError, match="row 2 has label 0, so labels count from 0"):
        read_examples(write(tmp_path, [{**row, "label": 1}, {**row, "label": 0}]), False)
    asked = {**row, "instruction": "i"}
    assert other(tmp_path, asked, "labelled").prompt == turns(user("i\nq"))
    assert other(tmp_path, {**asked, "input": ""}, "labelled").prompt == turns(user("i"))
    for label in (3, "2", True, None):
        (dropped,) = read_examples(write(tmp_path, [{**row, "label": label}]), False).dropped
        assert dropped.reason in ("unknown label", "null field"), label


def test_an_instruction_with_its_input(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4", "system": "s"}
    assert other(tmp_path, row, "instruction").prompt == turns({"role": "system", "content": "s"}, user("Add.\n1 2"))
    assert other(tmp_path, {**row, "input": "", "system": ""}, "instruction").prompt == turns(user("Add."))
    assert other(tmp_path, {**row, "instruction": "", "system": ""}, "instruction").prompt == turns(user("1 2"))
    (dropped,) = read_examples(write(tmp_path, [{**row, "instruction": "", "input": " "}]), False).dropped
    assert dropped.reason == "empty message"


def test_two_lists_of_messages_with_parts_and_loss_weights(tmp_path: Path) -> None:
    def message(role: str, *texts: str, weight: float = 0.0) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "value": t} for t in texts], "loss_weight": weight}

    start = [message("system", "s"), message("user", "q", "?")]
    row = {
        "chosen_messages": [
            *start,
            message("assistant", "x"),
            message("user", "r"),
            message("assistant", "a", weight=1),
        ],
        "rejected_messages": [*start, message("assistant", "b", weight=1.0)],
    }
    example = other(tmp_path, row, "message_lists")
    assert example.prompt == turns({"role": "system", "content": "s"}, user("q?"))
    assert example.answers == (turns(assistant("x"), user("r"), assistant("a")), turns(assistant("b")))
    assert [[m.counts for m in answer if isinstance(m, Message)] for answer in example.answers] == [
        [False, False, True],
        [True],
    ]


def test_openai_preferences_with_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    row = {
        "input": {"messages": [user("q")], "tools": tools, "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": None, "tool_calls": call}],
        "non_preferred_output": [assistant("b")],
    }
    example = other(tmp_path, row, "openai")
    assert example.prompt == turns(user("q")) and example.template == {"tools": tools}
    assert example.answers == ((Message("assistant", "", {"tool_calls": call}),), turns(assistant("b")))


def test_messages_that_go_on_with_two_answers(tmp_path: Path) -> None:
    """Axolotl's default: the prompt as messages, and one message for each answer."""
    start = [{"role": "system", "content": "s"}, user("q")]
    row = {"messages": start, "chosen": assistant("a"), "rejected": assistant("b")}
    for answers in (row, {**row, "chosen": "a", "rejected": [assistant("b")]}, {**row, "messages": json.dumps(start)}):
        example = other(tmp_path, {**row, **answers}, "messages_pairs")
        assert (example.prompt, example.answers) == (turns(*start), (turns(assistant("a")), turns(assistant("b"))))


def test_messages_that_are_one_of_two_whole_conversations(tmp_path: Path) -> None:
    both = {key: [user("q"), assistant(text)] for key, text in (("chosen", "a"), ("rejected", "b"))}
    for messages in (both["chosen"], both["rejected"], [user("q")]):
        example = other(tmp_path, {**both, "messages": messages}, "messages_pairs")
        assert (example.prompt, example.answers) == (turns(user("q")), (turns(assistant("a")), turns(assistant("b"))))


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize("start", [[user("q")], [SYSTEM, user("q")], [SYSTEM, user("q"), assistant("x"), user("r")]])
@pytest.mark.parametrize("write_as", [list, json.dumps])
def test_a_conversation_and_another_end_of_it(start: list[Any], write_as: Any, tmp_path: Path) -> None:
    """ms-swift: the rejected one is another answer in place of the last, or a whole conversation."""
    chosen = write_as([*start, assistant("a")])
    for format, rejected in (
        ("rejected_response", "b"),
        ("rejected_response", [assistant("b")]),
        ("rejected_messages", write_as([*start, assistant("b")])),
    ):
        example = other(tmp_path, {"messages": chosen, format: rejected}, format)
        assert (example.prompt, example.answers) == (turns(*start), (turns(assistant("a")), turns(assistant("b"))))


def test_another_answer_takes_the_place_of_all_turns_behind_the_last_question(tmp_path: Path) -> None:
    call = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}
    told = {"role": "tool_response", "content": "7"}
    example = other(
        tmp_path, {"messages": [user("q"), assistant("x"), call], "rejected_response": "b"}, "rejected_response"
    )
    assert example.prompt == turns(user("q")) and len(example.answers[0]) == 1
    after = {"messages": [user("q"), call, told, assistant("a")], "rejected_response": "b"}
    assert len(other(tmp_path, after, "rejected_response").prompt) == 3
    (dropped,) = read_examples(write(tmp_path, [{"messages": [user("q")], "rejected_response": "b"}]), False).dropped
    assert (dropped.reason, dropped.detail) == (
        "last turn not assistant",
        "messages does not end with the answer that rejected_response replaces",
    )


def test_the_tools_of_a_rejected_conversation_are_those_of_the_row(tmp_path: Path) -> None:
    row = {"messages": [user("q"), assistant("a")], "rejected_response": "b", "tools": [{"name": "f"}]}
    assert other(tmp_path, {**row, "rejected_tools": '[{"name": "f"}]'}, "rejected_response").template["tools"]
    for tools in ({"rejected_tools": [{"name": "g"}]}, {"rejected_tools": [{"name": "f"}], "tools": None}):
        (dropped,) = read_examples(write(tmp_path, [{**row, **tools}]), False).dropped
        assert (dropped.reason, dropped.detail.partition(";")[0]) == (
            "unsupported field",
            "tools and rejected_tools differ",
        )


def test_a_query_with_a_response_and_a_rejected_one(tmp_path: Path) -> None:
    row = {"query": "q", "response": "a", "rejected_response": "b", "system": "s", "history": [["u", "v"]]}
    example = other(tmp_path, row, "query")
    assert example.prompt == turns(SYSTEM, user("u"), assistant("v"), user("q"))
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))


@pytest.mark.parametrize("label", [True, False])
def test_conversations_with_a_label(label: bool, tmp_path: Path) -> None:
    example = other(tmp_path, {"messages": [user("q"), assistant("a")], "label": label}, "unpaired_messages")
    assert (example.prompt, example.answers, example.label) == (turns(user("q")), (turns(assistant("a")),), label)
    (dropped,) = read_examples(write(tmp_path, [{"messages": [user("q"), assistant("a")], "label": 1}]), False).dropped
    assert dropped.reason == "unknown label"


def test_rankings(tmp_path: Path) -> None:
    row = {"prompt": "q", "answers": ["a", "b", "c"]}
    assert other(tmp_path, row, "ranking").answers == tuple(turns(assistant(text)) for text in "abc")
    assert other(tmp_path, {**row, "scores": [1, 3.5, 2]}, "ranking", as_text=True).answers == ("b", "c", "a")
    bad: dict[str, dict[str, Any]] = {
        "unsupported field": {"ranks": [2, 1, 3]},
        "answers tie": {"scores": [1, 1, 2]},
        "wrong type": {"scores": [1, 2]},
        "answers are equal": {"answers": ["a", "b", "a"]},
        "empty answer": {"answers": ["a", " "]},
    }
    for reason, change in bad.items():
        (dropped,) = read_examples(write(tmp_path, [{**row, **change}]), False).dropped
        assert dropped.reason == reason
    assert dropped.detail == "answers[1]"


def test_answers_with_ranks_of_their_own(tmp_path: Path) -> None:
    """Nectar: rank 1 is the best; its prompts are transcripts."""
    ranked = [{"answer": text, "model": "m", "rank": rank} for text, rank in ((" c", 3.0), ("a", 1.0), ("b", 2.0))]
    row = {"prompt": "\n\nHuman: q\n\nAssistant: ", "answers": ranked, "turns": 1, "num_responses": 3, "source": ["x"]}
    example = other(tmp_path, row, "ranking")
    assert example.prompt == turns(user("q"))
    assert example.answers == tuple(turns(assistant(text)) for text in "abc")
    for change, reason in (
        ({"rank": 2.0}, "answers tie"),
        ({"rank": None}, "null field"),
        ({"rank": "x"}, "wrong type"),
    ):
        answers = [{**ranked[0], **change}, *ranked[1:]]
        (dropped,) = read_examples(write(tmp_path, [{**row, "answers": answers}]), False).dropped
        assert dropped.reason == reason


JUDGED = [
    ("helpsteer2", ("prompt", "response_1", "response_2", "preference_strength"), {-3: 0, -1: 0, 1: 1, 2.0: 1}, (0, 4)),
    ("helpsteer3", ("context", "response1", "response2", "overall_preference"), {-2: 0, 3: 1}, (0, "1")),
    ("saferlhf", ("prompt", "response_0", "response_1", "better_response_id"), {0: 0, 1: 1}, (2, True)),
    ("shp", ("history", "human_ref_A", "human_ref_B", "labels"), {1: 0, 0: 1}, (2, False)),
]


@pytest.mark.parametrize(("format", "keys", "better", "bad"), JUDGED)
def test_two_answers_and_a_field_that_says_which_is_better(
    format: str, keys: tuple[str, ...], better: dict[Any, int], bad: tuple[Any, ...], tmp_path: Path
) -> None:
    """The values as the cards of these data sets explain them."""
    for verdict, first in better.items():
        example = other(tmp_path, dict(zip(keys, ("q", "a", "b", verdict), strict=True)), format)
        assert example.prompt == turns(user("q"))
        assert example.answers == tuple(turns(assistant(text)) for text in ("ab", "ba")[first])
    for verdict in bad:
        path = write(tmp_path, [dict(zip(keys, ("q", "a", "b", verdict), strict=True))])
        (dropped,) = read_examples(path, False).dropped
        assert dropped.reason == ("answers tie" if verdict == 0 and verdict is not False else "unknown label")
        assert keys[-1] in dropped.detail


def test_turns_marked_within_a_prompt_of_helpsteer2_are_refused(tmp_path: Path) -> None:
    prompt = "q\n<extra_id_1>Assistant\nx\n<extra_id_1>User\nr"
    row = {"prompt": prompt, "response_1": "a", "response_2": "b", "preference_strength": 1}
    (dropped,) = read_examples(write(tmp_path, [row]), False).dropped
    assert dropped.reason == "turns within a string"


@pytest.mark.parametrize("key", ["question", "input"])
def test_a_prompt_may_be_a_question_or_an_input(key: str, tmp_path: Path) -> None:
    """orca_dpo_pairs, and its cleaned twin."""
    row = {"system": "s", key: "q", "chosen": "a", "rejected": "b"}
    example = other(tmp_path, row, key)
    assert example.prompt == turns({"role": "system", "content": "s"}, user("q"))
    assert example.answers == (turns(assistant("a")), turns(assistant("b")))
    assert other(tmp_path, {**row, "system": ""}, key).prompt == turns(user("q"))


def test_pairs_with_what_data_sets_keep_beside_them(tmp_path: Path) -> None:
    """UltraFeedback binarized, Capybara, Argilla's mix: whole conversations, their first or last question, scores."""
    start = [user("q"), assistant("x"), user("r")]
    both = {"chosen": [*start, assistant("a")], "rejected": [*start, assistant("b")]}
    for beside in (
        {"prompt": "q", "prompt_id": "1", "messages": [*start, assistant("a")], "score_chosen": 8.0},
        {
            "prompt": "r",
            "rating_chosen": 5,
            "rating_rejected": 4,
            "chosen_model": "m",
            "conversation": [{"input": "q"}],
        },
        {"dataset": "d", "chosen_rating": 5.0, "rejected_rating": 4.0},
    ):
        example = other(tmp_path, {**both, **beside}, "pairs" if "prompt" in beside else "conversations")
        assert example.prompt == turns(*start)
        assert example.answers == (turns(assistant("a")), turns(assistant("b")))


def test_responses_that_are_chosen_and_rejected(tmp_path: Path) -> None:
    """NeMo-Aligner and distilabel."""
    row = {"chosen_response": "a", "rejected_response": "b", "system": "s"}
    system, answers = {"role": "system", "content": "s"}, (turns(assistant("a")), turns(assistant("b")))
    example = other(tmp_path, {**row, "prompt": "q", "chosen_reward": 4, "rejected_reward": 1}, "responses")
    assert (example.prompt, example.answers) == (turns(system, user("q")), answers)
    example = other(tmp_path, {**row, "instruction": "i", "input": "x"}, "instruction_responses")
    assert (example.prompt, example.answers) == (turns(system, user("i\nx")), answers)
    marked = {**row, "prompt": "<extra_id_0>System\n\n<extra_id_1>User\nq\n<extra_id_1>Assistant\n"}
    (dropped,) = read_examples(write(tmp_path, [marked]), False).dropped
    assert dropped.reason == "turns within a string"


@pytest.mark.parametrize("write_as", [list, json.dumps])
def test_completions_by_their_ranks(write_as: Any, tmp_path: Path) -> None:
    """NeMo-RL: the lowest rank is the best, wherever it stands."""
    items: list[Any] = [
        {"rank": rank, "completion": [assistant(text)]} for rank, text in ((2, "c"), (0, "a"), (1, "b"))
    ]
    row = {"context": [user("q")], "completions": write_as(items)}
    example = other(tmp_path, row, "completions")
    assert (example.prompt, example.answers) == (turns(user("q")), tuple(turns(assistant(text)) for text in "abc"))
    for completions, reason in (
        (items[:1], "wrong type"),
        ("x", "wrong type"),
        (["x", "y"], "wrong type"),
        ([{**items[0], "rank": 1}, items[2]], "answers tie"),
        ([{**items[0], "rank": None}, items[2]], "null field"),
        ([{"rank": 0}, items[2]], "missing field"),
    ):
        (dropped,) = read_examples(write(tmp_path, [{**row, "completions": completions}]), False).dropped
        assert dropped.reason == reason, completions


def test_what_stands_beside_an_answer_and_its_rank(tmp_path: Path) -> None:
    items = [{"answer": text, "rank": rank, "model": "m"} for rank, text in enumerate("ab")]
    found = read_examples(write(tmp_path, [{"prompt": "q", "answers": items}]), False)
    assert list(found.notes) == ["fields that are not read: answers[].model"]
    for key, value in (("system", "s"), ("tools", [{"name": "f"}]), ("images", ["i"]), ("history", [["a", "b"]])):
        row = {"context": [user("q")], "completions": [{"completion": "a", "rank": 0, key: value}, {**RANKED}]}
        (dropped,) = read_examples(write(tmp_path, [row]), False).dropped
        assert dropped.reason == "unsupported field" and f".{key} is filled" in dropped.detail


RANKED = {"completion": "b", "rank": 1}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}, "labels judge steps of one answer"),
        ({"prompt": "q", "response": "a", "helpfulness": 4}, "each answer is rated by itself"),
        ({"prompt": "q", "response": "a", "is_safe": False}, "response: completion, is_safe: label"),
        (
            {"conversation_a": [user("q")], "conversation_b": [user("q")], "winner": "model_a"},
            "winner names one of two conversations",
        ),
        ({"query": "q", "answers": '[{"name": "f"}]', "tools": "[{}]"}, "calls to imitate"),
    ],
)
def test_what_is_in_wide_use_and_compares_no_answers_is_refused_with_what_to_do(
    row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no known format of data") as caught:
        read_examples(write(tmp_path, [row]), False)
    assert words in str(caught.value)


SAID = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"conversations": SAID, "kto_tag": False}, "unpaired_messages"),
        ({"instruction": "q", "input": "", "output": "a", "kto_tag": True}, "unpaired"),
        ({"conversations": SAID}, "sharegpt_messages"),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction_output"),
        ({"instruction": "q", "input": "", "output": "a", "text": "Below is an instruction."}, "instruction_output"),
    ],
)
def test_single_answers_under_other_names_are_read_as_their_refusal_says(
    row: dict[str, Any], format: str, tmp_path: Path
) -> None:
    path = write(tmp_path, [row])
    try:
        said = read_examples(path, False)
    except DataError as error:
        inner = str(error).partition("data.columns: {")[2].partition("}")[0]
        said = read_examples(path, False, columns=dict(item.split(": ") for item in inner.split(", ")))
    assert said.format == format and said.dropped == []
    (example,) = said.examples
    assert (example.prompt, example.answers) == (turns(user("q")), (turns(assistant("a")),))
    assert example.label == row.get("kto_tag")


def test_the_instruction_and_its_input_are_one_prompt(tmp_path: Path) -> None:
    example = other(tmp_path, {"instruction": "Sum up.", "input": "A tale.", "output": "a"}, "instruction_output")
    assert (example.prompt, example.answers) == (turns(user("Sum up.\nA tale.")), (turns(assistant("a")),))


def test_a_label_under_another_name_is_not_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, [{"messages": [user("q"), assistant("a")], "kto_tag": False}])
    (dropped,) = read_examples(path, False).dropped
    assert (dropped.reason, dropped.detail.split()[0]) == ("unsupported field", "kto_tag")
    (example,) = read_examples(path, False, columns={"kto_tag": "label"}).examples
    assert example.label is False


def test_answers_without_a_prompt_are_dropped_with_the_fields_that_may_hold_it(tmp_path: Path) -> None:
    row = {"context_messages": [user("q")], "chosen": assistant("a"), "rejected": assistant("b")}
    path = write(tmp_path, [row])
    (dropped,) = read_examples(path, False).dropped
    assert dropped.reason == "empty prompt" and "(context_messages)" in dropped.detail
    assert "data.columns: {...: prompt}" in dropped.detail
    (example,) = read_examples(path, False, columns={"context_messages": "prompt"}).examples
    assert example.prompt == turns(user("q"))


def test_a_system_message_of_the_rejected_answer_is_that_of_the_prompt(tmp_path: Path) -> None:
    talk, wrong = [user("q"), assistant("a")], [user("q"), assistant("b")]
    row = {"messages": talk, "rejected_messages": wrong, "rejected_system": "s"}
    held = {"messages": [SYSTEM, *talk], "rejected_messages": [SYSTEM, *wrong], "rejected_system": "s"}
    for same in ({**row, "system": "s"}, held):
        assert other(tmp_path, same, "rejected_messages").prompt == turns(SYSTEM, user("q"))
    for differs in (row, {**row, "system": "t"}, {**held, "rejected_system": "t"}):
        (dropped,) = read_examples(write(tmp_path, [differs]), False).dropped
        assert dropped.reason == "two system messages" and "rejected_system is not" in dropped.detail
    (dropped,) = read_examples(write(tmp_path, [{**held, "rejected_messages": wrong}]), False).dropped
    assert dropped.reason == "prompts differ"
    assert dropped.detail.endswith("they begin system, user, assistant and user, assistant")


def test_ratings_that_give_no_order_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """UltraFeedback as it first came: completions rated on several scales."""
    row = {"source": "s", "instruction": "q", "completions": [{"response": "a", "overall_score": 7}], "models": []}
    with pytest.raises(DataError, match=r"Fields found: completions, .*completions are rated.*write chosen and reject"):
        read_examples(write(tmp_path, [row]), False)


def test_a_label_of_single_answers_is_true_or_false(tmp_path: Path) -> None:
    for label in (1, 0, "true"):
        (dropped,) = read_examples(write(tmp_path, [{"prompt": "q", "completion": "a", "label": label}]), False).dropped
        assert dropped.reason == "unknown label"
        assert dropped.detail == (
            f"label is {label!r}; write true for a completion that is wanted, false for one that is not"
        )


def test_single_answers(tmp_path: Path) -> None:
    wanted = other(tmp_path, {"prompt": "q", "completion": "a", "label": False}, "unpaired")
    assert (wanted.prompt, wanted.answers, wanted.label) == (turns(user("q")), (turns(assistant("a")),), False)
    plain = other(tmp_path, {"prompt": "q", "completion": [assistant("a")]}, "completion")
    assert (plain.prompt, plain.answers, plain.label) == (turns(user("q")), (turns(assistant("a")),), None)
    talk = [user("q"), assistant("a"), user("r"), assistant("b")]
    whole = other(tmp_path, {"messages": talk}, "messages")
    assert (whole.prompt, whole.answers) == (turns(user("q")), (turns(*talk[1:]),))
    (dropped,) = read_examples(write(tmp_path, [{"messages": [user("q")]}]), False).dropped
    assert (dropped.reason, dropped.detail) == ("no assistant turn", "roles are user")
    for as_text in (False, True):
        document = other(tmp_path, {"text": " Once.\n"}, "text", as_text)
        assert (document.prompt, document.answers) == ("", (" Once.\n",))


def test_calls_and_observations_of_sharegpt(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "7"},
        ],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
        "tools": json.dumps([{"name": "f"}]),
    }
    example = other(tmp_path, row, "sharegpt")
    assert example.prompt == (
        Message("user", "q"),
        Message("assistant", "", {"tool_calls": [{"type": "function", "function": call}]}),
        Message("tool", "7"),
    )
    assert example.template == {"tools": [{"type": "function", "function": {"name": "f"}}]}


def test_the_most_rows_decide_and_a_recipe_can_decide_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, [{"text": "t"}, {"prompt": "q", "completion": "a", "label": True}, {"text": "u"}])
    result = read_examples(path, False)
    assert (result.format, [d.row for d in result.dropped]) == ("text", [2])
    path = write(tmp_path, [{"prompt": "q", "completion": "a", "label": True}, {"text": "u"}])
    asked = read_examples(path, False, "completion")
    assert (asked.format, [e.label for e in asked.examples]) == ("completion", [None])
    with pytest.raises(DataError, match=r"no row has the fields of data\.format ranking: prompt, answers; its"):
        read_examples(path, False, "ranking")


def test_a_format_is_told_by_fields_that_are_filled(tmp_path: Path) -> None:
    """In a table of several formats every row has all fields, and those of the other formats are null."""
    empty = dict.fromkeys(("conversations", "completion", "label", "answers", "instruction", "input"))
    path = write(tmp_path, [{**empty, **PAIR}, {**empty, **PAIR, "prompt": "r"}])
    result = read_examples(path, False)
    assert (result.format, len(result.examples), result.notes) == ("pairs", 2, {})
    single = {**empty, **dict.fromkeys(PAIR), "prompt": "q", "completion": "a"}
    assert read_examples(write(tmp_path, [single]), False).format == "completion"
    mixed = read_examples(write(tmp_path, [{**empty, **PAIR}, {**empty, **PAIR}, single]), False)
    assert [(d.row, d.reason, d.detail) for d in mixed.dropped] == [(3, "null field", "chosen is null")]
    nothing = read_examples(write(tmp_path, [dict.fromkeys(PAIR)]), False)  # no format is filled, so the names tell
    assert [d.reason for d in nothing.dropped] == ["null field"]


def test_a_row_that_says_more_than_its_files_format_reads_is_refused(tmp_path: Path) -> None:
    """The completion would be imitated although its row says that it is not wanted."""
    single = {"prompt": "q", "completion": "a"}
    result = read_examples(write(tmp_path, [single, single, {**single, "label": False}]), False)
    assert (result.format, len(result.examples)) == ("completion", 2)
    (dropped,) = result.dropped
    assert (dropped.row, dropped.reason) == (3, "another format than the file")
    assert "looks like unpaired, most of the file like completion" in dropped.detail
    asked = read_examples(write(tmp_path, [single, {**single, "label": False}]), False, "completion")
    assert len(asked.examples) == 2 and list(asked.notes) == ["fields that are not read: label"]
