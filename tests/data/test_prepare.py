"""The whole way from file to token examples: every row is used or listed, and the account adds up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.tiny_tokenizers import CHATML, INST, REWRITING, byte_bpe
from tuningfork.accounts import DataReport, Size
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import dataset_digest, prepare_examples, report_dict
from tuningfork.data.token_table import Subset, TokenTable, columns_of
from tuningfork.data.tokens.template import REWRITES
from tuningfork.data.tokens.truncate import CUT_ANSWERS, CUT_ONE_SIDE, CUT_PROMPT
from tuningfork.data.tokens.workers import BATCH
from tuningfork.errors import DataError
from tuningfork.records import Source, TokenAnswer, TokenExample

NONE = DataConfig(template="none")


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_of_several_answers_the_best_alone_is_used_where_that_is_asked_for(tmp_path: Path) -> None:
    """SFT on the chosen answers of preference pairs: the prompt is the pair's, the margin is gone, the weight stays."""
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}, {"role": "user", "content": "q"}]
    rows = [
        {**pair("q", "yes", "no"), "margin": 0.5, "weight": 2.0},
        {"prompt": "q", "answers": ["low", "high"], "scores": [1, 2]},
        {"prompt": "q", "completion": "one"},
        {key: [*talk, {"role": "assistant", "content": key}] for key in ("chosen", "rejected")},
    ]
    tokenizer, best = byte_bpe(chat_template=CHATML), DataConfig(answers="best")
    found = []
    for n, row in enumerate(rows):
        (tmp_path / str(n)).mkdir()
        path = write(tmp_path / str(n), [row])
        (example,), _ = prepare_examples(path, tokenizer, best, 260)
        (of_all,), _ = prepare_examples(path, tokenizer, DataConfig(), 260)
        assert tokenizer.decode(example.prompt_ids) == tokenizer.decode(of_all.prompt_ids)
        (answer,) = example.answers
        assert answer.ids.tolist() == of_all.answers[0].ids.tolist()
        found.append((tokenizer.decode(answer.ids[answer.mask]).partition("<")[0], example.weight, example.margin))
    assert found == [("yes", 2.0, None), ("high", 1.0, None), ("one", 1.0, None), ("chosen", 1.0, None)]


def test_transcripts_end_to_end(tmp_path: Path) -> None:
    """A small file with every fault of the real one, through a template with strict roles."""
    talk = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: {}\n\nAssistant:{}"
    twice = "\n\nHuman: Hi\n\nAssistant: Hello\n\nAssistant:{}"
    rows = [
        {"chosen": talk.format("q", " yes"), "rejected": talk.format("q", " no")},
        {"chosen": talk.format("q", " same"), "rejected": talk.format("q", " same")},
        {"chosen": talk.format("q", " yes"), "rejected": talk.format("q", "")},
        {"chosen": talk.format("q", " yes"), "rejected": talk.format("r", " no")},
        {"chosen": twice.format(" a"), "rejected": twice.format(" b")},
        {"chosen": talk.format("q", " yes"), "rejected": talk.format("q", " " + 200 * "n")},
        {"chosen": talk.format("z", " 1"), "rejected": talk.format("z", " 2")},
        {"chosen": talk.format("z", " "), "rejected": talk.format("z", " 2")},
    ]
    path = write(tmp_path, rows)
    tokenizer = byte_bpe(chat_template=INST)
    examples, report = prepare_examples(path, tokenizer, DataConfig(max_length=100), 260)
    assert [e.source.row for e in examples] == [1, 7]
    first = examples[0]
    assert tokenizer.decode(first.prompt_ids) == "<s>[INST] Hi [/INST] Hello </s>[INST] q [/INST]"
    assert [tokenizer.decode(a.ids[a.mask]) for a in first.answers] == [" yes </s>", " no </s>"]
    assert report_dict(report)["dropped_rows"][-2] == {
        "file": str(path),
        "row": 6,
        "reason": "longer than max_length",
        "detail": "prompt 42, chosen 6 and rejected 203 tokens, too long with rejected; data.max_length is 100",
    }
    assert [(row.row, row.reason) for row in report.dropped_rows] == [
        (2, "chosen equals rejected"),
        (3, "empty answer"),
        (4, "prompts differ"),
        (5, "prompt ends with an assistant turn"),
        (6, "longer than max_length"),
        (8, "empty answer"),
    ]
    assert (report.rows_read, report.used, sum(report.dropped.values())) == (8, 2, 6)
    # The same turns as plain text: the template cannot object, and nothing is added but EOS.
    plain, report = prepare_examples(path, tokenizer, NONE, 260)
    assert [e.source.row for e in plain] == [1, 5, 6, 7]
    assert tokenizer.decode(plain[1].prompt_ids) == "\n\nHuman: Hi\n\nAssistant: Hello\n\nAssistant:"
    assert tokenizer.decode(plain[1].answers[1].ids) == " b</s>"


