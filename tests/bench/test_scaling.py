"""The simulation of many ranks runs, on few examples, and its numbers are what they are said to be."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import scaling
from bench.lengths import QUANTILES
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data.packing.pack import PackLimits
from tuningfork.models.flops import FlopCounter

LIMITS = PackLimits.plan(2048, "prompt", compiled=True)
FLOPS = FlopCounter(block_weights=1000, head_weights=500)
SECONDS = scaling.PackTime(FLOPS, rate=1e6, overhead=2.0)


def simulated(lengths: list[tuple[int, int, int]], ranks: int) -> dict:
    drawn = np.array(lengths)
    return scaling.simulate(lambda count, _: drawn[:count], ranks, len(lengths) // ranks, 2, LIMITS, SECONDS)


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_there_is_a_line_for_every_case_and_a_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scaling, "POOL", 16)
    plot, out = tmp_path / "new" / "scaling.svg", tmp_path / "lines.jsonl"
    options = ["--ranks", "2", "8", "--pairs_per_rank", "4", "8", "--model", "tiny", "--steps", "2"]
    scaling.main([*options, "--plot", str(plot), "--out", str(out)])
    text = capsys.readouterr().out
    lines = lines_of(text)
    assert lines == lines_of(out.read_text())
    names = [*QUANTILES, "short", "long"]
    assert [(line["lengths"], line["pairs_per_rank"], line["ranks"]) for line in lines] == [
        (name, pairs, ranks) for name in names for pairs in (4, 8) for ranks in (2, 8)
    ]
    for line in lines:
        assert line["simulated"] and line["tflops"] == 500 and line["overhead_ms"] == 5
        assert line["tokens"] == (32_768 if line["lengths"] == "long" else 16_384)
        assert line["bound"] >= 1 and 1 <= line["slowest"] <= line["together"] and line["plan_ms"] > 0
        assert line["slowest"] <= line["over_bound"] * line["bound"] + 1e-3  # the worst step's, and means
        assert line["least_packs"] <= line["packs"]
    assert "slowest/mean" in text and "simulated: a pack takes 5 ms and its flops at 500 TFLOP/s" in text
    root = ElementTree.fromstring(plot.read_text())
    assert len(root.findall("{*}polyline")) == len(names) * 2 * 2


def test_pairs_alike_make_ranks_alike():
    # 8 pairs of 300 rows on 4 ranks: 600 rows in a pack of 1,024 slots; 500 of them are logit rows.
    line = simulated([(50, 125, 125)] * 8, ranks=4)
    assert (line["slowest"], line["bound"], line["over_bound"], line["together"], line["as_drawn"]) == (1, 1, 1, 1, 1)
    assert (line["packs"], line["least_packs"], line["empty"]) == (1, 1, 0)


def test_a_giant_is_the_bound_and_its_pack_takes_its_flops_and_its_padding():
    # One pair of 1,900 rows and three of 100 on two ranks, in packs of 1,920 and 1,024 slots.
    line = simulated([(1880, 10, 10), (80, 10, 10), (80, 10, 10), (80, 10, 10)], ranks=2)
    seconds = [2 + (6 * 1000 * slots + 6 * 500 * logit_rows) / 1e6 for slots, logit_rows in ((1920, 20), (1024, 60))]
    alone = 2 + (6 * 1000 * 1900 + 6 * 500 * 20) / 1e6
    mean = sum(seconds) / 2
    assert line["slowest"] == line["together"] == pytest.approx(seconds[0] / mean, abs=1e-4)
    assert line["bound"] == pytest.approx(alone / mean, abs=1e-4)
    assert line["over_bound"] == pytest.approx(seconds[0] / alone, abs=1e-4)
    flops = [6 * 1000 * rows + 6 * 500 * 20 for rows in (1900, 100)]
    assert line["as_drawn"] == pytest.approx(2 * (flops[0] + flops[1]) / (flops[0] + 3 * flops[1]), abs=1e-4)


def test_packs_are_counted():
    # Three pairs that fill a pack each, on two ranks with two packs each; the fourth has the last pack for itself.
    line = simulated([(1000, 300, 300)] * 3 + [(8, 1, 1)], ranks=2)
    assert (line["packs"], line["least_packs"], line["empty"]) == (2, 2, 0)
    # No two of these fit one pack, and their rows alone would need three of each rank.
    line = simulated([(1000, 300, 300)] * 4 + [(700, 200, 200)] * 2, ranks=2)
    assert (line["packs"], line["least_packs"], line["empty"]) == (3, 3, 0)
    # Six of 1,100 rows would need two packs a rank if they could be cut, and need three.
    line = simulated([(700, 200, 200)] * 6, ranks=2)
    assert (line["packs"], line["least_packs"], line["empty"]) == (3, 2, 0)


def test_lengths_that_no_pack_holds_are_replaced():
    drawn = np.array([(10, 5, 5), (100, 5, 5), (12, 4, 4), (90, 9, 9)])
    found = scaling.fitting(lambda count, seed: drawn[:count], 50, 4, 0)
    assert len(found) == 4 and {tuple(row) for row in found.tolist()} == {(10, 5, 5), (12, 4, 4)}
    assert (scaling.fitting(lambda count, seed: drawn[:count], 200, 4, 0) == drawn).all()


def test_lengths_come_from_a_file(tmp_path, capsys):
    data, folder = tmp_path / "pairs.jsonl", tmp_path / "tokenizer"
    rows = [{"prompt": "a" * n, "chosen": "b" * 3, "rejected": "c" * 2} for n in (4, 5, 6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    byte_bpe(chat_template=CHATML).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    options = ["--data", str(data), "--tokenizer", str(folder), "--ranks", "2", "--pairs_per_rank", "4"]
    scaling.main([*options, "--steps", "1", "--model", "tiny", "--tokens", "2048"])
    [line] = lines_of(capsys.readouterr().out)
    assert line["lengths"] == str(data) and line["tokens"] == 2048 and line["steps"] == 1


@pytest.mark.parametrize("options", [["--data", "pairs.jsonl"], ["--plot", "scaling.png"]])
def test_what_cannot_be_done_is_refused(options):
    with pytest.raises(SystemExit):
        scaling.main(options)
