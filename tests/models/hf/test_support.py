"""What cannot be trained correctly is refused, with its reason; nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models.hf.folders import edit, folder_of
from tests.tiny import FAMILIES, tiny_model
from tuningfork.errors import ModelError
from tuningfork.models import policy as policy_module
from tuningfork.models.hf import attention
from tuningfork.models.hf.load import load, load_config
from tuningfork.models.hf.support import check_config, check_modules, positions
from tuningfork.models.policy import Policy
from tuningfork.train.checks.self_check import check_packed_equals_alone

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def saved(path: Path, config) -> str:
    """A model folder with random weights, as transformers writes it."""
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


def refused(path: str, match: str) -> None:
    """Refused with one line that names the folder and the reason."""
    with pytest.raises(ModelError, match=match) as caught:
        load(path)
    message = str(caught.value)
    assert path in message
    assert "\n" not in message


def config_refused(path: Path, config, match: str) -> None:
    """Refused before any weight is read: the folder holds none."""
    config.save_pretrained(path)
    with pytest.raises(ModelError, match=match) as caught:
        load_config(str(path))
    assert f"{path} ({config.model_type})" in str(caught.value)


UNKNOWN_LAYERS = {
    "llama4": lambda: transformers.Llama4TextConfig(**TINY, layer_types=["chunked_attention", "full_attention"]),
    "exaone": lambda: transformers.Exaone4Config(**TINY, layer_types=["linear_attention", "full_attention"]),
}


@pytest.mark.parametrize("family", UNKNOWN_LAYERS)
def test_layers_of_unknown_types_are_refused_by_the_config(tmp_path, family):
    config_refused(tmp_path, UNKNOWN_LAYERS[family](), r"has layers of type (linear_attention|chunked_attention)")


RECURRENT = {
    "nemotron_h": "Mamba-2 layers",
    "bamba": "Mamba-2 layers",
    "granitemoehybrid": "Mamba-2 layers",
    "mamba2": "Mamba-2 layers",
    "zamba2": "Mamba-2 layers",
    "falcon_h1": "Mamba-2 layers",
    "bailing_hybrid": "Kimi delta attention",
    "minimax": "lightning attention",
    "jamba": "Mamba layers",
    "mamba": "Mamba layers",
    "recurrent_gemma": "gated linear recurrences",
    "rwkv": "RWKV layers",
    "xlstm": "xLSTM layers",
}


@pytest.mark.parametrize("family", [kind for kind in RECURRENT if kind in transformers.CONFIG_MAPPING])
def test_other_recurrent_families_are_refused_with_their_mixer_and_what_is_supported(family):
    """transformers#46851, Automodel#2147, ms-swift#9618: state that leaks across packed documents."""
    with pytest.raises(ModelError) as caught:
        check_config(transformers.CONFIG_MAPPING[family](), "here")
    message = str(caught.value)
    assert message.startswith(f"here ({family}) has {RECURRENT[family]}")
    assert "would leak from one example into the next" in message
    assert "the gated delta rule, in the dense models of OLMo Hybrid, Qwen3-Next and Qwen3.5" in message


HYBRID = {**TINY, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize("config", ["Qwen3NextConfig", "OlmoHybridConfig", "Qwen3_5TextConfig"])
def test_dense_models_with_the_gated_delta_rule_are_not_refused(config):
    check_config(getattr(transformers, config)(**HYBRID, **({"num_experts": 0} if "Next" in config else {})), "here")


def test_such_a_model_with_experts_is_refused():
    for kind, experts in ((transformers.Qwen3NextConfig, 4), (transformers.Qwen3_5MoeTextConfig, 4)):
        with pytest.raises(ModelError, match="is a mixture of experts"):
            check_config(kind(**HYBRID, num_experts=experts), "here")


def test_recurrent_models_without_layer_types_are_refused(tmp_path):
    rwkv = transformers.RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, context_length=64)
    config_refused(tmp_path, rwkv, "carry state from token to token")


def test_any_convolution_is_refused():
    model = tiny_model("llama", torch.float32)
    model.model.layers[1].self_attn.smooth = nn.Conv1d(4, 4, 3)
    with pytest.raises(ModelError, match=r"here: model\.layers\.1\.self_attn\.smooth \(Conv1d\) carries state"):
        check_modules(model, "here")


def test_encoder_decoders_are_refused(tmp_path):
    t5 = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    config_refused(tmp_path, t5, "is an encoder-decoder")


