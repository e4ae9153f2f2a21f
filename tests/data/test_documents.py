"""Documents from a file to examples: pieces, their account, and the bytes of text that targets stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.tiny_tokenizers import byte_bpe
from tuningfork.accounts import DataReport
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import LEFT_OUT, account_line, prepare_examples, report_dict
from tuningfork.data.tokens.truncate import CUT_PIECES
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
    assert report_dict(report)["pieces"] == {"rows": 2, "pieces": len(examples) - 1}
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
