"""What held-out data has in common with what is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_prepare import NONE, pair, write
from tests.data.tiny_tokenizers import byte_bpe
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.summary.overlap import overlap

TRAIN = [pair("one", "ab", "cd"), pair("two", "ab", "cd"), pair("two", "x", "y")]


def said(folder: Path, held_out: list[dict[str, str]]) -> str:
    (folder / "held_out").mkdir()
    paths = write(folder, TRAIN), write(folder / "held_out", held_out)
    (train, report), (held, other) = (prepare_examples(path, byte_bpe(), NONE, 260) for path in paths)
    return overlap(train, report, held, other)


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
    assert len(train[0].prompt_ids) == 0 and overlap(train, report, held, theirs) == ""


def test_one_file_for_both_under_two_names(tmp_path: Path) -> None:
    path = write(tmp_path, TRAIN)
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    (train, report), (held, other) = (prepare_examples(name, byte_bpe(), NONE, 260) for name in (path, link))
    found = overlap(train, report, held, other)
    assert found == f"data.eval and data.train name the same file, {link}: its rows are no held-out ones"
