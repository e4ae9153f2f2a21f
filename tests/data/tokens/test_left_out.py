"""Nothing that a row holds is left out of what the model sees without the row being refused for it."""

from __future__ import annotations

import pytest

from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.data.tokens.test_template import BY_NULL, CALL, REOPENING, SOURCE, answer, render_text, rendered, turns
from tests.real_tokenizers import REAL, Unavailable, real_tokenizer
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.template import render
from tuningfork.records import Example, Message

KNOWN = (
    "{% for m in messages %}{% if m['role'] in ROLES %}{{ m['role'] + ':' + m['content'] + ';' }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_what_is_said_in_a_role_that_a_template_does_not_know_is_not_lost_in_silence(role: str) -> None:
    """By hand; the word is one that is printed elsewhere, too."""
    said = Message(role, "user")
    template = KNOWN.replace("ROLES", "('user', 'assistant')")
    for prompt in ((said, *turns("user")), (*turns("q", "a"), said, *turns("user"))):
        with pytest.raises(
            Unusable, match=rf"leaves out a field.*content of message {prompt.index(said) + 1}, .*{role}"
        ):
            rendered(template, answer("user"), answer("b"), prompt=prompt)
        knows = rendered(KNOWN.replace("ROLES", f"('user', 'assistant', '{role}')"), answer("user"), prompt=prompt)
        assert f"{role}:user;" in knows.texts[0]
    assert rendered(template, answer("user"), prompt=(Message(role, ""), *turns("q"))).texts == (
        "user:q;assistant:user;",
    )


def test_a_template_that_reads_what_is_said_is_given_it() -> None:
    """No word of ours in place of a tool's JSON: what is refused for it is read."""
    reading = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}"
        "{% if m['content'][0] != '{' %}{{ raise_exception('no JSON') }}{% endif %}"
        "<{{ m['content'][1:-1] }}>{% else %}{{ m['content'] }};{% endif %}{% endfor %}"
    )
    prompt = (*turns("q", "a"), Message("tool", "{7}"))
    assert rendered(reading, answer("b"), prompt=prompt).texts == ("q;a;<7>b;",)
    with pytest.raises(Unusable, match=r"content of message 1, of role assistant"):
        rendered(reading.replace("{{ m['content'] }};", "{{ m['role'] }};"), answer("b"), prompt=(prompt[1], prompt[2]))


@pytest.mark.parametrize("change", ["upper", "capitalize", "trim", "tojson", "tojson(ensure_ascii=true)", "urlencode"])
def test_words_may_be_printed_in_another_way(change: str) -> None:
    """In capitals, or as JSON: they are not left out."""
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] | CHANGE }};{% endfor %}"
    prompt = (Message("system", "s"), *turns("q", "a"))
    text = rendered(template.replace("CHANGE", change), answer("b"), prompt=prompt).texts[0]
    assert text.lower().replace('"', "") == "system:s;user:q;assistant:a;assistant:b;"


@pytest.mark.parametrize(
    "said", ["<think>why</think>yes", "<think>\nwhy\n</think>\n\nyes", "why</think>", " why </think>yes"]
)
def test_thoughts_that_a_template_cuts_out_of_an_answer_cost_the_row(said: str) -> None:
    """They may be left out of earlier turns, and where there are none nothing is lost."""
    with pytest.raises(Unusable, match=r"leaves out a field', 'thoughts of message 2, before its </think>"):
        rendered(REOPENING, answer(said), answer("no"))
    for kept in ("<think>\n\n</think>\n\nyes", "</think>yes", "<think>yes", "yes"):
        assert rendered(REOPENING, answer(kept), answer("no")).texts[0].endswith("yes<E>")
    earlier = rendered(REOPENING, answer("yes"), answer("no"), prompt=turns("q", said, "u"))
    assert "why" not in earlier.texts[0]
    assert said in rendered("{% for m in messages %}{{ m['content'] }};{% endfor %}", answer(said)).texts[0]


