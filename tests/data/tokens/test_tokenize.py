"""Ids, boundaries and masks, each against values worked out by hand or against the joint encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PythonBackend

from tests.data.tiny_tokenizers import CHATML, INST, byte_bpe, word_level
from tuningfork.data.tokens.template import render
from tuningfork.data.tokens.tokenize import Encoder, check_vocabulary
from tuningfork.errors import DataError
from tuningfork.records import Example, Message, Source, TokenExample

SOURCE = Source("pairs.jsonl", 3)
BOS, EOS, START, END = 0, 1, 2, 3  # ids of byte_bpe's special tokens
MERGES = (("4", "6"), ("Ġ", "46"), ("l", "l"), ("Ġ", "ll"), (".", "Ċ"), (")", ".Ċ"))


def encode(tokenizer: PreTrainedTokenizerFast, prompt: Any, *answers: Any) -> TokenExample:
    template = "none" if isinstance(prompt, str) else "chat"
    (example,) = Encoder(tokenizer, template)([render(Example(SOURCE, prompt, answers), tokenizer)])
    assert example.source == SOURCE
    assert example.prompt_ids.dtype == np.int32
    assert all(a.ids.dtype == np.int32 and a.mask.dtype == bool and len(a.ids) == len(a.mask) for a in example.answers)
    return example


def chat(tokenizer: PreTrainedTokenizerFast, prompt: str, *answers: str | tuple[str, ...]) -> TokenExample:
    """One user turn; an answer of several strings alternates assistant and user."""
    roles = ("assistant", "user")
    contents = [(answer,) if isinstance(answer, str) else answer for answer in answers]
    turns = [tuple(Message(roles[i % 2], text) for i, text in enumerate(texts)) for texts in contents]
    return encode(tokenizer, (Message("user", prompt),), *turns)


def tokens(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids.tolist())


def counted(tokenizer: PreTrainedTokenizerFast, example: TokenExample) -> list[str]:
    return [tokenizer.decode(answer.ids[answer.mask].tolist()) for answer in example.answers]


# ---- the boundary


def test_tokens_that_merge_across_the_border_belong_to_the_answer() -> None:
    tokenizer = byte_bpe(MERGES)
    example = encode(tokenizer, "[/INST] ", "46", "$46")
    chosen, rejected = example.answers
    # jointly " 46" is one token, so the space at the prompt's end is no token that both sequences share
    assert tokens(tokenizer, example.prompt_ids) == ["[", "/", "I", "N", "S", "T", "]"]
    assert tokens(tokenizer, chosen.ids) == ["Ġ46", "</s>"]
    assert chosen.mask.tolist() == [True, True]
    assert tokens(tokenizer, rejected.ids) == ["Ġ", "$", "46", "</s>"]
    assert rejected.mask.tolist() == [False, True, True, True]  # its space lies in the prompt


def test_a_merge_that_both_answers_share_still_belongs_to_them() -> None:
    tokenizer = byte_bpe(MERGES)
    example = encode(tokenizer, "a ", "46", "46.")
    assert tokens(tokenizer, example.prompt_ids) == ["a"]
    assert [tokens(tokenizer, a.ids) for a in example.answers] == [["Ġ46", "</s>"], ["Ġ46", ".", "</s>"]]
    assert all(a.mask.all() for a in example.answers)


def test_a_tokens_trimmed_white_space_does_not_hide_that_it_crosses_the_border() -> None:
    # ") " is one token; GPT-2's offsets would report only ")" for it, which ends at the boundary
    backend = byte_bpe([(")", "Ġ")]).backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer("f) x", return_offsets_mapping=True).offset_mapping[1] == (1, 2)
    example = encode(tokenizer, "f)", " x", " y")
    assert tokens(tokenizer, example.prompt_ids) == ["f"]
    assert tokens(tokenizer, example.answers[0].ids) == [")Ġ", "x", "</s>"]
    assert example.answers[0].mask.all()


def test_prompt_tokens_that_depend_on_the_answer_are_not_shared() -> None:
    # "bc" merges before "ab" does, so the same prompt "ab" is a+b(c) in front of c and one token in front of d
    tokenizer = byte_bpe([("b", "c"), ("a", "b")])
    example = encode(tokenizer, "ab", "c", "d")
    assert len(example.prompt_ids) == 0
    chosen, rejected = example.answers
    assert (tokens(tokenizer, chosen.ids), chosen.mask.tolist()) == (["a", "bc", "</s>"], [False, True, True])
    assert (tokens(tokenizer, rejected.ids), rejected.mask.tolist()) == (["ab", "d", "</s>"], [False, True, True])


def test_answers_with_a_common_start_keep_it() -> None:
    tokenizer = byte_bpe()
    example = encode(tokenizer, "ab", "cde", "cdf")
    assert tokens(tokenizer, example.prompt_ids) == ["a", "b"]
    assert [tokens(tokenizer, a.ids)[:-1] for a in example.answers] == [["c", "d", "e"], ["c", "d", "f"]]


def test_characters_of_several_tokens_on_both_sides_of_the_border() -> None:
    tokenizer = byte_bpe()
    example = encode(tokenizer, "é\U0001f600", "\U0001f600", "\U0001f601")
    # UTF-8: 2 + 4 bytes before the boundary, 4 behind; the two answers share 3 bytes of a character, which stay theirs
    assert len(example.prompt_ids) == 6
    assert [len(a.ids) for a in example.answers] == [5, 5]
    assert all(a.mask.all() for a in example.answers)
    assert counted(tokenizer, example) == ["\U0001f600</s>", "\U0001f601</s>"]


def test_a_token_of_half_characters_across_the_border() -> None:
    # The last byte of the prompt's emoji and the first of the answer's are one token here.
    emoji = "".join(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("\U0001f600")[0][0]
    )
    tokenizer = byte_bpe([(emoji[3], emoji[0])])
    example = encode(tokenizer, "\U0001f600", "\U0001f600", "x")
    assert tokens(tokenizer, example.prompt_ids) == list(emoji[:3])
    assert tokens(tokenizer, example.answers[0].ids) == [emoji[3] + emoji[0], *emoji[1:], "</s>"]
    assert example.answers[0].mask.tolist() == [True] * 5
    assert tokens(tokenizer, example.answers[1].ids) == [emoji[3], "x", "</s>"]
    assert example.answers[1].mask.tolist() == [False, True, True]


# ---- special tokens


def test_plain_text_gets_the_tokenizers_own_bos_and_eos() -> None:
    with_bos = encode(byte_bpe(adds_bos=True), "a", "b", "c")
    without = encode(byte_bpe(adds_bos=False), "a", "b", "c")
    assert with_bos.prompt_ids.tolist() == [BOS, *without.prompt_ids.tolist()]
    for example in (with_bos, without):
        assert [a.ids[-1] for a in example.answers] == [EOS, EOS] and all(a.mask[-1] for a in example.answers)
        assert BOS not in np.concatenate([a.ids for a in example.answers])


def test_bos_and_eos_that_the_text_brings_are_not_doubled() -> None:
    example = encode(byte_bpe(adds_bos=True), "<s>a", "b</s>", "c")
    assert example.prompt_ids.tolist().count(BOS) == 1
    assert example.answers[0].ids.tolist().count(EOS) == 1 and example.answers[0].mask.all()


def test_a_tokenizer_without_bos_eos_and_pad() -> None:
    tokenizer = byte_bpe(bos=None, eos=None)
    example = encode(tokenizer, "a", "b", "cd")
    assert [tokens(tokenizer, ids) for ids in (example.prompt_ids, *(a.ids for a in example.answers))] == [
        ["a"],
        ["b"],
        ["c", "d"],
    ]


def test_an_empty_prompt() -> None:
    assert len(encode(byte_bpe(), "", "ab", "ac").prompt_ids) == 0
    assert encode(byte_bpe(), "", "ab").answer_tokens(0) == 2  # a, b, EOS; a has no predictor
    example = encode(byte_bpe(adds_bos=True), "", "ab", "ac")
    assert example.prompt_ids.tolist() == [BOS] and example.answer_tokens(0) == 3


def test_a_template_brings_exactly_one_bos() -> None:
    for tokenizer in (byte_bpe(chat_template=INST), byte_bpe(chat_template=INST, adds_bos=True)):
        example = chat(tokenizer, "q", ("a", "u", "b"), "c")
        assert example.prompt_ids[0] == BOS
        for answer in example.answers:
            assert [*example.prompt_ids, *answer.ids].count(BOS) == 1
        assert counted(tokenizer, example) == [" a </s> b </s>", " c </s>"]


def test_pad_equal_to_eos_loses_nothing() -> None:
    for pad in (None, "</s>"):
        tokenizer = byte_bpe(chat_template=INST, pad=pad)
        example = chat(tokenizer, "q </s> r", "a", "b </s> c")  # an EOS within prompt and answer, too
        assert EOS in example.prompt_ids
        for answer in example.answers:
            assert answer.mask.all() and answer.ids[-1] == EOS
        assert example.answers[1].ids.tolist().count(EOS) == 2


# ---- chat


def test_chatml_ids_equal_the_joint_encoding_and_the_mask_is_the_assistants() -> None:
    tokenizer = byte_bpe(MERGES, chat_template=CHATML)
    example = chat(tokenizer, "say 46", ("all 46).\n", "u\u00e9", "b"), "no\U0001f600")
    newline = tokenizer("\n").input_ids
    for contents, answer in zip((("all 46).\n", "u\u00e9", "b"), ("no\U0001f600",)), example.answers, strict=True):
        messages = [{"role": "user", "content": "say 46"}]
        messages += [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(contents)]
        joint = tokenizer.apply_chat_template(messages, return_dict=False)
        assert [*example.prompt_ids, *answer.ids, *newline] == joint
    assert counted(tokenizer, example) == ["all 46).\n<|im_end|>b<|im_end|>", "no\U0001f600<|im_end|>"]
    assert tokenizer.decode(example.prompt_ids.tolist()).endswith("say 46<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(example.prompt_ids.tolist()).count("<|im_start|>") == 3


def test_words_whose_spaces_no_token_covers() -> None:
    words = ["?", "[INST]", "[/INST]", "hello", "you", "me"]
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] }}{% endif %}{% endfor %}"
    )
    example = chat(word_level(words, template), "hello", "you", "me you")
    assert example.prompt_ids.tolist() == [1, 3, 2]
    assert [a.ids.tolist() for a in example.answers] == [[4], [5, 4]]


def test_a_word_marker_that_no_character_stands_for_goes_with_its_word() -> None:
    # SentencePiece style: "▁" in front of the text is not in the text, and here it is a token of its own
    backend = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    example = encode(tokenizer, "", "ab", "b")
    assert len(example.prompt_ids) == 0
    assert [a.ids.tolist() for a in example.answers] == [[0, 1, 2], [0, 2]]
    assert all(a.mask.all() for a in example.answers)
    assert encode(tokenizer, "a", "b", "a").prompt_ids.tolist() == [0, 1]


@settings(max_examples=60)
@given(*[st.text("abc4 6.\n)$é\U0001f600l", max_size=6)] * 3)
def test_any_text_is_its_joint_encoding_and_masks_the_border_only(prompt: str, chosen: str, rejected: str) -> None:
    tokenizer = byte_bpe([*MERGES, ("b", "c"), ("a", "b")])
    example = encode(tokenizer, prompt, chosen, rejected)
    ids = [[*example.prompt_ids, *answer.ids] for answer in example.answers]
    assert ids == [[*tokenizer(prompt + text).input_ids, EOS] for text in (chosen, rejected)]
    # By bytes: a prompt token ends within the prompt's text, an uncounted answer token does, a counted one does not.
    for answer in example.answers:
        ends = np.cumsum([_bytes(tokenizer, i) for i in [*example.prompt_ids, *answer.ids[:-1]]])
        within = ends <= len(prompt.encode())
        p = len(example.prompt_ids)
        assert within[:p].all() and (within[p:] == ~answer.mask[:-1]).all() and answer.mask[-1]


def _bytes(tokenizer: PreTrainedTokenizerFast, token: int) -> int:
    return len(tokenizer.convert_ids_to_tokens(int(token)))  # one character of the byte alphabet a byte


def test_examples_encoded_together_equal_examples_encoded_alone() -> None:
    tokenizer = byte_bpe(MERGES)
    prompts = ["", "a 46", "\U0001f600"]
    rendered = [render(Example(Source("f", i), prompt, ("b", "c" * 30)), tokenizer) for i, prompt in enumerate(prompts)]
    encoder = Encoder(tokenizer, "none")
    together = encoder(rendered)
    alone = [encoder([example])[0] for example in rendered]
    assert [e.source.row for e in together] == [0, 1, 2]
    for a, b in zip(together, alone, strict=True):
        assert a.prompt_ids.tolist() == b.prompt_ids.tolist()
        assert [x.ids.tolist() for x in a.answers] == [x.ids.tolist() for x in b.answers]
    assert encoder([]) == []


def test_the_tokenizer_is_given_no_more_text_at_once_than_a_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it returns of a text takes hundreds of times the text's memory."""
    tokenizer = byte_bpe(MERGES)
    lengths = [3, 3, 5, 20, 1, 1]
    rendered = [render(Example(Source("f", n), "", ("a" * n,)), tokenizer) for n in lengths]
    calls: list[list[int]] = []
    tokenize = type(tokenizer).__call__

    def counting(self: Any, texts: list[str], **options: Any) -> Any:
        calls.append([len(text) for text in texts])
        return tokenize(self, texts, **options)

    encoder = Encoder(tokenizer, "none")
    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    monkeypatch.setattr("tuningfork.data.tokens.tokenize.BATCH", 8)
    assert [len(example.answers[0].ids) for example in encoder(rendered)] == [n + 1 for n in lengths]  # and EOS
    assert calls == [[3, 3], [5], [20], [1, 1]]


