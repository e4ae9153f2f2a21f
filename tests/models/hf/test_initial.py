"""Models from nothing: what their values depend on, that they follow their family's rules, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from tests.tiny import FAMILIES, HYBRIDS, SHORT_CONVS
from tuningfork.errors import ConfigError, ModelError, RunFolderError
from tuningfork.models.hf import initial, own
from tuningfork.models.hf.initial import initial_model, make
from tuningfork.models.hf.load import load, load_tokenizer

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def weights(seed: int = 0, **settings: Any) -> dict[str, torch.Tensor]:
    return initial_model(transformers.LlamaConfig(**{**TINY, "vocab_size": 320} | settings), seed).state_dict()


def test_values_depend_on_seed_and_name_and_on_nothing_else() -> None:
    ours = weights()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again, other, deeper = weights(), weights(seed=1), weights(num_hidden_layers=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        assert torch.equal(tensor, again[name]) and torch.equal(tensor, deeper[name])
        assert torch.equal(tensor, other[name]) == ("norm" in name)
    matrices = [tensor.flatten()[:16] for tensor in ours.values() if tensor.ndim == 2]
    assert len({tuple(some.tolist()) for some in matrices}) == len(matrices)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *SHORT_CONVS])
def test_every_family_is_initialised_as_its_own_code_does(family: str) -> None:
    """Constants are the library's own to the bit; what is drawn has its mean and spread, within 5 standard errors."""
    config = {**FAMILIES, **HYBRIDS, **SHORT_CONVS}[family]()
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    ours = initial_model(config, 0).state_dict()
    assert ours.keys() == theirs.keys()
    drawn = 0
    for name, tensor in theirs.items():
        if tensor.min() == tensor.max():
            assert torch.equal(ours[name], tensor), name
        elif tensor.numel() >= 256:
            drawn += 1
            spread, error = float(tensor.std()), 5 * (2 / tensor.numel()) ** 0.5
            assert abs(float(ours[name].std()) - spread) < error * spread, name
            assert abs(float(ours[name].mean() - tensor.mean())) < error * spread, name
            assert not torch.equal(ours[name], tensor), name
    assert drawn >= 10


def test_a_made_folder_is_a_model_folder_of_plain_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "start"
    assert make(folder, TINY, 7, "bytes")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert not make(folder, TINY, 7, "bytes") and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.vocab_size, model.config.bos_token_id, model.config.pad_token_id) == (320, 256, 258)
    ours = load(str(folder)).model.state_dict()
    theirs = weights(seed=7, bos_token_id=256, eos_token_id=257, pad_token_id=258)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours[name], tensor) and torch.equal(stored[name], tensor), name
        assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("kind", own.FAMILIES)
def test_a_made_folder_of_our_own_class_has_its_code_as_an_export_has(tmp_path: Path, kind: str) -> None:
    """tests/models/hf/test_nsa.py and test_ccgqa.py have plain transformers load such files."""
    family, heads = own.FAMILIES[kind], {"head_dim": 8, "max_position_embeddings": 128}
    make(tmp_path / "start", {**TINY, "model_type": kind} | heads, 0, "bytes")
    config = json.loads((tmp_path / "start" / "config.json").read_text())
    assert config["auto_map"] == family.auto_map
    for file in family.files:
        assert (tmp_path / "start" / file.name).read_bytes() == file.read_bytes()
    assert load(str(tmp_path / "start")).notes == ()


def test_another_seed_or_config_makes_the_folder_anew_and_weights_come_when_they_are_needed(tmp_path: Path) -> None:
    folder, config = tmp_path / "start", tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}')
    assert make(folder, str(config), 0, "bytes", weights=False)
    assert not (folder / "model.safetensors").exists() and not make(folder, str(config), 0, "bytes", weights=False)
    assert make(folder, TINY, 0, "bytes") and not make(folder, TINY, 0, "bytes", weights=False)
    first = load_file(folder / "model.safetensors")
    assert make(folder, TINY, 1, "bytes")
    second = load_file(folder / "model.safetensors")
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])


