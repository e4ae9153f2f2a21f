"""Our CCGQA class as plain transformers has it: whole sequences, each by itself; and the settings that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import CCGQA, VOCAB
from tuningfork.models.ccgqa import modeling_ccgqa
from tuningfork.models.ccgqa.modeling_ccgqa import CcgqaAttention, CcgqaConfig, CcgqaForCausalLM, rotated

SIZES: dict[str, Any] = {**CCGQA["ccgqa"]().to_dict(), "num_hidden_layers": 2}
NEAR = {"rtol": 1e-12, "atol": 1e-12}  # float64


def settings(**changed: Any) -> dict[str, Any]:
    return {**SIZES, **changed}


@pytest.fixture(scope="module")
def model() -> CcgqaForCausalLM:
    torch.manual_seed(0)
    model = CcgqaForCausalLM(CcgqaConfig(**settings(recursions=2))).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, VOCAB, (1, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernels", [(2, 2), (3, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_attention_is_that_of_zaya_with_the_same_weights(kernels, group):
    """C2. ZAYA's `temp` is the factor of keys itself, ours its logarithm; it rotates half of each head."""
    zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya")
    from transformers import ZayaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": 8}
    theirs = ZayaConfig(**sizes, num_hidden_layers=1, cca_time0=kernels[0], cca_time1=kernels[1])
    theirs._attn_implementation = "sdpa"
    layer = zaya.ZayaAttention(theirs, 0)
    ours = CcgqaConfig(
        **sizes, depthwise_kernel_size=kernels[0], grouped_kernel_size=kernels[1], rotary_fraction=0.5, rope_theta=1e4
    )
    same = CcgqaAttention(ours)
    for module in (layer, same):
        module.double()
    of = layer.qkv_proj
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_()
        layer.qk_norm.temp.uniform_(0.5, 2)
        same.load_state_dict(
            {
                "qk_proj.weight": torch.cat([of.q_proj.weight, of.k_proj.weight]),
                "v_proj.weight": torch.cat([of.v_proj_current.weight, of.v_proj_delayed.weight]),
                "o_proj.weight": layer.o_proj.weight,
                "depthwise_weight": of.conv_qk_depthwise.weight[:, 0],
                "depthwise_bias": of.conv_qk_depthwise.bias,
                "grouped_weight": of.conv_qk_grouped.weight,
                "grouped_bias": of.conv_qk_grouped.bias,
                "temperature": layer.qk_norm.temp.log(),
            }
        )
    x, positions = torch.randn(2, 9, 32, dtype=torch.float64), torch.arange(9).expand(2, 9)
    cos, sin = modeling_ccgqa.rotation_of(positions, ours, torch.float64)
    visible = torch.ones(2, 9, 9, dtype=torch.bool).tril()
    expected, _ = layer(x, {"causal": visible[:, None]}, position_embeddings=(cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)))
    torch.testing.assert_close(same(x, (cos, sin), positions, visible), expected, **NEAR)


def test_sequences_one_behind_another_do_not_see_each_other(model, ids):
    """B.4: in a public trainer a second document behind the first differed by 0.81. Positions alone say where it is."""
    first, second = ids[:, :4], ids[:, 4:]
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    together = model(ids, position_ids=positions).logits
    torch.testing.assert_close(together[:, :4], model(first).logits, **NEAR)
    torch.testing.assert_close(together[:, 4:], model(second).logits, **NEAR)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_padding_on_either_side_changes_nothing(model, ids, left):
    mask = torch.zeros(1, 11, dtype=torch.long)
    mask[:, left : left + 7] = 1
    padded = model(ids, attention_mask=mask).logits[:, left : left + 7]
    torch.testing.assert_close(padded, model(ids[:, left : left + 7]).logits, **NEAR)


def test_a_token_changes_nothing_before_it(model, ids):
    changed = ids.clone()
    changed[:, 6] = 3 if ids[0, 6] != 3 else 4
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(-1).all()


