"""Real preference files, where they are at hand. Expected counts come from counting in the files by other means."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tests.data.rows import read_examples
from tests.data.tiny_tokenizers import CHATML, INST, byte_bpe
from tests.real_tokenizers import Unavailable, real_tokenizer
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import prepare_examples
from tuningfork.errors import DataError
from tuningfork.records import Example

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("TUNINGFORK_DATA", ROOT.parent / "shared" / "data"))
HH = DATA / "hh_rlhf_helpful_base_test.jsonl.gz"
DPO_EN = DATA / "llamafactory_dpo_en_demo.jsonl.gz"

pytestmark = pytest.mark.skipif(not HH.exists(), reason="no real data: set TUNINGFORK_DATA to a folder that has it")

HH_DROPS = {
    "prompts differ": [169, 355, 568, 744, 961, 1012, 1167, 1308, 1451],
    "empty answer": [121, 741, 1215, 2064],
    "chosen equals rejected": [722, 2169],
}
# Roles do not alternate in these, nor in the nine whose prompts differ.
HH_ODD_ROLES = [356, 992, 1133, 1356, 1684, 1848]
HH_DROP_ROWS = {row for rows in HH_DROPS.values() for row in rows}


@pytest.mark.parametrize("as_text", [False, True])
def test_every_hh_row_is_used_or_listed(as_text: bool) -> None:
    result = read_examples(HH, as_text)
    assert result.rows_read == 2354
    found: dict[str, list[int]] = {}
    for row in result.dropped:
        found.setdefault(row.reason, []).append(row.row)
    assert found == HH_DROPS
    used = [example.source.row for example in result.examples]
    assert sorted([*used, *HH_DROP_ROWS]) == list(range(1, 2355)) and len(used) == 2339


def test_hh_texts_are_the_files_own() -> None:
    with gzip.open(HH, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for example in read_examples(HH, as_text=True).examples:
        row = rows[example.source.row - 1]
        assert [example.prompt + answer for answer in example.answers] == [row["chosen"], row["rejected"]]  # type: ignore[operator]
    for example in read_examples(HH, as_text=False).examples:
        for name, answer in zip(("chosen", "rejected"), example.answers, strict=True):
            again = "".join(
                f"\n\n{'Human' if turn.role == 'user' else 'Assistant'}: {turn.content}"  # type: ignore[union-attr]
                for turn in (*example.prompt, *answer)
            )
            assert again.split() == rows[example.source.row - 1][name].split()


def test_dpo_en_conversations() -> None:
    result = read_examples(DPO_EN, as_text=False)
    assert (result.rows_read, len(result.examples), result.dropped) == (300, 300, [])
    assert sum(len(e.prompt) > 1 for e in result.examples) == 186
    assert sum(e.prompt[0].role == "system" for e in result.examples) == 80  # type: ignore[union-attr]
    assert {e.prompt[-1].role for e in result.examples} == {"user"}  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"data\.template: chat"):
        read_examples(DPO_EN, as_text=True)


def test_llmbar_labels() -> None:
    result = read_examples(DATA / "llmbar.jsonl.gz", as_text=False)
    assert (result.format, result.rows_read, len(result.examples), result.dropped) == ("labelled", 419, 419, [])
    with gzip.open(DATA / "llmbar.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert Counter(row["label"] for row in rows) == {1: 206, 2: 213}
    for row, example in zip(rows, result.examples, strict=True):
        contents = [answer[0].content for answer in example.answers]  # type: ignore[union-attr]
        assert contents == [row[f"output_{row['label']}"], row[f"output_{3 - row['label']}"]]


def test_v1_message_lists() -> None:
    result = read_examples(DATA / "llamafactory_v1_dpo_demo.jsonl.gz", as_text=False)
    assert (result.format, len(result.examples), result.dropped) == ("message_lists", 10, [])
    assert all(example.prompt[0].role == "system" for example in result.examples)  # type: ignore[union-attr]
    assert all(len(answer) == 1 for example in result.examples for answer in example.answers)


def test_hh_through_a_template_with_strict_roles(tmp_path: Path) -> None:
    """The template refuses what does not alternate; the rest of the rows is used."""
    examples = read_examples(HH, as_text=False).examples

    def alternates(example: Example) -> bool:
        roles = [turn.role for turn in example.prompt]  # type: ignore[union-attr]
        return roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]

    odd = [example.source.row for example in examples if not alternates(example)]
    assert odd == HH_ODD_ROLES
    path = tmp_path / "some.jsonl"
    with gzip.open(HH, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    chosen = sorted({*odd, *range(1, 200)} - HH_DROP_ROWS)
    path.write_text("".join(lines[row - 1] for row in chosen), encoding="utf-8")
    used, report = prepare_examples(path, byte_bpe(chat_template=INST), DataConfig(max_length=10**6), 260)
    assert report.dropped == {"the chat template refuses the conversation": len(odd)}
    assert len(used) == len(chosen) - len(odd)


def sample(path: Path, folder: Path, every: int) -> Path:
    """A file with every so many-th line of a zipped one."""
    small = folder / "sample.jsonl"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        small.write_text("".join(file.readlines()[::every]), encoding="utf-8")
    return small


def test_dpo_en_byte_by_byte(tmp_path: Path) -> None:
    """With one token a byte, lengths and masks can be counted from the text alone."""
    path = sample(DPO_EN, tmp_path, every=5)
    used, report = prepare_examples(path, byte_bpe(chat_template=CHATML), DataConfig(max_length=10**6), 260)
    assert report.rows_read == report.used == 60
    for source, example in zip(read_examples(path, as_text=False).examples, used, strict=True):
        turns = source.prompt if source.prompt[0].role == "system" else ("Be kind.", *source.prompt)  # type: ignore[union-attr]
        words = {"system": 6, "user": 4, "assistant": 9}
        size = 1 + words["assistant"] + 1  # the generation prompt: <|im_start|> assistant \n
        for turn in turns:
            role, content = ("system", turn) if isinstance(turn, str) else (turn.role, turn.content)
            size += 1 + words[role] + 1 + len(content.encode()) + 1 + 1
        assert len(example.prompt_ids) == size
        for answer, (turn,) in zip(example.answers, source.answers, strict=True):
            assert len(answer.ids) == len(turn.content.encode()) + 1 and answer.mask.all()  # type: ignore[union-attr]


@cache
def smollm2() -> PreTrainedTokenizerBase:
    """The demo's tokenizer, with which the statistics of these files were taken."""
    try:
        return real_tokenizer("smollm2")
    except Unavailable as error:
        pytest.skip(str(error))


def test_the_demo_tokenizer_on_hh(tmp_path: Path) -> None:
    """A sample against transformers' own tokenizing of whole conversations."""
    tokenizer = smollm2()
    path = sample(HH, tmp_path, every=20)
    used, report = prepare_examples(path, tokenizer, DataConfig(), len(tokenizer))
    assert report.rows_read == 118 and report.used >= 110
    sources = {example.source.row: example for example in read_examples(path, as_text=False).examples}
    newline = tokenizer("\n").input_ids
    for example in used:
        source = sources[example.source.row]
        for answer, turns in zip(example.answers, source.answers, strict=True):
            messages = [{"role": turn.role, "content": turn.content} for turn in (*source.prompt, *turns)]  # type: ignore[union-attr]
            joint = tokenizer.apply_chat_template(messages, return_dict=False)
            assert [*example.prompt_ids, *answer.ids, *newline] == joint
            assert tokenizer.decode(answer.ids[answer.mask]) == turns[-1].content + "<|im_end|>"  # type: ignore[union-attr]
    assert Counter(row.reason for row in report.dropped_rows).keys() <= HH_DROPS.keys()
