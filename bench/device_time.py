"""Where a step's device time goes: by kernel name and by kind of work, from torch.profiler."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.output import table

# The first pattern that a kernel's name matches decides. Flash attention names cutlass types, optimizers name copies
# and fused blocks name whatever they fuse, so the order matters. The window of native sparse attention is attention.
CATEGORIES: dict[str, str] = {
    "communication": r"^nccl|^gloo:",
    "copies": r"^Mem(cpy|set)|copy_kernel|CatArrayBatchedCopy|^aten::(copy_|cat|fill_|zero_)$",
    "optimizer+norms of gradients": (
        r"multi_tensor_apply|FusedOptimizer|lpnorm|LpNorm|NormTwoOps|_lerp_|_fused_adamw|aten::_foreach_"
    ),
    "scan": r"^delta_",
    "convolution": r"^conv_(forward|gradient)|^(query_key|shift)_|^gradient_of_(matrices|first|latent)",
    "compressed attention": r"^nsa_(mean|compressed)",
    "scores and choice of blocks": r"^nsa_(scores|choose)",
    "selected attention": r"^nsa_(lists|block|selected)",
    "sums of gradients of compressed and selected keys": r"^nsa_sum_",
    "attention or window": r"flash|fmha|attention|attend|^fork_|_(query|key|weighted)_gradient",
    "matrix products": r"nvjet|gemm|gemv|cutlass|cublas|splitK|triton_tem_fused|^aten::(mm|addmm|bmm|baddbmm)$",
    "gather/scatter": r"index|gather|scatter|compute_grad_weight|radix_sort|unique_by_key|embedding",
    "head rows": r"^_(forward|backward)(_|$)|row_logps|logits_gradient",
    "elementwise": "",  # the rest: fused blocks, casts, reductions
}

PAUSES = 12  # in a report


def category(kernel: str) -> str:
    """The kind of work that a kernel does, by its name."""
    return next(name for name, pattern in CATEGORIES.items() if re.search(pattern, kernel))


@dataclass
class DeviceProfile:
    """Profiles a few steps: `start` before the first of them, `stop` after the last, then read the rest.

    Only the device is traced, so that wall time stays close to that of steps that nobody watches. On a CPU, which has
    no kernels, the operators' own time stands for it.
    """

    microseconds: dict[str, float] = field(default_factory=dict)  # kernel -> device time of all profiled steps together
    calls: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[float, float, str]] = field(default_factory=list)  # begin and end of each kernel, µs
    _running: Any = None

    def start(self) -> None:
        cuda = torch.cuda.is_available()
        activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
        self._running = profile(activities=[activity], acc_events=True)  # or some versions warn, for there is one cycle
        self._running.start()

    def stop(self) -> None:
        self._running.stop()
        self.add(self._running.events(), torch.cuda.is_available())
        self._running = None

    def add(self, events: Iterable[Any], on_device: bool) -> None:
        """Add up the profiler's events: kernels, or operators where none run `on_device`.

        Annotations, such as an optimizer's name around its kernels, would count those kernels again and are left out.
        """
        for event in events:
            if getattr(event, "is_user_annotation", False) or re.match(r"Optimizer\.|ProfilerStep", event.name):
                continue
            if on_device != (event.device_type == DeviceType.CUDA):
                continue
            spent = event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
            self.microseconds[event.name] = self.microseconds.get(event.name, 0.0) + spent
            self.calls[event.name] = self.calls.get(event.name, 0) + 1
            self.spans.append((event.time_range.start, event.time_range.end, event.name))

    def busy_ms(self, steps: int, computing: bool = False) -> float:
        """Milliseconds of a step in which any kernel ran, or any that computes."""
        busy, until = 0.0, -math.inf
        for begin, end, kernel in sorted(self.spans):
            if not computing or category(kernel) != "communication":
                busy += max(end - max(begin, until), 0.0)
                until = max(until, end)
        return busy / steps / 1e3

    def pauses(self, steps: int) -> dict[tuple[str, str], float]:
        """Milliseconds of a step in which no kernel ran, by the kernels before and behind; the longest first."""
        found: dict[tuple[str, str], float] = {}
        until, before = math.inf, ""
        for begin, end, kernel in sorted(self.spans):
            if begin > until:
                found[before, kernel] = found.get((before, kernel), 0.0) + (begin - until) / steps / 1e3
            if end > until or not before:
                until, before = end, kernel
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def by_category(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step, by kind of work."""
        total = dict.fromkeys(CATEGORIES, 0.0)
        for kernel, spent in self.microseconds.items():
            total[category(kernel)] += spent / steps / 1e3
        return total

    def summary(self, steps: int, wall_seconds: float) -> dict[str, Any]:
        """All in milliseconds of a step; wall time includes whatever the host makes the device wait for.

        `device_ms` adds up kernels that run at the same time. `exposed_ms`: while other processes are talked to and
        nothing is computed.
        """
        busy, computing = self.busy_ms(steps), self.busy_ms(steps, computing=True)
        return {
            "device_ms": round(sum(self.microseconds.values()) / steps / 1e3, 3),
            "busy_ms": round(busy, 3),
            "exposed_ms": round(busy - computing, 3),
            "wall_ms": round(wall_seconds / steps * 1e3, 3),
            "by_category_ms": {name: round(spent, 3) for name, spent in self.by_category(steps).items()},
        }

    def report(self, steps: int, wall_seconds: float, environment: Mapping[str, Any]) -> str:
        """The tables by kind of work, of the longest pauses, and by kernel, with totals."""
        summary = self.summary(steps, wall_seconds)
        device_ms, busy_ms, exposed_ms, wall_ms = (
            summary[f"{name}_ms"] for name in ("device", "busy", "exposed", "wall")
        )
        kinds = [
            {"kind": name, "ms": ms, "share": f"{100 * ms / max(device_ms, 1e-9):.1f} %"}
            for name, ms in summary["by_category_ms"].items()
        ]
        kernels = [
            {
                "ms": round(spent / steps / 1e3, 3),
                "calls": round(self.calls[name] / steps, 1),
                "us": round(spent / self.calls[name], 1),
                "kind": category(name),
                "kernel": name[:160],
            }
            for name, spent in sorted(self.microseconds.items(), key=lambda item: -item[1])
        ]
        pauses = [
            {"ms": round(spent, 3), "before": before[:70], "behind": behind[:70]}
            for (before, behind), spent in islice(self.pauses(steps).items(), PAUSES)
        ]
        return "\n".join(
            [
                *(f"{key}: {value}" for key, value in environment.items()),
                f"\n{steps} steps; a step: device busy for {busy_ms:,} ms of {wall_ms:,} ms wall "
                f"({100 * busy_ms / max(wall_ms, 1e-9):.1f} %), for {exposed_ms:,} ms only by talking to others\n",
                table(kinds, {"kind": "kind of work", "ms": "ms/step", "share": "of device time"}) + "\n",
                table(pauses, {"ms": "ms/step", "before": "nothing runs behind", "behind": "and before"}) + "\n",
                table(
                    kernels, {"ms": "ms/step", "calls": "calls/step", "us": "µs/call", "kind": "kind", "kernel": "name"}
                ),
                "",
            ]
        )