@pytest.mark.parametrize("part", ["vision_config", "audio_config", "audio_encoder_config"])
def test_inputs_other_than_text_are_refused(part):
    config = transformers.LlamaConfig(**TINY)
    setattr(config, part, {"hidden_size": 8})
    with pytest.raises(ModelError, match=rf"here \(llama\) has an? {part}"):
        check_config(config, "here")


def test_a_real_vision_model_is_refused(tmp_path):
    config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**TINY))
    config_refused(tmp_path, config, "has a vision_config")


EXPERTS = {
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**TINY, num_experts=2),
    "olmoe": lambda: transformers.OlmoeConfig(**TINY, num_experts=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**TINY, n_routed_experts=2),
    "aria": lambda: transformers.AriaTextConfig(**TINY, moe_num_experts=2),
    "dbrx": lambda: transformers.DbrxConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=64),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_mixtures_of_experts_are_refused(family):
    with pytest.raises(ModelError, match="is a mixture of experts"):
        check_config(EXPERTS[family](), "here")


def rotary(kind: str) -> dict:
    return {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}


def scaled_by_length(kind: str):
    """A model whose rotary embedding depends on the longest sequence of a batch where that is longer than 16."""
    if kind == "dynamic":
        return transformers.LlamaConfig(**{**TINY, "max_position_embeddings": 16}, rope_parameters=rotary(kind))
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [9.0] * 4}
    scaling = {**rotary(kind), **factors}
    return transformers.Phi3Config(**TINY, rope_parameters=scaling, original_max_position_embeddings=16)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_by_length_is_exact_as_far_as_it_leaves_sequences_alone(monkeypatch, kind):
    config = scaled_by_length(kind)
    check_config(config, "here")
    assert positions(config) == 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32).train()
    for weight in model.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.5)
    check_packed_equals_alone(model, "here")
    monkeypatch.setattr(policy_module, "positions", lambda config: 64)
    with pytest.raises(ModelError, match="other log-probs"):  # the short example, beside one that is too long
        check_packed_equals_alone(model, "here")


