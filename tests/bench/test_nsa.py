"""The bench of native sparse attention: what its formulas count, by hand, and that it runs; no test has a speed."""

from __future__ import annotations

import json
import os

import pytest
import torch

from bench import nsa, nsa_index
from bench.nsa_roofline import Pairs, Work, beside, works
from bench.output import peak_bytes
from tuningfork.kernels.nsa.plain import Choice, Grid
from tuningfork.models.mixers.nsa import NsaLayer

TINY = Grid(2, 1, 2), Choice(2, 1, 1)


def test_pairs_of_six_rows_by_hand():
    """Rows see 0, 1, 2, 3, 4, 5 compressed blocks; 1, 1, 2, 2, 2, 2 chosen ones with 1, 2, 3, 4, 3, 4 of their rows; 1,
    2, 3, 3, 3, 3 rows of their window. The last two choose, of three blocks."""
    once = Pairs.of([6], *TINY, window=3)
    assert once == Pairs(6, 5, 15, 2, 9, 17, 15, 10, 6) and once.read == 15 + 17 + 15
    assert Pairs.of([6, 1, 6], *TINY, window=3) == Pairs(13, 10, 30, 4, 18, 35, 31, 21, 12)


@pytest.mark.parametrize("rows, means", [(512, (15, 257, 257)), (8192, (255, 933, 496)), (65536, (2047, 985, 510))])
def test_pairs_of_long_documents_are_those_of_the_product(rows, means):
    pairs = Pairs.of([rows], nsa.GRID, nsa.CHOICE, nsa.WINDOW)
    of_a_row = (pairs.compressed / rows, pairs.selected / rows, pairs.window / rows)
    assert of_a_row == pytest.approx(means, abs=0.6)
    assert pairs.read == NsaLayer(1, 1, 1, nsa.GRID, nsa.CHOICE, nsa.WINDOW).keys_read(0, rows)


def test_work_of_kernels_by_hand():
    """Two heads in one group, 4 wide keys and 6 wide values; 20 slots of heads, of 10 readers."""
    found = works(Pairs.of([6], *TINY, window=3), 2, 1, 4, 6, *TINY)
    assert found["nsa_compressed_forward"] == Work(15 * 2 * 2 * 10, 96 + 100 + 144 + 48)
    assert found["nsa_scores"] == Work(9 * 2 * 2 * 4, 2 * 2 * (8 + 4) + 5 * 8 + 6 * 8)
    assert found["nsa_choose"] == Work(0, 6 * 8 + 6 * 2 * 4)
    # Queries of slots and their places; keys and values; then of each slot its sum of values, a maximum and a sum.
    assert found["nsa_block_forward"] == Work(17 * 2 * 2 * 10, 20 * 8 + 10 * 4 + 120 + 20 * (24 + 8))
    # Products with keys three times, with values twice; a slot's gradient and two numbers, and what its query gets.
    slots = 20 * (8 + 12 + 8 + 16) + 10 * 4
    assert found["nsa_block_gradients"] == Work(17 * 2 * 2 * (3 * 4 + 2 * 6), slots + 120 + 2 * 6 * 10 * 4)
    assert found["nsa_selected_forward"] == Work(680, 96 + 120 + 144 + 48 + 48, cached=10 * 2 * 10 * 2)
    assert found["nsa_selected_query_gradient"].flops == 17 * 2 * 2 * (2 * 4 + 6)
    assert found["fork_key_gradient"].flops == 15 * 2 * 2 * (2 * 4 + 2 * 6)


