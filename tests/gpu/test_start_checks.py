"""A start's checks of kernels and of compiled blocks, on a GPU: they take ours for right, and find what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.policies import CUDA, policy_of
from tests.tiny import (
    CCGQA,
    FAMILIES,
    HYBRIDS,
    SHORT_CONVS,
    SPARSE,
    scorer_of,
    tiny_gpt_oss,
)
from tuningfork.data.packing.tree import Share
from tuningfork.errors import ModelError
from tuningfork.models import compiler
from tuningfork.models.policy import Policy
from tuningfork.train.checks.head_check import check_head
from tuningfork.train.checks.kernel_check import KernelCheck
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import hold_gradients

pytestmark = pytest.mark.gpu


def _checked(family: str, dtype: torch.dtype, share: Share = "prompt", factor: float = 1.0) -> None:
    """The check of kernels at a start, with attention whose scale is wrong by a factor."""
    policy = policy_of(family, dtype, compiled=False)
    kind = policy.kernels["attention"]

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def attend(self, *args, scale, **how):
            return super().attend(*args, scale=scale * factor, **how)

    if factor != 1.0:
        policy.kernels = replace(policy.kernels, forms={**policy.kernels.forms, "attention": Scaled})
    check_head(scorer_of(policy, 64), "here")
    check = KernelCheck.begin(policy, "here", share, compiling=True)
    policy.compile()
    check.compare(policy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *SHORT_CONVS, *SPARSE, *CCGQA])
def test_the_check_at_a_start_takes_our_kernels_for_right(family, dtype):
    _checked(family, dtype)


def test_the_check_at_a_start_takes_them_for_right_with_repeated_prompts():
    _checked("gemma3", torch.bfloat16, share="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_a_start_finds_a_wrong_scale(dtype):
    with pytest.raises(ModelError, match="here: attention kernel fork, call 1"):
        _checked("llama", dtype, factor=1.1)


@pytest.mark.parametrize("mode", ["none", "budget:0.4", "block", "offload"])
@pytest.mark.parametrize(
    ("family", "weights"), [("llama", torch.float32), ("llama", torch.bfloat16), ("olmo_hybrid", torch.float32)]
)
def test_the_check_at_a_start_takes_gradients_of_weights_for_right_however_they_are_kept(family, weights, mode):
    policy = policy_of(family, torch.bfloat16, compiled=False, weights=weights)
    if weights == torch.bfloat16:
        hold_gradients(policy.model, TrainConfig(gradient_dtype="float32"))
    check = KernelCheck.begin(policy, "here", True, compiling=True)
    policy.compile()
    policy.keep_activations(mode)
    check.compare(policy)
    assert all(weight.grad is None for weight in policy.model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_a_start_takes_sinks_and_experts_for_right(dtype):
    policy = Policy.fast(tiny_gpt_oss().to(CUDA), dtype)
    KernelCheck.begin(policy, "here", True, compiling=False).compare(policy)


class _Doubling(compiler.Float32WeightGradients):
    """Rewrites gradients of weights as it should, and then takes them for twice what they are."""

    def __call__(self, graph):
        super().__call__(graph)
        for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.dtype):
            with graph.inserting_after(product):
                twice = graph.call_function(torch.ops.aten.mul.Scalar, (product, 2.0))
            twice.meta = dict(product.meta)
            product.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)

    def uuid(self):
        return "doubling"


def test_the_check_at_a_start_finds_a_pass_over_graphs_that_spoils_gradients_of_weights(monkeypatch):
    policy = policy_of("llama", torch.bfloat16, compiled=False)
    check = KernelCheck.begin(policy, "here", True, compiling=True)
    monkeypatch.setattr(compiler, "options", lambda *_: {"post_grad_custom_pre_pass": _Doubling()})
    policy.compile()
    with pytest.raises(ModelError, match=r"the compiled blocks: gradients of model\.layers\.\*\.\S+_proj\.weight are"):
        check.compare(policy)
