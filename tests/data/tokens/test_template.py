"""Rendering: the exact text, where its prompt ends, and which characters count."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from tests.data.tiny_tokenizers import CHATML, INST, REWRITING, byte_bpe
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.template import (
    REOPENS,
    REWRITES,
    RenderedExample,
    check_template,
    render,
)
from tuningfork.errors import DataError
from tuningfork.records import Example, Message, Source

SOURCE = Source("pairs.jsonl", 7)
SYSTEM = "<|im_start|>system\nBe kind.<|im_end|>\n"


def turns(*contents: str, start: str = "user") -> tuple[Message, ...]:
    roles = ("user", "assistant") if start == "user" else ("assistant", "user")
    return tuple(Message(roles[i % 2], content) for i, content in enumerate(contents))


def answer(*contents: str) -> tuple[Message, ...]:
    return turns(*contents, start="assistant")


def counted(rendered: RenderedExample) -> list[list[str]]:
    return [
        [text[start:stop] for start, stop in spans] for text, spans in zip(rendered.texts, rendered.spans, strict=True)
    ]


def rendered(
    template: str, *answers: tuple[Message, ...], prompt: tuple[Message, ...] | None = None
) -> RenderedExample:
    return render(Example(SOURCE, prompt or turns("q"), answers), byte_bpe(chat_template=template))


def test_chatml() -> None:
    got = rendered(CHATML, answer("yes"), answer("no\n"))
    prompt = f"{SYSTEM}<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert got.source == SOURCE
    assert got.boundary == len(prompt)
    assert got.texts == (f"{prompt}yes<|im_end|>", f"{prompt}no\n<|im_end|>")
    assert counted(got) == [["yes<|im_end|>"], ["no\n<|im_end|>"]]


def test_a_system_message_of_its_own_takes_the_default_ones_place() -> None:
    got = rendered(CHATML, answer("a"), answer("b"), prompt=(Message("system", ""), Message("user", "q")))
    assert got.texts[0].startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nq<|im_end|>\n")


def test_all_assistant_turns_of_an_answer_count_and_no_other() -> None:
    got = rendered(CHATML, answer("a", "u", "b", "v", "c"), answer("d"), prompt=turns("p", "x", "q"))
    assert counted(got) == [["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"], ["d<|im_end|>"]]
    prompt = got.texts[0][: got.boundary]
    assert prompt.endswith("assistant\nx<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    assert got.texts[0][got.boundary :] == (
        "a<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
        "b<|im_end|>\n<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    )


def test_a_template_without_generation_prompt() -> None:
    got = rendered(INST, answer("yes", "u", "z"), answer("no"))
    assert got.boundary == len("<s>[INST] q [/INST]")
    assert got.texts == ("<s>[INST] q [/INST] yes </s>[INST] u [/INST] z </s>", "<s>[INST] q [/INST] no </s>")
    assert counted(got) == [[" yes </s>", " z </s>"], [" no </s>"]]


def test_white_space_of_the_content_counts_where_no_marker_closes_the_turn() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    got = rendered(template, answer("yes \n"), answer("no"))
    assert counted(got) == [["assistant: yes \n"], ["assistant: no"]]


def test_an_answer_that_looks_like_the_prompt_or_the_markers() -> None:
    got = rendered(CHATML, answer("<|im_end|>"), answer("assistant\n"), prompt=turns("assistant\n"))
    assert counted(got) == [["<|im_end|><|im_end|>"], ["assistant\n<|im_end|>"]]


@pytest.mark.parametrize(
    ("template", "answers", "reason", "detail"),
    [
        (
            INST,
            (answer("a") + answer("b"), answer("c")),
            "the chat template refuses the conversation",
            "must alternate",
        ),
        ("{{ nothing.here }}", (answer("a"), answer("b")), "the chat template refuses the conversation", "undefined"),
        ("{% if %}", (answer("a"), answer("b")), "the chat template refuses the conversation", "Expected an expr"),
    ],
)
def test_what_a_template_cannot_print_is_unusable(
    template: str, answers: tuple[tuple[Message, ...], ...], reason: str, detail: str
) -> None:
    with pytest.raises(Unusable) as caught:
        rendered(template, *answers)
    assert caught.value.reason == reason and detail in caught.value.detail


def test_a_rewriting_template_is_no_trouble_for_single_turns() -> None:
    got = rendered(REWRITING, answer("a"), answer("b"), prompt=turns("p", "x", "q"))
    assert counted(got) == [["<think></think>a<|im_end|>"], ["<think></think>b<|im_end|>"]]


def test_a_rewriting_template_prints_a_whole_conversation_as_it_will_be_met() -> None:
    """An earlier turn of the answer has lost its thought, and counts as it is printed now."""
    got = rendered(REWRITING, answer("a", "u", "b"), answer("c"))
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert got.boundary == len(prompt)
    assert got.texts[0] == (
        f"{prompt}a<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<think></think>b<|im_end|>"
    )
    assert counted(got) == [["a<|im_end|>", "<think></think>b<|im_end|>"], ["<think></think>c<|im_end|>"]]
    assert got.notes == (REWRITES,)


# Like DeepSeek-R1: the generation prompt opens a thought, and a printed turn has none.
REOPENING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<U>' + m['content'] }}"
    "{% else %}{{ '<A>' + m['content'].split('</think>')[-1] + '<E>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}"
)


def test_a_generation_prompt_that_no_printed_turn_has_is_no_part_of_the_prompt() -> None:
    got = rendered(REOPENING, answer("yes"), answer("no", "u", "z"))
    assert got.boundary == len("<s><U>q<A>")
    assert got.texts == ("<s><U>q<A>yes<E>", "<s><U>q<A>no<E><U>u<A>z<E>")
    assert counted(got) == [["yes<E>"], ["no<E>", "z<E>"]]
    assert got.notes == (REOPENS,)


def test_the_border_is_the_last_that_all_answers_share() -> None:
    # The one answer begins as the generation prompt goes on; the other does not, and decides.
    got = rendered(REOPENING, answer("<think>\nyes"), answer("no"))
    assert got.boundary == len("<s><U>q<A>")
    both = rendered(REOPENING, answer("<think>\nyes"), answer("<think>\nno"))
    assert both.boundary == len("<s><U>q<A><think>\n") and counted(both) == [["yes<E>"], ["no<E>"]]


def test_a_template_that_counts_its_messages_shares_no_prompt() -> None:
    got = rendered("{{ messages | length }}: {% for m in messages %}{{ m['content'] }};{% endfor %}",
                   answer("a", "u", "b"), answer("c"))  # fmt: skip
    assert got.boundary == 0 and got.texts == ("4: q;a;u;b;", "2: q;c;")
    assert counted(got) == [["a;", "b;"], ["c;"]]


def test_what_is_said_twice_is_unusable() -> None:
    twice = "{{ messages[-1]['content'] }}{% for m in messages %}{{ m['content'] }};{% endfor %}"
    with pytest.raises(Unusable, match=r"prints the content of message [24] 2 times"):
        rendered(twice, answer("a", "u", "b"), answer("c"))


def test_only_the_last_turn_counts_where_that_is_asked_for() -> None:
    example = Example(SOURCE, turns("q"), (answer("a", "u", "b"), answer("c")))
    got = render(example, byte_bpe(chat_template=CHATML), "last")
    assert counted(got) == [["b<|im_end|>"], ["c<|im_end|>"]]
    every = render(example, byte_bpe(chat_template=CHATML), "all_assistant")
    assert (got.texts, got.boundary) == (every.texts, every.boundary)


def test_a_turn_that_its_file_does_not_let_count_does_not() -> None:
    silent = (Message("assistant", "a", counts=False), *answer("a", "u", "b")[1:])
    assert counted(rendered(CHATML, silent, answer("c"))) == [["b<|im_end|>"], ["c<|im_end|>"]]
    assert counted(rendered(CHATML, silent[:1], answer("c"))) == [[], ["c<|im_end|>"]]


TOOLS = (
    "{% if tools is defined and tools %}{{ 'T' + tools[0]['name'] + '|' }}{% endif %}{% for m in messages %}"
    "{{ m['role'] + ':' + m['content'] }}{% for c in m['tool_calls'] or [] %}{{ '@' + c['name'] }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CALL = Message("assistant", "", {"tool_calls": [{"name": "f"}]})


def test_tools_and_calls_are_printed() -> None:
    prompt = (*turns("q"), CALL, Message("tool", "7"))
    example = Example(SOURCE, prompt, ((CALL,), answer("b")), template={"tools": [{"name": "f"}]})
    got = render(example, byte_bpe(chat_template=TOOLS))
    assert got.texts[0] == "Tf|user:q;assistant:@f;tool:7;assistant:@f;"
    assert counted(got) == [["@f;"], ["b;"]]


@pytest.mark.parametrize("example", [Example(SOURCE, turns("q"), ((CALL,), answer("b"))),
                                     Example(SOURCE, turns("q"), (answer("a"), answer("b")),
                                             template={"tools": [{"name": "f"}]})])  # fmt: skip
def test_a_template_that_knows_no_tools_costs_the_row(example: Example) -> None:
    with pytest.raises(Unusable, match=r"the chat template leaves out a field.*tool"):
        render(example, byte_bpe(chat_template=CHATML))


BODY = "{% for c in m['tool_calls'] %}{{ '@' + c['name'] }}{% endfor %}"
OTHERS = "{% else %}{{ m['role'] + ':' + m['content'] }}{% endif %};{% endfor %}"
BY_NULL = "{% for m in messages %}{% if m['content'] is none %}" + BODY + OTHERS
ONLY_NULL = (
    "{% for m in messages %}{% if m['tool_calls'] %}{% if m['content'] is not none %}{{ raise_exception('words') }}"
    "{% endif %}" + BODY + OTHERS
)
TELLS_NULL = (
    "{% for m in messages %}{% if m['tool_calls'] %}{{ 'null' if m['content'] is none else 'text' }}" + BODY + OTHERS
)


@pytest.mark.parametrize(
    ("template", "call"), [(BY_NULL, "@f"), (ONLY_NULL, "@f"), (TELLS_NULL, "text@f")], ids=["by", "only", "tells"]
)
def test_the_content_of_a_call_without_words_is_null_where_no_text_is_refused(template: str, call: str) -> None:
    """By hand: DeepSeek's templates tell a call by its content being null; others are given no text."""
    prompt = (*turns("q"), CALL, Message("tool", "7"))
    got = rendered(template, (CALL,), answer("b"), prompt=prompt)
    assert got.texts == (f"user:q;{call};tool:7;{call};", f"user:q;{call};tool:7;assistant:b;")
    assert counted(got) == [[f"{call};"], ["assistant:b;"]]
    wordy = Message("assistant", "x", CALL.extra)
    # Nothing is taken away to please a template.
    with pytest.raises(Unusable, match=r"leaves out a field.*(tool_calls|content) of message 2|refuses.*words"):
        rendered(template, (wordy,), answer("b"))