def test_rotary_scaling_by_length_that_does_not_say_where_it_begins_is_refused():
    config = transformers.LlamaConfig(**TINY)
    config.rope_parameters = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with pytest.raises(ModelError, match="rotary scaling of type 'longrope', which depends on the longest sequence"):
        check_config(config, "here")


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rotary_scaling_that_is_the_same_for_every_sequence_is_accepted(kind):
    parameters = {**rotary(kind), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    check_config(transformers.LlamaConfig(**TINY, rope_parameters=parameters), "here")


def test_dynamic_rotary_of_one_kind_of_layer_counts():
    parameters = {"full_attention": rotary("dynamic"), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = transformers.Gemma3TextConfig(**TINY, head_dim=8, rope_parameters=parameters)
    check_config(config, "here")
    assert positions(config) == 16


DROPOUT = {
    "llama": lambda: transformers.LlamaConfig(**TINY, attention_dropout=0.1),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, embd_pdrop=0, attn_pdrop=0
    ),
    "gpt2 attention": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2, embd_pdrop=0, resid_pdrop=0
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, dropout=0.1,
        word_embed_proj_dim=16, max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    ["llama", "gpt2", "gpt2 attention", "opt"],
)
def test_dropout_is_refused_by_the_name_of_its_setting(tmp_path, family):
    rate = {"llama": "attention_dropout", "gpt2": "resid_pdrop", "gpt2 attention": "attn_pdrop", "opt": "dropout"}
    refused(saved(tmp_path, DROPOUT[family]()), rf"config\.json sets {rate[family]} to 0\.1\. .* Set it to 0\.$")


def test_all_rates_are_named_at_once(tmp_path):
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    path = saved(tmp_path, config)
    refused(
        path, r"sets (?=.*resid_pdrop to 0\.1)(?=.*embd_pdrop to 0\.1)(?=.*attn_pdrop to 0\.1).*Set each of them to 0"
    )
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "summary_first_dropout" not in str(caught.value)  # which no language model reads


def test_layers_that_are_left_out_by_chance_are_refused_by_the_name_of_their_setting(tmp_path):
    """OPT and BioGPT draw a number for each block, and no module of theirs says so."""
    opt = DROPOUT["opt"]()
    opt.dropout, opt.layerdrop = 0.0, 0.1
    refused(saved(tmp_path / "opt", opt), r"config\.json sets layerdrop to 0\.1\. .* Set it to 0\.$")
    biogpt = transformers.BioGptConfig(
        **{name: value for name, value in TINY.items() if name != "num_key_value_heads"},
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layerdrop=0.2,
    )  # fmt: skip
    refused(saved(tmp_path / "biogpt", biogpt), r"config\.json sets layerdrop to 0\.2\. .* Set it to 0\.$")


def test_dropout_that_no_setting_turns_off_is_refused():
    model = tiny_model("llama", torch.float32)
    model.model.layers[1].mlp.drop = nn.Dropout(0.3)
    match = (
        r"here: model\.layers\.1\.mlp\.drop \(Dropout\) has dropout 0\.3, which no setting of config\.json turns off"
    )
    with pytest.raises(ModelError, match=match):
        check_modules(model, "here")


def test_models_whose_tokens_see_later_ones_are_refused(tmp_path):
    """Whatever the weights: those of a new model are so small that hardly a number would tell."""
    without_kv = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    encoder = transformers.BertGenerationConfig(
        **without_kv, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=False
    )
    embedder = transformers.Gemma3TextConfig(**TINY, head_dim=8, use_bidirectional_attention=True, sliding_window=8)
    for config in (encoder, embedder):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
        check_config(config, "here")
        with pytest.raises(ModelError, match=r"attention of this model \(\w+\) looks both ways: its tokens see those"):
            Policy.plain(model, torch.float32)
    config = transformers.LlamaConfig(**TINY)
    config.is_causal = False
    config_refused(tmp_path, config, "has is_causal set to false: its tokens see those that come after them")


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_shows_nothing_is_refused(window):
    config = transformers.MistralConfig(**TINY, sliding_window=window)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    with pytest.raises(
        ModelError, match=rf"has a window of {window} tokens\. Set sliding_window in config\.json to null"
    ):
        Policy.plain(model, torch.float32)


def test_dropout_of_zero_is_accepted(tmp_path):
    config = DROPOUT["gpt2"]()
    config.resid_pdrop = 0.0
    load(saved(tmp_path, config))


def test_weights_behind_the_hidden_states_other_than_the_heads_own_are_refused(tmp_path):
    bert = transformers.BertConfig(
        **{name: value for name, value in TINY.items() if name != "num_key_value_heads"},
        is_decoder=True,  # and with dropout, which it would be in vain to turn off
    )  # fmt: skip
    refused(saved(tmp_path, bert), r"by more than a linear output head \(cls\.predictions\.")


def test_a_config_that_is_no_language_model_s_is_refused(tmp_path):
    config_refused(tmp_path, transformers.DistilBertConfig(vocab_size=64, dim=16, n_heads=2), "is no causal language")


def test_attention_in_code_of_its_own_is_refused_before_anything_else_is_asked_for(tmp_path):
    """Not first for its dropout, which would be set to 0 in vain."""
    falcon = transformers.FalconConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, attention_dropout=0.1)
    config_refused(tmp_path, falcon, "computes attention in code of its own")


def test_a_name_that_happens_to_hold_the_letters_of_a_recurrent_layer_is_no_reason(tmp_path):
    config = transformers.SeedOssConfig(**TINY, head_dim=8, attention_dropout=0.0, residual_dropout=0.0)
    load(saved(tmp_path, config))


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_every_check(family):
    model = tiny_model(family, torch.float32)
    check_config(model.config, "here")
    check_modules(model, "here")
    state = torch.get_rng_state()
    check_packed_equals_alone(model, "here")
    # and the check leaves everything as it was
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == attention.NAME
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite"])
def test_weights_in_bfloat16_are_checked_as_sharply_and_stay_what_they_are(monkeypatch, family):
    model = tiny_model(family, torch.bfloat16)
    before = {name: (id(weight), weight.detach().clone()) for name, weight in model.named_parameters()}

    def unchanged() -> bool:
        return all(
            id(weight) == before[name][0] and weight.dtype == torch.bfloat16 and torch.equal(weight, before[name][1])
            for name, weight in model.named_parameters()
        )

    check_packed_equals_alone(model, "here")
    assert unchanged()
    changed_forward(monkeypatch, type(model.model.layers[0].mlp), lambda x: x + 5e-2 * x.roll(1, dims=1))
    with pytest.raises(ModelError, match="other log-probs"):
        check_packed_equals_alone(model, "here")
    assert unchanged()


