"""Conversations of agents, with thoughts, calls and what tools answer, in published templates.

A template may print a turn otherwise once others follow. Whatever it does: what counts of a conversation is what the
assistant says, each turn from behind its header to its end marker, and nothing that anybody else says.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from tests.data.rows import assistant, drop, user
from tests.data.rows import one as read_one
from tests.data.tiny_tokenizers import byte_bpe
from tests.real_tokenizers import DEEPSEEK_V3, GEMMA3, GPT_OSS, LLAMA3, QWEN3, TRL, Unavailable, template, vocabulary
from tests.real_tokenizers import Package as Vocabulary
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.template import LEAVES_OUT, REFUSES, RenderedExample, render
from tuningfork.data.tokens.tokenize import Encoder
from tuningfork.records import Example, Message, Source, Turns


class Printed(NamedTuple):
    """A template, what stands before its assistant turns, and what ends them, by reading it.

    `refuses` are its own words for what it does not take, `within` whether it prints tools' answers within a turn.
    """

    vocabulary: Vocabulary
    template: str
    headers: tuple[str, ...]
    ends: tuple[str, ...]
    refuses: str = "^$"
    within: bool = False


CHATML = ("<|im_start|>assistant\n",)
OPENED = ("<|im_start|>assistant\n<think>", "<|im_start|>assistant\n<think>\n")  # by the generation prompt
TEMPLATES = {
    "qwen2_5": Printed(QWEN3, "qwen2_5.jinja", CHATML, ("<|im_end|>",)),
    "qwen3": Printed(QWEN3, "qwen3.jinja", CHATML, ("<|im_end|>",)),
    "qwen3_5": Printed(QWEN3, "qwen3_5_think.jinja", CHATML + OPENED, ("<|im_end|>",)),
    "qwen3_8": Printed(QWEN3, "qwen3_8.jinja", OPENED, ("<|im_end|>",)),
    "nemotron": Printed(QWEN3, "nemotron_3_ultra.jinja", CHATML + OPENED, ("<|im_end|>",)),
    "glm4": Printed(QWEN3, "glm4moe.jinja", ("<|assistant|>",), ("</tool_call>", "")),  # the next header ends a turn
    "lfm2": Printed(QWEN3, "lfm2_2_5.jinja", CHATML, ("<|im_end|>",)),
    "llama3_1": Printed(
        LLAMA3,
        "llama3_1.jinja",
        ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        ("<|eot_id|>",),
        refuses="only supports single tool-calls",
    ),
    "gemma4": Printed(
        GEMMA3,
        "gemma4_v5.jinja",
        ("<|turn>model\n", "<tool_response|>", "qz", " 11", " 4", " 17"),  # or the words before
        ("<turn|>", "<|tool_response>"),
        within=True,
    ),
    "deepseek_v3": Printed(
        DEEPSEEK_V3,
        "deepseekv3.jinja",
        ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>"),
        ("<｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>"),
    ),
    "gpt_oss": Printed(
        GPT_OSS,
        "gptoss.jinja",
        ("<|start|>assistant",),
        ("<|return|>", "<|end|>", "<|call|>"),
        refuses="Cannot pass both content and thinking",
    ),
}  # fmt: skip
MARKERS = re.compile(r"<\|\w+\|>|<\w+\|>|<\|\w+>|</?think>")
WORD = re.compile(r"zq\d+qz")
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "k"}}, "required": ["key"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": PARAMETERS}}]


@cache
def loaded(name: str) -> tuple[PreTrainedTokenizerBase, Encoder]:
    """The template, with a vocabulary that has all of its markers."""
    printed = TEMPLATES[name]
    try:
        tokenizer, text = copy.deepcopy(vocabulary(printed.vocabulary)), template(TRL, printed.template)
    except Unavailable as error:
        pytest.skip(str(error))
    markers = sorted(set(MARKERS.findall(text)) - tokenizer.get_added_vocab().keys())
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    tokenizer.chat_template = text
    return tokenizer, Encoder(tokenizer, "chat")


def numbered(turns: list[tuple[str, int, bool, bool]], first: int) -> Turns:
    """Turns (role, calls, thinks, speaks) -> turns whose every word is another one, some with a number behind it; some
    calls have no arguments."""
    found: list[Message] = []
    words = (f"zq{n}qz" + ("", " 11", " 4", " 17")[n % 4] for n in range(first, first + 1000))
    for role, calls, thinks, speaks in turns:
        extra: dict[str, object] = {"reasoning_content": next(words)} if thinks else {}
        ids = [f"call{first + len(found):04}{i}" for i in range(calls)]
        if calls:
            functions = [
                {"name": "look", "arguments": {} if (first + len(found) + n) % 5 == 2 else {"key": next(words)}}
                for n in range(calls)
            ]
            extra["tool_calls"] = [
                {"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)
            ]
        found.append(Message(role, next(words) if speaks else "", extra))
        found.extend(Message("tool", next(words), {"tool_call_id": i, "name": "look"}) for i in ids)
    return tuple(found)


@st.composite
def answers(draw: st.DrawFn, thinks: bool) -> list[tuple[str, int, bool, bool]]:
    """An answer: now and then a user's turn, calls with their answers, and words, or thoughts alone."""
    thoughts = st.booleans() if thinks else st.just(False)
    found: list[tuple[str, int, bool, bool]] = []
    for n in range(draw(st.integers(1, 2))):
        found += [("user", 0, False, True)] * bool(n)
        for _ in range(draw(st.integers(0, 2))):
            found.append(("assistant", draw(st.sampled_from([1, 1, 2])), draw(thoughts), draw(st.integers(0, 3)) == 0))
        speaks = not thinks or draw(st.integers(0, 5)) > 0
        found.append(("assistant", 0, draw(thoughts) if speaks else True, speaks))
    return found


