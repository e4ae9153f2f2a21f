"""Lines of metrics.jsonl: exact numbers by hand, and the same speed however often a line is written."""

import math
from dataclasses import replace

import pytest
import torch

from tuningfork.objective.pairs import DPO
from tuningfork.report.run.metrics import (
    Interval,
    Means,
    StepResult,
    training_definitions,
)

GIB = 2**30


def pairs(count: int, *sums: float) -> Means:
    """Means over so many pairs, from their sums in the order in which DPO defines its statistics."""
    keys = DPO.statistics_defined
    return Means(dict(zip(keys, sums, strict=True)), dict.fromkeys(keys, count))


A = StepResult(
    step=11, epoch=0.25, lr=4e-7, grad_norm=3.0, examples=1, loss=0.5, loss_size=1, tokens=300, unique_tokens=200,
    answer_tokens=150, rows=256, pad_rows=56, seconds=2.0, data_seconds=0.5, model_flops=6e12,
    statistics=pairs(1, 0.2, -0.2, 0.4, 1.0, -10.0, -20.0), peak_memory_bytes=3 * GIB,
)  # fmt: skip
B = StepResult(
    step=12, epoch=0.5, lr=2e-7, grad_norm=1.0, examples=3, loss=0.9, loss_size=3, tokens=900, unique_tokens=700,
    answer_tokens=450, rows=768, pad_rows=68, seconds=0.5, data_seconds=0.0, model_flops=14e12,
    statistics=pairs(3, 1.0, 1.4, -0.4, 1.5, -50.0, -60.0), peak_memory_bytes=2 * GIB, late_compilations=2,
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
    "late_compilations": 2,
}


def line(*steps: StepResult, peak_flops: float | None = 1e15) -> dict[str, float | int | None]:
    interval = Interval(peak_flops)
    for step in steps:
        interval.add(step)
    return interval.take()


def test_a_line_by_hand() -> None:
    got = line(A, B)
    assert list(got) == list(training_definitions(DPO.statistics_defined))
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
    got = line(replace(A, statistics=pairs(0, *[0.0] * 6), peak_memory_bytes=None), peak_flops=None)
    null = {"rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy", "logps/chosen",
            "logps/rejected", "mfu", "peak_memory_gib"}  # fmt: skip
    assert {key for key, value in got.items() if value is None} == null


def test_means_by_hand_from_lists_and_tensors() -> None:
    values = {"rewards/margin": [2.0, -1.0, 0.0, 0.0], "logps/chosen": [-1.0, -2.0]}
    means = Means.of(values)
    assert means == Means({"rewards/margin": 1.0, "logps/chosen": -3.0}, {"rewards/margin": 4, "logps/chosen": 2})
    assert means == Means.of({key: torch.tensor(numbers) for key, numbers in values.items()})
    assert means.values() == {"rewards/margin": 0.25, "logps/chosen": -1.5}
    assert type(means.sums["rewards/margin"]) is float


def test_means_add_up_each_over_its_own_values() -> None:
    first, second = Means.of({"a": [1.0], "b": [4.0]}), Means.of({"a": [0.0, 5.0], "c": []})
    assert first + second == Means({"a": 6.0, "b": 4.0, "c": 0.0}, {"a": 3, "b": 1, "c": 0})
    assert (first + second).values() == {"a": 2.0, "b": 4.0, "c": None}
    assert first + Means() == Means() + first == first


def test_a_nan_is_not_hidden_by_the_sums() -> None:
    nan = Means.of({"rewards/margin": [math.nan]})
    assert math.isnan(line(A, replace(B, statistics=nan))["rewards/margin"] or 0)