def changed_forward(monkeypatch, kind: type, change) -> None:
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: change(forward(self, *args, **kwargs)))


@pytest.mark.parametrize(
    "change",
    [lambda z: 0.9 * z, lambda z: 5 * torch.tanh(z / 5), lambda z: z + 0.1 * torch.arange(z.shape[-1]).cos()],
    ids=["scale", "softcap", "bias"],
)
def test_a_logit_transform_that_nobody_knows_is_caught_by_the_numbers(monkeypatch, change):
    """No table of ours can promise to know every family: the model itself is asked."""

    def changed(output):
        output.logits = change(output.logits)
        return output

    changed_forward(monkeypatch, transformers.LlamaForCausalLM, changed)
    with pytest.raises(ModelError, match="here: LlamaForCausalLM gives packed examples other log-probs"):
        check_packed_equals_alone(tiny_model("llama", torch.float32), "here")


def test_a_layer_that_looks_at_the_row_before_is_caught_by_the_numbers(monkeypatch):
    """A convolution or a recurrence in plain code, under a name that says nothing."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    changed_forward(monkeypatch, LlamaMLP, lambda x: x + 0.1 * x.roll(1, dims=1))
    with pytest.raises(ModelError, match="other log-probs"):
        check_packed_equals_alone(tiny_model("llama", torch.float32), "here")


def test_a_model_that_ignores_the_positions_it_is_given_is_caught_by_the_numbers(monkeypatch):
    """Answers start again behind the prompt; a model that counts rows instead sees other positions."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    forward = LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        LlamaRotaryEmbedding,
        "forward",
        lambda self, x, position_ids: forward(self, x, torch.arange(x.shape[1], device=x.device)[None]),
    )
    with pytest.raises(ModelError, match="other log-probs"):
        check_packed_equals_alone(tiny_model("llama", torch.float32), "here")


def test_chance_that_no_setting_names_is_caught_by_running_twice(monkeypatch):
    """Dropout or layers left out by code of the model's own: no rate in the config, no module with a name."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    changed_forward(monkeypatch, LlamaMLP, lambda x: x * (1 + 1e-6 * torch.rand_like(x)))
    with pytest.raises(ModelError, match="here: LlamaForCausalLM gives other numbers when run again: there is chance"):
        check_packed_equals_alone(tiny_model("llama", torch.float32), "here")


def test_a_window_that_attention_is_not_told_is_caught_beyond_it():
    """The model's own mask cuts off at 70 tokens, the packed path is told of 71: it takes longer sequences to see."""
    model = tiny_model("mistral", torch.float32)
    model.config.sliding_window = 70
    check_packed_equals_alone(model, "here")
    handed = attention._attention
    attention.ALL_ATTENTION_FUNCTIONS.register(
        attention.NAME,
        lambda *args, sliding_window=None, **how: handed(
            *args, sliding_window=sliding_window and sliding_window + 1, **how
        ),
    )
    try:
        with pytest.raises(ModelError, match="other log-probs"):
            check_packed_equals_alone(model, "here")
    finally:
        attention.ALL_ATTENTION_FUNCTIONS.register(attention.NAME, handed)


def test_a_model_that_gives_no_numbers_is_refused():
    model = tiny_model("llama", torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="other log-probs"):
        check_packed_equals_alone(model, "here")


def test_an_attention_that_does_not_hand_its_keywords_on_is_refused(monkeypatch):
    """Nemotron's blocks do not; they are known by name, which this test takes away."""
    monkeypatch.setattr(attention, "_ONLY_HAND_ON_MASKS", set())
    config = transformers.NemotronConfig(**TINY)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"\(NemotronAttention\) is not told which tokens belong to one example"):
        check_packed_equals_alone(model.train(), "here")


@pytest.mark.parametrize("value", [{}, {"a": 1}, [], "x", 5], ids=str)
@pytest.mark.parametrize("names", [("text_config",), ("decoder",), ("text_encoder", "generator")])
def test_a_part_that_is_no_config_is_refused_by_name(tmp_path, names, value):
    edit(folder_of(tmp_path) / "config.json", **dict.fromkeys(names, value))
    with pytest.raises(ModelError, match=rf"config.json sets ({'|'.join(names)}), which is no setting of this model's"):
        load_config(str(tmp_path))
