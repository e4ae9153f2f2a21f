"""Lines of metrics.jsonl: exact numbers by hand, and the same speed however often a line is written."""

import math
from dataclasses import replace

import pytest
import torch

from tuningfork.report.run.metrics import METRICS, Interval, PairSums, StepResult, pair_statistics

GIB = 2**30

A = StepResult(
    step=11, epoch=0.25, lr=4e-7, grad_norm=3.0, examples=1, loss_sum=0.5, tokens=300, unique_tokens=200,
    answer_tokens=150, rows=256, pad_rows=56, seconds=2.0, data_seconds=0.5, model_flops=6e12,
    pairs=PairSums(1, 0.2, -0.2, 0.4, 1.0, -10.0, -20.0), peak_memory_bytes=3 * GIB,
)  # fmt: skip
B = StepResult(
    step=12, epoch=0.5, lr=2e-7, grad_norm=1.0, examples=3, loss_sum=2.7, tokens=900, unique_tokens=700,
    answer_tokens=450, rows=768, pad_rows=68, seconds=0.5, data_seconds=0.0, model_flops=14e12,
    pairs=PairSums(3, 1.0, 1.4, -0.4, 1.5, -50.0, -60.0), peak_memory_bytes=2 * GIB,
)  # fmt: skip

EXPECTED = {
    "step": 12,
    "epoch": 0.5,
    "loss": 0.8,  # 3.2 / 4: by example, not by step
    "lr": 2e-7,
    "grad_norm": 2.0,
    "examples": 4,
    "tokens": 1200,
    "unique_tokens": 900,
    "answer_tokens": 600,
    "pad_share": 0.12109375,  # 124 / 1024
    "rewards/chosen": 0.3,
    "rewards/rejected": 0.3,
    "rewards/margin": 0.0,
    "rewards/accuracy": 0.625,  # 2.5 / 4
    "logps/chosen": -15.0,
    "logps/rejected": -20.0,
    "step_s": 1.25,
    "data_s": 0.25,
    "examples_per_s": 1.6,  # 4 / 2.5 s, not the mean of 0.5 and 6
    "tokens_per_s": 480.0,
    "unique_tokens_per_s": 360.0,
    "mfu": 0.008,  # 20e12 / 2.5 s / 1e15
    "peak_memory_gib": 3.0,
}


def line(*steps: StepResult, peak_flops: float | None = 1e15) -> dict[str, float | int | None]:
    interval = Interval(peak_flops)
    for step in steps:
        interval.add(step)
    return interval.take()


def test_a_line_by_hand() -> None:
    got = line(A, B)
    assert list(got) == list(METRICS)
    assert got == {key: pytest.approx(value, rel=1e-12, abs=1e-12) for key, value in EXPECTED.items()}
    assert {key: type(value) for key, value in got.items()} == {key: type(value) for key, value in EXPECTED.items()}


def test_taking_a_line_starts_afresh() -> None:
    interval = Interval(1e15)
    interval.add(A)
    interval.take()
    interval.add(B)
    assert interval.take() == line(B)
    with pytest.raises(AssertionError, match="no step"):
        interval.take()


def test_writing_a_line_every_step_or_every_ten_gives_the_same_totals_and_speed() -> None:
    steps = [replace(A if i % 3 else B, step=i, seconds=0.1 + i % 4, peak_memory_bytes=i * GIB) for i in range(1, 11)]
    often, seldom = [line(step) for step in steps], line(*steps)
    seconds = sum(each["step_s"] for each in often)
    for key in ("examples", "tokens", "unique_tokens"):
        total = sum(each[key] for each in often)
        assert seldom[key] == total
        assert seldom[f"{key}_per_s"] == pytest.approx(total / seconds, rel=1e-12)
        # and each short line's speed is that of its own step
        assert sum(each[f"{key}_per_s"] * each["step_s"] for each in often) == pytest.approx(total, rel=1e-12)
    assert seldom["mfu"] == pytest.approx(sum(each["mfu"] * each["step_s"] for each in often) / seconds, rel=1e-12)
    assert seldom["loss"] == pytest.approx(sum(each["loss"] * each["examples"] for each in often) / seldom["examples"])
    assert seldom["peak_memory_gib"] == 10.0


def test_what_is_not_known_is_null() -> None:
    got = line(replace(A, pairs=PairSums(), peak_memory_bytes=None), peak_flops=None)
    null = {"rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy", "logps/chosen",
            "logps/rejected", "mfu", "peak_memory_gib"}  # fmt: skip
    assert {key for key, value in got.items() if value is None} == null


def test_pair_statistics_by_hand_ties_count_half() -> None:
    expected = PairSums(4, 1.5, 0.5, 1.0, 2.0, -10.0, -26.0)  # one right, one wrong, two ties
    chosen, rejected = [2.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.5, 0.0]
    logps_chosen, logps_rejected = [-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, -7.0, -8.0]
    assert pair_statistics(chosen, rejected, logps_chosen, logps_rejected) == expected
    tensors = [torch.tensor(values) for values in (chosen, rejected, logps_chosen, logps_rejected)]
    from_tensors = pair_statistics(*tensors)
    assert from_tensors == expected
    assert type(from_tensors.margin) is float
    assert expected.means()["rewards/accuracy"] == 0.5
    assert pair_statistics([0.0], [0.0], [-1.0], [-1.0]).means()["rewards/accuracy"] == 0.5


def test_pair_statistics_add_up_and_refuse_unequal_numbers_of_answers() -> None:
    first, second = pair_statistics([1.0], [0.0], [-1.0], [-2.0]), pair_statistics([0.0], [3.0], [-4.0], [-8.0])
    assert first + second == pair_statistics([1.0, 0.0], [0.0, 3.0], [-1.0, -4.0], [-2.0, -8.0])
    assert first + PairSums() == first
    with pytest.raises(ValueError):
        pair_statistics([1.0, 2.0], [0.0], [-1.0], [-2.0])


def test_a_nan_is_not_hidden_by_the_sums() -> None:
    assert math.isnan(
        line(A, replace(B, pairs=pair_statistics([math.nan], [0.0], [-1.0], [-1.0])))["rewards/margin"] or 0
    )