@st.composite
def examples(draw: st.DrawFn) -> Example:
    thinks = draw(st.booleans())
    system = numbered([("system", 0, False, True)], 9000) if draw(st.booleans()) else ()
    before = draw(st.one_of(st.just([]), answers(False)))
    prompt = (*system, *numbered([("user", 0, False, True), *before, *[("user", 0, False, True)] * bool(before)], 1000))
    pair = (numbered(draw(answers(thinks)), 3000), numbered(draw(answers(thinks)), 5000))
    called = any(turn.extra.get("tool_calls") for turns in (prompt, *pair) for turn in turns)
    return Example(Source("pairs.jsonl", 1), prompt, pair, template={"tools": TOOLS} if called else {})


def said(turn: Message) -> set[str]:
    return set(WORD.findall(repr((turn.content, turn.extra))))


@pytest.mark.parametrize("train_on", ["all_assistant", "last"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15, derandomize=True)
@given(example=examples())
def test_what_counts_is_what_the_assistant_says_and_nothing_else(name: str, train_on: str, example: Example) -> None:
    tokenizer, encoder = loaded(name)
    printed = TEMPLATES[name]
    other = Example(example.source, example.prompt, example.answers[::-1], template=example.template)
    try:
        got = render(example, tokenizer, train_on)  # type: ignore[arg-type]
    except Unusable as unusable:
        with pytest.raises(Unusable):
            render(other, tokenizer, train_on)  # type: ignore[arg-type]
        assert_lost_for_a_reason(unusable, printed)
        return
    swapped = render(other, tokenizer, train_on)  # type: ignore[arg-type]
    assert (swapped.boundary, swapped.texts, swapped.spans) == (got.boundary, got.texts[::-1], got.spans[::-1])
    assert_spans(got, example, printed, train_on)
    (tokens,) = encoder([got])
    for answer, text, spans in zip(tokens.answers, got.texts, got.spans, strict=True):
        ids = [*tokens.prompt_ids, *answer.ids]
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
        counted = [int(i) for i, counts in zip(answer.ids, answer.mask, strict=True) if counts]
        spelt = WORD.findall(tokenizer.decode(counted))
        assert spelt == [word for start, stop in spans for word in WORD.findall(text[start:stop])]


def assert_lost_for_a_reason(unusable: Unusable, printed: Printed) -> None:
    if unusable.reason == LEAVES_OUT:
        what = r"(content|reasoning_content|tool_calls) of message \d+.*, in the (prompt|(chosen|rejected) answer)$"
        assert re.match(what, unusable.detail) or unusable.detail == "tools"
    elif unusable.reason == REFUSES:
        assert re.search(printed.refuses, unusable.detail)
    else:
        raise AssertionError(f"{unusable.reason}: {unusable.detail}")


def assert_spans(got: RenderedExample, example: Example, printed: Printed, train_on: str) -> None:
    for turns, text, spans in zip(example.answers, got.texts, got.spans, strict=True):
        assistant = [turn for turn in turns if turn.role == "assistant"]
        due = assistant[-1:] if train_on == "last" else assistant
        left = list(spans)
        for turn in due:
            start, stop = left.pop(0)
            words = set(WORD.findall(text[start:stop]))
            if printed.within and turn.extra.get("tool_calls") and turn.content and turn is not turns[-1]:
                again, stop_again = left.pop(0)  # the words beside a call stand behind what the tool answers
                assert text[start:stop].endswith(printed.ends) and text[:again].endswith("<tool_response|>")
                start, stop, words = again, stop_again, words | set(WORD.findall(text[again:stop_again]))
            assert words == said(turn)
            assert text[:start].endswith(printed.headers) or text[start:].startswith("<think>"), text[:start][-40:]
            tail = WORD.split(text[start:stop])[-1]
            ends = [end for end in printed.ends if tail.endswith(end)]
            if printed.within and not tail.strip(" 0123456789"):  # the next call, or words, follow without a marker
                continue
            once = range(1, 1 + max(1, len(turn.extra.get("tool_calls", ()))))  # or once for each call
            assert ends and (not ends[0] or tail.count(ends[0]) in once), tail
        assert not left and got.texts[0][: got.boundary] == got.texts[1][: got.boundary]


@pytest.mark.parametrize("one", ["", "\n", "\n\n", " \n"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_8"])
def test_a_forced_thought_is_cut_off_at_the_same_place_on_both_sides(name: str, one: str) -> None:
    """By hand: the prompt opens a thought with one line break; two are one token, which has a part of the header."""
    tokenizer, encoder = loaded(name)
    thinks = (Message("assistant", "4", {"reasoning_content": f"{one}two"}),)
    for pair in ((thinks, (Message("assistant", "5"),)), ((Message("assistant", "5"),), thinks)):
        example = Example(Source("f", 1), (Message("user", "q"),), pair)
        (tokens,) = encoder([render(example, tokenizer)])
        assert tokenizer.decode(tokens.prompt_ids).endswith("<|im_start|>assistant\n<think>")
        assert all(answer.mask.all() for answer in tokens.answers)


BODY = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.key }}</tool_call>{% endfor %}"
)
BOT = "{{ 'BOT' if m.role == 'assistant' else m.role }}"
LAST = "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
# Templates that leave a header open, drop thoughts, or lack a header where one is asked for: what counts of the turns
# of `CALLED`, by hand. White space behind a header that is left open is no part of it where templates strip it.
OPENERS = {
    "always": (f"{{% for m in messages %}}<|im_start|>{BOT}\n{BODY}<|im_end|>{{% endfor %}}<|im_start|>BOT\n", "\n"),
    "always, with a default system": (
        "<|im_start|>system\nBe.<|im_end|>\n"
        f"{{% for m in messages %}}<|im_start|>{BOT}\n{BODY}<|im_end|>\n{{% endfor %}}<|im_start|>BOT\n",
        "\n",
    ),
    "behind the assistant": (
        f"{{% for m in messages %}}<|im_start|>{BOT}\n{BODY}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt or messages[-1].role == 'assistant' %}{{ '<|im_start|>BOT\n' }}{% endif %}",
        "",
    ),
    "the user's": (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + BODY + "{{ '<|im_end|>\n<|im_start|>user\n' }}"
        "{% else %}{{ '<|im_start|>user\n' if loop.first }}{{ m.content }}{{ '<|im_end|>\n<|im_start|>BOT\n' }}"
        "{% endif %}{% endfor %}",
        "",
    ),
    "the role's beginning": (
        "<|im_start|>{% for m in messages %}" + BOT + "{{ '\n' }}" + BODY + "{{ '<|im_end|>\n<|im_start|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'BOT\n' }}{% endif %}",
        "",
    ),
    "none": (
        f"{{% for m in messages %}}<|im_start|>{BOT}\n{BODY}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>BOT\n' }}{% endif %}",
        "",
    ),
}
CALLED = (
    Message("assistant", "", {"tool_calls": [{"function": {"name": "f", "arguments": {"key": "k"}}}]}),
    Message("user", "more"),
    Message("assistant", "end"),
)


