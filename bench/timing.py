"""Time and memory of one piece of work on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

CYCLES = 2e9  # of a GPU's clock in a second, at most


def median_ms(
    run: Callable[[], object], device: torch.device, repeats: int, warmup: int = 3, device_only: bool = False
) -> float:
    """Median milliseconds of `run`, after `warmup` calls that are not counted.

    On a GPU the time between two events in its stream: calls follow each other without a pause, so the host's time
    shows only where the host cannot keep up. With `device_only` not even there: the device first waits for as long as
    the host takes to issue all calls. On a CPU wall time.
    """
    for _ in range(warmup):
        run()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begun))
        return median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    if device_only:
        begun = time.perf_counter()
        run()
        ahead = min(2 * repeats * (time.perf_counter() - begun), 0.5)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(ahead * CYCLES))
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(first.elapsed_time(second) for first, second in pairwise(marks))


def transient_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """The most device memory that `run` holds at once beyond what is held before it; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def free_memory() -> None:
    """Give back what earlier work left behind, so that it does not weigh on what follows."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