def test_what_becomes_of_a_row_does_not_depend_on_the_rows_before_it() -> None:
    """A template that prints the words beside one call but not beside two, and one that leaves system messages out."""
    beside = "{% if m.tool_calls | length < 2 %}{{ m['content'] }}{% endif %}{{ m.tool_calls | tojson }};"
    calling = (
        "{% for m in messages %}{% if m.tool_calls %}" + beside + "{% else %}{{ m['content'] }};{% endif %}{% endfor %}"
    )
    one, two = (Message("assistant", "words", {"tool_calls": [{"name": "f"}] * calls}) for calls in (1, 2))
    rows = [((one, *turns("q")), True), ((two, *turns("q")), False)]
    unsaid = KNOWN.replace("ROLES", "('user', 'assistant')")
    said = f"{731552}{0:07}7"  # what stands for the words of the first message, were it not in the row itself
    unprinted = [((Message("system", text), *turns(f"q{said}")), False) for text in ("s", said)]
    for template, cases in ((calling, rows), (unsaid, unprinted)):
        for order in (cases, cases[::-1], cases * 2):
            tokenizer = byte_bpe(chat_template=template)
            for prompt, used in order:
                example = Example(SOURCE, prompt, (answer("a"),))
                if used:
                    assert "words" in render(example, tokenizer).texts[0]
                else:
                    with pytest.raises(Unusable, match=r"leaves out a field.*content of message 1"):
                        render(example, tokenizer)


@pytest.mark.parametrize("first", [0, 1])
def test_thoughts_that_are_cut_out_are_seen_whatever_the_rows_before_it_lack(first: int) -> None:
    """Empty thoughts that a template cuts out are no loss, in whichever row; thoughts are one in every row."""
    tokenizer = byte_bpe(chat_template=REOPENING)
    for said in ("<think>\n\n</think>\n\nyes", "<think>why</think>yes")[:: 1 if first else -1] * 2:
        example = Example(SOURCE, turns("q"), (answer(said), answer("no")))
        if "why" in said:
            with pytest.raises(Unusable, match="thoughts of message 2, before its </think>, in the chosen answer"):
                render(example, tokenizer)
        else:
            assert render(example, tokenizer).texts[0].endswith("yes<E>")


def test_a_template_that_is_exchanged_is_looked_at_anew() -> None:
    tokenizer = byte_bpe(chat_template=KNOWN.replace("ROLES", "('system', 'user', 'assistant')"))
    example = Example(SOURCE, (Message("system", "s"), *turns("q")), (answer("a"),))
    assert "system:s;" in render(example, tokenizer).texts[0]
    tokenizer.chat_template = KNOWN.replace("ROLES", "('user', 'assistant')")
    with pytest.raises(Unusable, match="content of message 1, of role system"):
        render(example, tokenizer)


def test_what_one_row_tells_the_template_decides_for_it_alone() -> None:
    """Whether words are printed is remembered for rows that are alike, in this too."""
    template = KNOWN.replace("ROLES", "(['user', 'assistant'] + (['system'] if keep else []))")
    tokenizer = byte_bpe(chat_template=template)
    prompt = (Message("system", "s"), *turns("q"))
    for keep in (True, False, True):
        example = Example(SOURCE, prompt, (answer("a"),), template={"keep": keep})
        if keep:
            assert render(example, tokenizer).texts == ("system:s;user:q;assistant:a;",)
        else:
            with pytest.raises(Unusable, match="content of message 1, of role system"):
                render(example, tokenizer)


