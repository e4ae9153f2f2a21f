"""The seam in transformers: what reaches the kernel, and what is refused rather than ignored."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.tiny import FAMILIES, one_pack, random_examples, tiny_policy
from tuningfork.errors import ModelError
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.models.hf import attention


class Spy:
    """Stands for prepared attention; keeps what it was called with."""

    def attend(self, query, key, value, **settings):
        self.shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        self.dtypes = query.dtype, key.dtype, value.dtype
        self.settings = settings
        self.query = query
        return query


def call(spy: Spy, dtype=torch.float32, **keywords):
    q, k, v = (torch.randn(1, heads, 10, 8) for heads in (4, 2, 2))
    function = ALL_ATTENTION_FUNCTIONS[attention.NAME]
    return q, function(nn.Identity(), q, k, v.to(dtype), None, fork=spy, **keywords)


def test_tensors_arrive_with_rows_first_and_leave_as_transformers_wants_them():
    spy = Spy()
    q, (out, weights) = call(spy, scaling=0.25)
    assert spy.shapes == ((10, 4, 8), (10, 2, 8), (10, 2, 8))
    assert weights is None
    assert torch.equal(out, q.transpose(1, 2))  # [1, T, H, d]
    assert spy.settings == {"scale": 0.25, "window": None, "softcap": None}


def test_window_and_soft_cap_arrive_and_the_scale_has_the_usual_default():
    spy = Spy()
    call(spy, sliding_window=7, softcap=30.0)
    assert spy.settings == {"scale": 8**-0.5, "window": 7, "softcap": 30.0}
    call(spy, scaling=0.0)
    assert spy.settings["scale"] == 0.0  # zero is a scale, not "none given"


def test_queries_and_keys_take_the_dtype_of_the_values():
    """Under autocast a rotary embedding returns float32."""
    spy = Spy()
    call(spy, dtype=torch.bfloat16)
    assert spy.dtypes == (torch.bfloat16,) * 3


@pytest.mark.parametrize("keyword", ["position_bias", "never_heard_of"])
def test_a_keyword_that_attention_does_not_know_is_refused(keyword):
    with pytest.raises(ModelError, match=rf" \(Identity\) takes '{keyword}' into account"):
        call(Spy(), **{keyword: torch.ones(4)})


def test_keywords_that_say_nothing_are_ignored():
    call(
        Spy(), position_ids=torch.arange(10)[None], use_cache=False, s_aux=None, output_attentions=False, is_causal=True
    )


def test_attention_dropout_is_refused():
    with pytest.raises(ModelError, match=r"attention dropout 0\.1"):
        call(Spy(), dropout=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_mask_is_made_nor_are_sequences_looked_for(monkeypatch, family):
    """A mask would be T x T, and transformers' look for sequences among the positions makes the host wait for a GPU."""
    masks = []

    def seen(*_, attention_mask=None, **__):
        masks.append(attention_mask)

    def refuse(*_, **__):
        raise AssertionError("transformers looks for sequences in the positions")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    policy = tiny_policy(family, torch.float32)
    for block in policy.blocks:
        block.register_forward_pre_hook(lambda _, args, kwargs: seen(*args, **kwargs), with_kwargs=True)
    policy.hidden_rows(one_pack(random_examples([(3, (4, 5))]), "prompt"))
    assert masks == [None] * len(policy.blocks)


@pytest.mark.parametrize(
    ("family", "calls"),
    [
        ("llama", [(None, None)] * 4),
        ("mistral", [(6, None)] * 4),
        ("olmo3", [(5, None)] * 3 + [(None, None)]),
        ("gemma2", [(5, 50.0), (None, 50.0)] * 2),
    ],
)
def test_every_layer_of_a_model_calls_it_with_its_own_window(monkeypatch, family, calls):
    seen: list[tuple[int | None, float | None]] = []
    attend = PlainAttention.attend

    def spy(self, *tensors, scale, window, softcap):
        seen.append((window, softcap))
        return attend(self, *tensors, scale=scale, window=window, softcap=softcap)

    monkeypatch.setattr(PlainAttention, "attend", spy)
    policy = tiny_policy(family, torch.float32)
    policy.hidden_rows(one_pack(random_examples([(3, (4, 5))]), "prompt"))
    assert seen == calls
    assert [mixer.windows for mixer in policy.mixers] == [[window for window, _ in calls]]
