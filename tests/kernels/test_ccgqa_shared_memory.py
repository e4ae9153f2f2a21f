"""CCGQA's kernels as compiled, without a GPU: none needs more shared memory than the smallest cards in use have.

It needs Triton, whose compiler comes with it. Not with TRITON_INTERPRET=1, which compiles nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ccgqa import SHAPES, Case, applied, given
from tests.forests import Known
from tests.tiny import one_pack, random_examples

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

LEAST = 99 * 1024  # bytes that a program may have on consumer cards (sm_86, sm_89, sm_120); 227 KB on sm_90
ADA, HOPPER = 89, 90  # architectures whose products lie differently in shared memory


class Elsewhere:
    """In place of Triton's driver: a GPU that is not here."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return -self.target.arch  # its kernels are kept apart from those of GPUs that are here

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch) -> Iterator[list[Any]]:
    """What is launched is compiled, and goes here."""
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []

    def of_grid(self, grid):
        return lambda *args, **told: kernels.append(self.run(*args, grid=grid, warmup=True, **told))

    monkeypatch.setattr(JITFunction, "__getitem__", of_grid)
    yield kernels
    triton.runtime.driver.set_active(None)  # it looks for one when it needs it


@pytest.mark.parametrize("architecture", [ADA, HOPPER])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(1, 1, 64, 4, 2), torch.bfloat16),  # as many taps as are loaded ahead of their head
        (Case(1, 1, 128, 1, 4), torch.bfloat16),
        (Case(1, 1, 256, 1, 1), torch.float32),
    ],
    ids=str,
)
def test_shared_memory_is_what_the_smallest_cards_have(case, dtype, architecture, compiled):
    from tuningfork.kernels.ccgqa.fast import TritonCcgqa

    triton.runtime.driver.set_active(Elsewhere(architecture))
    batch = one_pack(random_examples(SHAPES), "prompt", 80)
    leaves, upstream = given(Known().rows(batch), case, dtype)
    torch.autograd.grad(applied(TritonCcgqa, batch, case, *leaves), leaves, upstream)
    needed = {kernel.metadata.name: kernel.metadata.shared for kernel in compiled}
    assert len(needed) == 7
    assert max(needed.values()) <= LEAST, needed
