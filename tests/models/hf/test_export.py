"""From a trained model back to a folder: what others read in it is what was trained."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.models.hf.folders import edit, folder_of, logits, plain_load, rewrite
from tests.tiny import FAMILIES, tiny_model
from tuningfork.errors import ModelError
from tuningfork.models.hf import attention, digests
from tuningfork.models.hf.comparable import comparable
from tuningfork.models.hf.export import check_exportable, exported_config, exported_dtype, save
from tuningfork.models.hf.load import Loaded, load, load_config, load_tokenizer

F32, BF16 = torch.float32, torch.bfloat16
NORM, HEAD = "model.norm.weight", "lm_head.weight"


def content(path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture(params=["straight", "slow"])
def either_way(request, monkeypatch) -> None:
    """The weights go straight from the disk to the device, or through the library."""
    if request.param == "slow":
        monkeypatch.setattr("tuningfork.models.hf.load._draft", lambda *_: None)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "granite"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_export_is_what_transformers_itself_would_write(tmp_path, family, dtype, either_way):
    """open-instruct#1820. Equal keys, equal logits; granite ties its embeddings."""
    original = folder_of(tmp_path / "original", family, dtype)
    save(load(str(original)), tmp_path / "export", dtype)

    theirs, ours = load_file(original / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == dtype for key in ours)
    assert torch.equal(logits(plain_load(tmp_path / "export")), logits(plain_load(original)))
    again = load(str(tmp_path / "export"))
    assert (again.model.get_output_embeddings().weight is again.model.get_input_embeddings().weight) == (
        family == "granite"
    )


@pytest.mark.parametrize("family", ["llama", "granite", "gemma3"])
def test_an_export_is_the_same_to_the_byte_however_the_weights_were_read(tmp_path, monkeypatch, family):
    original = folder_of(tmp_path / "original", family, BF16)
    save(load(str(original)), tmp_path / "straight")
    monkeypatch.setattr("tuningfork.models.hf.load._draft", lambda *_: None)
    save(load(str(original)), tmp_path / "slow")
    straight, slow = sorted((tmp_path / "straight").iterdir()), sorted((tmp_path / "slow").iterdir())
    assert [file.name for file in straight] == [file.name for file in slow]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(straight, slow, strict=True))


def test_a_trained_weight_reaches_the_export_and_the_model_in_memory_keeps_its_own(tmp_path):
    loaded = load(str(folder_of(tmp_path / "original")))
    model = loaded.model
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1.0 + 2**-20  # too fine for bfloat16
    before = {key: t.clone() for key, t in model.state_dict().items()}
    settings, generation = model.config.to_dict(), model.generation_config
    save(loaded, tmp_path / "export", BF16)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    assert model.config.to_dict() == settings and model.generation_config is generation
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported["model.layers.1.mlp.up_proj.weight"][3, 4] == 1.0
    assert all(torch.equal(exported[key], before[key].to(BF16)) for key in exported)


def test_weights_that_begin_at_one_place_in_memory_are_not_taken_for_tied(tmp_path):
    """Only one and the same parameter under two names is: a norm that is the first row of the head is a norm."""
    model = tiny_model("llama", F32)
    norm = torch.nn.Parameter(model.lm_head.weight.detach()[0])
    assert norm.data_ptr() == model.lm_head.weight.data_ptr()
    model.model.norm.weight = norm
    save(Loaded(model, F32), tmp_path, BF16)
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(exported[NORM], norm.detach().bfloat16())
    assert torch.equal(exported[HEAD], model.lm_head.weight.detach().bfloat16())


