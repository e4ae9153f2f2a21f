"""The seam of gated short convolutions in transformers: what reaches the op, and what is refused or comes back."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from tests.models.hf.folders import logits, plain_load
from tests.tiny import SHORT_CONVS, one_pack, random_examples, tiny_model, tiny_policy, with_form
from tuningfork.errors import ModelError
from tuningfork.kernels.causal_conv.plain import PlainCausalConv
from tuningfork.models.hf import layers, short_conv
from tuningfork.models.hf.export import save
from tuningfork.models.hf.load import load
from tuningfork.models.hf.support import check_config, check_modules
from tuningfork.models.policy import Policy

EXAMPLES = random_examples([(7, (5, 9)), (0, (3, 5)), (1, (1, 2))])
families = pytest.mark.parametrize("family", SHORT_CONVS)


class Spy(PlainCausalConv):
    calls: ClassVar[list] = []

    def conv(self, x, weight, bias=None, silu=True):
        out = super().conv(x, weight, bias, silu)
        Spy.calls.append((x.dtype, out.dtype, tuple(weight.shape), bias is not None, silu))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@families
def test_layers_give_their_op_what_it_expects(family, dtype):
    Spy.calls = []
    policy = Policy(tiny_model(family, torch.float32), with_form("causal_conv", Spy), dtype)
    policy.hidden_rows(one_pack(EXAMPLES, "prompt"))
    biased = family == "lfm2_with_biases"
    assert Spy.calls == [(dtype, dtype, (32, 4 if biased else 3), biased, False)] * 3


@families
def test_both_kinds_of_blocks_are_found_with_what_they_cost(family):
    policy = tiny_policy(family)
    assert policy.blocks == list(policy.model.model.layers)
    assert {name: dict(sizes) for name, sizes in policy.ops.items()} == {
        "attention": {"head_width": 8},
        "causal_conv": {"width": 4 if family == "lfm2_with_biases" else 3},
        "row_logps": {},
    }
    matrices = [w for w in policy.model.model.layers.parameters() if w.ndim == 2]  # a convolution's have three
    assert policy.flops().block_weights == sum(w.numel() for w in matrices)


@families
def test_such_a_model_is_not_refused(family):
    model = tiny_model(family, torch.float32)
    check_config(model.config, "here")
    check_modules(model, "here")
    model.model.layers[0].feed_forward.smooth = torch.nn.Conv1d(4, 4, 3)
    with pytest.raises(ModelError, match=r"here: model\.layers\.0\.feed_forward\.smooth \(Conv1d\) carries state"):
        check_modules(model, "here")


@families
def test_a_folder_is_loaded_and_exported_as_transformers_writes_it(family, tmp_path):
    tiny_model(family, torch.bfloat16).save_pretrained(tmp_path / "model")
    loaded = load(str(tmp_path / "model"))
    save(loaded, tmp_path / "export")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "export"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    assert torch.equal(logits(plain_load(tmp_path / "export")), logits(plain_load(tmp_path / "model")))


def test_a_model_may_be_patched_again_and_copied():
    model = tiny_model("lfm2", torch.float32)
    batch = one_pack(EXAMPLES, "prompt")
    first = Policy.plain(model, torch.float32).hidden_rows(batch)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].conv.conv.weight.fill_(1.0)
    assert torch.equal(Policy.plain(model, torch.float32).hidden_rows(batch), first)
    assert not torch.equal(Policy.plain(other, torch.float32).hidden_rows(batch), first)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"cache": object()}, "is given a cache"),
        ({"past_key_values": object()}, "is given a cache"),
        ({"attention_mask": torch.ones(1, 4)}, "is given a mask"),
        ({"seq_idx": torch.zeros(1, 4)}, "take 'seq_idx' into account"),
        ({"short_conv": None}, "are not told which tokens belong to one example"),
    ],
)
def test_what_a_pack_has_not_is_refused(keywords, words):
    model = tiny_model("lfm2", torch.float32)
    short_conv.patch(model)
    with pytest.raises(ModelError, match=rf"Lfm2ShortConv.* {words}"):
        short_conv.layers(model)[0](torch.zeros(1, 4, 32), **{"short_conv": object(), **keywords})


def test_a_block_that_tells_its_layer_numbers_of_sequences_alone_hands_on_what_it_needs():
    """As some versions of the library have it."""
    told = []

    class Lfm2ShortConv(torch.nn.Module):
        def forward(self, hidden_states, past_key_values=None, attention_mask=None, seq_idx=None):
            told.append(seq_idx)
            return hidden_states

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Lfm2ShortConv()

        def forward(self, hidden_states, **kwargs):
            return self.conv(hidden_states, attention_mask=None, seq_idx=kwargs.get("seq_idx"))

    block, spy = torch.nn.ModuleList([Block()]), object()
    short_conv.patch(block)
    short_conv.patch(block)
    assert len(block[0]._forward_pre_hooks) == 1
    with layers.taken_out(block):
        block[0](torch.zeros(1, 2, 4), short_conv=spy)
    assert told == [spy]
    with pytest.raises(ModelError, match="are not told which tokens belong to one example"):
        block[0](torch.zeros(1, 2, 4))
    with pytest.raises(ModelError, match="take 'seq_idx' into account"):
        block[0](torch.zeros(1, 2, 4), seq_idx=torch.zeros(1, 2))