def test_kernels_stand_beside_the_least_time_of_their_work():
    work = {"a": Work(10**12, 10**9), "b": Work(10**9, 3 * 10**9, cached=4 * 10**9)}
    found = beside({"a": 4.0, "b": 2.0, "other": 1.0}, work, 1e15, 3e12)
    assert found["a"] == {"ms": 4.0, "flops_ms": 1.0, "bytes_ms": 0.333, "bound": "flops", "of_bound": 0.25}
    b = {"ms": 2.0, "flops_ms": 0.001, "bytes_ms": 1.0, "bound": "bytes", "of_bound": 0.5, "cache_tb_s": 2.0}
    assert found["b"] == b and found["other"] == {"ms": 1.0}
    assert beside({"a": 4.0}, work, None, None)["a"] == {"ms": 4.0, "flops_ms": None, "bytes_ms": None}
    speeds = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H100 NVL": 3.9e12, "cpu": None}
    assert {name: peak_bytes(name) for name in speeds} == speeds
    assert peak_bytes("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None and peak_bytes("NVIDIA GH200 480GB") is None


def test_ratios_stand_beside_what_is_asked_of_them():
    ours, dense = {"train_ms": 2.0, "transient_gb": 3.0}, {"train_ms": 9.0, "transient_gb": 2.0}
    found = nsa.against(ours, dense, "12x2x64x64", 65536)
    assert found == {"target": 4.0, "ratio": 4.5, "memory_x": 1.5}
    assert nsa.against({"train_ms": 2.0}, {"train_ms": 9.0}, "2x1x16x24", 256) == {"target": None, "ratio": 4.5}


def test_native_sparse_attention_is_timed_beside_dense_and_in_a_pack(capsys):
    nsa.main(["--rows", "128", "--documents", "2x64"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    *steps, dense, ours, one, two = lines
    assert all(step["loop_ms"] > 0 for step in steps) and [step.get("reported") for step in steps] == [169, None]
    assert not any("note" in line for line in (dense, ours, one, two))
    assert ours["ratio"] == pytest.approx(dense["train_ms"] / ours["train_ms"], rel=1e-2)
    pairs = [Pairs.of(documents, nsa.GRID, nsa.CHOICE, nsa.WINDOW).read for documents in ([128], [64, 64])]
    assert [one["pairs"], two["pairs"]] == pairs and (one["rows"], two["rows"]) == (128, 128)
    assert two["of_pairs"] == pytest.approx(two["train_ms"] / one["train_ms"] * pairs[0] / pairs[1], abs=2e-3)


def test_kernels_are_printed_with_the_least_time_of_their_work(monkeypatch, capsys):
    monkeypatch.setattr(nsa, "peak", lambda: 1e9)
    monkeypatch.setattr(nsa, "peak_bytes", lambda: 1e12)
    monkeypatch.setattr(nsa, "index_line", lambda name, repeats: {"kernel": name})

    def lines(shape, rows, repeats, seconds):
        found = nsa.roofline(shape, [rows], {"fork_forward": 50.0, "other": 0.5})
        return [{"heads": str(shape), "rows": rows, "kernels": found}]

    monkeypatch.setattr(nsa, "attention_lines", lines)
    nsa.main(["--shapes", "2x1x4x6", "--rows", "100", "--documents"])
    *_, forward, other = [line.split() for line in capsys.readouterr().out.splitlines()]
    # 5,050 pairs, 2 heads, 2 flops for each of 10 numbers; bytes: queries 1,600, results 2,400, sums 800, keys 2,000.
    expected = ["2x1x4x6", "100", "fork_forward", "50.0", "0.202", "6.8e-06", "flops", "0.004", "-"]
    assert forward == expected and other == ["2x1x4x6", "100", "other", "0.5", "-", "-", "-", "-", "-"]


def test_the_literal_loop_and_lists_let_rows_read_the_same():
    """Two sequences of six rows, blocks of two: -1 is none, neighbours are joined, and a row's own end cuts."""
    chosen = [[[0]], [[-1, 0]], [[1, 0]], [[0]], [[2]], [[2, 0]]]
    expected = [[[(0, 1)]], [[(0, 2)]], [[(0, 3)]], [[(0, 2)]], [[(4, 5)]], [[(0, 2), (4, 6)]]]
    assert nsa_index.ranges(chosen * 2, 6, 2) == expected * 2
    reads = nsa_index.rows_of_ranges(expected * 2, 6)
    assert reads[11, 0].nonzero().flatten().tolist() == [6, 7, 10, 11] and reads[6, 0].nonzero().tolist() == [[6]]
    pieces, position = torch.arange(12).view(6, 2), torch.arange(12) % 6
    of_blocks = [[[0, 9]], [[9, 0]], [[1, 0]], [[0, 9]], [[2, 9]], [[2, 0]]]
    lists = torch.tensor(of_blocks + [[[n + 3 if n < 9 else 9 for n in row[0]]] for row in of_blocks])
    assert torch.equal(nsa_index.rows_of_lists(lists, pieces, position), reads)
    lists[11, 0, 0] = 4
    assert not torch.equal(nsa_index.rows_of_lists(lists, pieces, position), reads)
    two = torch.tensor([[[0, 12], [12, 0]]]).expand(
        12, 2, 2
    )  # of two groups: a piece of the first in the second's list
    with pytest.raises(ValueError, match="another group"):
        nsa_index.rows_of_lists(two, pieces, position)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
def test_lists_of_this_package_are_those_of_the_loop(monkeypatch):
    monkeypatch.setitem(nsa_index.INDEX_STEPS, "tiny", (2, 64, 2, 4, 8))
    lists, chosen = nsa_index.Lists("tiny", torch.device("cpu")), nsa_index.chosen_blocks("tiny")
    assert not torch.equal(chosen, chosen.sort(dim=-1).values)
    assert lists.equal(chosen)
    pieces = lists.op.pieces
    lists.op = lists.op._replace(pieces=pieces._replace(rows=pieces.rows.roll(1, 0)))
    assert not lists.equal(chosen)