def test_the_limit_holds_for_the_longer_of_the_answers_and_to_the_token(tmp_path: Path) -> None:
    # byte tokens: prompt 6, answer 3 + EOS
    rows = [
        pair("123456", "abc", "d"),
        pair("123456", "d", "abc"),
        pair("1234567", "abc", "d"),
        pair("1", "a", "b" * 99),
    ]
    path = write(tmp_path, rows)
    for limit, kept in ((10, [1, 2]), (11, [1, 2, 3]), (101, [1, 2, 3, 4])):
        examples, report = prepare_examples(path, byte_bpe(), replace(NONE, max_length=limit), 260)
        assert [e.source.row for e in examples] == kept
        assert max(e.longest for e in examples) <= limit
        assert report.dropped == ({"longer than max_length": 4 - len(kept)} if len(kept) < 4 else {})


def test_a_prompt_as_long_as_the_limit_is_listed_and_not_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path, [pair("x" * 10, "a", "b"), pair("x", "a", "b")])
    examples, report = prepare_examples(path, byte_bpe(), replace(NONE, max_length=10), 260)
    assert [e.source.row for e in examples] == [2]
    assert report.dropped_rows[0].detail == (
        "prompt 10, chosen 2 and rejected 2 tokens, too long with chosen and rejected; data.max_length is 10"
    )


def test_answers_without_a_token_that_counts_and_answers_equal_as_tokens(tmp_path: Path) -> None:
    tokenizer = byte_bpe(eos=None)
    path = write(tmp_path, [pair("", "ab", "c"), pair("q", "a", "b")])
    examples, report = prepare_examples(path, tokenizer, NONE, 260)
    assert [e.source.row for e in examples] == [2]
    assert [(row.reason, row.detail) for row in report.dropped_rows] == [("no token of an answer counts", "rejected")]
    path = write(tmp_path, [pair("q", "a ", "a"), pair("q", "a", "b")])  # the template trims
    _, report = prepare_examples(path, byte_bpe(chat_template=INST), DataConfig(), 260)
    assert report.dropped == {"chosen equals rejected": 1}


def test_a_template_that_prints_earlier_turns_otherwise_is_noted(tmp_path: Path) -> None:
    several = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "b"},
    ]
    path = write(tmp_path, [pair("q", "a", "b"), {"prompt": "q", "chosen": several, "rejected": "c"}])
    examples, report = prepare_examples(path, byte_bpe(chat_template=REWRITING), DataConfig(), 260)
    assert [e.source.row for e in examples] == [1, 2] and report.dropped == {}
    assert report.notes == {REWRITES: [Source(str(path), 2)]}


def test_nothing_left_is_an_error_with_reasons_and_counts(tmp_path: Path) -> None:
    path = write(tmp_path, [pair("q", "a", ""), pair("q", "", "b"), pair("q" * 20, "a", "b")])
    with pytest.raises(DataError) as caught:
        prepare_examples(path, byte_bpe(), replace(NONE, max_length=5), 260)
    assert str(caught.value) == (
        f"{path}: none of its 3 rows can be used: 2 x empty answer (first: row 1, rejected); "
        "1 x longer than max_length (first: row 3, prompt 20, chosen 2 and rejected 2 tokens, "
        "too long with chosen and rejected; data.max_length is 5). "
        "Mend the rows or change the settings named here."
    )


def test_order_batches_and_progress(tmp_path: Path) -> None:
    rows = [pair(f"p{i}", "a", "b" if i % 3 else "a") for i in range(2 * BATCH)]
    calls: list[tuple[int, int]] = []
    path = write(tmp_path, rows)
    examples, report = prepare_examples(path, byte_bpe(), NONE, 260, lambda done, total: calls.append((done, total)))
    assert [e.source.row for e in examples] == [i + 1 for i in range(2 * BATCH) if i % 3]
    assert report.dropped == {"chosen equals rejected": len(rows) - len(examples)}
    assert calls == [(BATCH, len(rows)), (len(rows), len(rows))]