@pytest.mark.parametrize(
    ("stored", "asked", "norm", "head", "rest"),
    [
        ({NORM: F32}, None, F32, BF16, BF16),
        ({NORM: F32}, BF16, F32, BF16, BF16),
        ({NORM: F32}, F32, F32, F32, F32),
        ({HEAD: F32}, None, BF16, F32, BF16),
        ({HEAD: F32}, BF16, BF16, BF16, BF16),  # a matrix, of which the user says what it becomes
        ({}, None, BF16, BF16, BF16),
        ({}, F32, F32, F32, F32),
    ],
)
def test_each_tensor_is_exported_in_its_own_dtype(tmp_path, either_way, stored, asked, norm, head, rest):
    """float32 among bfloat16 says that someone needed its digits."""
    fine = 1 + 2**-20  # too fine for bfloat16

    def keep(weights):
        weights.update({name: torch.full_like(weights[name], fine, dtype=dtype) for name, dtype in stored.items()})

    rewrite(folder_of(tmp_path / "original", dtype=BF16), keep)
    loaded = load(str(tmp_path / "original"), dtype=BF16 if HEAD not in stored else F32)
    assert loaded.stored_dtype == BF16
    save(loaded, tmp_path / "export", asked)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert (exported.pop(NORM).dtype, exported.pop(HEAD).dtype) == (norm, head)
    assert {weight.dtype for weight in exported.values()} == {rest}
    again = load(str(tmp_path / "export")).model.state_dict()
    assert all((again[name] == fine).all() for name, dtype in stored.items() if (name == NORM or asked is None))
    config = content(tmp_path / "export" / "config.json")
    assert config["dtype"] == config["torch_dtype"] == ("float32" if asked == F32 else "bfloat16")


def test_whole_numbers_and_truths_are_never_cast():
    for kind in (torch.int64, torch.uint8, torch.bool):
        assert exported_dtype(kind, BF16, False, F32) == exported_dtype(kind, BF16, True, BF16) == kind


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_exported_config_names_the_dtype_of_the_weights(tmp_path, dtype):
    """transformers loads in the dtype of config.json, so that a wrong one doubles the memory of every user."""
    original = folder_of(tmp_path / "original")
    edit(original / "config.json", dtype=None, torch_dtype="float16")  # says what is not so, in the older name
    save(load(str(original)), tmp_path / "export", dtype)
    config = content(tmp_path / "export" / "config.json")
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert load(str(tmp_path / "export")).stored_dtype == dtype
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == dtype


# --- settings ---------------------------------------------------------------------------------------------------------