def test_weights_stay_unless_they_may_be_replaced(tmp_path: Path) -> None:
    """Without weights no seed decides anything, so that of others is as good; another config needs another folder."""
    folder, deeper = tmp_path / "start", TINY | {"num_hidden_layers": 3}
    assert make(folder, TINY, 0, "bytes", weights=False, may_replace=False)
    assert make(folder, deeper, 0, "bytes", weights=False, may_replace=False)  # no weights, nothing lost
    assert make(folder, TINY, 0, "bytes", may_replace=False)
    before = (folder / "model.safetensors").read_bytes()
    assert not make(folder, TINY, 0, "bytes", may_replace=False)
    for seed in (0, 1):
        assert not make(folder, TINY, seed, "bytes", weights=False, may_replace=False)
    for settings, seed, weights in ((TINY, 1, True), (deeper, 0, True), (deeper, 0, False)):
        with pytest.raises(RunFolderError, match="a run begins from, and was made from another config, seed or token"):
            make(folder, settings, seed, "bytes", weights, may_replace=False)
    assert (folder / "model.safetensors").read_bytes() == before


def test_what_was_not_made_here_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="no model that was made here"):
        make(tmp_path / "start", TINY, 0, "bytes")
    assert (tmp_path / "start" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hiden_size": 3}, "model.init: hiden_size is no setting of llama models. Did you mean hidden_size?"),
        ({"model_type": "lama"}, "model_type 'lama', which transformers does not know. Did you mean llama?"),
        ({"model_type": None}, "model.init names no model_type"),
        ({"model_type": None}, "model_type. It says what model this is"),  # and no type like "None" is suggested
        ({"model_type": "qwen3_5", "text_config": {}}, "under text_config: model_type qwen3_5_text."),
        ({"vocab_size": 200}, "sets vocab_size to 200, but the tokenizer has 259 tokens"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads to 4 and num_key_value_heads to 3. Make the first a multiple",
        ),
        ({"rope_parameters": {"rope_thet": 9.0}}, "has rope_thet, which is no setting of it. Did you mean rope_theta?"),
        (
            {"rope_scaling": {"type": "yarn", "facto": 2.0}},
            "rope_scaling has facto, which is no setting of it. Did you",
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            "has full_attention, which is no kind of layer that the model has.",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attentio": {"rope_theta": 9.0}}},
            "has sliding_attentio, which is no kind of layer that the model has. Did you mean sliding_attention?",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_thet": 9.0}}},
            "rope_parameters.sliding_attention has rope_thet, which is no setting of it. Did you mean rope_theta?",
        ),
    ],
)
def test_settings_that_a_config_does_not_have_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "start", TINY | settings, 0, "bytes")
    assert words in str(caught.value)
    assert not (tmp_path / "start").exists()


def test_what_a_family_says_of_its_own_is_taken() -> None:
    """Also where kinds of layers rotate otherwise, or a setting differs from layer to layer."""
    own = {name: CONFIG_MAPPING[name]().to_dict() for name in ("llama", "gemma3_text", "qwen3_5_text", "gemma4_text")}
    for name, settings in own.items():
        settings.pop("transformers_version", None)
        initial._check_settings(settings | {"model_type": name})


