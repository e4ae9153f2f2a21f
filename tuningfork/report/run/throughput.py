"""How fast a run was: peak speeds of devices, and the totals of a run with its warm-up apart."""

from __future__ import annotations

import re
from typing import Literal

from tuningfork.report.run.metrics import StepResult, Sums

Dtype = Literal["bfloat16", "float32", "tf32"]

# Dense peak flops per second, no sparsity: bfloat16 on tensor cores with fp32 accumulation, and float32 on the ordinary
# cores (tf32 off). Tried in order against the name that torch.cuda.get_device_name gives; the first match counts.
# From the vendor's data sheets, halved where they give the sparse number:
PEAK_FLOPS: dict[str, dict[Literal["bfloat16", "float32"], float]] = {
    r"\bGH200\b": {"bfloat16": 989e12, "float32": 67e12},  # GH200 Grace Hopper data sheet
    r"\bB200\b": {"bfloat16": 2250e12, "float32": 75e12},  # HGX B200 data sheet
    r"\bH200 NVL\b": {"bfloat16": 835.5e12, "float32": 60e12},  # H200 data sheet
    r"\bH200\b": {"bfloat16": 989e12, "float32": 67e12},  # H200 data sheet, SXM
    r"\bH100 NVL\b": {"bfloat16": 835.5e12, "float32": 60e12},  # H100 data sheet
    r"\bH100 PCIe\b": {"bfloat16": 756e12, "float32": 51e12},  # H100 data sheet
    r"\bH100\b": {"bfloat16": 989e12, "float32": 67e12},  # H100 data sheet, SXM ("H100 80GB HBM3")
    r"\bA100\b": {"bfloat16": 312e12, "float32": 19.5e12},  # A100 data sheet, SXM and PCIe alike
    r"\bL40S\b": {"bfloat16": 362e12, "float32": 91.6e12},  # L40S data sheet
    r"\bL4\b": {"bfloat16": 121e12, "float32": 30.3e12},  # L4 data sheet
    r"\bA10\b": {"bfloat16": 125e12, "float32": 31.2e12},  # A10 data sheet
    r"\bRTX 4090$": {"bfloat16": 165e12, "float32": 82.6e12},  # Ada architecture white paper, fp32 accumulation
    r"\bRTX 3090$": {"bfloat16": 71e12, "float32": 35.6e12},  # GA102 architecture white paper, fp32 accumulation
}


def peak_flops(device_name: str, dtype: Dtype) -> float | None:
    """Dense peak flops per second of one device; None where it is not known, as for every CPU.

    That of tf32 is half of bfloat16's, on the data sheet of each of these cards.

    A MIG slice bears its card's name but has only a part of its speed, so it is unknown too.
    """
    if "MIG" in device_name:
        return None
    if dtype == "tf32":
        in_bfloat16 = peak_flops(device_name, "bfloat16")
        return in_bfloat16 and in_bfloat16 / 2
    return next((peak[dtype] for pattern, peak in PEAK_FLOPS.items() if re.search(pattern, device_name)), None)


class RunTotals:
    """Adds up the steps that this process made. Rates leave out warm-up: the steps in which something was compiled.

    A resumed run counts only its own steps, so that its rates never divide work it did not do by time it did not spend.
    `peak_flops` is that of all devices together, if known.
    """

    def __init__(self, peak_flops: float | None) -> None:
        self.peak_flops = peak_flops
        self.all, self.steady = Sums(), Sums()
        self.first_step: int | None = None
        self.last_step: int | None = None

    def add(self, step: StepResult) -> None:
        self.first_step = step.step if self.first_step is None else self.first_step
        self.last_step = step.step
        self.all.add(step)
        if not step.compiled:
            self.steady.add(step)

    def summary(self) -> dict[str, float | int | None]:
        """Totals of all steps, and the rates of the steps after warm-up (null where there is none).

        Units and meanings are those of metrics.jsonl; *_seconds are totals.
        """
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "steps": self.all.steps,
            "examples": self.all.examples,
            "tokens": self.all.tokens,
            "unique_tokens": self.all.unique_tokens,
            "answer_tokens": self.all.answer_tokens,
            "pad_share": self.all.pad_share,
            "seconds": self.all.seconds,
            "data_seconds": self.all.data_seconds,
            "warmup_steps": self.all.steps - self.steady.steps,
            "warmup_seconds": self.all.seconds - self.steady.seconds,
            **self.steady.rates(self.peak_flops),
            "peak_memory_gib": self.all.peak_memory_gib,
            **self.steady.of_ranks(),
        }
