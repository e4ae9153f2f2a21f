"""Examples token by token: the text of each, its id, what counts, and what is left out of a long one."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.data.summary.workbench import pair, summary_of
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data.summary.records import Piece
from tuningfork.data.summary.show import HEAD, TAIL, show_examples
from tuningfork.errors import DataError
from tuningfork.records import Source, TokenAnswer, TokenExample


def texts(pieces: list[Piece]) -> list[str]:
    return [piece.text for piece in pieces]


def test_a_chat_with_two_answers_turn_by_turn(tmp_path) -> None:
    """Only the assistant's turns count, with their end markers; what the user says between them does not."""
    several = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "b"},
    ]
    tokenizer = byte_bpe(chat_template=CHATML)
    summary = summary_of(tmp_path, [pair("q", several, "no")], tokenizer=tokenizer, template="chat", max_length=99)
    [shown] = summary.shown
    assert (shown.title, shown.row) == ("first and median length and longest", 1)
    assert texts(shown.prompt.head) == [
        *("<|im_start|>", *"system\n", *"Be kind.", "<|im_end|>", "\n"),
        *("<|im_start|>", *"user\n", "q", "<|im_end|>", "\n"),
        *("<|im_start|>", *"assistant\n"),
    ]
    assert not any(piece.counted for piece in shown.prompt.head) and shown.prompt.counted == 0
    answer = [(piece.text, piece.counted, piece.special) for piece in shown.answers[0].head]
    assert answer == [
        *(("a", True, False), ("<|im_end|>", True, True), ("\n", False, False)),
        *(("<|im_start|>", False, True), *((c, False, False) for c in "user\nu"), ("<|im_end|>", False, True)),
        *(("\n", False, False), ("<|im_start|>", False, True), *((c, False, False) for c in "assistant\n")),
        *(("b", True, False), ("<|im_end|>", True, True)),
    ]
    assert (shown.answers[0].counted, shown.answers[0].tokens) == (4, len(answer))
    assert [piece.ids for piece in shown.answers[1].head] == [[81], [82], [3]]  # n, o: places in the sorted alphabet


def test_tokens_that_make_up_one_character_are_one_piece(tmp_path) -> None:
    """A byte a token: two of them for é, four for the face."""
    [shown] = summary_of(tmp_path, [pair("é", "a🙂", "日b")]).shown
    assert [(piece.text, len(piece.ids)) for piece in shown.prompt.head] == [("é", 2)]
    assert [(p.text, len(p.ids), p.counted) for p in shown.answers[0].head] == [
        ("a", 1, True),
        ("🙂", 4, True),
        ("</s>", 1, True),
    ]
    assert (shown.answers[0].tokens, shown.answers[0].counted, shown.prompt.tokens) == (6, 6, 2)
    assert texts(shown.answers[1].head) == ["日", "b", "</s>"]


def test_without_a_prompt_the_first_token_does_not_count(tmp_path) -> None:
    [shown] = summary_of(tmp_path, [pair("", "ab", "c")]).shown
    assert (shown.prompt.head, shown.prompt.tokens) == ([], 0)
    assert [piece.counted for piece in shown.answers[0].head] == [False, True, True] and shown.answers[0].counted == 2


def test_the_first_the_median_and_the_longest_each_once(tmp_path) -> None:
    rows = [pair("p", "a" * n, "b") for n in (3, 9, 5, 1, 7)]
    assert [(shown.title, shown.row) for shown in summary_of(tmp_path, rows).shown] == [
        ("first", 1),
        ("median length", 3),
        ("longest", 2),
    ]
    rows = [pair("p", "a" * n, "b") for n in (9, 5, 7)]
    assert [(shown.title, shown.row) for shown in summary_of(tmp_path, rows).shown] == [
        ("first and longest", 1),
        ("median length", 3),
    ]


def test_a_long_part_keeps_its_ends_and_says_how_much_is_hidden(tmp_path) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(1000))
    [shown] = summary_of(tmp_path, [pair(text, "a" * (HEAD + TAIL - 1), "b" * (HEAD + TAIL))], max_length=5000).shown
    assert (shown.prompt.tokens, shown.prompt.hidden) == (1000, 1000 - HEAD - TAIL)
    assert "".join(texts(shown.prompt.head)) == text[:HEAD] and "".join(texts(shown.prompt.tail)) == text[-TAIL:]
    assert (shown.answers[0].hidden, len(shown.answers[0].head), shown.answers[0].tail) == (
        0,
        HEAD + TAIL,
        [],
    )  # with its </s>
    assert (shown.answers[1].hidden, shown.answers[1].counted) == (1, HEAD + TAIL + 1)


@pytest.mark.parametrize("broken", [[131], [131, 131]])
def test_bytes_that_never_become_a_character(broken: list[int]) -> None:
    """131 is the first byte of two: alone at the end of an answer, it is no character."""
    mask = np.ones(len(broken), dtype=bool)
    answers = tuple(TokenAnswer(np.array(ids, np.int32), mask[: len(ids)]) for ids in (broken, [70]))
    [shown] = show_examples([TokenExample(Source("f", 1), np.array([70], np.int32), answers)], byte_bpe())
    assert sum(len(piece.ids) for piece in shown.answers[0].head) == len(broken)
    assert "�" in shown.answers[0].head[-1].text


def test_words_keep_their_spaces_where_decoding_a_token_alone_would_lose_them() -> None:
    """A decoder that strips the first space of a text, as Llama 2's: only in context a word shows its own."""
    words = ["<unk>", "▁Hello", "▁wor", "ld", "<0xC3>", "<0xA9>"]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ones = np.ones(3, dtype=bool)
    answers = (TokenAnswer(np.array([2, 3, 1], np.int32), ones), TokenAnswer(np.array([4, 5, 1], np.int32), ones))
    [shown] = show_examples([TokenExample(Source("f", 1), np.array([1], np.int32), answers)], tokenizer)
    assert texts(shown.answers[0].head) == [" wor", "ld", " Hello"]
    assert texts(shown.answers[1].head) == ["é", " Hello"]


def test_single_answers_and_rankings_have_names_of_their_own() -> None:
    def parts(number: int) -> list[str]:
        answers = tuple(TokenAnswer(np.array([70 + i], np.int32), np.ones(1, dtype=bool)) for i in range(number))
        [shown] = show_examples([TokenExample(Source("f", 1), np.array([70], np.int32), answers)], byte_bpe())
        return [shown.prompt.name, *(part.name for part in shown.answers)]

    assert parts(1) == ["prompt", "answer"] and parts(2) == ["prompt", "chosen", "rejected"]
    assert parts(3) == ["prompt", "answer 1", "answer 2", "answer 3"]


def test_a_decoder_that_its_library_fails_with_is_named() -> None:
    tokenizer = byte_bpe()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Strip("!", 10**18, 10**18)]  # it counts to that, and finds fewer
    )
    [bang] = tokenizer("!", add_special_tokens=False)["input_ids"]
    answers = (TokenAnswer(np.array([bang], np.int32), np.ones(1, dtype=bool)),)
    with pytest.raises(DataError, match=r"^f:1: the decoder of tokenizer.json cannot write its tokens as text"):
        show_examples([TokenExample(Source("f", 1), np.array([bang], np.int32), answers)], tokenizer)
