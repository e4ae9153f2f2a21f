"""Models with native sparse attention as transformers has them: their config, their branches, and their own forward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import SPARSE, VOCAB, one_pack, random_examples, scorer_of, tiny_model, tiny_policy
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.select import plain
from tuningfork.models.nsa import NsaConfig, NsaForCausalLM
from tuningfork.models.nsa.modeling_nsa import NsaTurn
from tuningfork.models.policy import Policy

IDS = torch.randint(3, VOCAB, (2, 90), generator=torch.Generator().manual_seed(0))


def logits(model: Any, ids: torch.Tensor = IDS, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **given).logits


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"block_stride": 12},
            "block_stride must divide block_length, and block_stride is 12 and block_length is 32; "
            "block_stride must divide select_length, and block_stride is 12 and select_length is 64",
        ),
        (
            {"block_length": 128},
            "block_length must not be larger than select_length, and block_length is 128 and select_length is 64",
        ),
        (
            {"select_count": 2},
            "select_count must have room for select_initial and select_local, "
            "and select_count is 2 and select_initial is 1 and select_local is 2",
        ),
        ({"window": 0}, "window must be at least 1, and window is 0"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads must divide num_attention_heads, "
            "and num_attention_heads is 12 and num_key_value_heads is 5",
        ),
        ({"head_dim": 7}, "head_dim must be even, for it is rotated in halves, and head_dim is 7"),
        (
            {"select_local": 0},
            "select_local must be at least 1, for a row reads its own block, and select_local is 0",
        ),
        ({"select_count": "2"}, "select_count must be a whole number, and select_count is '2'"),
        ({"hidden_size": None}, "hidden_size must be a whole number, and hidden_size is None"),
        ({"use_cache": True}, "use_cache is true: this model has no cache of keys and values"),
        ({"sparse": 1}, "sparse must be true or false, and sparse is 1"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number, and rope_theta is '1e4'"),
        ({"phi": "mlpp"}, "phi must be one of mean, linear, mlp, and phi is mlpp"),
        (
            {"blok_length": 32},
            "blok_length is no setting of a model of type tuningfork_nsa; did you mean block_length?",
        ),
    ],
)
def test_sizes_that_do_not_fit_and_names_that_nobody_reads_are_refused(settings, message):
    with pytest.raises(ValueError) as caught:
        NsaConfig(**settings)
    assert str(caught.value) == message


def test_the_auto_classes_know_it_and_a_config_comes_back_as_it_was():
    config = AutoConfig.for_model("tuningfork_nsa", window=100, eos_token_id=7, tie_word_embeddings=True)
    assert isinstance(config, NsaConfig)
    again = NsaConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert (again.window, again.eos_token_id, again.tie_word_embeddings) == (100, 7, True)
    assert (again.value_head_dim, again.intermediate_size) == (64, 4 * 768)


def test_weights_begin_as_the_paper_needs_them():
    """Gates at one half, whatever the row; learned positions at zero; matrices normal. Counted by hand at 78.7 M."""
    tiny = AutoModelForCausalLM.from_config(SPARSE["nsa"]())
    for name, weight in tiny.named_parameters():
        if "gate." in name or name.endswith(("positions", ".bias")):
            assert (weight == 0).all(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            assert 0.7 * 0.02 < weight.std() < 1.3 * 0.02, name
    with torch.device("meta"):
        m7c = NsaForCausalLM(NsaConfig(phi="mean"))
    assert sum(weight.numel() for weight in m7c.model.layers[0].parameters()) == 6_517_284
    assert sum(weight.numel() for weight in m7c.parameters()) == 12 * 6_517_284 + 2 * 320 * 768 + 768


# --- its own forward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SPARSE)
def test_padding_on_either_side_changes_nothing(family):
    model = tiny_model(family, torch.float32)
    whole = logits(model)
    mask = torch.ones_like(IDS)
    mask[1, 70:] = 0
    torch.testing.assert_close(logits(model, attention_mask=mask)[1, :70], whole[1, :70], rtol=1e-5, atol=1e-5)
    left = torch.cat([IDS[1:, :20] * 0, IDS[1:, :70]], 1)
    mask = (torch.arange(90) >= 20)[None].long()
    torch.testing.assert_close(logits(model, left, attention_mask=mask)[0, 20:], whole[1, :70], rtol=1e-5, atol=1e-5)


def test_it_generates_without_a_cache_and_refuses_one():
    model = tiny_model("nsa", torch.float32).eval()
    told = model.generate(IDS[:1, :20], max_new_tokens=4, do_sample=False, pad_token_id=0)
    greedy = IDS[:1, :20]
    while greedy.shape[1] < told.shape[1]:
        greedy = torch.cat([greedy, logits(model, greedy)[:, -1:].argmax(-1)], 1)
    assert torch.equal(told, greedy)
    with pytest.raises(ValueError, match="has no use_cache: leave it out"):
        model(input_ids=IDS, use_cache=True)
    with pytest.raises(ValueError, match="position_ids must count each sequence's tokens from 0"):
        model(input_ids=IDS, position_ids=torch.arange(90)[None] % 45)


@pytest.mark.parametrize("family", SPARSE)
def test_no_later_token_moves_a_bit_of_an_earlier_row(family):
    """In packs, and by its own forward; from row 65 on there is a choice of blocks."""
    model = tiny_model(family, torch.float32)
    policy = Policy(model, plain(), torch.float32)
    [example] = random_examples([(0, (150,))])
    before = policy.hidden_rows(build_pack([example], 192, "none"))
    ids = torch.from_numpy(example.answers[0].ids).long()[None]
    alone = logits(model, ids)
    for t in (0, 31, 64, 100, 148):
        example.answers[0].ids[t] = 1
        changed = policy.hidden_rows(build_pack([example], 192, "none"))
        assert torch.equal(before[:t], changed[:t]) and (before[t:] != changed[t:]).any(1).all()
        other = logits(model, torch.from_numpy(example.answers[0].ids).long()[None])
        assert torch.equal(alone[:, :t], other[:, :t])
        before, alone = changed, other


# --- branches ---------------------------------------------------------------------------------------------------------


def with_gates(model: Any, *gates: float) -> Any:
    """The model with the same gates for all rows and heads: 0 or 1 each, of compressed, selected and window."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.gate.weight.zero_()
            layer.self_attn.gate.bias.copy_(
                torch.tensor(gates).sub(0.5).mul(1e4).repeat(model.config.num_attention_heads)
            )
    return model