def test_words_beside_a_call_may_be_left_out_once_the_answer_is_there() -> None:
    """As thoughts are; gpt-oss prints them up to there. Where they are never printed, they are lost."""
    later = (
        "{% for m in messages %}{% if not m['tool_calls'] or SHOWN %}{{ m['content'] }}{% endif %}"
        "{% for c in m['tool_calls'] or [] %}@{% endfor %};{% endfor %}"
    )
    prompt = (*turns("q"), Message("assistant", "hm", CALL.extra), Message("tool", "7"))
    assert rendered(later.replace("SHOWN", "loop.last"), answer("a"), prompt=prompt).texts == ("q;@;7;a;",)
    with pytest.raises(Unusable, match="content of message 2, of role assistant"):
        rendered(later.replace("SHOWN", "false"), answer("a"), prompt=prompt)


def test_documents_that_are_not_printed_are_not_lost_in_silence() -> None:
    example = Example(SOURCE, turns("q"), (answer("a"),), template={"documents": [{"text": "d"}]})
    with pytest.raises(Unusable, match=r"leaves out a field.*documents"):
        render_text(example, CHATML)
    assert render_text(example, "{% for d in documents %}{{ d['text'] }};{% endfor %}" + CHATML).startswith("d;")


def test_what_is_missing_beside_a_call_by_null_is_named() -> None:
    """The calls are printed by the second attempt, so it is not they that are left out."""
    example = Example(SOURCE, turns("q"), ((CALL,), answer("b")), template={"tools": [{"name": "f"}]})
    with pytest.raises(Unusable, match=r"leaves out a field', 'tools'"):
        render_text(example, BY_NULL)


WHOLE_CALL = Message(
    "assistant", "", {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
)
ONE, TWO = Message("user", "one"), Message("user", "two")
CONVERSATIONS = {
    "plain": (ONE, Message("assistant", "said"), TWO),
    "system": (Message("system", "opening"), ONE),
    "developer": (Message("developer", "opening"), ONE),
    "both": (Message("system", "opening"), Message("developer", "more"), ONE),
    "late system": (ONE, Message("assistant", "said"), Message("system", "late"), TWO),
    "tool": (ONE, WHOLE_CALL, Message("tool", "found")),
    "words beside a call": (ONE, Message("assistant", "said", WHOLE_CALL.extra), Message("tool", "found")),
}


# What each published template prints whole, by reading it; all print what is plain.
PRINTED = {
    "smollm2": {"system", "developer", "both", "late system"},
    "qwen2_5": {"system", "late system", "tool", "words beside a call"},
    "qwen3": {"system", "late system", "tool", "words beside a call"},
    "llama3": {"system", "developer", "both", "late system"},
    "llama3_first": {"system", "developer", "both", "late system"},
    "llama3_1": {"system", "developer", "both", "late system", "tool"},
    "mistral": {"system"},
    "phi3": {"system", "late system"},
    "gemma2": set(),
    "gemma3": {"system"},
    "deepseek_v3": {"system", "late system", "tool"},
    "deepseek_r1": {"system", "late system", "tool"},
    "gpt_oss": {"system", "developer", "tool", "words beside a call"},
}


@pytest.mark.parametrize("name", REAL)
def test_published_templates_print_every_word_or_cost_the_row(name: str) -> None:
    try:
        tokenizer = real_tokenizer(name)
    except Unavailable as error:
        pytest.skip(str(error))
    used = set()
    for kind, prompt in CONVERSATIONS.items():
        # Words that no template writes itself.
        said = tuple(Message(t.role, t.content and f"zq{t.content}qz", t.extra) for t in prompt)
        last = (Message("assistant", "zqlastqz"),)
        try:
            got = render(Example(SOURCE, said, (last, (Message("assistant", "zqotherqz"),))), tokenizer)
        except Unusable:
            continue
        used.add(kind)
        for text, answered in zip(got.texts, ("zqlastqz", "zqotherqz"), strict=True):
            # gpt-oss takes words beside a call for thoughts, which it prints up to the answer.
            due = [turn for turn in said if not (turn.extra and name == "gpt_oss")]
            assert all(turn.content in text for turn in due) and answered in text
    assert used == {"plain", *PRINTED[name]}
