"""Time and memory of one piece of work on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

CYCLES = 2e9  # of a GPU's clock in a second, at most
AHEAD = 4  # calls that the host issues while a device waits: a stream holds about 1,000 launches, then the host waits


def median_ms(
    run: Callable[[], object], device: torch.device, repeats: int, warmup: int = 3, device_only: bool = False
) -> float:
    """Median milliseconds of `run`, after `warmup` calls that are not counted.

    On a GPU the time between two events in its stream: calls follow each other without a pause, so the host's time
    shows only where the host cannot keep up. With `device_only` not even there: before every few calls the device waits
    for as long as the host takes to issue them. On a CPU wall time.
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
    if not device_only:
        return median(_between_marks(run, repeats))
    begun = time.perf_counter()
    run()
    wait = int(min(2 * AHEAD * (time.perf_counter() - begun), 0.5) * CYCLES)
    firsts = range(0, repeats, AHEAD)
    return median(ms for first in firsts for ms in _between_marks(run, min(AHEAD, repeats - first), wait))


def _between_marks(run: Callable[[], object], repeats: int, wait: int = 0) -> list[float]:
    """Milliseconds of each call by a GPU's own clock, after so many cycles in which it waits for the host."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    if wait:
        torch.cuda._sleep(wait)
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(marks)]


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


def timed(run: Callable[[], object], where: torch.device, repeats: int, seconds: float) -> float:
    """Median milliseconds of so many repeats, or of as many as there are in so many seconds, 3 at least."""
    run()
    once = median_ms(run, where, 1, warmup=1)
    times = max(3 if repeats > 1 else 1, min(repeats, int(1e3 * seconds / max(once, 1e-3))))
    return float(f"{median_ms(run, where, times, warmup=0, device_only=True):.4g}")