# ---- tokenizers that do not fit


def test_the_callers_tokenizer_is_left_alone() -> None:
    tokenizer = byte_bpe(adds_bos=True)
    before = tokenizer.backend_tokenizer.to_str()
    encode(tokenizer, "a", "b", "c")
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_text_longer_than_the_tokenizers_limit_is_whole_and_unwarned() -> None:
    tokenizer = byte_bpe()
    tokenizer.model_max_length = 4
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert len(encode(tokenizer, "a" * 50, "b", "c").prompt_ids) == 50


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow(PythonBackend):
        vocab_size = 1

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    with pytest.raises(DataError, match=r"slow one \(Slow\).*tokenizer\.json"):
        Encoder(Slow(), "none")


def test_chat_needs_a_template() -> None:
    with pytest.raises(DataError, match="no chat template"):
        Encoder(byte_bpe(), "chat")
    Encoder(byte_bpe(), "none")


def test_a_vocabulary_larger_than_the_model_is_refused() -> None:
    tokenizer = byte_bpe()  # 4 special tokens and 256 bytes
    check_vocabulary(tokenizer, 260)
    check_vocabulary(tokenizer, 1000)
    with pytest.raises(DataError, match="with id 259, but the model embeds only the ids below 259"):
        check_vocabulary(tokenizer, 259)
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(DataError, match="'<extra>' with id 260"):
        check_vocabulary(tokenizer, 260)