def test_an_export_says_nothing_of_us(tmp_path):
    """Anyone can load it who has never heard of our attention."""
    original = folder_of(tmp_path / "original")
    byte_bpe(chat_template=CHATML).save_pretrained(original)
    save(load(str(original)), tmp_path / "export")
    for file in (tmp_path / "export").glob("*.json"):
        assert attention.NAME not in file.read_text() or file.name == digests.NAME, file.name
    config = content(tmp_path / "export" / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"


def test_settings_stay_as_they_were_written(tmp_path):
    """By whichever version, in their order; keys that the library does not know are somebody's, too."""
    original = folder_of(tmp_path / "original")
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {**llama3, "original_max_position_embeddings": 64}
    edit(original / "config.json", rope_parameters=None, dtype=None, rope_theta=500000.0, rope_scaling=scaling)
    edit(original / "config.json", torch_dtype="float32", transformers_version="4.43.0", their_own={"a": [1, None]})
    before = content(original / "config.json")
    save(load(str(original)), tmp_path / "export")
    after = content(tmp_path / "export" / "config.json")
    assert after == {**before, "dtype": "float32"}
    assert list(after)[: len(before)] == list(before)
    assert comparable(load_config(str(tmp_path / "export"))) == comparable(load_config(str(original)))


LINEAR = {"rope_type": "linear", "factor": 8.0}
ROPE = [
    ("LlamaConfig", {"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}),
    ("LlamaConfig", {"rope_theta": 5e5, **LINEAR}, {"rope_theta": 5e5, "rope_scaling": LINEAR}),
    ("Qwen3Config", {"rope_theta": 1e6, **LINEAR}, {"rope_theta": 1e6, "rope_scaling": LINEAR}),
    (
        "GPTNeoXConfig",
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
        {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
    ),
    (
        "StableLmConfig",
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5},
    ),
    (
        "Gemma3TextConfig",
        {
            "full_attention": {"rope_theta": 1e6, **LINEAR},
            "sliding_attention": {"rope_theta": 1.5e4, "rope_type": "default"},
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 1.5e4, "rope_scaling": LINEAR},
    ),
]


@pytest.mark.parametrize(("kind", "rope", "legacy"), ROPE, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(ROPE)])
def test_rotary_settings_stand_in_their_older_names_too(kind, rope, legacy):
    """Whoever does not know `rope_parameters` takes theta 10,000 without a word."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = getattr(transformers, kind)(**sizes, num_hidden_layers=2, num_key_value_heads=4, rope_parameters=rope)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Some versions of the library write a few of the older names themselves.
    start = {key: value for key, value in config.to_dict().items() if key not in legacy}
    exported = exported_config(start, model, F32)
    assert {key: exported[key] for key in legacy} == legacy
    assert exported["rope_parameters"] == start["rope_parameters"]
    assert comparable(type(config).from_dict(exported)) == comparable(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_reads_as_its_model(tmp_path, family):
    """Also one that was built and not loaded, so that there is no config.json to start from."""
    model = tiny_model(family, F32)
    save(Loaded(model, F32), tmp_path)
    assert comparable(load_config(str(tmp_path))) == comparable(model.config)


def test_code_of_its_own_is_not_left_dangling(tmp_path):
    """The export has the library's model, not the code's: who trusts remote code would look for what is not there."""
    original = folder_of(tmp_path / "original")
    edit(original / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    byte_bpe().save_pretrained(original)
    edit(original / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.X", None]}, mine=1)
    for name in ("modeling_x.py", "tokenizer_x.py", "vocab.pkl"):  # the latter lie where a tokenizer's files do
        (original / name).write_text("raise SystemExit('run')")
    loaded = load(str(original))
    assert len(loaded.notes) == 2 and all("(auto_map), which is not run" in note for note in loaded.notes)
    save(loaded, tmp_path / "export")
    assert {file.suffix for file in (tmp_path / "export").iterdir()} == {".json", ".safetensors"}
    for file in (tmp_path / "export").glob("*.json"):
        assert "auto_map" not in content(file), file.name
    # which makes it no other architecture: its weights may be scored against its start
    assert comparable(load_config(str(tmp_path / "export"))) == comparable(load_config(str(original)))
    assert content(tmp_path / "export" / "tokenizer_config.json")["mine"] == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    AutoTokenizer.from_pretrained(tmp_path / "export", trust_remote_code=True)


# --- what lies beside the weights -------------------------------------------------------------------------------------


def test_tokenizer_template_and_generation_settings_travel_to_the_byte(tmp_path, either_way):
    """Although the library would refuse to write such generation settings, or would write them its own way."""
    original = folder_of(tmp_path / "original")
    byte_bpe(chat_template=CHATML).save_pretrained(original)
    edit(original / "tokenizer_config.json", **{"tokenizer_class": "PreTrainedTokenizerFast", "backend": None})
    edit(original / "tokenizer_config.json", extra_special_tokens=None, additional_special_tokens=["<|im_start|>"])
    edit(original / "generation_config.json", temperature=0.6, do_sample=False, eos_token_id=[2, 3], mine={"a": 1})
    (original / "LICENSE").write_text("yours\r\n")
    (original / "additional_chat_templates").mkdir()
    (original / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (original / "special_tokens_map.json").write_text('{ "eos_token":"</s>" }')
    (original / "notes.txt").write_text("private")
    there = {
        str(file.relative_to(original)): file.read_bytes()
        for file in original.rglob("*")
        if file.is_file() and file.name not in ("notes.txt", "config.json", "model.safetensors")
    }
    assert len(there) == 7
    loaded = load(str(original))
    for file in original.rglob("*"):  # whatever becomes of the folder while the model trains
        if file.is_file():
            file.unlink()
    save(loaded, tmp_path / "export")
    exported = {
        str(file.relative_to(tmp_path / "export")): file.read_bytes()
        for file in (tmp_path / "export").rglob("*")
        if file.is_file() and file.name not in ("config.json", "model.safetensors", digests.NAME)
    }
    assert exported == there


def test_without_generation_settings_there_are_none_in_the_export(tmp_path):
    (folder_of(tmp_path / "original") / "generation_config.json").unlink()
    save(load(str(tmp_path / "original")), tmp_path / "export")
    names = ["config.json", "model.safetensors", digests.NAME]
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == names


@pytest.mark.parametrize("family", ["llama", "qwen2", "olmo2", "gemma3", "cohere", "mistral"])
def test_a_tokenizer_in_new_names_is_exported_in_names_that_all_know(tmp_path, family):
    """As this version reads it, it is the same; version 4 fails on the new ones."""
    original = tmp_path / "original"
    tokenizer = byte_bpe([("Ġ", "a")], chat_template=CHATML, pad="</s>", adds_bos=True)
    tokenizer.save_pretrained(folder_of(original, family))
    before = content(original / "tokenizer_config.json")
    assert before["tokenizer_class"] == "TokenizersBackend" and isinstance(before["extra_special_tokens"], list)
    save(load(str(original)), tmp_path / "export")
    after = content(tmp_path / "export" / "tokenizer_config.json")
    assert after["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert after["additional_special_tokens"] == before["extra_special_tokens"]
    assert "extra_special_tokens" not in after and "backend" not in after
    ours, theirs = load_tokenizer(str(tmp_path / "export")), load_tokenizer(str(original))
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.chat_template == theirs.chat_template == CHATML
    assert ours.extra_special_tokens == theirs.extra_special_tokens
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours("as <s> a tuning fork")["input_ids"] == theirs("as <s> a tuning fork")["input_ids"]
    assert (ours.eos_token, ours.pad_token, ours.bos_token) == ("</s>", "</s>", "<s>")


# --- checksums --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    original, export = (tmp_path_factory.mktemp("digests") / name for name in ("original", "export"))
    byte_bpe(chat_template=CHATML).save_pretrained(folder_of(original))
    (original / "additional_chat_templates").mkdir()
    (original / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    save(load(str(original)), export)
    return export


FILES = [
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", digests.NAME),
]


def test_every_file_of_an_export_has_a_checksum(exported):
    there = {str(file.relative_to(exported)) for file in exported.rglob("*") if file.is_file()}
    assert there == {*FILES}
    assert content(exported / digests.NAME)["xxh3_128"].keys() == there - {digests.NAME}
    assert torch.equal(logits(plain_load(exported)), logits(load(str(exported)).model))


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_of_an_export_is_noticed(tmp_path, exported, name):
    """Most give a model, a tokenizer or a template that works, and is another one."""
    folder = shutil.copytree(exported, tmp_path / "copy")
    whole = (folder / name).read_bytes()
    for place in (len(whole) // 3, len(whole) // 2, 2 * len(whole) // 3, len(whole) - 2):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1
        (folder / name).write_bytes(spoilt)
        with pytest.raises(ModelError) as caught:
            load(str(folder))
        assert digests.NAME in str(caught.value) or name in FILES[:2]  # which may not be JSON any more
        if not name.endswith((".safetensors", "digests.json")):
            with pytest.raises(ModelError):
                load_tokenizer(str(folder))


def test_what_is_changed_on_purpose_is_read_without_the_checksums(tmp_path, exported):
    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / "mine.txt").write_text("beside")
    load_tokenizer(str(folder))
    edit(folder / "generation_config.json", top_k=3)
    with pytest.raises(ModelError, match=rf"not as it was exported.* changed on purpose, remove {digests.NAME}"):
        load_config(str(folder))
    (folder / digests.NAME).unlink()
    assert load(str(folder)).model.generation_config.top_k == 3


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_an_export_is_named(tmp_path, exported, name):
    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / name).unlink()
    with pytest.raises(ModelError, match=rf"{name}"):
        load(str(folder))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"xxh3_128": [1]}', '{"xxh3_128": {"config.json": 1}}', "[" * 10**5])
def test_checksums_that_are_none_are_named(tmp_path, exported, text):
    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / digests.NAME).write_text(text)
    with pytest.raises(ModelError, match=f"{digests.NAME} is damaged"):
        load_config(str(folder))


@pytest.mark.parametrize("name", ["LICENSE", "vocab.old", "tokenizer.model", "chat_template.jinja"])
def test_a_link_out_of_a_folder_is_not_exported(tmp_path, exported, name):
    """Whoever made the folder would have the user publish a private file."""
    (tmp_path / "key").write_text("private")
    shutil.copytree(exported, tmp_path / "model")
    (tmp_path / "model" / digests.NAME).unlink()
    (tmp_path / "model" / name).unlink(missing_ok=True)
    (tmp_path / "model" / name).symlink_to(tmp_path / "key")
    with pytest.raises(ModelError, match=rf"{name} is a link that leads out of the folder, to .*key.*Put a copy"):
        load(str(tmp_path / "model"))


def test_a_copy_by_links_is_the_same_model(tmp_path, exported):
    (tmp_path / "linked").mkdir()
    for file in exported.iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    load(str(tmp_path / "linked"))


# --- before the first step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        *({"output_attentions": True}, {"output_hidden_states": True}, {"return_dict": False}, {"use_cache": False}),
        *({"torchscript": True}, {"max_length": 3, "num_beams": "x"}, {"architectures": [5]}, {"id2label": {"0": 5}}),
    ],
    ids=str,
)
def test_settings_of_what_a_model_hands_out_cost_no_export(tmp_path, setting):
    """With our attention, transformers saves no config that asks for attention weights."""
    edit(folder_of(tmp_path / "original") / "config.json", **setting)
    try:
        loaded = load(str(tmp_path / "original"))
    except ModelError as error:  # some versions of the library read no such setting
        assert "config.json cannot be read: Validation error for field" in str(error)
        return
    assert loaded.model.config.return_dict and not loaded.model.config.output_hidden_states
    check_exportable(loaded, "original")
    save(loaded, tmp_path / "export")
    written = content(tmp_path / "export" / "config.json")
    assert written | setting | {"architectures": ["LlamaForCausalLM"]} == written
    load(str(tmp_path / "export"))


@pytest.mark.parametrize("setting", [{"rope_parameters": {"full_attention": 5, "rope_theta": 1e4}}], ids=str)
def test_what_could_not_be_exported_is_refused_before_it_is_trained(tmp_path, setting):
    edit(folder_of(tmp_path / "original") / "config.json", **setting)
    loaded = load(str(tmp_path / "original"))
    with pytest.raises(ModelError, match=r"^original: the model could be trained, but not exported: .* Correct config"):
        check_exportable(loaded, "original")


def test_whatever_the_library_would_not_save_is_refused_before_it_is_trained(tmp_path, monkeypatch):
    loaded = load(str(folder_of(tmp_path / "original")))

    def objects(*_, **__):
        raise ValueError("no such thing")

    monkeypatch.setattr(type(loaded.model.config), "save_pretrained", objects)
    with pytest.raises(ModelError, match=r"cannot save it: no such thing\. Correct"):
        check_exportable(loaded, "original")


@pytest.mark.parametrize("name", ["validate", "save_pretrained", "get_text_config"])
def test_a_setting_by_the_name_of_a_function_is_refused(tmp_path, name):
    edit(folder_of(tmp_path / "original") / "config.json", **{name: 5})
    with pytest.raises(ModelError, match=rf"config.json (sets {name}, which is no setting|cannot be read)"):
        load_config(str(tmp_path / "original"))
