"""Documents from a file to examples: pieces, their account, and the bytes of text that targets stand for."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.data.tiny_tokenizers import byte_bpe
from tuningfork.accounts import DataReport
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import LEFT_OUT, account_line, prepare_examples, report_dict, stream_line
from tuningfork.data.tokens import workers
from tuningfork.data.tokens.stream import JOINED, NO_DOCUMENT
from tuningfork.data.tokens.truncate import CUT_PIECES
from tuningfork.errors import DataError
from tuningfork.objective.lm import LM
from tuningfork.records import Source, TokenExample

TEXTS = [
    "one two three four five six",  # 27 bytes
    "short",
    "naïve 天気 \U0001f600 and more of it",  # characters of 1 to 4 bytes
]
BYTES = [len(text.encode()) for text in TEXTS]
MERGES = [("t", "h"), ("o", "n"), ("on", "e"), ("Ã", "¯"), ("å", "¤")]  # the last is half of a character


def read(folder: Path, cache: Path | None = None, **settings) -> tuple[list[TokenExample], DataReport]:
    path = folder / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS), encoding="utf-8")
    bos = settings.pop("bos", False)
    config = DataConfig(template="none", **{"max_length": 8, "over_length": "pieces"} | settings)
    examples, report = prepare_examples(path, byte_bpe(MERGES, adds_bos=bos), config, 270, cache=cache)
    return list(examples), report


def test_rows_are_cut_and_the_account_says_so(tmp_path: Path) -> None:
    examples, report = read(tmp_path)
    pieces = {row: [e.source.piece for e in examples if e.source.row == row] for row in (1, 2, 3)}
    assert pieces[2] == [0] and all(pieces[row] == [*range(1, len(pieces[row]) + 1)] for row in (1, 3))
    assert (report.rows_read, report.cut, report.pieces) == (3, 2, len(examples) - 1)
    assert (report.used, report.dropped) == (len(examples), {})
    path = str(tmp_path / "docs.jsonl")
    assert report.notes == {CUT_PIECES: [Source(path, 1), Source(path, 3)]}
    assert report_dict(report)["pieces"] == {"rows": 2, "joined": 0, "pieces": len(examples) - 1}
    said = f"docs: 3 rows read, 2 of them cut into {len(examples) - 1} pieces, {len(examples)} used"
    assert account_line("docs", report) == said


def test_what_a_mix_leaves_out_of_pieces_is_counted_piece_by_piece(tmp_path: Path) -> None:
    everything, _ = read(tmp_path)
    some, report = read(tmp_path, counts=[4])
    assert len(some) == report.used == 4
    assert report.dropped == {LEFT_OUT: len(everything) - 4}
    assert {(row.row, row.piece) for row in report.dropped_rows} == {
        (e.source.row, e.source.piece) for e in everything
    } - {(e.source.row, e.source.piece) for e in some}


@pytest.mark.parametrize("limit", [2, 5, 8, 200])
def test_bytes_of_the_targets_add_up_to_the_text(tmp_path: Path, limit: int) -> None:
    """Behind a BOS each token is a target, the end among them, which stands for no text."""
    examples, _ = read(tmp_path, bos=True, max_length=limit)
    for row, size in enumerate(BYTES, start=1):
        assert sum(e.answers[0].text_bytes for e in examples if e.source.row == row) == size


@pytest.mark.parametrize("limit", [3, 200])
def test_the_first_token_of_a_document_without_bos_is_no_target_and_its_bytes_are_not_counted(
    tmp_path: Path, limit: int
) -> None:
    """ "one" is one token of three bytes; "s" and "n" are one each."""
    examples, _ = read(tmp_path, max_length=limit)
    for row, (size, first) in enumerate(zip(BYTES, (3, 1, 1), strict=True), start=1):
        assert sum(e.answers[0].text_bytes for e in examples if e.source.row == row) == size - first


def test_what_is_cut_off_is_not_counted_and_the_cache_keeps_what_is(tmp_path: Path) -> None:
    made, _ = read(tmp_path, tmp_path / "cache", over_length="truncate_answers", max_length=4)
    kept, _ = read(tmp_path, tmp_path / "cache", over_length="truncate_answers", max_length=4)
    assert [e.answers[0].text_bytes for e in made] == [3, 3, 4]  # " tw", "hor", and "aï" with " "
    assert [e.answers[0].text_bytes for e in kept] == [3, 3, 4]
    pieces, _ = read(tmp_path, tmp_path / "cache")
    again, _ = read(tmp_path, tmp_path / "cache")
    assert [(e.source, e.answers[0].text_bytes) for e in again] == [(e.source, e.answers[0].text_bytes) for e in pieces]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("limit", [2, 3, 8, 200])
def test_a_stream_has_every_token_of_its_documents_once(tmp_path: Path, limit: int, bos: bool) -> None:
    """Joined by hand: the tokens of all documents, ends and BOS among them, of which all but the first are targets."""
    documents, _ = read(tmp_path, bos=bos, over_length="drop", max_length=500)
    whole = np.concatenate([np.concatenate([e.prompt_ids, e.answers[0].ids]) for e in documents])
    pieces, report = read(tmp_path, bos=bos, over_length="stream", max_length=limit)
    assert [piece.longest for piece in pieces[:-1]] == [limit] * (len(pieces) - 1) and 2 <= pieces[-1].longest <= limit
    laid = [piece.answers[0].ids for piece in pieces]
    assert np.array_equal(np.concatenate([laid[0][:1], *(ids[1:] for ids in laid)]), whole)
    assert all(one[-1] == other[0] for one, other in pairwise(laid))
    assert sum(LM().totals([piece]).tokens for piece in pieces) == len(whole) - 1
    first = 0 if bos else 3  # "one", which nothing predicts
    assert sum(piece.answers[0].text_bytes for piece in pieces) == sum(BYTES) - first
    assert [piece.source.piece for piece in pieces] == [*range(1, len(pieces) + 1)]
    rows = np.repeat([1, 2, 3], [document.longest for document in documents])
    assert [piece.source.row for piece in pieces] == rows[1 :: limit - 1].tolist()
    assert (report.rows_read, report.cut, report.joined, report.pieces) == (3, 0, 3, len(pieces))
    assert report.used == len(pieces) and len(report.notes[JOINED]) == 3
    assert report_dict(report)["pieces"] == {"rows": 0, "joined": 3, "pieces": len(pieces)}
    assert f"3 of them joined into a stream of {len(pieces)} piece" in account_line("docs", report)
    assert "leaks across documents by design" in stream_line("docs", report)


def test_a_stream_does_not_depend_on_batches_and_the_cache_keeps_it(tmp_path: Path, monkeypatch) -> None:
    made, _ = read(tmp_path, over_length="stream")
    monkeypatch.setattr(workers, "BATCH", 1)
    apart, _ = read(tmp_path, tmp_path / "cache", over_length="stream")
    kept, report = read(tmp_path, tmp_path / "cache", over_length="stream")
    for one, *others in zip(made, apart, kept, strict=True):
        assert all((other.source, other.content) == (one.source, one.content) for other in others)
        assert {other.answers[0].text_bytes for other in others} == {one.answers[0].text_bytes}
    assert report.joined == 3 and len(list((tmp_path / "cache").glob("*/account.json"))) == 1


def test_a_stream_takes_texts_that_all_count_alike(tmp_path: Path) -> None:
    path, config = tmp_path / "docs.jsonl", DataConfig(template="none", max_length=8, over_length="stream")
    path.write_text('{"text": "one"}\n{"text": "two", "weight": 2}\n')
    _, report = prepare_examples(path, byte_bpe(MERGES), config, 270)
    assert [(row.row, row.reason) for row in report.dropped_rows] == [(2, NO_DOCUMENT)]
    assert (report.rows_read, report.joined, report.pieces, report.used) == (2, 1, 1, 1)
    path.write_text('{"prompt": "a question", "completion": "an answer"}\n')
    with pytest.raises(DataError, match=r"its only row cannot be used: 1 x no document.* it has a prompt"):
        prepare_examples(path, byte_bpe(MERGES), config, 270)
