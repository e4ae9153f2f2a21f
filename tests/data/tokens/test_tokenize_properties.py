"""Any conversation, in any of the common kinds of template, with tokenizers that merge across every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.data.joint import Style, boundary, byte_spans, differences, encoded, refused, whole
from tests.data.tiny_tokenizers import CHATML, INST, REWRITING, SPECIAL, byte_bpe, sentence_piece
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tokens.template import render
from tuningfork.data.tokens.tokenize import Encoder
from tuningfork.records import Example, Message, Source, TokenExample, Turns

BOS, EOS = 0, 1

# Like Gemma: trims, and puts a system message into the first user turn.
MERGING_SYSTEM = (
    "{{ bos_token }}{% set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages if m['role'] != 'system' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + (system if loop.first else '') + m['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Mistral: a system message goes into the last user turn, wherever that is.
MOVING_SYSTEM = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if messages[0]['role'] == 'system' and m is sameas(users[-1]) %}{{ messages[0]['content'] + '\n\n' }}"
    "{% endif %}{{ m['content'] + '[/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Like Phi-3: an EOS of its own closes a conversation that ends.
CLOSING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Like DeepSeek-R1: the generation prompt opens a thought that finished turns no longer have.
OPENING_THOUGHT = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")


@dataclass(frozen=True)
class Family:
    """A kind of template, how its assistant turns look, and whether every printing continues the one before."""

    template: str
    style: Style
    continues: bool = True


TURN = Style("<|im_start|>assistant\n", "<|im_end|>")
FAMILIES = {
    "chatml": Family(CHATML, TURN),
    "inst": Family(INST, Style("[/INST]", " </s>")),
    "merging_system": Family(MERGING_SYSTEM, TURN),
    "moving_system": Family(MOVING_SYSTEM, Style("[/INST]", "</s>"), continues=False),
    "rewriting": Family(REWRITING, TURN, continues=False),
    "closing": Family(CLOSING, Style("<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>\n</s>"), continues=False),
    "opening_thought": Family(OPENING_THOUGHT, TURN, continues=False),
}

LETTERS = "ab4.\n<>|[]/é"
contents = st.lists(
    st.one_of(
        st.text("ab4 .\n\té\u0301\U0001f600你", min_size=1, max_size=5),
        st.sampled_from([*SPECIAL, "<|im_start|>assistant\n", "[/INST]", " [INST] ", "<think></think>", "  \n\n"]),
    ),
    min_size=1,
    max_size=3,
).map("".join)
said = contents.filter(lambda text: bool(text.strip()))


@st.composite
def merges(draw: st.DrawFn, letters: list[str]) -> list[tuple[str, str]]:
    """Merges, each of two tokens that are there before it."""
    tokens, found = list(letters), []
    for _ in range(draw(st.integers(0, 12))):
        a, b = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if a + b not in tokens:
            found.append((a, b))
            tokens.append(a + b)
    return found


@st.composite
def tokenizers(draw: st.DrawFn) -> PreTrainedTokenizerFast:
    """Byte-level, or like SentencePiece's; word by word or with merges across anything but special tokens."""
    if draw(st.booleans()):
        return sentence_piece(
            draw(merges([*LETTERS, "▁"])), letters=LETTERS, prepend=draw(st.sampled_from(["first", "never"]))
        )
    letters = [*"ab4.<>|[]/ĠĊ", *"Ã©ðŁĺĢ"]  # the last are the bytes of é and of an emoji
    return byte_bpe(
        draw(merges(letters)),
        adds_bos=draw(st.booleans()),
        trim_offsets=draw(st.booleans()),
        splits_words=draw(st.booleans()),
    )


@st.composite
def turns(draw: st.DrawFn, first: str, most: int) -> Turns:
    """Turns of alternating roles that begin and end with the same."""
    roles = (first, "user" if first == "assistant" else "assistant")
    count = 2 * draw(st.integers(0, most)) + 1
    return tuple(Message(roles[i % 2], draw(said)) for i in range(count))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Turns, list[Turns]]:
    """A prompt with one to three answers; now and then roles that strict templates refuse."""
    system = draw(
        st.one_of(st.just(()), contents.map(lambda text: (Message("system", text),)), st.just((Message("system", ""),)))
    )
    prompt = system + draw(turns("user", 2))
    if draw(st.integers(0, 9)) == 0:
        prompt += (Message("user", draw(said)),)
    return prompt, draw(st.lists(turns("assistant", 2), min_size=1, max_size=3))


# Where a template trims it, the answer's white space seems to be printed: it is the template's, behind the end marker.
LIKE_ITS_END = ((Message("user", "4"), Message("user", "4")), [(Message("assistant", "<|im_end|>\n"),)])


def begin_unlike_the_thought(conversations: Sequence[Turns]) -> bool:
    """Whether one turn begins with the thought that OPENING_THOUGHT opens, and another with its first sign alone."""
    said = [turn.content for turns in conversations for turn in turns if turn.role == "assistant"]
    alike = [text.startswith("<think>") for text in said if text.startswith("<")]
    return any(alike) and not all(alike)