def test_a_tokenizer_that_does_not_fit_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="embeds only the ids below 100"):
        prepare_examples(tmp_path / "missing.jsonl", byte_bpe(), NONE, 100)
    with pytest.raises(DataError, match="no chat template"):
        prepare_examples(tmp_path / "missing.jsonl", byte_bpe(), DataConfig(), 260)
    with pytest.raises(DataError, match="no such file"):
        prepare_examples(tmp_path / "missing.jsonl", byte_bpe(), NONE, 260)


def test_the_report_is_plain_data(tmp_path: Path) -> None:
    path = write(tmp_path, [pair("q", "a", "b"), pair("q", "a", "")])
    _, report = prepare_examples(path, byte_bpe(chat_template=CHATML), DataConfig(), 260)
    expected = {
        "sources": {str(path): [str(path)]},
        "passed_over": [],
        "formats": {str(path): "pairs"},
        "rows_read": 2,
        "pieces": {"rows": 0, "joined": 0, "pieces": 0},
        "used": 1,
        "dropped": {"empty answer": 1},
        "notes": {},
        "dropped_rows": [{"file": str(path), "row": 2, "reason": "empty answer", "detail": "rejected"}],
    }
    assert json.loads(json.dumps(report_dict(report))) == expected


def example(prompt: list[int], *answers: tuple[list[int], list[int]], row: int = 1) -> TokenExample:
    made = tuple(TokenAnswer(np.array(ids, np.int32), np.array(mask, bool)) for ids, mask in answers)
    return TokenExample(Source("f", row), np.array(prompt, np.int32), made)


def test_the_digest_sees_ids_masks_cuts_and_order_and_nothing_else() -> None:
    a = example([1, 2], ([3], [1]), ([4, 5], [1, 1]))
    b = example([6], ([7], [1]), ([8], [1]))
    variants = [
        [a, b],
        [b, a],
        [a],
        [example([1, 9], ([3], [1]), ([4, 5], [1, 1])), b],
        [example([1, 2], ([3], [1]), ([4, 5], [0, 1])), b],
        [example([1], ([2, 3], [1, 1]), ([4, 5], [1, 1])), b],
        [example([1, 2], ([3, 4], [1, 1]), ([5], [1])), b],
        [example([1, 2], ([4, 5], [1, 1]), ([3], [1])), b],
        [],
    ]
    digests = [dataset_digest(variant) for variant in variants]
    assert len(set(digests)) == len(variants) and {len(d) for d in digests} == {32}
    moved = example([1, 2], ([3], [1]), ([4, 5], [1, 1]), row=99)
    table = TokenTable("f", columns_of([b, a]))
    assert dataset_digest([moved, b]) == digests[0] == dataset_digest(Subset([table], [1, 0]))
    # fixed for good: a run that is resumed by a later version must find its data unchanged
    assert digests[0] == "2480540d8bfcf5bf1a844d79f9f9f352"


def test_the_digest_sees_what_rows_say_beside_their_text() -> None:
    plain = example([1], ([2], [1]), ([3], [1]))
    changed = [replace(plain, **change) for change in ({"weight": 2.0}, {"margin": 1.0}, {"label": True})]
    assert len({dataset_digest([each]) for each in (plain, *changed)}) == 4
    assert dataset_digest([replace(plain, weight=1.0)]) == dataset_digest([plain])


def test_weights_margins_and_labels_reach_the_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, [pair("q", "a", "b") | {"weight": 0.5, "margin": 1}, pair("q", "c", "d")])
    examples, _ = prepare_examples(path, byte_bpe(), NONE, 260)
    assert [(e.weight, e.margin, e.label) for e in examples] == [(0.5, 1.0, None), (1.0, None, None)]


def noted(report: DataReport) -> dict[str, list[int]]:
    return {note: [source.row for source in sources] for note, sources in report.notes.items()}


def test_what_was_cut_is_noted_and_counted(tmp_path: Path) -> None:
    # a token for each character, and EOS; a limit of 7
    rows = [pair("qqq", "aaaa", "bb"), pair("qqq", "aaaaa", "bbbbbb"), pair("qqq", "a", "b"), pair("q" * 8, "a", "b")]
    path = write(tmp_path, rows)
    config = replace(NONE, max_length=7)
    _, dropped = prepare_examples(path, byte_bpe(), config, 260)
    assert dropped.dropped == {"longer than max_length": 3}
    answers, cut = prepare_examples(path, byte_bpe(), replace(config, over_length="truncate_answers"), 260)
    assert [[len(a.ids) for a in e.answers] for e in answers] == [[4, 3], [4, 4], [2, 2]]
    assert noted(cut) == {CUT_ANSWERS: [1, 2], CUT_ONE_SIDE: [1]}
    assert cut.dropped == {"prompt leaves no room for an answer": 1}
    prompts, left = prepare_examples(path, byte_bpe(), replace(config, over_length="truncate_prompt_left"), 260)
    assert [(e.source.row, len(e.prompt_ids)) for e in prompts] == [(1, 2), (3, 3), (4, 5)]
    assert noted(left) == {CUT_PROMPT: [1, 4]}
    assert left.dropped == {"answer leaves no room for the prompt": 1}


