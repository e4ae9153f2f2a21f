"""The seam of the gated delta rule in transformers: what reaches its ops, and what is refused rather than ignored."""

from __future__ import annotations

import copy
from typing import ClassVar, NamedTuple

import pytest
import torch

from tests.tiny import HYBRIDS, one_pack, random_examples, tiny_model, tiny_policy, with_forms
from tuningfork.errors import ModelError
from tuningfork.kernels.causal_conv.plain import Heads, PlainCausalConv
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.models.hf import gated_delta
from tuningfork.models.hf.load import hold_weights
from tuningfork.models.mixers.gated_delta import PreparedGatedDelta
from tuningfork.models.policy import Policy

EXAMPLES = random_examples([(7, (5, 9)), (0, (3, 5)), (66, (1, 2))])


class SpyConv(PlainCausalConv):
    calls: ClassVar[list] = []

    def query_key_value(self, x, weight, heads):
        out = super().query_key_value(x, weight, heads)
        SpyConv.calls.append((x.dtype, tuple(weight.shape), heads, *(t.dtype for t in out)))
        return out


class SpyScan(PlainGatedDelta):
    calls: ClassVar[list] = []

    def scan(self, query, key, value, decay, beta):
        SpyScan.calls.append((query.dtype, key.dtype, value.dtype, decay, beta))
        return super().scan(query, key, value, decay, beta)


@pytest.fixture
def spies():
    SpyConv.calls, SpyScan.calls = [], []
    return with_forms(causal_conv=SpyConv, gated_delta=SpyScan)


def spied(policy: Policy) -> list:
    policy.hidden_rows(one_pack(EXAMPLES, "prompt"))
    return SpyScan.calls


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_give_their_ops_what_they_expect(family, spies):
    spied(Policy(tiny_model(family, torch.float32), spies, torch.float32))
    assert [call[1:3] for call in SpyConv.calls] == [((80, 4), Heads(2, 8, 4, 12))] * 3
    assert len(SpyScan.calls) == 3


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HYBRIDS)
def test_gates_are_float32_under_autocast_and_with_bfloat16_weights(family, weights, spies, monkeypatch):
    monkeypatch.setattr("tuningfork.models.hf.load._LEAST_IN_8_BITS", 0)
    model = tiny_model(family, torch.float32)
    hold_weights(model, weights)
    layer = model.model.layers[0].linear_attn
    norm = layer.o_norm if family == "olmo_hybrid" else layer.norm
    assert {layer.A_log.dtype, layer.dt_bias.dtype, norm.weight.dtype} == {torch.float32}
    for query, key, value, decay, beta in spied(Policy(model, spies, torch.bfloat16)):
        assert query == key == value == torch.bfloat16
        assert decay.dtype == beta.dtype == torch.float32
        assert decay.shape == beta.shape and (decay <= 0).all()
        rounded = decay.to(torch.bfloat16).float()
        assert (decay != rounded).any()  # it is no wider form of a narrow number


def test_gates_are_as_wide_as_a_wider_run(spies):
    for query, _, _, decay, beta in spied(Policy(tiny_model("qwen3_next"), spies, torch.float64)):
        assert query == decay.dtype == beta.dtype == torch.float64


@pytest.mark.parametrize(("allowed", "most"), [(True, 2.0), (False, 1.0)])
def test_negative_eigenvalues_are_a_setting_of_olmo_hybrid(allowed, most, spies):
    model = tiny_model("olmo_hybrid", torch.float32)
    for layer in gated_delta.layers(model):
        layer.allow_neg_eigval = allowed
    betas = torch.cat([call[4] for call in spied(Policy(model, spies, torch.float32))])
    assert most / 2 < betas.max() < most