def test_scores_depend_on_how_far_apart_tokens_are_and_on_nothing_else():
    config = CcgqaConfig(**settings(rotary_fraction=1.0))
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    scores = []
    for place in (0, 5, 100):
        cos, sin = modeling_ccgqa.rotation_of(torch.tensor([[place + 3, place]]), config, torch.float64)
        q, k = rotated(query, cos[:, 0], sin[:, 0]), rotated(key, cos[:, 1], sin[:, 1])
        scores.append((q * k).sum())
    torch.testing.assert_close(scores[1:], scores[:1] * 2, rtol=1e-5, atol=1e-5)  # angles are float32


def test_it_generates_what_its_logits_say_from_a_padded_batch_too(model, ids):
    expected = ids.clone()
    for _ in range(3):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    pads = torch.zeros(1, 2, dtype=torch.long)
    batch, mask = torch.cat([pads, ids], 1), torch.tensor([[0, 0, *[1] * 11]])
    found = model.generate(batch, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(found[:, 2:], expected)


def test_every_weight_has_a_gradient(model, ids):
    """In a public trainer fused norms and gates had none, nor what lies before them."""
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"use_cache": True}, "no cache of keys and values"),
        ({"past_key_values": object()}, "no cache of keys and values"),
        ({"attention_mask": torch.tensor([[1, 0] * 5 + [1]])}, "padding between tokens"),
        ({"attention_mask": torch.ones(1, 1, 11, 11)}, "attention_mask has 4 dimensions"),
    ],
)
def test_what_it_cannot_take_into_account_is_refused(model, ids, how, words):
    with pytest.raises(ValueError, match=words):
        model(ids, **how)


def test_a_keyword_that_it_does_not_know_is_no_secret(model, ids):
    """Most classes drop it, and with `cu_seq_lens_q` the borders of sequences."""
    with pytest.raises(TypeError, match="cu_seq_lens_q"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 4, 11]))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"num_attention_head": 4},
            "num_attention_head is no setting of a tuningfork_ccgqa model; did you mean num_at",
        ),
        ({"mod_capacity": 0.5}, "mod_capacity is no setting"),  # depth by top-k over a sequence: a neighbour decides
        ({"num_attention_heads": 5}, "num_attention_heads is 5 and num_key_value_heads 2"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, "num_key_value_heads is 3, and value_shift heads"),
        ({"value_shift": "head"}, "value_shift is 'head'; it must be heads or channels"),
        ({"head_dim": 6, "rotary_fraction": 0.5}, r"head_dim is 6 and rotary_fraction 0\.5: 3 channels"),
        ({"head_dim": 8, "rotary_fraction": 1.5}, "12 channels of a head would be rotated"),
        ({"head_dim": 8, "rotary_fraction": -0.5}, r"rotary_fraction is -0\.5; it must be a number, 0 or more"),
        ({"residual_scale": "half"}, "residual_scale is 'half'; it must be a number, 0 or more"),
        ({"embedding_scale": float("nan")}, "embedding_scale is nan; it must be a number"),
        ({"conv_bias": 3}, "conv_bias is 3; it must be true or false"),
        ({"recursions": 0}, "recursions is 0; it must be a whole number, at least 1"),
        ({"depthwise_kernel_size": 0}, "depthwise_kernel_size is 0"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"use_cache": True}, "use_cache is true"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 5, "value_shift": "channels"}
            | {"rotary_fraction": 0.0},
            "num_key_value_heads is 3 and head_dim 5: their product, 15 channels",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_their_numbers(changed, words):
    with pytest.raises(ValueError, match=words):
        CcgqaConfig(**settings(**changed))


def test_recursions_begin_as_the_same_mlp_and_offsets_are_learned():
    config = CcgqaConfig(**settings(recursions=3))
    layer = CcgqaForCausalLM(config).model.layers[0]
    assert layer.offsets.shape == (3, 32)
    assert not layer.offsets.any()
    attention = layer.self_attn
    assert not attention.temperature.any()  # keys begin as long as queries: a score is sqrt(d) cos(angle)
    assert 0 < attention.grouped_weight.abs().max() <= (8 * 2) ** -0.5