@pytest.mark.xfail(strict=True, reason="the sign that both begin with is taken for a header, and does not count")
def test_a_turn_that_begins_with_the_first_sign_of_a_thought_leaves_it_to_the_others() -> None:
    tokenizer = byte_bpe(chat_template=OPENING_THOUGHT)
    prompt = (Message("user", "4"), Message("user", "4"))
    answers = [(Message("assistant", text),) for text in ("<s>", "<think></think>4")]
    wholes = [whole(tokenizer, TURN, prompt, answer) for answer in answers]
    assert differences(encoded(tokenizer, prompt, answers), wholes, boundary(tokenizer, prompt, wholes)) == []


def thinks_twice(answers: Sequence[Turns]) -> bool:
    """Whether several turns of one answer begin with a thought of their own."""
    return any(sum(t.role == "assistant" and t.content.startswith("<think>") for t in turns) > 1 for turns in answers)


@pytest.mark.xfail(strict=True, reason="the thought that the first of them opens is taken for a header there")
def test_two_turns_of_an_answer_that_begin_with_a_thought_of_their_own_count_it() -> None:
    tokenizer = byte_bpe(chat_template=OPENING_THOUGHT)
    prompt, thought = (Message("user", "4"), Message("user", "4")), Message("assistant", "<think></think>4")
    answers = [(thought, Message("user", "4"), thought)]
    wholes = [whole(tokenizer, TURN, prompt, answer) for answer in answers]
    assert differences(encoded(tokenizer, prompt, answers), wholes, boundary(tokenizer, prompt, wholes)) == []


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60)
@example(tokenizer=byte_bpe(), conversation=LIKE_ITS_END)
@given(tokenizer=tokenizers(), conversation=conversations())
def test_what_is_used_is_the_joint_reading_and_nothing_else_is_lost(
    name: str, tokenizer: PreTrainedTokenizerFast, conversation: tuple[Turns, list[Turns]]
) -> None:
    family, (prompt, answers) = FAMILIES[name], conversation
    known = begin_unlike_the_thought((prompt, *answers)) or thinks_twice(answers)  # the two tests above
    assume(name != "opening_thought" or not known)
    tokenizer.chat_template = family.template
    try:
        found = encoded(tokenizer, prompt, answers)
    except Unusable as unusable:
        assert unusable.reason and unusable.detail
        assert refused(tokenizer, prompt, answers) or not family.continues
        return
    assert not refused(tokenizer, prompt, answers)
    wholes = [whole(tokenizer, family.style, prompt, answer) for answer in answers]
    assert differences(found, wholes, boundary(tokenizer, prompt, wholes)) == []
    assert all(answer.mask.any() for answer in found.answers)


@pytest.mark.parametrize("template", [CHATML, MERGING_SYSTEM], ids=["as it is", "trimmed"])
@pytest.mark.parametrize("text", ["<|im_end|>\n", "<|im_end|><|im_end|>\n", " <|im_end|>\n"])
def test_content_that_reads_like_its_end_marker_takes_no_white_space_from_the_template(
    template: str, text: str
) -> None:
    tokenizer = byte_bpe(chat_template=template)
    prompt, answers = (Message("user", "q"),), [(Message("assistant", answer),) for answer in (text, "no")]
    wholes = [whole(tokenizer, TURN, prompt, answer) for answer in answers]
    assert differences(encoded(tokenizer, prompt, answers), wholes, boundary(tokenizer, prompt, wholes)) == []


harmless = st.text("ab4 .\n\té\u0301\U0001f600你", min_size=1, max_size=5).filter(lambda text: bool(text.strip()))


@settings(max_examples=60)
@given(tokenizers(), harmless, st.lists(harmless, min_size=1, max_size=3))
def test_one_bos_in_front_and_one_end_behind_each_answer(
    tokenizer: PreTrainedTokenizerFast, question: str, answers: list[str]
) -> None:
    tokenizer.chat_template = INST
    example = encoded(tokenizer, (Message("user", question),), [(Message("assistant", text),) for text in answers])
    assert_framed(example, bos=True)


@settings(max_examples=120)
@given(tokenizers(), st.one_of(st.just(""), harmless), st.lists(harmless, min_size=1, max_size=3))
def test_plain_text_is_its_joint_reading_between_bos_and_eos(
    tokenizer: PreTrainedTokenizerFast, prompt: str, answers: list[str]
) -> None:
    (example,) = Encoder(tokenizer, "none")([render(Example(Source("f", 1), prompt, tuple(answers)), tokenizer)])
    bos = tokenizer("").input_ids
    assert_framed(example, bos=bool(bos))
    for answer, text in zip(example.answers, answers, strict=True):
        ids = tokenizer(f"{prompt}{text}", add_special_tokens=False).input_ids
        assert [*example.prompt_ids, *answer.ids] == [*bos, *ids, EOS]
        spans = byte_spans(tokenizer, f"{prompt}{text}", ids)
        mask = [False] * len(bos) + [stop > len(prompt.encode()) for _, stop in spans] + [True]
        assert [*[False] * len(example.prompt_ids), *answer.mask] == mask


def assert_framed(example: TokenExample, bos: bool) -> None:
    """BOS is the first id or nowhere; every answer ends with the only EOS there is, and it counts."""
    for answer in example.answers:
        ids = [*example.prompt_ids.tolist(), *answer.ids.tolist()]
        assert ids[: int(bos)] == [BOS] * bos and ids.count(BOS) == bos
        assert ids.count(EOS) == 1 and ids[-1] == EOS and answer.mask[-1]
