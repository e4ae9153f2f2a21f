"""The choice of kernels: on a CPU always the plain ones, and each with a name for the log and the fingerprint."""

from __future__ import annotations

import pytest
import torch

from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import plain, select


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("head_dim", [8, 64, 512])
def test_a_cpu_gets_the_plain_kernels(dtype, head_dim):
    kernels = select(torch.device("cpu"), dtype, head_dim)
    assert kernels == plain()
    assert kernels.attention is PlainAttention
    assert kernels.row_logps is plain_rows.row_logps
    assert kernels.logits_gradient is plain_rows.logits_gradient
    assert kernels.names == {"attention": "plain", "row_logps": "plain"}


@pytest.mark.parametrize("head_dim", [64, 512])
def test_float64_is_plain_on_a_gpu_too(head_dim):
    """It is there to check against; no fast kernel computes in it."""
    assert select(torch.device("cuda"), torch.float64, head_dim) == plain()
