"""What `tuningfork data` prints: every section, in text that fits, with nothing that a terminal would obey."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console

from tests.data.summary.workbench import pair, summary_of
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.report.dataset.test_page import harmful
from tests.report.run.test_console import Terminal
from tuningfork.data.summary.records import DataSummary
from tuningfork.report.dataset.terminal import draw_report
from tuningfork.report.run.console import Console


def printed(summary: DataSummary, stream: io.StringIO) -> str:
    log: list[str] = []
    console = Console(stream)
    console.attach(log.append)
    console.draw(draw_report(summary))
    assert "held-out" in "".join(log) or summary.eval is None
    assert "\x1b" not in "".join(log)  # the log never has colours
    return stream.getvalue()


def test_every_number_has_its_line(tmp_path: Path) -> None:
    summary = harmful(tmp_path)
    text = printed(summary, io.StringIO())
    assert max(map(len, text.splitlines())) <= 100 and not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u200f]", text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "66 of 70 pairs can be trained on"
    # question i has 5 (i % 9 + 1) and 4 (i % 5 + 1) letters, and an end marker on either side
    lost = next(line for line in lines if "(recipe)" in line)
    assert lost.split()[:3] == ["900", "(recipe)", "1"]
    assert "rows that repeat an earlier row 1 0" in lines and "prompt is trained on 2" in lines
    assert "1 x dropped: unknown role" in lines and "row 7: chosen" in lines
    assert "BOS <s> (id 0), before 0 of 132 sequences" in lines
    assert lines[-2].startswith(
        "--strict would fail because of: dropped in train.jsonl (4), duplicates in train.jsonl (1)"
    )
    assert lines[-1].endswith("leaks in eval.jsonl (2)")
    for layout in summary.cost.layouts:
        assert f"{layout.slots:,}" in text


def test_a_short_example_says_what_does_not_count(tmp_path: Path) -> None:
    several = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "b"},
    ]
    rows = [pair("q", several, "no")]
    tokenizer = byte_bpe(chat_template=CHATML)
    summary = summary_of(tmp_path, rows, tokenizer=tokenizer, template="chat", max_length=100)
    text = re.sub(r"\s+", " ", printed(summary, io.StringIO()))
    chosen = text.partition("chosen, ")[2]
    assert chosen.startswith(
        "25 tokens, 4 count in the loss a│<|im_end|>│(↵)│(<|im_start|>)│(u)│(s)│(e)│(r)│(↵)│(u)│(<|im_end|>)│"
    )
    assert "rejected, 3 tokens, 3 count in the loss n│o│<|im_end|>│" in text
    assert "prompt, 38 tokens <|im_start|>│s│y" in text and "more tokens" not in text  # that two are left out says more
    rows = [pair("q" * 20, several, "no")]
    summary = summary_of(tmp_path, rows, tokenizer=tokenizer, template="chat", max_length=100)
    text = re.sub(r"\s+", " ", printed(summary, io.StringIO()))
    assert "prompt, 57 tokens <|im_start|>│s│y" in text and " … 21 more tokens … " in text  # 24 and 12 are printed
    assert "--strict would pass" in text


def test_colours_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    summary = summary_of(tmp_path, [pair("one", "ab", "cde"), pair("two", "fgh", "")])
    assert "\x1b[" in printed(summary, Terminal())
    assert "\x1b[" not in printed(summary, io.StringIO())


def test_trees_in_words_and_at_any_width(tmp_path: Path) -> None:
    """Two turns of a conversation, by bytes: a question of 40, an answer of 40 and a question of 20.

    With end markers row 1 is 40 + 41 + 3 tokens and row 2 is 100 + 6 + 3, of which 80 are row 1's; with each prompt
    once per answer they are 124 + 209.
    """
    question, said = "q" * 40, "a" * 40
    rows = [pair(question, said, "no"), pair(question + said + "b" * 20, "right", "no")]
    summary = summary_of(tmp_path, rows, max_length=200, share="tree")
    trees = summary.cost.layout("trees")
    assert (trees.common_prompt, trees.common_answer, trees.tokens) == (40, 40, 40 + 41 + 3 + 20 + 6 + 3)
    text = re.sub(r"\s+", " ", printed(summary, io.StringIO()))
    assert "sharing prompts saves 42.0% of the tokens" in text
    assert f"trees save {1 - 113 / 333:.1%} of the tokens and " in text
    assert ", about as much as in any order" in text
    apart = printed(summary_of(tmp_path, rows, max_length=200, share="tree", per_step=1), io.StringIO())
    assert f"{1 - 113 / 333:.1%} of the tokens and " in apart and "that begin alike lay together" in apart
    assert (
        "70.8% of the tokens that they lay are common to several pairs, 35.4% as prompt and 35.4% within answers"
        in text
    )
    assert "▒ prompt of several" in text and "▒ answer of several" in text
    for width in (40, 60, 100, 200):
        stream = io.StringIO()
        rich.console.Console(file=stream, width=width).print(draw_report(summary))
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert f"{trees.slots:,}" in stream.getvalue() and "▒" in stream.getvalue()


def test_where_nothing_is_common_to_several_pairs(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, [pair("one", "ab", "cde"), pair("two", "fgh", "ij")], share="tree")
    text = printed(summary, io.StringIO())
    assert "too little is common to several pairs for trees to save more" in text
    assert "of several" not in text


def test_an_order_to_compare_and_the_first_of_very_many(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, [pair("one", "ab", "cde"), pair("two", "fgh", "ij")], share="tree")
    other = replace(summary.cost.layout("trees"), order="grouped by prompt")
    cost = replace(summary.cost, layouts=[*summary.cost.layouts, other], examples_packed=1)
    text = printed(replace(summary, cost=cost), io.StringIO())
    assert "trees, grouped by prompt" in text and "packs are counted on the first 1 pair and scaled up" in text
    assert "scaled up" not in printed(summary, io.StringIO())
