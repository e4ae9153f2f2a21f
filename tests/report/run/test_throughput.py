"""Peak speeds by the names that devices really report, and the totals of a run."""

from dataclasses import replace

import pytest

from tests.report.run.test_metrics import A, B
from tuningfork.report.run.throughput import PEAK_FLOPS, RunTotals, peak_flops


def test_tf32_has_half_the_speed_of_bfloat16() -> None:
    assert peak_flops("NVIDIA A100 80GB PCIe", "tf32") == 156e12 and peak_flops("cpu", "tf32") is None


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        # Names that look like one of these, and are not.
        ("NVIDIA GB200", None),
        ("NVIDIA H20", None),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("cpu", None),
        ("Intel(R) Xeon(R) Platinum 8480+", None),
        ("", None),
    ],
)
def test_peak_flops_by_name(name: str, bf16: float | None) -> None:
    assert peak_flops(name, "bfloat16") == bf16
    assert (peak_flops(name, "float32") is None) == (bf16 is None)


def test_float32_is_the_speed_without_tensor_cores() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "float32") == 19.5e12
    for name, peak in PEAK_FLOPS.items():
        assert peak["float32"] < peak["bfloat16"] / 1.9, name


def test_totals_by_hand_with_warmup_apart() -> None:
    totals = RunTotals(1e15)
    for step in (replace(A, step=1, seconds=60.0, compiled=True), replace(A, step=2), replace(B, step=3)):
        totals.add(step)
    expected = {
        "first_step": 1,
        "last_step": 3,
        "steps": 3,
        "examples": 5,
        "tokens": 1500,
        "unique_tokens": 1100,
        "answer_tokens": 750,
        "pad_share": 180 / 1280,
        "seconds": 62.5,
        "data_seconds": 1.0,
        "warmup_steps": 1,
        "warmup_seconds": 60.0,
        "examples_per_s": 1.6,
        "tokens_per_s": 480.0,
        "unique_tokens_per_s": 360.0,
        "mfu": 0.008,
        "peak_memory_gib": 3.0,
    }
    assert totals.summary() == pytest.approx(expected, rel=1e-12)


def test_a_resumed_run_speaks_of_its_own_steps_only() -> None:
    fresh, resumed = RunTotals(None), RunTotals(None)
    for i in range(1, 5):
        fresh.add(replace(A, step=i))
        resumed.add(replace(A, step=1000 + i))
    assert resumed.summary() == fresh.summary() | {"first_step": 1001, "last_step": 1004}
    assert resumed.summary()["examples_per_s"] == 0.5


def test_without_a_step_after_warmup_there_is_no_rate() -> None:
    totals = RunTotals(1e15)
    empty = totals.summary()
    assert empty["steps"] == 0 and empty["pad_share"] is None and empty["first_step"] is None
    totals.add(replace(A, compiled=True))
    summary = totals.summary()
    assert summary["tokens"] == 300 and summary["warmup_steps"] == 1
    assert [summary[key] for key in ("examples_per_s", "tokens_per_s", "unique_tokens_per_s", "mfu")] == [None] * 4
