"""Tokenizers that fail at a text, and ids that the model has not: by name, never as a failure of ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.bounds import within
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.token_table import TokenTable, columns_of
from tuningfork.data.tokens import split_points
from tuningfork.data.tokens.tokenize import check_ids, check_vocabulary
from tuningfork.errors import DataError
from tuningfork.records import Source, TokenAnswer, TokenExample

HARD = "a" * 400 + "b"  # for the expression below, which tries every way to read it


@pytest.mark.parametrize("control", [None, "as_text"])
def test_a_text_at_which_the_tokenizer_fails_costs_its_row_and_no_other(control: str | None, tmp_path: Path) -> None:
    tokenizer = byte_bpe(chat_template=CHATML)
    tokenizer.name_or_path = "./model"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated"), tokenizer.backend_tokenizer.pre_tokenizer]
    )
    end = "<|im_end|>" if control else ""
    rows = [{"prompt": f"q{end}", "chosen": said, "rejected": "no"} for said in ("yes", f"{HARD}{end}.", "well")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with within(60):
        used, report = prepare_examples(tmp_path / "rows.jsonl", tokenizer, DataConfig(control_tokens=control), 260)
    assert [example.source.row for example in used] == [1, 3]
    [dropped] = report.dropped_rows
    assert (dropped.row, dropped.reason) == (2, "the tokenizer fails")
    assert dropped.detail.startswith("tokenizer.json of ./model cannot read it (") and "retry-limit" in dropped.detail


def test_a_vocabulary_without_tokens() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(DataError, match="has no tokens"):
        check_vocabulary(tokenizer, 10)


@pytest.mark.parametrize(("ids", "wrong"), [([[1, 9]], None), ([[1, 2], [3, 10]], 2), ([[1, -1], [3, 4]], 1)])
def test_an_id_that_the_model_has_not_names_its_row(ids: list[list[int]], wrong: int | None) -> None:
    examples = [
        TokenExample(
            Source("rows.jsonl", row),
            np.array([5], np.int32),
            (TokenAnswer(np.array(given, np.int32), np.ones(len(given), bool)),),
        )
        for row, given in enumerate(ids, 1)
    ]
    table = TokenTable("rows.jsonl", columns_of(examples))
    if wrong is None:
        check_ids(table, 10)
        return
    with pytest.raises(DataError, match=rf"^rows.jsonl:{wrong} has the token id {ids[wrong - 1][1]}, but"):
        check_ids(table, 10)


def test_among_very_many_tokens_texts_are_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_bpe(chat_template=CHATML)
    assert split_points.SplitPoints(tokenizer).tokens
    monkeypatch.setattr(split_points, "MOST", 3)
    assert split_points.SplitPoints(tokenizer).tokens == []
