"""The ops of a recurrence beside the plain ones: what is wrong is named, what only rounds otherwise passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.tiny import HYBRIDS, SHORT_CONVS, tiny_model, with_forms
from tuningfork.errors import ModelError
from tuningfork.kernels.causal_conv.plain import PlainCausalConv
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.kernels.select import Kernels
from tuningfork.models.policy import Policy
from tuningfork.train.checks.kernel_check import KernelCheck

DTYPES = [torch.float32, torch.bfloat16]
Change = Callable[..., Any]


def kernels_of(conv: Change | None = None, scan: Change | None = None) -> Kernels:
    """Plain kernels whose convolution or scan is another function of the plain one and its arguments."""

    class Conv(PlainCausalConv):
        def query_key_value(self, *args):
            return conv(super().query_key_value, *args) if conv else super().query_key_value(*args)

        def conv(self, x, weight, bias=None, silu=True):
            plain = partial(super().conv, silu=silu)
            return conv(plain, x, weight, bias) if conv else plain(x, weight, bias)

    class Scan(PlainGatedDelta):
        def scan(self, *args):
            return scan(super().scan, *args) if scan else super().scan(*args)

    kernels = with_forms(causal_conv=Conv, gated_delta=Scan)
    return replace(kernels, names=dict.fromkeys(kernels.names, "other"))


def begin(kernels: Kernels, family: str, dtype: torch.dtype) -> tuple[Policy, KernelCheck]:
    policy = Policy(tiny_model(family, torch.float32), kernels, dtype)
    return policy, KernelCheck.begin(policy, "here", "prompt", compiling=False)


def finely_conv(plain, x, weight, more):
    out = plain(x.double(), weight.double(), more.double() if isinstance(more, torch.Tensor) else more)
    return tuple(t.to(x.dtype) for t in out) if isinstance(out, tuple) else out.to(x.dtype)


def finely_scan(plain, *given):
    return plain(*(t.double() for t in given)).to(given[2].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [*HYBRIDS, *SHORT_CONVS])
def test_kernels_that_only_round_otherwise_pass(family, dtype):
    policy, check = begin(kernels_of(finely_conv, finely_scan), family, dtype)
    check.compare(policy)


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


def half(place: int) -> Change:
    """A form with half the gradient of one of its arguments."""

    def wrong(plain, *given):
        return plain(*(_HalfGradient.apply(t) if n == place else t for n, t in enumerate(given)))

    return wrong


GRADIENTS = {"queries": 0, "keys": 1, "values": 2, "decays": 3, "betas": 4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient_of_the_scan_is_named(name, dtype):
    words = rf"^here: scan kernel other, call 1: gradients of {name} are 5\.\de-01 of their size away"
    with pytest.raises(ModelError, match=words) as caught:
        begin(kernels_of(scan=half(GRADIENTS[name])), "olmo_hybrid", dtype)
    assert f"PyTorch {torch.__version__}" in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "place"), [("channels", 0), ("weights", 1)])
def test_a_wrong_gradient_of_the_convolution_is_named(name, place, dtype):
    with pytest.raises(ModelError, match=f"^here: convolution kernel other, call 1: gradients of {name} are"):
        begin(kernels_of(conv=half(place)), "qwen3_next", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "place"), [("channels", 0), ("weights", 1), ("biases", 2)])
def test_a_wrong_gradient_of_a_short_convolution_is_named(name, place, dtype):
    with pytest.raises(ModelError, match=f"^here: convolution kernel other, call 1: gradients of {name} are"):
        begin(kernels_of(conv=half(place)), "lfm2_with_biases", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["queries", "keys", "values"])
def test_a_wrong_output_of_the_convolution_is_named(name, dtype):
    def wrong(plain, *given):
        parts = dict(zip(("queries", "keys", "values"), plain(*given), strict=True))
        return tuple((parts | {name: 1.1 * parts[name]}).values())

    with pytest.raises(ModelError, match=f"^here: convolution kernel other, call 1: {name} are"):
        begin(kernels_of(conv=wrong), "qwen3_5_text", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scan_that_is_wrong_behind_its_first_chunk_is_named(dtype):
    def wrong(plain, query, key, value, decay, beta):
        out = plain(query, key, value, decay, beta)
        return torch.cat([out[:64], out[64:66] * 0, out[66:]])

    with pytest.raises(ModelError, match=r"^here: scan kernel other, call 1: outputs are"):
        begin(kernels_of(scan=wrong), "olmo_hybrid", dtype)
