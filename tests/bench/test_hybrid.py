"""The benchmarks of hybrid models: their logic, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import hybrid_lengths, hybrid_trl, shapes, tuning_storm
from tests.tiny import VOCAB, random_examples, scorer_of, tiny_model, tiny_policy
from tuningfork.data.packing.pack import PackLimits
from tuningfork.models import compilations
from tuningfork.models.compilations import Compilation
from tuningfork.report.run.metrics import StepResult

STEP = StepResult(1, 0.1, 1e-3, 1.0, 4, 0.5, 4, 100, 80, 40, 1000, 16, 2.0, 0.1, 1e9)


def test_each_step_is_one_pack_of_a_random_number_of_rows():
    limits = PackLimits.plan(4096, "tree", compiled=True)
    steps = hybrid_lengths.random_steps(20, 1024, 4096, vocabulary=500)
    loader = hybrid_lengths.InOrder(steps, limits, pin_memory=False)
    assert loader.order.total_steps == 20
    packs = [loader.step(step) for step in range(20)]
    assert [len(of_step) for of_step in packs] == [1] * 20
    for step, [pack] in zip(steps, packs, strict=True):
        assert {example.content for example in pack.examples} == {example.content for example in step}
    sizes = [len(pack.input_ids) for [pack] in packs]
    assert len(set(sizes)) > 10 and min(sizes) >= 1024 and max(sizes) <= 4096


def test_a_step_that_is_slow_for_its_size_and_a_late_compilation_show():
    steps = [replace(STEP, step=n, rows=1000 * n, seconds=0.01 * n) for n in range(1, 103)]
    flat = hybrid_lengths.summary(steps)
    assert (flat["steps"], flat["lengths"], flat["shortest"], flat["longest"]) == (102, 102, 1000, 102_000)
    assert flat["late"] == 0 and flat["first_steps_s"] == [0.01, 0.02, 0.03]
    assert flat["slowest_of_its_size"] == pytest.approx(1.0) and flat["halves"] == [10.0, 10.0]
    assert flat["ms_per_1000_rows"] == dict.fromkeys(("0.5", "0.9", "0.99", "1.0"), 10.0)
    steps[0] = replace(steps[0], compilations=9)  # which compiles as it should
    steps[60] = replace(steps[60], seconds=30.0, compilations=2, compiled_here=("a", "b"))
    stormy = hybrid_lengths.summary(steps)
    assert stormy["late"] == 2 and stormy["causes"] == ["a", "b"]
    assert stormy["slowest_of_its_size"] > 10 and stormy["step_s"]["1.0"] == 30.0


def test_a_length_says_what_was_tuned_for_it():
    met = set()

    def run(rows: int) -> None:
        if rows not in met:
            compilations._of_triton += [Compilation("kernel a was compiled")] + [Compilation("tuned", "", 34)] * 2
        met.add(rows)

    found = list(tuning_storm.of_kernels(lambda: run, [5, 7, 5], torch.device("cpu")))
    assert [(line["rows"], line["tunings"], line["timed"], line["compiled"]) for line in found] == [
        (5, 2, 68, 1),
        (7, 2, 68, 1),
        (5, 0, 0, 0),
    ]
    assert all(line["first"] >= 0 and line["again"] >= 0 for line in found)


def test_kernels_that_fail_have_a_line():
    (line,) = tuning_storm.of_kernels(lambda: 1 / 0, [5], torch.device("cpu"))
    assert line["note"].startswith("failed: ZeroDivisionError")


def test_ours_run_without_a_gpu_and_nothing_is_tuned():
    shape = tuning_storm.Shape.parse("1x1x4x6")
    assert list(tuning_storm.runs(shape, torch.device("cpu"))) == ["ours"]
    (line,) = tuning_storm.of_kernels(lambda: tuning_storm.ours(shape, torch.device("cpu")), [10], torch.device("cpu"))
    assert (line["tunings"], line["compiled"]) == (0, 0)


PAIRS = random_examples([(70, (5, 12)), (3, (1, 66)), (9, (20, 2))])


def test_by_hand_a_state_leaks_where_position_ids_alone_part_sequences_and_padding_leaks_nothing():
    model = tiny_model("olmo_hybrid", torch.float32)
    model.set_attn_implementation("sdpa")
    truth = hybrid_trl.of_all(hybrid_trl.alone, model, PAIRS, 1)
    assert [len(part) for part in truth] == [5, 12, 1, 66, 20, 2]
    errors = {name: hybrid_trl.compared(hybrid_trl.of_all(way, model, PAIRS, 2), truth)
              for name, way in hybrid_trl.WAYS.items()}  # fmt: skip
    assert errors["padded"]["error"] < 1e-4
    assert errors["position_ids"]["error"] > 1 and errors["position_ids"]["equal"].endswith("of 6")
    dense = tiny_model("llama", torch.float32)  # whose attention sees the borders: the comparison itself is right
    dense.set_attn_implementation("sdpa")
    truth = hybrid_trl.of_all(hybrid_trl.alone, dense, PAIRS, 1)
    for way in hybrid_trl.WAYS.values():
        assert hybrid_trl.compared(hybrid_trl.of_all(way, dense, PAIRS, 3), truth)["error"] < 1e-4


def test_ours_is_alone_to_the_bit_and_the_class_but_for_rounding():
    scorer, limits = scorer_of(tiny_policy("olmo_hybrid", torch.float32)), PackLimits.plan(256, "tree", compiled=False)
    found = hybrid_trl.ours(scorer, PAIRS, limits)
    assert hybrid_trl.compared(found, hybrid_trl.ours_alone(scorer, PAIRS, limits)) == {
        "error": 0.0,
        "error_token": 0.0,
        "equal": "6 of 6",
    }
    model = tiny_model("olmo_hybrid", torch.float32)
    model.set_attn_implementation("sdpa")
    sums = [part.sum()[None] for part in hybrid_trl.of_all(hybrid_trl.alone, model, PAIRS, 1)]
    assert hybrid_trl.compared(found, sums)["error"] < 1e-3


def test_a_plain_step_trains_and_its_pairs_are_counted():
    model = shapes.build("tiny", "cpu")
    model.set_attn_implementation("sdpa")
    before = [weight.detach().clone() for weight in model.parameters()]
    steps = [PAIRS[:2]] * 3
    assert model.config.vocab_size >= VOCAB
    line = hybrid_trl.plain_speed(hybrid_trl.padded, model, steps, at_once=1)
    assert line["pairs_s"] > 0 and line["peak_gib"] is None
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