def test_settings_within_settings_are_looked_at() -> None:
    inner = {"model_type": "gemma3_text", "hiden_size": 8}
    for settings, words in (
        ({"model_type": "dbrx", "attn_config": {"clip_qkz": 1.0}}, "clip_qkz is no setting of the attn_config of dbrx"),
        (
            {"model_type": "gemma3", "text_config": inner},
            "hiden_size is no setting of the text_config of gemma3 models",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            initial._check_settings(settings)


NSA = {"model_type": "tuningfork_nsa", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (TINY | {"hidden_size": 0}, "model.init sets hidden_size to 0; there is no such model. Correct it."),
        (TINY | {"dtype": "float8"}, "model.init sets dtype to 'float8'. Set it to float32, float16 or bfloat16, or"),
        (TINY | {"hidden_size": "abc"}, "model.init cannot be read: Validation error for field 'hidden_size'"),
        (NSA | {"select_count": 0}, "model.init cannot be read: select_count must have room for select_initial"),
        (NSA | {"select_count": "2"}, "model.init cannot be read: select_count must be a whole number"),
        (TINY | {"attention_dropout": 0.1}, "model.init sets attention_dropout to 0.1."),
        (TINY | {"hidden_act": "gleu"}, "model.init sets hidden_act to 'gleu', which transformers"),
        (
            TINY | {"rope_parameters": {"rope_type": "yarm", "rope_theta": 1e4}},
            "model.init sets rope_parameters.rope_type to 'yarm', which transformers",
        ),
        (
            {"model_type": "gpt2", "n_embd": 33, "n_head": 2, "n_layer": 1},
            "model.init: transformers cannot build a gpt2 model of these settings (ValueError: ",
        ),
    ],
)
def test_what_is_wrong_is_said_of_the_setting_and_of_no_file_that_nobody_has(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        make(tmp_path / "start", settings, 0, "bytes", weights=False)
    assert str(caught.value).startswith(words) and "config.json" not in str(caught.value)


def test_a_model_that_cannot_be_trained_is_refused_by_the_settings_own_name(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ModelError, match=r"model\.init .*mixture of experts"):
        make(tmp_path / "start", experts, 0, "bytes")
    with pytest.raises(ConfigError, match="neither bytes nor a folder"):
        make(tmp_path / "start", TINY, 0, str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json: No such file|cannot be read as a config"):
        make(tmp_path / "start", str(tmp_path / "config.json"), 0, "bytes")


@pytest.mark.parametrize("weights", [True, False])
def test_what_training_would_refuse_is_refused_before_anything_is_written(tmp_path: Path, weights: bool) -> None:
    folder = tmp_path / "start"
    with pytest.raises(ModelError, match=r"^model\.init sets attention_dropout to 0\.1\..* Set it to 0\."):
        make(folder, TINY | {"attention_dropout": 0.1}, 0, "bytes", weights)
    words = "knows 128 positions, and data.max_length is 129. Set max_position_embeddings of model.init to 129 or more"
    with pytest.raises(ConfigError, match=words):
        make(folder, TINY, 0, "bytes", weights, max_length=129)
    assert not folder.exists()
    make(folder, TINY, 0, "bytes", weights, max_length=128)
    with pytest.raises(ConfigError, match=words):
        make(folder, TINY, 0, "bytes", weights, max_length=129)


def test_a_weight_that_the_family_leaves_without_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(model: Any, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Embedding):
            initialize(model, module)

    initialize = transformers.PreTrainedModel._init_weights
    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", forgets)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM leaves model\.embed_tokens\.weight without a value"):
        weights()


def test_a_tokenizer_of_another_folder_comes_along(tmp_path: Path) -> None:
    make(tmp_path / "one", TINY, 0, "bytes")
    make(tmp_path / "two", TINY, 0, str(tmp_path / "one"))
    assert load_tokenizer(str(tmp_path / "two"))("ab").input_ids == [256, 97, 98]


# ---- the byte tokenizer


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As plain transformers loads it from a made folder."""
    folder = tmp_path_factory.mktemp("made") / "start"
    make(folder, TINY, 0, "bytes", weights=False)
    return AutoTokenizer.from_pretrained(folder)


def test_ids_are_the_bytes_and_every_text_comes_back(words: Any) -> None:
    """All characters below U+3000 and of each length of UTF-8, white space and line ends of all kinds, none at all."""
    every = "".join(map(chr, range(0x3000)))
    for text in (every, "\U0001f600 \u00a0\u2028\r\n\t  two  spaces ", "'s don't \ufeff", "\U0010ffff", ""):
        ids = words(text, add_special_tokens=False).input_ids
        assert ids == list(text.encode())
        assert words.decode(ids) == text
        assert words(text).input_ids == [256, *ids]


def test_marks_are_tokens_of_their_own(words: Any) -> None:
    assert (words.bos_token_id, words.eos_token_id, words.pad_token_id, len(words)) == (256, 257, 258, 259)
    assert words.decode([256, 104, 105, 257, 258], skip_special_tokens=True) == "hi"
    for byte in range(256):  # half a character, too
        assert words.convert_ids_to_tokens(byte) is not None
    assert words.decode([0xC3]) == "\ufffd" and initial.byte_tokenizer.SYMBOLS == 320
