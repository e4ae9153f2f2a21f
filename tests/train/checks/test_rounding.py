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
from tuningfork.train.checks.rounding import check_rounding, rounded_products


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
        with torch.enable_grad():
            keys = k.clone().requires_grad_()
            mean = ctx.how["scale"] * PlainAttention.attend(ctx.form, q, k, keys, **ctx.how)
        (of_keys,) = torch.autograd.grad(mean, keys, off * q)
        d_q, d_k = (d_q.float() - off * mean.detach(), d_k.float() - of_keys)
        return None, None, None, ctx.times * d_q.to(grad.dtype), d_k.to(grad.dtype), d_v


def _begin(
    times: float = 1.0, junk: float = 0.0, wrong_row: bool = False, keys: float = 30.0, values: float = 0.0
) -> None:
    """A start of a model whose keys, or values, are much alike, as a large bias of theirs has them.

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
            layer.self_attn.k_proj.bias.add_(keys)
            layer.self_attn.v_proj.bias.add_(values)
    kernels = replace(with_form("attention", Flash), names={"attention": "other", "row_logps": "other"})
    policy = Policy(model, kernels, torch.bfloat16)
    used = _probe_rows(policy)
    KernelCheck.begin(policy, "here", "prompt", compiling=False).compare(policy)


def _probe_rows(policy: Policy) -> int:
    batch = KernelCheck.begin(Policy.plain(policy.model, policy.dtype), "here", "prompt", compiling=False).batch
    assert batch.used_slots < len(batch.input_ids)
    return batch.used_slots


@pytest.mark.parametrize(("keys", "values"), [(0, 0), (30, 0), (0, 3), (0, 30), (30, 30)])
def test_a_kernel_that_loses_what_flash_attention_loses_passes(keys, values):
    _begin(keys=keys, values=values)


def test_and_is_named_where_it_loses_more():
    with pytest.raises(ModelError, match="other, call 1: gradients of queries are"):
        _begin(times=0.7)


def test_rows_of_padding_are_nobodys():
    _begin(junk=100.0)
    with pytest.raises(ModelError, match="other, call 1: outputs are"):
        _begin(junk=100.0, wrong_row=True)


def test_nothing_passes_where_the_measure_is_no_number():
    with pytest.raises(ModelError, match=r"are 1\.0e"):
        check_rounding("here", "outputs", torch.zeros(3), torch.full((3,), torch.inf), torch.ones(3))


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
    with rounded_products(torch.bfloat16):
        torch.testing.assert_close(torch.addmm(grad, a, b), grad + ra @ rb, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(a @ b[0], ra @ rb[0], rtol=1e-6, atol=1e-6)


def test_attention_of_pytorch_is_made_of_products_there():
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with rounded_products(torch.bfloat16):
        rounded = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
