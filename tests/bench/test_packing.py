"""The benchmark of packing and balance runs, on few examples, and draws what it says it draws."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import packing
from bench.lengths import QUANTILES, draw, examples_of
from tests.data.tiny_tokenizers import CHATML, byte_bpe


@pytest.mark.parametrize("name", QUANTILES)
def test_draws_have_the_quantiles_that_were_measured(name):
    lengths = draw(name, 100_000)
    assert (lengths == draw(name, 100_000)).all() and (lengths[:100] != draw(name, 100, seed=1)).any()
    for column, (median, quantile, largest) in zip(lengths.T, QUANTILES[name], strict=True):
        assert np.quantile(column, [0.5, 0.95]) == pytest.approx([median, quantile], rel=0.03)
        assert column.min() >= 1 and column.max() <= largest


@pytest.mark.parametrize(("name", "means"), [("hh", (162, 59, 45)), ("dpo_en", (447, 311, 341))])
def test_draws_have_nearly_the_means_that_were_measured(name, means):
    """They are no input: how far the real lengths are from log-normal shows here."""
    assert draw(name, 100_000).mean(0) == pytest.approx(means, rel=0.02 if name == "hh" else 0.17)


def test_examples_have_the_lengths_asked_for():
    lengths = np.array([[5, 2, 3], [1, 7, 1]])
    examples = examples_of(lengths)
    assert [(len(e.prompt_ids), *(len(a.ids) for a in e.answers)) for e in examples] == [(5, 2, 3), (1, 7, 1)]
    assert [e.answer_tokens(1) for e in examples] == [3, 1]


def test_packing_and_balance_have_a_line_for_every_case(capsys):
    options = ["--examples", "100", "3000", "--tokens", "2048", "8192", "--window", "256", "--model", "tiny"]
    packing.main([*options, "--ranks", "2", "16", "--pairs_per_rank", "4", "16", "--steps", "2"])
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    packed = [line for line in lines if "way" in line]
    assert [(line["lengths"], line["tokens"], line["way"]) for line in packed[:4]] == [
        *(("hh", 2048, way) for way in ("set", "stream")),
        *(("hh", 8192, way) for way in ("set", "stream")),
    ]
    assert len(packed) == 2 * 2 * 2 * 2 and all(line["seconds"] > 0 for line in packed)
    for line in packed:
        assert line["examples"] + line["left_out"] in (100, 3000)
        rows = draw(line["lengths"], line["examples"] + line["left_out"]).sum(1)
        rows = rows[rows <= line["tokens"]]
        assert line["examples"] == len(rows)
        assert line["fill"] == pytest.approx(rows.sum() / line["packs"] / line["tokens"], abs=1e-5)
    shared = [line for line in lines if "imbalance" in line]
    assert [(line["pairs_per_rank"], line["ranks"]) for line in shared] == [(4, 2), (4, 16), (16, 2), (16, 16)] * 2
    assert all(1 <= line["bound"] <= line["imbalance"] <= line["worst"] for line in shared)
    assert all(line["imbalance"] < line["as_drawn"] for line in shared)
    assert "slowest/mean" in out and "fill" in out


def test_balance_by_hand():
    # As drawn 9 + 9 against 1 + 1; shared out 10 and 10. Then a giant, which is the bound: 18 of 12.
    line = packing.measure_balance(iter([[9, 9, 1, 1], [18, 2, 2, 2]]), ranks=2)
    assert (line["imbalance"], line["worst"]) == (1.25, 1.5)
    assert (line["bound"], line["as_drawn"]) == (1.25, round((18 / 10 + 20 / 12) / 2, 4))


def test_lengths_come_from_a_file(tmp_path, capsys):
    data, folder = tmp_path / "pairs.jsonl", tmp_path / "tokenizer"
    rows = [{"prompt": "a" * n, "chosen": "b" * 3, "rejected": "c" * 2} for n in (4, 5, 6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    byte_bpe(chat_template=CHATML).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    lengths = packing.lengths_of(str(data), str(folder))
    assert (np.diff(lengths[:, 0]) == 1).all() and (lengths[:, 1:] == (4, 3)).all()  # with the end of the turn
    drawn = packing.resampled(lengths, 50)
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in lengths.tolist()}
    options = ["--data", str(data), "--tokenizer", str(folder), "--examples", "20", "--tokens", "512"]
    packing.main([*options, "--ranks", "2", "--pairs_per_rank", "4", "--steps", "1", "--model", "tiny", "--unshared"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["lengths"] for line in lines] == [str(data)] * 3 and {line["share"] for line in lines} == {"none"}


def test_data_needs_a_tokenizer():
    with pytest.raises(SystemExit):
        packing.main(["--data", "pairs.jsonl"])
