"""Two small kernels of Triton, and a card that is not there to compile them for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@triton.jit
def offset(x, rows, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(x + places, tl.load(x + places) + 1.0, mask=places < rows)


def _no_time(kernel_call, quantiles):
    """In the place of a stopwatch: every configuration is run once, and all are as fast."""
    kernel_call()
    return [1.0, 1.0, 1.0]


@triton.autotune([triton.Config({"SIZE": size}) for size in (8, 16)], key=["rows"], do_bench=_no_time)
@triton.jit
def scaled(x, rows, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(x + places, tl.load(x + places, mask=places < rows) * 2.0, mask=places < rows)


class _NoCard:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@contextmanager
def without_a_card() -> Iterator[None]:
    """Kernels compile for an H100; none can be launched."""
    before = driver._active
    driver.set_active(_NoCard())
    try:
        yield
    finally:
        driver._active = before