def test_several_sources_are_one_data_set_with_one_account(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write(tmp_path, [pair("q", "a", "b"), pair("q", "a", "a"), pair("r", "a", "b")]).rename(first)
    write(tmp_path, [{"text": "t"}, {"text": " "}]).rename(second)
    examples, report = prepare_examples([str(first), str(second)], byte_bpe(), NONE, 260)
    assert [e.id for e in examples] == [f"{first}:1", f"{first}:3", f"{second}:1"]
    assert (report.rows_read, report.used) == (5, 3)
    assert [(d.file, d.row) for d in report.dropped_rows] == [(str(first), 2), (str(second), 2)]
    assert report.formats == {str(first): "pairs", str(second): "text"}


def test_what_a_mix_leaves_out_is_listed(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        write(tmp_path, [pair(f"{file.stem}{i}", "a", "b") for i in range(8)]).rename(file)
    config = replace(NONE, counts=[2, 5], mix_seed=3)
    examples, report = prepare_examples(list(map(str, files)), byte_bpe(), config, 260)
    assert [e.source.file for e in examples] == [str(files[0])] * 2 + [str(files[1])] * 5
    assert report.dropped == {"left out of the mix": 9} and (report.rows_read, report.used) == (16, 7)
    assert len({e.id for e in examples} | {f"{d.file}:{d.row}" for d in report.dropped_rows}) == 16
    again, _ = prepare_examples(list(map(str, files)), byte_bpe(), config, 260)
    other, _ = prepare_examples(list(map(str, files)), byte_bpe(), replace(config, mix_seed=4), 260)
    assert [e.id for e in again] == [e.id for e in examples] != [e.id for e in other]
    every, _ = prepare_examples(list(map(str, files)), byte_bpe(), config, 260, use="eval")
    assert len(every) == 16


@pytest.mark.parametrize(("settings", "key"), [({"shares": [1.0, 3.0]}, "shares"), ({"counts": [1, 1]}, "counts")])
def test_a_source_of_a_mix_without_a_usable_row_is_named_with_the_reasons(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write(tmp_path, [pair("q", "a", "b")]).rename(good)
    write(tmp_path, [pair("q", "a", ""), pair("q", "a", "b" * 99)]).rename(bad)
    config = replace(NONE, max_length=20, **settings)
    with pytest.raises(DataError) as caught:
        prepare_examples([str(good), str(bad)], byte_bpe(), config, 260)
    assert str(caught.value) == (
        f"{bad}: none of its 2 rows can be used: 1 x empty answer (first: row 1, rejected); 1 x longer than max_length "
        "(first: row 2, prompt 1, chosen 2 and rejected 100 tokens, too long with rejected; "
        "data.max_length is 20). Mend the rows or change the "
        f"settings named here. data.{key} takes a part of every source."
    )
    examples, _ = prepare_examples([str(good), str(bad)], byte_bpe(), replace(NONE, max_length=20), 260)
    assert [e.id for e in examples] == [f"{good}:1"]  # without a mix it is a list of files like any other


def test_the_report_knows_which_splits_were_taken_and_how_long_rows_were_before_a_cut(tmp_path: Path) -> None:
    for name, rows in {
        "train": [pair("12345", "abc", "d"), pair("1", "a", "b")],
        "test": [pair("1", "a", "b")],
    }.items():
        write(tmp_path, rows).rename(tmp_path / f"{name}.jsonl")
    train, test = str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")
    config = replace(NONE, max_length=7, over_length="truncate_answers")
    examples, report = prepare_examples(tmp_path, byte_bpe(), config, 260)
    assert (report.sources, report.passed_over) == ({str(tmp_path): [train]}, [test])
    assert [len(a.ids) for a in examples[0].answers] == [2, 2]
    assert report.sizes == {Source(train, 1): Size(5, (4, 2))}  # with </s> behind each answer
    _, held_out = prepare_examples(tmp_path, byte_bpe(), config, 260, use="eval")
    assert (held_out.sources, held_out.passed_over) == ({str(tmp_path): [test]}, [train])
