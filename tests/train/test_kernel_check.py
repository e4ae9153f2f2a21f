"""Kernels and compiled blocks beside the plain ones: what is wrong is named, what only rounds otherwise passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.tiny import FAMILIES, head_of, tiny_model
from tuningfork.errors import ModelError
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import Kernels, plain
from tuningfork.models.policy import Policy
from tuningfork.train.kernel_check import KernelCheck
from tuningfork.train.self_check import probes, window_not_reached

DTYPES = [torch.float32, torch.bfloat16]


def attention_of(attend: Callable[..., Any]) -> Kernels:
    """Kernels whose attention is another function of the plain one's arguments."""

    class Other(PlainAttention):
        def attend(self, *args: Any, **how: Any) -> torch.Tensor:
            return attend(super().attend, *args, **how)

    return replace(plain(), attention=Other, names={"attention": "other", "row_logps": "other"})


def begun(kernels: Kernels, family: str = "llama", dtype: torch.dtype = torch.float32, share: bool = True):
    policy = Policy(tiny_model(family, torch.float32), kernels, dtype)
    return policy, KernelCheck.begin(policy, head_of(policy), "here", share, compiling=False)


def finely(plain_attend, q, k, v, **how):
    """Attention as it should be, rounded at another place: once, at the end."""
    return plain_attend(q.double(), k.double(), v.double(), **how).to(q.dtype)


def coarsely(plain_attend, q, k, v, **how):
    """Keys and values read in another order of heads, and scaled in front of the product: rounded at other places."""
    scale = how.pop("scale")
    return plain_attend(q * scale**0.5, k * scale**0.5, v, scale=1.0, **how)


def test_a_model_that_scales_its_embedded_tokens_in_place_is_checked(monkeypatch):
    """As CTRL does."""
    forward = LlamaRotaryEmbedding.forward

    def scaling(self, embedded, *args, **how):
        embedded *= 2.0
        return forward(self, embedded, *args, **how)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", scaling)
    policy, check = begun(attention_of(finely))
    check.compare(policy)


@pytest.mark.parametrize("right", [finely, coarsely])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_that_only_round_otherwise_pass(family, dtype, right):
    policy, check = begun(attention_of(right), family, dtype)
    state = torch.get_rng_state()
    check.compare(policy)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None and weight.requires_grad for weight in policy.model.parameters())


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


WRONG = {
    "scale": lambda attend, q, k, v, *, scale, **how: attend(q, k, v, scale=1.5 * scale, **how),
    "window off by one": lambda attend, q, k, v, *, window, **how: attend(q, k, v, window=window and window + 1, **how),
    "no window": lambda attend, q, k, v, *, window, **how: attend(q, k, v, window=None, **how),
    "gradient of queries": lambda attend, q, k, v, **how: attend(_HalfGradient.apply(q), k, v, **how),
    "gradient of keys": lambda attend, q, k, v, **how: attend(q, _HalfGradient.apply(k), v, **how),
    "gradient of values": lambda attend, q, k, v, **how: attend(q, k, _HalfGradient.apply(v), **how),
    "a row beyond a tile": lambda attend, q, k, v, **how: attend(q, k, v, **how).index_fill(0, torch.tensor([64]), 0),
    "no number": lambda attend, q, k, v, **how: attend(q, k, v, **how) * float("nan"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_attention_kernel_is_named(wrong, dtype):
    with pytest.raises(ModelError, match="here: attention kernel other, call 1: ") as caught:
        begun(attention_of(WRONG[wrong]), "mistral", dtype)
    assert "of their size away from those of plain kernels in float32" in str(caught.value)
    assert ("gradients of" in str(caught.value)) == wrong.startswith("gradient")


def test_a_softcap_that_is_left_out_is_named():
    kernels = attention_of(lambda attend, q, k, v, *, softcap, **how: attend(q, k, v, softcap=1.0, **how))
    with pytest.raises(ModelError, match="attention kernel other, call 1"):
        begun(kernels, "gemma2")


def off(logits, targets, transform):
    logps, lse = plain_rows.row_logps(logits, targets, transform)
    return logps + 0.01, lse


def without_transform(logits, targets, lse, grad, transform, out):
    return plain_rows.logits_gradient(logits, targets, lse, grad, replace(transform, scale=1.0), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change, said", [({"row_logps": off}, "log-probs are"), ({"logits_gradient": without_transform}, "gradients are")]
)
def test_a_wrong_kernel_of_the_head_is_named(change, said, dtype):
    with pytest.raises(ModelError, match=f"here: row_logps kernel plain: {said}"):
        begun(replace(plain(), **change), "granite", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_block_that_was_compiled_wrongly_is_found(where, share, dtype):
    """A compiler puts other code in the place of a block; here it computes something a little else."""
    policy, check = begun(plain(), "llama", dtype, share)
    forward = policy.blocks[2].forward
    change = (lambda x: 1.1 * x) if where == "forward" else _HalfGradient.apply
    policy.blocks[2].forward = lambda x, *args, **how: forward(change(x), *args, **how)
    with pytest.raises(ModelError, match=f"the blocks: {'hidden states' if where == 'forward' else 'gradients'} are"):
        check.compare(policy)


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_blocks_that_are_right_pass():
    policy = Policy(tiny_model("llama", torch.float32), plain(), torch.float32)
    check = KernelCheck.begin(policy, head_of(policy), "here", True, compiling=True)
    policy.compile()
    check.compare(policy)
    assert len(check.batch.input_ids) == 1024  # rows as compiled packs have them


def test_probes_stay_within_a_models_positions() -> None:
    model = tiny_model("llama", torch.float32)
    for most in range(2, 80):
        model.config.max_position_embeddings = most
        found = probes(Policy.plain(model, torch.float32))
        assert all(len(example.prompt_ids) and example.longest <= most for example in found), most
        assert all(len(answer.ids) for example in found for answer in example.answers), most


@pytest.mark.parametrize(
    "window, positions, longest, reached",
    [
        (6, 1000, 139, True),
        (200, 1000, 275, True),
        (600, 1000, 640, True),
        (700, 1000, 640, False),
        (80, 50, 50, False),
    ],
)
def test_probes_reach_beyond_tile_and_window(window, positions, longest, reached):
    model = tiny_model("mistral", torch.float32)
    model.config.sliding_window, model.config.max_position_embeddings = window, positions
    policy = Policy.plain(model, torch.float32)
    assert policy.layer_windows == [window] * 4
    assert max(example.longest for example in probes(policy)) == longest
    assert window_not_reached(policy) == (None if reached else window)
