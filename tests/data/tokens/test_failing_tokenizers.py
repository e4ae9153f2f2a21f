"""Tokenizers that fail at a text, and ids that the model has not: by name, never as a failure of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
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
from tuningfork.data.tokens import split_points, tokenize
from tuningfork.data.tokens.bounded import OutOfTime
from tuningfork.data.tokens.in_time import in_time
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


SLOW = "a" * 300  # for the expression below: some seconds


def slow_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_bpe(chat_template=CHATML)
    tokenizer.name_or_path = "./model"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(?:a|a){19}[0-9]"), "isolated"), tokenizer.backend_tokenizer.pre_tokenizer]
    )
    return tokenizer


@pytest.mark.parametrize("control", [None, "as_text"])
def test_a_text_that_the_tokenizer_does_not_come_to_an_end_with_is_named(
    control: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "SECONDS", 0.2)
    monkeypatch.setattr(tokenize, "SECONDS_A_LETTER", 0)
    end = "<|im_end|>" if control else ""
    rows = [{"prompt": f"q{end}", "chosen": said, "rejected": "no"} for said in ("yes", f"{SLOW}{end}.", "well")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with within(30), pytest.raises(DataError) as raised:
        prepare_examples(tmp_path / "rows.jsonl", slow_tokenizer(), DataConfig(control_tokens=control), 260)
    assert str(raised.value).startswith(
        f"{tmp_path}/rows.jsonl:2: tokenizer.json of ./model does not come to an end with it within 0.2 s of processor"
    )
    assert "TOKENIZERS_PARALLELISM" not in os.environ or os.environ["TOKENIZERS_PARALLELISM"] != "false"


SCRIPT = """
from tests.data.tokens.test_failing_tokenizers import slow_tokenizer
from tuningfork.data.tokens.tokenize import Encoder
from tuningfork.data.tokens.template import RenderedExample
from tuningfork.records import Source
encoder = Encoder(slow_tokenizer(), "none")
print("begun", flush=True)
encoder([RenderedExample(Source("f", 1), 0, ("a" * 100_000,), (((0, 1),),))])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_whose_tokenizer_does_not_come_to_an_end(number: signal.Signals) -> None:
    # Python itself takes SIGINT so, unless it was started in the background of a shell.
    handled = "for number in (2, 15): signal.signal(number, signal.default_int_handler)"
    script = f"import signal\n{handled}\n{SCRIPT}"
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            time.sleep(0.3)
            process.send_signal(number)
            _, said = process.communicate(timeout=10)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in said and process.returncode in (-signal.SIGINT, 130, 1)


def test_work_in_time_gives_what_it_gives_and_leaves_no_thread_behind_each() -> None:
    here = threading.get_ident()
    others = {in_time(threading.get_ident, 5) for _ in range(20)}
    assert len(others) == 1 and here not in others
    in_time(lambda: time.sleep(0.6), 0.3)  # it takes no processor's time
    with pytest.raises(TimeoutError, match="of its own"):
        in_time(_fails, 5)
    with pytest.raises(OutOfTime, match=r"0\.1 s"):
        in_time(_busy, 0.1)
    assert in_time(lambda: 3, 5) == 3 and in_time(threading.get_ident, 5) not in others


def _fails() -> None:
    raise TimeoutError("of its own")


def _busy() -> None:
    until = time.thread_time() + 1
    while time.thread_time() < until:
        pass


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
