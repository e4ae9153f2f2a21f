"""What held-out data has in common with what is trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.test_prepare import NONE, pair, write
from tests.data.tiny_tokenizers import byte_bpe
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.summary.overlap import overlap
from tuningfork.data.summary.repeats import find_leaks
from tuningfork.models.hf.byte_tokenizer import byte_tokenizer

TRAIN = [pair("one", "ab", "cd"), pair("two", "ab", "cd"), pair("two", "x", "y")]


def said(folder: Path, held_out: list[dict[str, str]]) -> str:
    (folder / "held_out").mkdir()
    paths = write(folder, TRAIN), write(folder / "held_out", held_out)
    (train, report), (held, other) = (prepare_examples(path, byte_bpe(), NONE, 260) for path in paths)
    return overlap(train, report, held, other, None)


@pytest.mark.parametrize(
    ("held_out", "text"),
    [
        ([pair("three", "ab", "cd"), pair("one ", "ab", "cd")], ""),
        (
            [pair("two", "p", "q"), pair("three", "ab", "cd"), pair("two", "x", "y")],
            "2 of 3 held-out examples have a prompt that is trained on (66.7%)",
        ),
        ([pair("one", "p", "q")], "1 of 1 held-out example has a prompt that is trained on (100.0%)"),
    ],
)
def test_prompts_that_are_trained_on_are_counted(tmp_path: Path, held_out: list[dict[str, str]], text: str) -> None:
    assert said(tmp_path, held_out) == text


def test_having_no_prompt_is_nothing_in_common(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = write(tmp_path, [pair("", "ab", "cd")]), write(tmp_path / "other", [pair("", "ef", "gh")])
    (train, report), (held, theirs) = (prepare_examples(path, byte_bpe(), NONE, 260) for path in (one, other))
    assert len(train[0].prompt_ids) == 0 and overlap(train, report, held, theirs, None) == ""


def test_documents_have_no_bos_in_common_but_are_found_as_a_whole(tmp_path: Path) -> None:
    tokenizer, pieces = byte_tokenizer(), replace(NONE, max_length=4, over_length="pieces")
    (tmp_path / "other").mkdir()
    paths = [
        write(tmp_path, [{"text": "abcdef"}, {"text": "xy"}]),
        write(tmp_path / "other", [{"text": "ab"}, {"text": "xy"}, {"text": "xz"}]),
    ]
    (train, report), (held, theirs) = (prepare_examples(path, tokenizer, pieces, 320) for path in paths)
    bos = tokenizer.bos_token_id
    assert [example.prompt_ids.tolist() for example in held] == [[bos]] * 3
    found = overlap(train, report, held, theirs, bos)
    assert found == "1 of 3 held-out examples is trained on as a whole (33.3%)"
    leaks = find_leaks(train, held, bos)
    assert [(shared.eval_row.row, shared.train_row.row) for shared in leaks.prompts] == [(2, 2)]


def test_one_file_for_both_under_two_names(tmp_path: Path) -> None:
    path = write(tmp_path, TRAIN)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    (train, report), (held, other) = (prepare_examples(name, byte_bpe(), NONE, 260) for name in (path, link))
    found = overlap(train, report, held, other, None)
    assert found == f"data.eval and data.train name the same file, {link}: its rows are no held-out ones"


def test_joined_documents_are_not_looked_for_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "held_out").mkdir()
    paths = write(tmp_path, [{"text": "abc" * 9}]), write(tmp_path / "held_out", [{"text": "abc" * 9}])
    stream = replace(NONE, over_length="stream")
    (train, report), (held, other) = (prepare_examples(path, byte_tokenizer(), stream, 260) for path in paths)
    assert "were not looked for" in overlap(train, report, held, other, None)
