"""G8 on a GPU: a fast kernel's error to the truth is at most twice what the plain version loses in the same dtype.

Uninitialised memory is filled with NaN, so that an element that a kernel leaves unwritten cannot pass.
"""

from __future__ import annotations

import pytest
import torch

from tests.tiny import one_pack, random_examples
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.records import LogitTransform

pytestmark = pytest.mark.gpu
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (9, (1, 1)), (130, (70, 20)), (17, (13, 140))]


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def _no_worse(fast: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, what: str) -> None:
    assert torch.isfinite(fast).all(), f"{what}: not every element was written"
    error, allowed = (fast.double() - truth).norm(), 2 * (plain.double() - truth).norm()
    # A plain version that happens to be exact still allows the rounding of one result.
    assert error <= allowed + torch.finfo(fast.dtype).eps * truth.norm(), f"{what}: {error:.3e} > {allowed:.3e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.25, 30.0)], ids=["raw", "softcapped"])
@pytest.mark.parametrize("rows,vocab", [(1, 2), (3, 97), (130, 4096), (57, 4097), (64, 50_001)])  # block edges
def test_row_logps(rows, vocab, transform, dtype):
    from tuningfork.kernels.row_logps import fast

    torch.manual_seed(0)
    logits = (torch.randn(rows, vocab, device="cuda") * 8).to(dtype)
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    grads = torch.randn(rows, device="cuda")
    truth, truth_lse = plain_rows.row_logps(logits.double(), targets, transform)
    plain, plain_lse = plain_rows.row_logps(logits, targets, transform)
    ours, lse = fast.row_logps(logits, targets, transform)
    _no_worse(ours, plain, truth, "logps")
    _no_worse(lse, plain_lse, truth_lse, "lse")
    d_truth = plain_rows.logits_gradient_(logits.double(), targets, truth_lse, grads.double(), transform)
    d_plain = plain_rows.logits_gradient_(logits.clone(), targets, plain_lse, grads, transform)
    d_ours = fast.logits_gradient_(logits.clone(), targets, lse, grads, transform)
    _no_worse(d_ours, d_plain, d_truth, "gradient of the logits")


def test_row_logps_of_extreme_logits():
    """Huge, equal and infinite logits give the right finite numbers, or NaN where there is no number."""
    from tuningfork.kernels.row_logps import fast

    logits = torch.tensor([[1e4, -1e4, 0.0], [5.0, 5.0, 5.0], [float("-inf"), 0.0, 0.0], [float("nan"), 0.0, 0.0]])
    logps, _ = fast.row_logps(logits.cuda(), torch.tensor([0, 1, 1, 1]).cuda(), LogitTransform())
    expected = torch.tensor([0.0, -1.0986123, -0.6931472])
    torch.testing.assert_close(logps[:3].cpu(), expected)
    assert logps[3].isnan()


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("heads,kv_heads,width", [(4, 4, 64), (4, 2, 32), (2, 1, 128)])
@pytest.mark.parametrize("kernel,dtype,softcap", [("varlen", torch.bfloat16, None), ("flex", torch.float32, None),
                                                  ("flex", torch.bfloat16, 20.0)])  # fmt: skip
def test_attention(kernel, dtype, softcap, heads, kv_heads, width, window, share_prompt):
    from tuningfork.kernels.attention.flex import FlexAttention
    from tuningfork.kernels.attention.varlen import VarlenAttention

    batch = one_pack(random_examples(SHAPES), share_prompt, tokens=768).to(torch.device("cuda"))
    rows = len(batch.input_ids)
    torch.manual_seed(0)
    inputs = [torch.randn(rows, h, width, device="cuda").to(dtype) for h in (heads, kv_heads, kv_heads)]
    out_grad = torch.randn(rows, heads, width, device="cuda").to(dtype)

    def run(form, to):
        leaves = [t.to(to).requires_grad_() for t in inputs]
        prepared = form.prepare(batch.layout, frozenset({None, window}))
        out = prepared.attend(*leaves, scale=width**-0.5, window=window, softcap=softcap)
        out.backward(out_grad.to(to))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    fast = {"varlen": VarlenAttention, "flex": FlexAttention}[kernel]
    truth, plain, ours = run(PlainAttention, torch.float64), run(PlainAttention, dtype), run(fast, dtype)
    for what, o, p, t in zip(("out", "d query", "d key", "d value"), ours, plain, truth, strict=True):
        _no_worse(o, p, t, what)
