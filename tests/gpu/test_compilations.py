"""What Triton compiles and tunes is told as it happens, on a card."""

from __future__ import annotations

import pytest
import torch

from tuningfork.models.compilations import Compilations

CUDA = "cuda"
pytestmark = pytest.mark.gpu


def test_a_kernel_that_is_launched_for_another_kind_of_size():
    from tests.models.kernels_of_triton import offset

    seen = Compilations()
    x = torch.zeros(32, device=CUDA)
    for rows in (32, 16, 17, 19):
        offset[(1,)](x, rows, SIZE=32)
    assert [what.what for what in seen.taken()] == ["kernel offset was compiled"] * 2
    assert seen.taken() == []


def test_a_kernel_that_is_tuned_for_each_length():
    from tests.models.kernels_of_triton import scaled

    seen = Compilations()
    x = torch.ones(8, device=CUDA)
    for rows in (5, 7, 5):
        scaled[(1,)](x, rows)
    tuned = [str(what) for what in seen.taken() if "tuned" in what.what]
    assert tuned == [f"kernel scaled was tuned, 2 configurations: the first with rows {rows}" for rows in (5, 7)]
