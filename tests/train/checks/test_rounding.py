"""What rounding may do to a kernel's numbers: enough for what fast kernels do, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_model, with_form
from tuningfork.errors import ModelError
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.models.policy import Policy
from tuningfork.train.checks.kernel_check import KernelCheck
from tuningfork.train.checks.rounding import rounded_products


class _Flash(torch.autograd.Function):
    """Plain attention, but for what queries' gradients lose where D is made from results in the run's dtype."""

    @staticmethod
    def forward(ctx: Any, form: PlainAttention, how: dict[str, Any], times: float, q: Tensor, k: Tensor, v: Tensor):
        ctx.form, ctx.how, ctx.times = form, how, times
        ctx.save_for_backward(q, k, v)
        return PlainAttention.attend(form, q, k, v, **how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = PlainAttention.attend(ctx.form, *leaves, **ctx.how)
        d_q, d_k, d_v = torch.autograd.grad(out, leaves, grad)
        q, k, v = (t.detach().float() for t in leaves)
        exact = PlainAttention.attend(ctx.form, q, k, v, **ctx.how)
        off = ((exact.to(grad.dtype) - exact) * grad).sum(-1, keepdim=True)
        keys = ctx.how["scale"] * PlainAttention.attend(ctx.form, q, k, k, **ctx.how)
        return None, None, None, ctx.times * (d_q.float() - off * keys).to(d_q.dtype), d_k, d_v


def _begin(times: float = 1.0, junk: float = 0.0, wrong_row: bool = False, dtype=torch.bfloat16) -> None:
    """A start of a model whose keys are much alike, as a large bias of theirs has them.

    Args:
        times: what queries' gradients are multiplied with, wrongly.
        junk: what rows of padding have more, and with `wrong_row` the one before them.
    """

    class Flash(PlainAttention):
        def attend(self, query, key, value, **how):
            out = _Flash.apply(self, how, times, query, key, value)
            places = torch.arange(len(out))[:, None, None]
            return out + junk * (places >= used - wrong_row).to(out.dtype)

    model = tiny_model("qwen2", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for weights in layer.self_attn.q_proj.parameters():
                weights.mul_(0.01)  # so that queries look at many of them
            layer.self_attn.k_proj.bias.add_(30)
    kernels = replace(with_form("attention", Flash), names={"attention": "other", "row_logps": "other"})
    policy = Policy(model, kernels, dtype)
    used = _probe_rows(policy)
    KernelCheck.begin(policy, "here", "prompt", compiling=False)


def _probe_rows(policy: Policy) -> int:
    batch = KernelCheck.begin(Policy.plain(policy.model, policy.dtype), "here", "prompt", compiling=False).batch
    assert batch.used_slots < len(batch.input_ids)
    return batch.used_slots


def test_a_kernel_that_loses_what_flash_attention_loses_passes():
    _begin()


def test_and_is_named_where_it_loses_more():
    with pytest.raises(ModelError, match="other, call 1: gradients of queries are"):
        _begin(times=0.7)


def test_rows_of_padding_are_nobodys():
    _begin(junk=100.0)
    with pytest.raises(ModelError, match="other, call 1: outputs are"):
        _begin(junk=100.0, wrong_row=True)


def test_operands_of_products_are_rounded_those_of_gradients_too():
    a, b = (torch.randn(5, 5, requires_grad=True) for _ in range(2))
    grad = torch.randn(5, 5)
    with rounded_products(torch.bfloat16):
        out = a @ b
        d_a, d_b = torch.autograd.grad(out, (a, b), grad)
        added = a + b
    ra, rb, rg = (t.detach().bfloat16().float() for t in (a, b, grad))
    assert torch.equal(out, ra @ rb) and torch.equal(d_a, rg @ rb.T) and torch.equal(d_b, ra.T @ rg)
    assert torch.equal(added, a + b)


def test_attention_of_pytorch_is_made_of_products_there():
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with rounded_products(torch.bfloat16):
        rounded = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
