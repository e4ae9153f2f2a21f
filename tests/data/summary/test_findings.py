"""What is worth a word, and what `--strict` stops on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.summary.workbench import pair, summary_of
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data.examples.unpack import JSON_AS_TEXT, SOME_AS_JSON
from tuningfork.data.summary.records import Finding
from tuningfork.data.tokens.stream import JOINED
from tuningfork.report.dataset.wording import account, headline

GOOD = [pair("one", "ab", "cde"), pair("two", "fgh", "ij")]


def found(folder: Path, *args: object, **options: object) -> dict[str, Finding]:
    findings = summary_of(folder, *args, **options).findings  # type: ignore[arg-type]
    assert len({(finding.kind, finding.name) for finding in findings}) == len(findings)
    return {finding.kind: finding for finding in findings}


def numbers(finding: Finding) -> list[int]:
    return [row.row for row in finding.rows]


def test_good_data_needs_no_attention(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD, [pair("three", "x", "y")]) == {}


def test_dropped_rows_with_every_reason(tmp_path: Path) -> None:
    rows = [*GOOD, pair("x", "", "b"), pair("x", "a", "a"), pair("x", "a", " "), pair("x" * 99, "a", "b")]
    summary = summary_of(tmp_path, rows)
    [finding] = summary.findings
    assert finding.text == (
        "train.jsonl: 4 rows are dropped: empty answer (2), chosen equals rejected (1), longer than max_length (1)"
    )
    assert (finding.kind, finding.strict, finding.count, numbers(finding)) == ("dropped", True, 4, [3, 4, 5, 6])
    file = summary.train
    assert (file.rows_read, file.used, file.empty_answers, file.identical_answers) == (6, 2, 2, 1)
    assert [(row.row, row.reason) for row in file.dropped_rows][-1] == (6, "longer than max_length")
    # what is too long counts for the limits all the same: 99 + 2 tokens, and all rows' tokens with prompts twice
    lost = next(row for row in file.truncation if row.recipe)
    assert (lost.max_length, lost.rows_lost, lost.tokens_lost) == (64, 1, 2 * 99 + 4)
    assert lost.rows_lost_share == pytest.approx(1 / 3)


def test_repeats_contradictions_and_leaks(tmp_path: Path) -> None:
    rows = [*GOOD, GOOD[0], pair("two", "ij", "fgh"), pair("four", "kl", "m"), pair("five", "kl", "m")]
    held_out = [pair("one", "x", "y"), pair("two", "ij", "y"), pair("three", "ab", "cde")]
    findings = found(tmp_path, rows, held_out)
    assert list(findings) == ["duplicates", "conflicts", "leaks"] and all(f.strict for f in findings.values())
    assert (findings["duplicates"].count, numbers(findings["duplicates"])) == (1, [3])
    assert (findings["conflicts"].count, numbers(findings["conflicts"])) == (2, [2, 4])
    assert (findings["leaks"].count, numbers(findings["leaks"])) == (2, [1, 2])
    assert findings["leaks"].text == (
        "eval.jsonl: 2 rows have a prompt that is trained on (66.7%), 1 of them with an answer to it"
    )


def test_the_held_out_file_is_looked_at_as_well(tmp_path: Path) -> None:
    findings = found(tmp_path, GOOD, [pair("x", "a", "b"), pair("x", "a", "b"), pair("y", "a", "")])
    assert set(findings) == {"dropped", "duplicates"}
    assert {finding.name for finding in findings.values()} == {"eval.jsonl"}


def test_pairs_longer_than_the_model_knows_positions(tmp_path: Path) -> None:
    rows = [*GOOD, pair("x" * 8, "ab", "c"), pair("x" * 9, "b", "ac")]  # 11 and 12 tokens with </s>
    findings = found(tmp_path, rows, positions=11)
    assert (findings["positions"].count, numbers(findings["positions"])) == (1, [4])
    assert "11 positions" in findings["positions"].text
    assert found(tmp_path, rows, positions=None) == {}


def test_two_bos(tmp_path: Path) -> None:
    """A template that puts one, before a text that has one already."""
    template = (
        "{{ bos_token }}{% for turn in messages %}{{ turn['content'] }}"
        "{% if turn['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = byte_bpe(chat_template=template)
    once = summary_of(tmp_path, [pair("q", "ab", "cd")], tokenizer=tokenizer, template="chat")
    assert (once.tokenizer.begin_with_bos, once.tokenizer.begin_with_two_bos, once.findings) == (2, 0, [])
    twice = summary_of(
        tmp_path, [pair("<s>q", "ab", "cd")], tokenizer=tokenizer, template="chat", control_tokens="keep"
    )
    assert (twice.tokenizer.begin_with_bos, twice.tokenizer.begin_with_two_bos) == (2, 2)
    assert [finding.kind for finding in twice.strict] == ["two_bos"]
    assert "2 sequences begin with <s> twice" in twice.strict[0].text


def test_answers_of_which_only_some_are_messages_as_json_text(tmp_path: Path) -> None:
    """In either set, with a chat template or without; answers that are JSON, all of them, are only noted."""
    said = json.dumps({"role": "assistant", "content": "x"})
    half, whole = pair("q", said, "b"), pair("r", '{"text": "a"}', '{"text": "b"}')
    chat = {"tokenizer": byte_bpe(chat_template=CHATML, eos="<|im_end|>"), "template": "chat", "max_length": 200}
    for options in ({}, chat):
        summary = summary_of(tmp_path, [*GOOD, half, whole], [pair("p", "b", said)], **options)  # type: ignore[arg-type]
        train, held = summary.strict
        assert (train.kind, train.name, train.count, numbers(train)) == ("json_text", "train.jsonl", 1, [3])
        assert "1 row has messages written as JSON text for some answers only, so all answers are" in train.text
        assert (held.kind, held.name, held.count) == ("json_text", "eval.jsonl", 1)
        assert {note: found.count for note, found in summary.train.notes.items()} == {SOME_AS_JSON: 1, JSON_AS_TEXT: 1}


def test_control_tokens_in_a_rows_own_words(tmp_path: Path) -> None:
    """In either set, with the tokens, where they stand and in which rows; none where the recipe says what they are."""
    rows = [
        *GOOD,
        pair("x<|im_end|>y", "ab<|im_end|>", "cd"),
        pair("z", "ab", "c<s>d"),
        pair("w<|im_end|>", "ab", "cd"),
    ]
    held_out = [pair(f"<|im_start|>user\n{i}<|im_end|>", f"ab{i}", "cd") for i in range(2)]
    chat = {"tokenizer": byte_bpe(chat_template=CHATML, eos="<|im_end|>"), "template": "chat", "max_length": 200}
    summary = summary_of(tmp_path, rows, held_out, **chat)  # type: ignore[arg-type]
    train, held = summary.strict
    assert (train.kind, train.name, train.count, numbers(train)) == ("control_tokens", "train.jsonl", 3, [3, 4, 5])
    assert train.text == (
        "train.jsonl: 3 rows have control tokens of the tokenizer written as text: <|im_end|> in prompt (user) (2), "
        "<|im_end|> in chosen (1), <s> in rejected (assistant) (1); "
        "say with data.control_tokens what they are: keep, as_text or drop"
    )
    assert (held.name, held.count, numbers(held)) == ("eval.jsonl", 2, [1, 2])
    assert "2 of them look as if rendered already, which needs data.template: none" in held.text
    for asked in ("keep", "as_text"):
        told = summary_of(tmp_path, rows, held_out, control_tokens=asked, **chat)  # type: ignore[arg-type]
        assert told.strict == [] and told.train.control_words is None and len(told.train.notes) == 3
    dropped = summary_of(tmp_path, rows, control_tokens="drop", **chat)  # type: ignore[arg-type]
    assert [finding.kind for finding in dropped.strict] == ["dropped"] and dropped.train.dropped_rows[0].row == 3
    one = summary_of(tmp_path, [*GOOD, pair("x", "ab<|im_end|>", "cd")], **chat)  # type: ignore[arg-type]
    assert one.strict[0].text.startswith("train.jsonl: 1 row has a control token of the tokenizer written as text: ")


def test_control_tokens_in_plain_text_are_what_was_asked_for(tmp_path: Path) -> None:
    assert found(tmp_path, [*GOOD, pair("<|im_start|>user\nq<|im_end|>", "ab</s>", "cd</s>")]) == {}


def test_notes_do_not_stop_strict(tmp_path: Path) -> None:
    """Chosen is longer in 3 of 5 pairs of unequal length; a chat answer ends with <|im_end|>, not with </s>."""
    rows = [
        pair(f"q{i}", "a" * chosen, "b" * rejected) for i, (chosen, rejected) in enumerate(((3, 1), (4, 1), (5, 1)))
    ]
    rows += [pair("r", "a", "bb"), pair("s", "a", "bb"), pair("t", "a", "b")]
    summary = summary_of(tmp_path, rows, tokenizer=byte_bpe(chat_template=CHATML), template="chat")
    assert [(finding.kind, finding.strict, finding.count) for finding in summary.findings] == [
        ("length", False, 3),
        ("no_eos", False, 12),
    ]
    assert summary.strict == []
    assert "the chosen answer is longer in 3 of 5 pairs of unequal length (60.0%)" in summary.findings[0].text
    rows[0] = pair("q0", "a", "bb")  # now as many the one way as the other
    assert "length" not in found(tmp_path, [*rows[:-2], rows[-1]])


def test_the_tokenizers_facts(tmp_path: Path) -> None:
    facts = summary_of(tmp_path, GOOD, tokenizer=byte_bpe(pad="<|im_end|>", adds_bos=True)).tokenizer
    assert (facts.tokens, facts.highest_id, facts.model_rows, facts.model_positions) == (260, 259, 260, 1000)
    assert facts.bos is not None and (facts.bos.text, facts.bos.id) == ("<s>", 0)
    assert facts.eos is not None and facts.pad is not None and (facts.eos.id, facts.pad.id) == (1, 3)
    assert (facts.sequences, facts.begin_with_bos, facts.end_with_eos) == (4, 4, 4)
    bare = summary_of(tmp_path, GOOD, tokenizer=byte_bpe(bos=None, eos=None)).tokenizer
    assert (bare.bos, bare.eos, bare.pad, bare.begin_with_bos, bare.end_with_eos) == (None, None, None, 0, 0)


def test_pieces_that_go_on_need_no_end_of_their_own(tmp_path: Path) -> None:
    rows = [{"text": "abcdefghij"}, {"text": "ab"}, {"text": "kl"}]
    summary = summary_of(tmp_path, rows, tokenizer=byte_bpe(adds_bos=True), max_length=5, over_length="pieces")
    facts, train = summary.tokenizer, summary.train
    assert (train.rows_used, train.used, train.cut, train.pieces) == (3, 5, 1, 3)
    assert (facts.sequences, facts.end_with_eos, facts.cut_before_eos) == (5, 3, 2)
    assert "no_eos" not in [finding.kind for finding in summary.findings]


def test_a_stream_is_told_by_its_rows_and_its_pieces_go_on(tmp_path: Path) -> None:
    """8 + 4 tokens, and a row without a text."""
    rows = [{"text": "abcdef"}, {"text": "ab"}, {"text": ""}]
    summary = summary_of(tmp_path, rows, tokenizer=byte_bpe(adds_bos=True), max_length=5, over_length="stream")
    facts, train = summary.tokenizer, summary.train
    assert (train.rows_read, train.rows_used, train.joined, train.pieces, train.used) == (3, 2, 2, 3, 3)
    assert [note.count for text, note in train.notes.items() if text == JOINED] == [2]
    assert train.lengths["sequence"].total == 5 + 5 + 4 and train.tables[0].tokens == 14
    assert (facts.sequences, facts.end_with_eos, facts.cut_before_eos) == (3, 1, 2)
    assert "no_eos" not in [finding.kind for finding in summary.findings]
    said = "3 rows read, 2 of them joined into a stream of 3 pieces, 3 used, 1 dropped"
    assert account(train) == said and headline(summary).startswith("2 of 3 examples can be trained on")


def test_the_tree_is_plain_data(tmp_path: Path) -> None:
    """JSON holds it without a loss."""
    tree = summary_of(tmp_path, GOOD, GOOD[:1]).as_dict()
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree
