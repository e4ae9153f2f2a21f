"""The policy around a transformers model: which rows, which dtype, and what its config says about logits and layers."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import one_pack, random_examples, scorer_of, tiny_policy
from tuningfork.models.hf import attention
from tuningfork.models.policy import Policy, head_dim, picked
from tuningfork.records import LogitTransform


def test_hidden_rows_are_the_models_own_final_states():
    policy = tiny_policy("llama")
    [example] = random_examples([(4, (6,))])
    batch = one_pack([example], "prompt")
    ids = batch.input_ids[None, :10]
    policy.model.set_attn_implementation("sdpa")
    expected = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    policy.model.set_attn_implementation(attention.NAME)
    hidden = policy.hidden_rows(batch)
    torch.testing.assert_close(hidden, expected[batch.logit_rows], rtol=1e-6, atol=1e-6)
    assert batch.logit_rows.tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_that_is_picked_by_many_answers_gets_the_sum_of_their_gradients_in_order(dtype):
    """Those of a ranking all begin at the last row of its prompt. Written out: one addition after the other."""
    batch = one_pack(random_examples([(4, (3, 1, 2, 1, 5)), (2, (3, 3)), (0, (4, 2)), (3, (1, 1, 1))]), "prompt")
    rows = batch.logit_rows
    assert torch.bincount(rows).max() == 5
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(batch.input_ids), 64, generator=generator, dtype=torch.float64).to(dtype)
    gradient = (10 ** torch.linspace(-3, 3, len(rows), dtype=torch.float64))[:, None] * torch.randn(
        len(rows), 64, generator=generator, dtype=torch.float64
    )
    gradient = gradient.to(dtype)
    leaf, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    result = picked(leaf, rows)
    assert torch.equal(result, hidden[rows])
    result.backward(gradient)
    other.index_select(0, rows).backward(gradient)

    expected = torch.zeros(hidden.shape, dtype=torch.promote_types(dtype, torch.float32))
    for row, part in zip(rows.tolist(), gradient, strict=True):
        expected[row] += part
    assert torch.equal(leaf.grad, expected.to(dtype))
    if dtype != torch.bfloat16:  # there index_select rounds each addition
        assert torch.equal(leaf.grad, other.grad)


def test_picked_rows_have_the_gradient_that_differences_give():
    hidden = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rows = torch.tensor([2, 2, 5, 0, 2])
    assert torch.autograd.gradcheck(lambda leaf: picked(leaf, rows).square(), hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_run_in_the_compute_dtype_on_float32_weights(dtype):
    model = tiny_policy("llama", torch.float32).model
    policy = Policy(model, tiny_policy("llama").kernels, dtype)
    batch = one_pack(random_examples([(4, (6, 5))]), "prompt")
    hidden = policy.hidden_rows(batch)
    assert hidden.dtype == dtype
    scorer_of(policy).backward(batch, lambda a, b, s: s.sum())
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if dtype == torch.bfloat16:
        exact = Policy(model, policy.kernels, torch.float32).hidden_rows(batch)
        error = (hidden.float() - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.05  # rounded to 8 bits, and to no fewer


@pytest.mark.parametrize(
    ("family", "transform"),
    [
        ("llama", LogitTransform()),
        ("cohere", LogitTransform(scale=0.5)),
        ("granite", LogitTransform(scale=1 / 2.0)),
        ("gemma2", LogitTransform(softcap=30.0)),
        ("gemma3", LogitTransform()),
    ],
)
def test_what_a_family_does_to_its_logits(family, transform):
    assert tiny_policy(family).transform == transform


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", [None] * 4),
        ("qwen2", [None] * 4),
        ("mistral", [6] * 4),
        ("olmo3", [5, 5, 5, None]),
        ("gemma2", [5, None, 5, None]),
    ],
)
def test_each_layer_has_its_own_window(family, windows):
    assert [mixer.windows for mixer in tiny_policy(family).mixers] == [windows]


def test_head_dim_is_the_configs_or_the_share_of_the_hidden_size():
    assert head_dim(tiny_policy("llama").config) == 8
    assert head_dim(tiny_policy("qwen3").config) == 16


def test_blocks_are_the_decoder_layers():
    policy = tiny_policy("llama")
    assert list(policy.blocks) == list(policy.model.model.layers)
