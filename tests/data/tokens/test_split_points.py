"""Cut in front of an added token and encoded in two parts, a text gives the tokens of the whole, for any tokenizer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.data.tiny_tokenizers import CHATML, INST, byte_bpe, sentence_piece
from tests.real_tokenizers import REAL, Unavailable, real_tokenizer
from tuningfork.data.tokens.split_points import SplitPoints

# Names that overlap in every way: one in another, end on beginning, on themselves, words, spaces.
NAMES = ("<a>", "<a>b", "c<a>", "<a", "a>", "<<", "aa", "a", "_x", " <s", "<s> ", "><", "<a><a>")
FLAGS = ("normalized", "lstrip", "rstrip", "single_word")
ADDED = st.lists(st.tuples(st.sampled_from(NAMES), st.sets(st.sampled_from(FLAGS))), min_size=1, max_size=6)
NORMALIZERS = {
    "none": None,
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "lowercase": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()]),
}
SPLITTERS = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace always": pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
}
TEXT = st.lists(st.sampled_from([*NAMES, " ", "\n", "a", "b", "ab", "x", "é", "A"]), max_size=12).map("".join)


def made(added: list[tuple[str, set[str]]], normalizer: str, splitter: str) -> PreTrainedTokenizerFast:
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet(), *"▁abcxsé_<> \nABĠ"})
    tokens = [*letters, "ab", "▁a"]
    merges = [("a", "b"), ("▁", "a")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    if NORMALIZERS[normalizer] is not None:
        backend.normalizer = NORMALIZERS[normalizer]
    backend.pre_tokenizer = SPLITTERS[splitter]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    flagged = [AddedToken(name, **{flag: flag in flags for flag in FLAGS}) for name, flags in added]
    tokenizer.add_tokens(flagged)
    tokenizer.chat_template = " ".join(NAMES)  # so that all of them are looked for
    return tokenizer


def read(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor, kept = None, backend.post_processor
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    backend.post_processor = kept
    return found["input_ids"], found["offset_mapping"]


def check(tokenizer: PreTrainedTokenizerBase, text: str, cut: int) -> None:
    ids, offsets = read(tokenizer, text)
    (first, before), (second, behind) = read(tokenizer, text[:cut]), read(tokenizer, text[cut:])
    assert first + second == ids, (text, cut)
    assert before + [(start + cut, stop + cut) for start, stop in behind] == offsets, (text, cut)


@settings(max_examples=600)
@given(ADDED, st.sampled_from(list(NORMALIZERS)), st.sampled_from(list(SPLITTERS)), TEXT)
def test_any_added_tokens(added: list, normalizer: str, splitter: str, text: str) -> None:
    tokenizer = made(added, normalizer, splitter)
    points = SplitPoints(tokenizer)
    for boundary in range(len(text) + 1):
        if cut := points.last(text, boundary):
            assert cut < boundary and any(text.startswith(token, cut) for token in points.tokens)
            check(tokenizer, text, cut)


def test_a_token_that_may_not_be_cut_at_is_known() -> None:
    """By hand: what makes the two parts differ, each with a text that shows it."""
    cases = {
        "another holds it": ([("<a>", set()), ("c<a>", set())], "xc<a>x", 2),
        "another ends as it begins": ([("<a>", set()), ("<<", set())], "<<a>", 1),
        "it takes the space before it": ([("<a>", {"lstrip"})], "x <a>", 2),
        "it overlaps itself": ([("aa", set())], "aaa", 1),
    }
    for why, (added, text, cut) in cases.items():
        tokenizer = made(added, "none", "bytes")
        assert added[0][0] not in SplitPoints(tokenizer).tokens, why
        parts = read(tokenizer, text[:cut])[0] + read(tokenizer, text[cut:])[0]
        assert parts != read(tokenizer, text)[0] or "takes" in why, why
    assert SplitPoints(made([("<a>", set())], "none", "bytes")).tokens == ["<a>"]


def test_no_text_is_cut_where_special_tokens_are_text_like_any_other() -> None:
    """Merged with what stands before it, "<" of a token would be another one."""
    for name in ("split_special_tokens", "encode_special_tokens"):
        tokenizer = made([("<a>", set())], "none", "bytes")
        assert SplitPoints(tokenizer).tokens == ["<a>"]
        setattr(tokenizer if name.startswith("split") else tokenizer.backend_tokenizer, name, True)
        assert SplitPoints(tokenizer).tokens == []


def test_where_a_text_is_cut_by_hand() -> None:
    points = SplitPoints(byte_bpe(chat_template=CHATML))
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na"
    assert points.last(text, len(text) - 1) == text.rindex("<|im_start|>") == 29
    assert points.last(text, 29 + len("<|im_start|>") - 1) == 12 + 6  # within the last one: the one before
    assert points.last(text, 5) == points.last("no token", 8) == points.last(text, 0) == 0
    assert "[INST]" not in SplitPoints(byte_bpe(chat_template=INST)).tokens  # text like any other
    assert set(SplitPoints(sentence_piece(letters="a")).tokens) == {"<s>", "</s>", "<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize("name", REAL)
def test_published_tokenizers(name: str) -> None:
    """Every added token of a published tokenizer beside spaces, words and another one, cut at every split point."""
    try:
        tokenizer = real_tokenizer(name)
    except Unavailable as error:
        pytest.skip(str(error))
    points = SplitPoints(tokenizer)
    assert points.tokens, "no prompt of it is ever encoded once"
    added = sorted(token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values())
    rng = np.random.default_rng(0)
    few = [*rng.choice(added, size=min(40, len(added)), replace=False), *points.tokens]
    for one, other in pairwise([*few, few[0]]):
        for token in points.tokens[:6]:
            for text in (f"a {one}{token}assistant\n b", f"{one} {token} {other}\n", f"x{one}\n{token}{token}{other}y"):
                check(tokenizer, text, text.rindex(token))
