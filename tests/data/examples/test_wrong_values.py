"""Rows with something else at each of their places: used, or dropped with a detail that names the field; never more."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.rows import assistant, user, write
from tests.data.tiny_tokenizers import byte_bpe
from tuningfork.accounts import DroppedRow
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import prepare_examples

Row = dict[str, Any]
Place = tuple[str | int, ...]

# Prints all that a row may say, as templates that know tools and thoughts do.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<t>' + tool | tojson }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['reasoning_content'] %}{{ '<r>' + m['reasoning_content'] }}"
    "{% endif %}{{ m['content'] }}{% for call in m['tool_calls'] or [] %}{{ '<c>' + call | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SPOKEN = json.dumps({"name": "f", "arguments": {}})

GOOD: dict[str, Row] = {
    "pairs": {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}],
        "chosen": [
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "7"},
            assistant("yes"),
        ],
        "rejected": [assistant("no")],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}],
        "system": "s",
        "chat_template_kwargs": {"thinking": True},
        "weight": 0.5,
        "margin": 1.0,
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": SPOKEN},
            {"from": "observation", "value": "7"},
        ],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "instruction": {"instruction": "q", "input": "i", "chosen": "yes", "rejected": "no", "history": [["a", "b"]]},
    "input": {"input": "q", "chosen": "yes", "rejected": "no"},
    "message_lists": {
        "chosen_messages": [{**user("q"), "loss_weight": 0.0}, {**assistant("yes"), "loss_weight": 1.0}],
        "rejected_messages": [user("q"), {"role": "assistant", "content": [{"type": "text", "value": "no"}]}],
    },
    "openai": {
        "input": {"messages": [user("q")], "tools": [{"type": "function", "function": {"name": "f"}}]},
        "preferred_output": [assistant("yes")],
        "non_preferred_output": [assistant("no")],
    },
    "labelled": {"input": "q", "output_1": "yes", "output_2": "no", "label": 1},
    "helpsteer3": {"context": [user("q")], "response1": "no", "response2": "yes", "overall_preference": 2},
    "conversations": {"chosen": "\n\nHuman: q\n\nAssistant: yes", "rejected": "\n\nHuman: q\n\nAssistant: no"},
    "ranking": {"prompt": "q", "answers": [{"answer": "yes", "rank": 1}, {"answer": "no", "rank": 2}]},
    "unpaired": {"prompt": "q", "completion": "yes", "label": True},
    "messages": {"messages": [user("q"), assistant("yes")]},
    "text": {"text": "yes"},
}

WRONG: tuple[Any, ...] = (
    *(None, True, 3, 1.5, -(10**400), 10**400, float("nan"), float("inf"), 1e-320),
    *("", " ", "a", "a\ud800", "\udfff", "\0", "\x1b[2J", "a\u2028b\x85c\r\n", "[", '{"role": "user"}'),
    *([], {}, [[]], [[1]], [None], ["a"], ["\ud800"], {"": ""}, {"a": {"b": [None]}}, {"\ud800": "\udfff"}),
    *([{}], [{"role": "user", "content": None}], {"role": ["user"], "content": {}}, {"function": 3, "name": []}),
)


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from places(inner, (*at, key))


def variants(row: Row) -> Iterator[tuple[Place, Row]]:
    """The row with each of its values replaced by each wrong one, taken away, and put under half a character."""
    for place in places(row):
        for change in (*range(len(WRONG)), "take", "rename"):
            made = copy.deepcopy(row)
            holder: Any = made
            for key in place[:-1]:
                holder = holder[key]
            if isinstance(change, int):
                holder[place[-1]] = WRONG[change]
            elif change == "take" or isinstance(holder, list):
                del holder[place[-1]]
            else:
                holder["\ud800"] = holder.pop(place[-1])
            yield place, made


# What is wrong with a conversation as a whole, which has no one field.
OF_THE_WHOLE = {
    *("prompts differ", "two system messages", "empty prompt", "empty message", "no assistant turn"),
    *("prompt ends with an assistant turn",),
}


def read(form: str, folder: Path) -> tuple[list[Place], list[int], list[DroppedRow]]:
    """A file with a good row and all its variants: their places, the rows that are used, and those that are not."""
    made = list(variants(GOOD[form]))
    path = write(folder, [GOOD[form], *(row for _, row in made)])
    tokenizer = byte_bpe(chat_template=TEMPLATE)
    used, report = prepare_examples(path, tokenizer, DataConfig(format=form), len(tokenizer))
    assert report.rows_read == len(made) + 1
    return [place for place, _ in made], [example.source.row for example in used], report.dropped_rows


@pytest.mark.parametrize("form", GOOD)
def test_a_wrong_value_anywhere_costs_its_row_and_no_other(form: str, tmp_path: Path) -> None:
    places, used, dropped = read(form, tmp_path)
    assert used[0] == 1 and sorted([*used, *(row.row for row in dropped)]) == list(range(1, len(places) + 2))
    for row in dropped:
        named = str(places[row.row - 2][0]) in row.detail
        assert row.reason and (named or row.reason in OF_THE_WHOLE), (places[row.row - 2], row)


def test_of_all_these_values_only_text_is_taken_for_text(tmp_path: Path) -> None:
    """Half characters are no text, and white space says nothing."""
    _, used, _ = read("text", tmp_path)
    said = ["a", "\0", "\x1b[2J", "a\u2028b\x85c\r\n", "[", '{"role": "user"}']
    assert used == [1, *(2 + WRONG.index(text) for text in said)]
