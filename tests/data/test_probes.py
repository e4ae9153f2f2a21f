"""Faults that other trainers' users reported in public, as small inputs with values worked out by hand.

Reports whose probe is a test of the module that it concerns stay there; here are the others, from a file to its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.rows import assistant, user, write
from tests.data.tiny_tokenizers import CHATML, INST, byte_bpe
from tuningfork.accounts import DataReport
from tuningfork.data.config import DataConfig
from tuningfork.data.packing.layout import build_pack
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.tokens.tokenize import MERGES
from tuningfork.data.tokens.truncate import OverLength
from tuningfork.records import ROOT, PackedBatch, Source, TokenExample

BOS, EOS, START, END = 0, 1, 2, 3  # ids of byte_bpe's special tokens


def ids(text: str) -> list[int]:
    """Byte tokens by hand: "!" is the first letter behind four special tokens, and what is no letter comes last.

    94 letters of ASCII and 94 of Latin-1 are in front of the 68 that stand for the other bytes, in their order: line
    break is the 11th of these and space the 33rd.
    """
    last = 4 + 94 + 94
    return [last + {"\n": 10, " ": 32}[c] if c in "\n " else ord(c) - ord("!") + 4 for c in text]


def prepared(
    folder: Path, rows: list[Any], tokenizer: PreTrainedTokenizerFast, **settings: Any
) -> tuple[list[TokenExample], DataReport]:
    """What becomes of a file with these rows; as plain text for a tokenizer without a chat template."""
    config = DataConfig(template="chat" if tokenizer.chat_template else "none", **settings)
    examples, report = prepare_examples(write(folder, rows), tokenizer, config, len(tokenizer))
    return list(examples), report


def answers(example: TokenExample) -> list[tuple[list[int], list[bool]]]:
    return [(answer.ids.tolist(), answer.mask.tolist()) for answer in example.answers]


def pair(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


MERGED = byte_bpe([("4", "6"), ("Ġ", "46")])  # ids 260 and 261
INSTRUCTED = "[/INST]"


def test_tokens_that_merge_across_the_border_leave_one_prompt_and_are_noted(tmp_path: Path) -> None:
    """trl#2054: " 46" is one token, " $46" is three; glued encodings are neither, and give the pair two prompts."""
    rows = [pair(f"{INSTRUCTED} ", "46", "$46"), pair(INSTRUCTED, "$", "4")]
    (merged, whole), report = prepared(tmp_path, rows, MERGED)
    assert merged.prompt_ids.tolist() == whole.prompt_ids.tolist() == ids(INSTRUCTED)
    space, dollar = ids(" $")
    assert answers(merged) == [
        ([261, EOS], [True, True]),
        ([space, dollar, 260, EOS], [False, True, True, True]),  # the space is the prompt's
    ]
    assert report.notes == {MERGES: [Source(str(tmp_path / "pairs.jsonl"), 1)]}


@pytest.mark.parametrize(("train_on", "counted"), [("all_assistant", 4 + 5), ("last", 5)])
def test_every_assistant_turn_of_a_long_chosen_conversation_counts(tmp_path: Path, train_on: str, counted: int) -> None:
    """axolotl#1645: of a chosen list of 4 messages only the first turn was kept. Here: "yes", "more", each with end."""
    chosen = [user("q"), assistant("yes"), user("and"), assistant("more")]
    rows = [{"chosen": chosen, "rejected": [user("q"), assistant("no")]}]
    (example,), _ = prepared(tmp_path, rows, byte_bpe(chat_template=CHATML), train_on=train_on)
    (long, mask), (short, _) = answers(example)
    between = [*ids("\n"), START, *ids("user\nand"), END, *ids("\n"), START, *ids("assistant\n")]
    assert long == [*ids("yes"), END, *between, *ids("more"), END] and short == [*ids("no"), END]
    assert sum(mask) == counted and mask[-5:] == [True] * 5


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_pair_and_a_single_answer_of_the_same_text_have_the_same_ids(tmp_path: Path, adds_bos: bool) -> None:
    """trl#907: what trained alone had a BOS, the same text in a pair had none."""
    tokenizer = byte_bpe(chat_template=INST, adds_bos=adds_bos)
    said = {"prompt": "q", "completion": "yes"}, {"messages": [user("q"), assistant("yes")]}
    for row in (pair("q", "yes", "no"), *said):
        (example,), _ = prepared(tmp_path, [row], tokenizer)
        assert example.prompt_ids.tolist() == [BOS, *ids("[INST] q [/INST]")]
        assert answers(example)[0] == ([*ids(" yes "), EOS], [True] * 6)
    plain = byte_bpe(adds_bos=adds_bos)
    opening = [BOS] if adds_bos else []
    for row in (pair("q", "yes", "no"), said[0], {"text": "qyes"}):
        (example,), _ = prepared(tmp_path, [row], plain)
        assert [*example.prompt_ids, *example.answers[0].ids] == [*opening, *ids("qyes"), EOS]