def twin(model: Any, branch: str) -> Any:
    """The dense twin with the weights of one branch: full attention."""
    config = NsaConfig.from_dict({**model.config.to_dict(), "sparse": False})
    dense = NsaForCausalLM(config).to(torch.float64)
    state = {name.replace(f"_{branch}.", "_full."): weight for name, weight in model.state_dict().items()}
    dense.load_state_dict({name: weight for name, weight in state.items() if name in dense.state_dict()})
    return dense


@pytest.mark.parametrize(
    ("branch", "gates", "settings"),
    [
        ("slc", (0, 1, 0), {"select_count": 6}),
        ("win", (0, 0, 1), {"window": 90}),
        ("cmp", (1, 0, 0), {"block_length": 1, "block_stride": 1, "phi": "mean", "cmp_rope": "block_start"}),
        ("cmp", (1, 0, 0), {"block_length": 1, "block_stride": 1, "phi": "mean", "cmp_rope": "before"}),
    ],
)
def test_a_branch_that_sees_everything_is_full_attention(branch, gates, settings):
    torch.manual_seed(0)
    config = NsaConfig.from_dict({**SPARSE["nsa"]().to_dict(), "initializer_range": 0.2, **settings})
    model = with_gates(NsaForCausalLM(config).to(torch.float64), *gates)
    full = logits(twin(model, branch))
    torch.testing.assert_close(logits(model), full, rtol=1e-10, atol=1e-10)
    config.select_count, config.window = 4, 9
    if branch != "cmp":
        for layer in model.model.layers:
            layer.self_attn.choice = layer.self_attn.choice._replace(count=4)
        assert (logits(model)[:, 80:] - full[:, 80:]).abs().max() > 1e-3  # with less it is another


def test_scores_of_rotated_rows_depend_on_their_distance_alone():
    """Each head is turned by itself: a pair at distance 3 scores the same from three places, rows and blocks alike."""
    config = SPARSE["nsa"]()
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 4, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = []
    for place in (0, 5, 41):
        turn = NsaTurn.of(config, torch.tensor([place + 3]), torch.tensor([place]), torch.float64)
        at = NsaTurn.of(config, torch.tensor([place]), None, torch.float64)
        scores.append([(turn.rows(query) * turned).sum(-1) for turned in (turn.blocks(key), at.rows(key))])
    for later in scores[1:]:
        for one, other in zip(scores[0], later, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*scores[0], rtol=1e-12, atol=1e-12)


def test_labels_of_chance_stay_at_chance():
    """No row sees its own label: from the first batch on, before anything can be learned by heart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SPARSE["nsa"]())
    ids = torch.randint(VOCAB, (8, 128))
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert abs(float(loss) - math.log(VOCAB)) < 0.02


def test_what_is_kept_of_a_block_changes_no_gradient():
    """Recomputed, and with inputs in host memory: gates are noted anew, blocks chosen anew, and all is as it was."""
    policy = tiny_policy("nsa", torch.float32)
    batch = one_pack(random_examples([(70, (3, 61)), (1, (2, 130))]), "prompt", tokens=320)
    found = []
    for mode in ("none", "block", "offload"):
        policy.keep_activations(mode)
        policy.model.zero_grad()
        scorer_of(policy).backward(batch, lambda first, last, logps: logps.sum())
        found.append([weight.grad.clone() for weight in policy.model.parameters()])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