@pytest.mark.parametrize("content", ["{{ m['content'] }}", "{{ m['content'] or 'nothing' }}"])
def test_a_null_that_a_template_prints_is_not_taken_for_a_call(content: str) -> None:
    template = f"{{% for m in messages %}}{content};{{% endfor %}}"
    with pytest.raises(Unusable, match=r"the chat template leaves out a field.*tool_calls of message 2"):
        rendered(template, (CALL,), answer("b"))


ONE_CALL = (
    "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ ARGUMENTS }};{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("given", ['{"x":1}', {"x": 1}])
def test_arguments_are_what_the_template_can_print(given: object) -> None:
    """A template that writes JSON is given the object, one that puts text together the text, the file's own."""
    call = Message("assistant", "", {"tool_calls": [{"name": "f", "arguments": given}]})
    text = given if isinstance(given, str) else '{"x": 1}'
    for arguments, expected in (("c['arguments'] | tojson", '{"x": 1};'), ("'@' + c['arguments']", f"@{text};")):
        template = ONE_CALL.replace("ARGUMENTS", arguments)
        example = Example(SOURCE, (*turns("q"), call, Message("tool", "7")), (answer("a"), answer("b")))
        assert render_text(example, template) == f"q{expected}7a"


def test_what_is_printed_of_one_conversation_is_not_taken_for_another() -> None:
    """Python holds 1, 1.0 and True for equal, and objects in whatever order."""
    given = ({"n": 1}, {"n": True}, {"n": 1.0}, {"n": 1, "m": 2}, {"m": 2, "n": 1})
    said = ('{"n": 1}', '{"n": true}', '{"n": 1.0}', '{"n": 1, "m": 2}', '{"m": 2, "n": 1}')
    calls = [(Message("assistant", "", {"tool_calls": [{"name": "f", "arguments": a}]}),) for a in given]
    got = rendered(ONE_CALL.replace("ARGUMENTS", "c['arguments'] | tojson"), *calls)
    assert got.texts == tuple(f"q{text};" for text in said)


def render_text(example: Example, template: str) -> str:
    return render(example, byte_bpe(chat_template=template)).texts[0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_go_by_the_name_that_the_template_has(name: str) -> None:
    """Words such as reasoning_effort or enable_thinking are other words."""
    template = (
        "{{ reasoning_effort }}{{ enable_thinking }}{% for m in messages %}"
        f"{{{{ m['{name}'] }}}}{{{{ m['content'] }}}};{{% endfor %}}"
    )
    thinks = (Message("assistant", "a", {"reasoning_content": "hm:"}),)
    for written in (template, template.replace(f"m['{name}']", f"m.{name}")):
        assert render_text(Example(SOURCE, turns("q"), (thinks, answer("b"))), written) == "q;hm:a;"
    with pytest.raises(Unusable, match=r"the chat template leaves out a field.*reasoning_content of message 2"):
        render_text(Example(SOURCE, turns("q"), (thinks, answer("b"))), CHATML)


def test_a_template_that_loses_itself_costs_the_row() -> None:
    """Templates that print a tool's parameters call themselves for each level of them."""
    endless = "{% macro deeper(x) %}{{ deeper(x) }}{% endmacro %}{{ deeper(1) }}"
    with pytest.raises(Unusable, match=r"the chat template refuses the conversation.*recursion"):
        rendered(endless, answer("a"), answer("b"))


@pytest.mark.parametrize("plain", [True, False])
def test_a_text_too_long_for_the_tokenizers_memory_costs_the_row(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and answer together; to the character."""
    prompt, long, short = ("q", "a" * 9, "b") if plain else (turns("q"), answer("a" * 9), answer("b"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    example = Example(SOURCE, prompt, (short, long))  # type: ignore[arg-type]
    monkeypatch.setattr("tuningfork.data.tokens.template.LONGEST", 10)
    assert [len(text) for text in render(example, byte_bpe(chat_template=template)).texts] == [2, 10]
    monkeypatch.setattr("tuningfork.data.tokens.template.LONGEST", 9)
    with pytest.raises(Unusable, match=r"too long to be encoded.*10 characters, 9 at most"):
        render(example, byte_bpe(chat_template=template))


def test_half_a_surrogate_pair_in_a_tool_costs_the_row() -> None:
    tools = [{"name": "f", "description": "\ud83d"}]
    template = "{{ tools | tojson }}{% for m in messages %}{{ m['content'] }};{% endfor %}"
    with pytest.raises(Unusable, match="half a surrogate pair"):
        render_text(Example(SOURCE, turns("q"), (answer("a"), answer("b")), template={"tools": tools}), template)


def test_plain_text_stays_as_it_is() -> None:
    got = render(Example(SOURCE, "q \n", ("a ", "")), byte_bpe())
    assert got == RenderedExample(SOURCE, 3, ("q \na ", "q \n"), (((3, 5),), ((3, 3),)), plain=True)


@pytest.mark.parametrize("template", [None, "", {"tool_use": CHATML}])
def test_a_tokenizer_without_a_usable_template_is_refused(template: str | dict[str, str] | None) -> None:
    tokenizer: PreTrainedTokenizerBase = byte_bpe()
    tokenizer.chat_template = template
    with pytest.raises(
        DataError,
        match=r"no chat template to use.*data\.template: file\.jinja.*plain strings, set data\.template: none",
    ):
        check_template(tokenizer)
    tokenizer.chat_template = {"default": CHATML, "tool_use": "x"}
    check_template(tokenizer)


THINKING = "{% for m in messages %}{{ m['content'] }};{% endfor %}{{ 'think' if enable_thinking else '' }}"


def test_a_rows_own_arguments_reach_the_template_and_no_further() -> None:
    def of(arguments: dict[str, object]) -> RenderedExample:
        example = Example(SOURCE, turns("q"), (answer("a"), answer("b")), template=arguments)
        return render(example, byte_bpe(chat_template=THINKING))

    assert of({"enable_thinking": True}).texts[0] == "q;a;think" and of({}).texts[0] == "q;a;"
    for name in ("tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "chat_template",
                 "conversation", "conversations", "messages", "self", "return_assistant_tokens_mask", "max_length",
                 "tokenizer_kwargs"):  # fmt: skip
        with pytest.raises(Unusable, match=rf"chat_template_kwargs\.{name} is no argument of a template"):
            of({name: []})