def test_a_template_that_prints_a_bos_that_is_none_prints_nothing(tmp_path: Path) -> None:
    """trl#1073: tokenizers without BOS, such as Qwen's, crashed."""
    (example,), _ = prepared(tmp_path, [pair("q", "yes", "no")], byte_bpe(chat_template=INST, bos=None, pad=None))
    assert example.prompt_ids.tolist() == ids("[INST] q [/INST]")
    assert [found for found, _ in answers(example)] == [[*ids(" yes "), EOS], [*ids(" no "), EOS]]


def packed(folder: Path, rows: int) -> PackedBatch:
    """Two turns and another question, as a template like Llama 2's prints them: an EOS lies within the prompt."""
    prompt = [user("q"), assistant("a"), user("r")]
    tokenizer = byte_bpe(chat_template=INST, pad="</s>")
    examples, _ = prepared(folder, [pair(prompt, "b", "c")], tokenizer)
    assert examples[0].prompt_ids.tolist() == [
        *(BOS, *ids("[INST] q [/INST] a "), EOS),  # 21 tokens
        *ids("[INST] r [/INST]"),  # 16
    ]
    return build_pack(examples, rows, share="prompt")


def test_an_answers_end_has_a_log_prob_where_pad_is_the_same_token(tmp_path: Path) -> None:
    """Megatron-Bridge#4660: targets equal to pad were masked by id, and the model never learnt to stop."""
    batch = packed(tmp_path, rows=48)
    counted = batch.logit_row_of_counted
    assert batch.targets[counted].tolist() == [*ids(" b "), EOS, *ids(" c "), EOS]
    assert batch.logit_rows[counted].tolist() == [36, 37, 38, 39, 36, 41, 42, 43]  # each the row before its target's
    assert batch.answer_lengths == [4, 4]


def test_an_end_token_within_the_prompt_is_seen_like_any_other(tmp_path: Path) -> None:
    """trl PR#741: where pad is EOS, an EOS in the middle of the prompt was masked out of attention."""
    batch = packed(tmp_path, rows=48)
    assert batch.input_ids[20] == EOS
    assert [entry[:5] for entry in batch.layout.segments.tolist() if entry[0] < entry[1]] == [
        [0, 37, ROOT, 0, 45],  # one prompt, whole, and both answers see all of it
        [37, 41, 0, 37, 41],
        [41, 45, 0, 37, 45],
        [45, 48, ROOT, 0, 48],  # padding, which sees only itself
    ]
    assert batch.layout.position_of_row.tolist() == [*range(41), *range(37, 41), *range(3)]


@pytest.mark.parametrize(
    ("policy", "limit", "kept", "reason"),
    [
        ("drop", 8, None, "longer than max_length"),
        ("truncate_prompt_left", 8, None, "answer leaves no room for the prompt"),
        ("truncate_answers", 8, [1, 1], None),
        ("truncate_answers", 7, None, "prompt leaves no room for an answer"),
    ],
)
def test_a_tight_limit_leaves_no_answer_without_a_token_that_counts(
    tmp_path: Path, policy: OverLength, limit: int, kept: list[int] | None, reason: str | None
) -> None:
    """trl#3382: a batch with a long and a 3-token answer kept none of their tokens, and its loss was NaN."""
    rows = [pair(INSTRUCTED, "x" * 60, "no"), pair("q", "a", "b")]  # prompt 7, answers 61 and 3 with their ends
    examples, report = prepared(tmp_path, rows, byte_bpe(), max_length=limit, over_length=policy)
    used = {example.source.row: [sum(mask) for _, mask in answers(example)] for example in examples}
    assert used == ({1: kept} if kept else {}) | {2: [2, 2]}
    assert report.dropped == ({reason: 1} if reason else {})


def test_an_answer_cut_down_to_what_is_the_prompts_is_dropped(tmp_path: Path) -> None:
    """trl#3382 again: 8 tokens are room for one of each answer, and the rejected one's first is the prompt's space."""
    rows = [pair(f"{INSTRUCTED} ", "46", "$46"), pair("q", "a", "b")]
    examples, report = prepared(tmp_path, rows, MERGED, max_length=8, over_length="truncate_answers")
    assert [example.source.row for example in examples] == [2]
    assert [(row.row, row.reason) for row in report.dropped_rows] == [(1, "no token of an answer counts")]