@pytest.mark.parametrize("name", OPENERS)
def test_the_next_turns_header_never_counts(name: str) -> None:
    text, space = OPENERS[name]
    tokenizer = byte_bpe(chat_template=text)
    got = render(Example(Source("f", 1), (Message("user", "q"),), (CALLED, CALLED[-1:])), tokenizer)
    counted = [[text[start:stop] for start, stop in spans] for text, spans in zip(got.texts, got.spans, strict=True)]
    end = f"{space}end<|im_end|>"
    assert counted == [[f"{space}<tool_call>k</tool_call><|im_end|>", end], [end]]


def test_a_header_that_is_left_open_is_found_beside_thoughts_that_are_dropped() -> None:
    text = (
        f"{{% for m in messages %}}<|im_start|>{BOT}\n{LAST}{BODY}<|im_end|>{{% endfor %}}{{{{ '<|im_start|>BOT\n' }}}}"
    )
    tokenizer = byte_bpe(chat_template=text)
    thinks = (*CALLED[:2], Message("assistant", "end", {"reasoning_content": "hm"}))
    got = render(Example(Source("f", 1), (Message("user", "q"),), (thinks, thinks[-1:])), tokenizer)
    counted = [[text[start:stop] for start, stop in spans] for text, spans in zip(got.texts, got.spans, strict=True)]
    end = "<think>hm</think>end<|im_end|>"
    assert counted == [["<tool_call>k</tool_call><|im_end|>", end], [end]]


def test_thoughts_alone_are_an_answer(tmp_path: Path) -> None:
    never = {"role": "assistant", "content": "", "reasoning_content": "endless"}
    got = read_one(tmp_path, {"prompt": [user("q")], "chosen": [assistant("4")], "rejected": [never]})
    assert got.answers[1] == (Message("assistant", "", {"reasoning_content": "endless"}),)
    blank = {**never, "reasoning_content": " \n"}
    reason, detail = drop(tmp_path, {"prompt": [user("q")], "chosen": [assistant("4")], "rejected": [blank]})
    assert (reason, detail) == ("empty answer", "rejected")
