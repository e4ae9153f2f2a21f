"""An embedding's gradient has the same bits every time, however few tokens its rows are of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tuningfork.models.embedding import repeat_gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, 256, 50257])
def test_gradients_repeat(tokens, dtype):
    torch.manual_seed(0)
    embedding = nn.Embedding(tokens, 768, device="cuda", dtype=dtype)
    repeat_gradients(embedding)
    ids = torch.randint(tokens, (65536,), device="cuda")
    upstream = torch.randn(65536, 768, device="cuda", dtype=dtype)
    found = [torch.autograd.grad(embedding(ids), embedding.weight, upstream)[0] for _ in range(4)]
    assert all(torch.equal(found[0], again) for again in found[1:])
    exact = torch.zeros(tokens, 768, device="cuda", dtype=torch.float64).index_add_(0, ids, upstream.double())
    # 3,277 partial sums of a token, one after the other, of up to 700: half a unit in the last place each, at random
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=5e-3)
