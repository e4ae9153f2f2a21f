"""Nothing that a row holds is left out of what the model sees without the row being refused for it."""

from __future__ import annotations

import pytest

from tests.data.test_template import BY_NULL, CALL, SOURCE, answer, render_text, rendered, turns
from tests.data.tiny_tokenizers import CHATML
from tests.real_tokenizers import REAL, Unavailable, real_tokenizer
from tuningfork.data.template import render
from tuningfork.data.values import Unusable
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


@pytest.mark.parametrize("name", REAL)
def test_published_templates_print_every_word_or_cost_the_row(name: str) -> None:
    try:
        tokenizer = real_tokenizer(name)
    except Unavailable as error:
        pytest.skip(str(error))
    used = 0
    for prompt in CONVERSATIONS.values():
        # Words that no template writes itself.
        said = tuple(Message(t.role, t.content and f"zq{t.content}qz", t.extra) for t in prompt)
        last = (Message("assistant", "zqlastqz"),)
        try:
            got = render(Example(SOURCE, said, (last, (Message("assistant", "zqotherqz"),))), tokenizer)
        except Unusable:
            continue
        used += 1
        for text, answered in zip(got.texts, ("zqlastqz", "zqotherqz"), strict=True):
            assert all(turn.content in text for turn in said) and answered in text
    assert used, "not even a plain conversation can be used"