def test_a_model_may_be_patched_again_and_copied():
    model = tiny_model("qwen3_5_text", torch.float32)
    policy = Policy.plain(model, torch.float32)
    batch = one_pack(EXAMPLES, "prompt")
    first = policy.hidden_rows(batch)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].linear_attn.A_log.fill_(1.0)
    assert torch.equal(Policy.plain(model, torch.float32).hidden_rows(batch), first)
    assert not torch.equal(Policy.plain(other, torch.float32).hidden_rows(batch), first)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"cache": object()}, "is given a cache"),
        ({"cache_params": object()}, "is given a cache"),
        ({"attention_mask": torch.ones(1, 4)}, "is given a mask"),
        ({"seq_idx": torch.zeros(1, 4)}, "take 'seq_idx' into account"),
        ({"gated_delta": None}, "are not told which tokens belong to one example"),
    ],
)
def test_what_a_pack_has_not_is_refused(keywords, words):
    model = tiny_model("qwen3_next", torch.float32)
    gated_delta.patch(model)
    with pytest.raises(ModelError, match=rf"Qwen3NextGatedDeltaNet.* {words}"):
        gated_delta.layers(model)[0](
            torch.zeros(1, 4, 32), **{"gated_delta": PreparedGatedDelta(None, None), **keywords}
        )


def test_layers_of_an_older_library_are_refused_by_its_version():
    model = tiny_model("olmo_hybrid", torch.float32)
    layer = gated_delta.layers(model)[2]
    layer.q_conv1d = layer.conv1d
    del layer.conv1d
    with pytest.raises(ModelError, match=r"OlmoHybridGatedDeltaNet of transformers 5.* has no conv1d: .*5\.15"):
        gated_delta.patch(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_gated_norm_of_another_package_is_refused(family):
    """Older versions of the library take that of flash-linear-attention, where it is installed."""

    class FusedRMSNormGated(torch.nn.Module):
        __module__ = "fla.modules.fused_norm_gate"

    model = tiny_model(family, torch.float32)
    setattr(gated_delta.layers(model)[0], "o_norm" if family == "olmo_hybrid" else "norm", FusedRMSNormGated())
    with pytest.raises(ModelError, match=r"fla.modules.fused_norm_gate.FusedRMSNormGated.*uninstall that package"):
        gated_delta.patch(model)


def test_other_activations_and_biases_of_the_convolution_are_refused():
    model = tiny_model("qwen3_next", torch.float32)
    layer = gated_delta.layers(model)[1]
    layer.activation = "gelu"
    with pytest.raises(ModelError, match=r"'gelu' behind its convolution \(hidden_act in config.json\)"):
        gated_delta.patch(model)
    layer.activation, layer.conv1d.bias = "silu", torch.nn.Parameter(torch.zeros(80))
    with pytest.raises(ModelError, match="has a bias"):
        gated_delta.patch(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_both_kinds_of_blocks_are_found_with_what_they_cost(family):
    policy = tiny_policy(family)
    assert policy.blocks == list(policy.model.model.layers)
    assert {name: dict(sizes) for name, sizes in policy.ops.items()} == {
        "attention": {"head_width": 8 if family == "olmo_hybrid" else 16},
        "causal_conv": {"width": 4},
        "gated_delta": {"key_width": 8, "value_width": 12},
        "row_logps": {},
    }
    matrices = [w for w in policy.model.model.layers.parameters() if w.ndim == 2]  # a convolution's have three
    assert policy.flops().block_weights == sum(w.numel() for w in matrices)


class Opaque(NamedTuple):
    """Stands for both ops: a compiler sees no more of them than of a kernel."""

    table: torch.Tensor

    def query_key_value(self, x, weight, heads):
        query, key, value = (x * weight.sum(1)).split([16, 16, 48], dim=1)
        return query.unflatten(1, (2, 8)), key.unflatten(1, (2, 8)), value.unflatten(1, (4, 12))

    def scan(self, query, key, value, decay, beta):
        return value * beta[..., None] * decay.exp()[..., None] + query.sum() * key.sum()


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_block_is_one_graph(family):
    torch._dynamo.reset()
    model = tiny_model(family, torch.float32)
    gated_delta.patch(model)
    block, hidden = model.model.layers[0], torch.randn(1, 9, 32)
    given = {"position_embeddings": None, "fork": None, "gated_delta": PreparedGatedDelta(*[Opaque(torch.ones(1))] * 2)}
    compiled = torch.compile(block.forward, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(hidden, **given), block(hidden, **given))
