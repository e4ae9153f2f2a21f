"""Folders that are not what they seem: refused in words, or read as their index says."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers

from tests.data.tiny_tokenizers import byte_bpe
from tests.models.hf.folders import edit, folder_of, never, plain_load, refused, rewrite, same_model, same_weights
from tests.tiny import tiny_model
from tuningfork.errors import ModelError
from tuningfork.models.hf import safetensors_reader
from tuningfork.models.hf.load import load, load_config, load_tokenizer


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_model_is_refused(tmp_path, dtype):
    """Without a quantization_config in config.json, transformers would cast it and say nothing."""
    rewrite(
        folder_of(tmp_path),
        lambda weights: weights.update({name: w.to(dtype) for name, w in weights.items() if w.ndim == 2}),
    )
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ModelError, match=rf"weights are stored in {kind}, such as .*a quantized"):
        load(str(tmp_path))


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_quantized_model_in_an_older_file_is_refused(tmp_path, prefix):
    """Also under the names that its base model has."""
    model = tiny_model("granite", torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = {prefix + name: w.to(torch.int8) if w.ndim == 2 else w for name, w in model.model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "weights are stored in int8, such as .*a quantized")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(tmp_path, content):
    tiny_model("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json (has no weight_map|cannot be read: it holds no JSON)"):
        load(str(tmp_path))


def test_a_shard_that_is_not_there(tmp_path):
    tiny_model("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="40KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    refused(
        tmp_path,
        r"the model cannot be loaded: model\.safetensors\.index\.json names model-00002\S+, which is not there",
    )


def test_not_a_folder_names_the_nearest_one(tmp_path):
    folder_of(tmp_path / "my-model")
    message = refused(tmp_path / "my-modle", "is not a folder")
    assert f"Did you mean {tmp_path / 'my-model'}?" in message
    assert "Did you mean" not in refused(tmp_path / "my-model" / "config.json", "is not a folder")
    refused(tmp_path / "nowhere" / "at" / "all", "is not a folder")
    assert "current directory" not in message


def test_a_relative_path_is_said_to_start_at_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    message = refused("./tiny", "is not a folder")
    assert f"./tiny is not a folder. That is {tmp_path}/sub/tiny: relative paths start at the current" in message
    assert "directory, not at the recipe." in message


def test_loaders_name_the_nearest_folder(tmp_path):
    folder_of(tmp_path / "my-model")
    for loader in (load_config, load_tokenizer):
        with pytest.raises(ModelError, match="Did you mean"):
            loader(str(tmp_path / "my-modle"))


def test_a_hub_name_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("meta-llama/Llama-3.2-1B", "is not a folder")


def test_a_folder_that_holds_no_model(tmp_path):
    refused(tmp_path, r"no config\.json")
    (tmp_path / "config.json").write_text("{ not json")
    refused(tmp_path, r"config\.json cannot be read")
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of"}')
    refused(tmp_path, r"transformers \S+ knows no model of type 'never-heard-of'")
    for missing in ("{}", '{"model_type": null}', '{"model_type": 7}'):
        (tmp_path / "config.json").write_text(missing)
        refused(tmp_path, r"config\.json names no model_type")


def test_no_weights(tmp_path):
    (folder_of(tmp_path) / "model.safetensors").unlink()
    refused(tmp_path, r"no weights found \(looked for model\.safetensors")


@pytest.mark.parametrize(
    ("name", "format"),
    [("model-Q4_K_M.gguf", "GGUF, which llama.cpp reads"), ("tf_model.h5", "the format of TensorFlow"),
     ("consolidated.00.pth", "the layout of its authors' own code")],
)  # fmt: skip
def test_weights_in_a_format_that_is_not_read_are_named(tmp_path, name, format):
    (folder_of(tmp_path) / "model.safetensors").rename(tmp_path / name)
    refused(tmp_path, rf"no weights found .* {name} is in {format}; get the model as it is published for transformers")
    refused(tmp_path / name, rf"is not a folder\. {name} is in {format}")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, rf"no config\.json, .* {name} is in {format}")


@pytest.mark.parametrize("with_config", [True, False])
def test_an_adapter_without_its_model(tmp_path, with_config):
    (folder_of(tmp_path) / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    if not with_config:
        (tmp_path / "config.json").unlink()
    refused(tmp_path, r"an adapter \(adapter_config\.json\) without its model, some/base\. Merge it into that")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_into_git_lfs_is_no_weights(tmp_path, name):
    (folder_of(tmp_path) / "model.safetensors").unlink()
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4096\n")
    refused(tmp_path, rf"the model cannot be loaded: .* {name} is no more than a pointer into Git LFS")
    (tmp_path / name).rename(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json is no more than a pointer into Git LFS"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hidden_act": "magic"}, r"config\.json sets hidden_act to 'magic', which transformers \S+ does not know\.$"),
        ({"rope_parameters": {"rope_type": "magic", "rope_theta": 1e4}},
         r"config\.json sets rope_parameters\.rope_type to 'magic', which transformers \S+ does not know\.$"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, r"config\.json cannot be read: Missing .*f"),
        ({"num_hidden_layers": "two"}, r"config\.json cannot be read: .*num_hidden_layers.* expected int, got str"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, r"config\.json cannot be read: .* not a multiple of "),
        ({"num_attention_heads": 0}, r"config\.json sets num_attention_heads to 0; there is no such model"),
        ({"dtype": "float99"}, r"config\.json sets dtype to 'float99'\. Get the model in float32"),
        ({"torch_dtype": "int8"}, r"config\.json sets torch_dtype to 'int8'\. Get the model in float32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_setting_that_no_model_can_have_is_named(tmp_path, settings, why):
    edit(folder_of(tmp_path) / "config.json", **settings)
    refused(tmp_path, why)


def test_what_is_wrong_with_the_config_is_not_blamed_on_the_tokenizer(tmp_path):
    edit(folder_of(tmp_path) / "config.json", num_hidden_layers="two")
    with pytest.raises(ModelError, match=r"config\.json cannot be read: .*num_hidden_layers"):
        load_tokenizer(str(tmp_path))


def test_a_kind_of_attention_that_is_not_installed_here_is_not_needed(tmp_path):
    """config.json may name the one that the model was made with; ours takes its place."""
    edit(folder_of(tmp_path) / "config.json", _attn_implementation="flash_attention_2")
    load(str(tmp_path))


def test_missing_tensors_are_counted_and_never_drawn_at_random(tmp_path):
    rewrite(folder_of(tmp_path), lambda weights: [weights.pop(key) for key in list(weights) if "layers.2" in key])
    refused(tmp_path, r"the weights lack 9 tensors of the model, first model\.layers\.2\.input_layernorm\.weight")


def test_a_missing_head_is_missing_unless_it_is_tied(tmp_path):
    rewrite(folder_of(tmp_path), lambda weights: weights.pop("lm_head.weight"))
    refused(tmp_path, r"lack 1 tensor of the model, first lm_head\.weight\. That is its output head: this is a base")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path, bad):
    def spoil(weights):
        weights["model.layers.1.self_attn.k_proj.weight"][2, 3] = bad

    rewrite(folder_of(tmp_path), spoil)
    refused(tmp_path, r"NaN or infinite weights in 1 tensors, first model\.layers\.1\.self_attn\.k_proj\.weight")


def test_weights_of_another_shape(tmp_path):
    edit(folder_of(tmp_path) / "config.json", intermediate_size=48)
    refused(
        tmp_path,
        r"12 tensors have another .* first model\.layers\.0\.mlp\.down_proj\.weight: \(32, 64\) and not \(32, 48\)",
    )


def test_half_a_weight_file(tmp_path):
    path = folder_of(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(tmp_path, "the model cannot be loaded")


def test_no_tokenizer(tmp_path):
    folder_of(tmp_path)
    said = rf"^no tokenizer files in {tmp_path} \(looked for tokenizer\.json, .*\)\. Copy those of the model's own"
    with pytest.raises(ModelError, match=said):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_without_a_vocabulary_is_none(tmp_path, kind):
    """The library makes one up of the settings alone, which knows no word and has no chat template either."""
    folder_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(ModelError, match=f"no tokenizer files in {tmp_path} "):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_loses_spaces(tmp_path):
    tokenizer = byte_bpe()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
    tokenizer.save_pretrained(folder_of(tmp_path))
    with pytest.raises(ModelError, match=r"reads 'one two' and gives back 'onetwo': spaces are lost"):
        load_tokenizer(str(tmp_path))


def test_nothing_is_read_of_weights_that_do_not_fit(tmp_path, monkeypatch):
    rewrite(folder_of(tmp_path), lambda weights: weights.pop("model.norm.weight"))
    monkeypatch.setattr("tuningfork.models.hf.safetensors_reader._Piece.read", never)
    refused(tmp_path, "the weights lack 1 tensor of the model")


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    folder_of(tmp_path)
    real = safetensors_reader.read_weights

    def cut_first(tensors, progress):
        os.truncate(tmp_path / "model.safetensors", 5000)
        real(tensors, progress)

    monkeypatch.setattr(safetensors_reader, "read_weights", cut_first)
    refused(tmp_path, r"the weights cannot be read: .*model\.safetensors ends too early")


def test_a_file_that_is_cut_short(tmp_path):
    os.truncate(folder_of(tmp_path) / "model.safetensors", 5000)
    refused(tmp_path, r"cannot be loaded: .*\. A file of its weights is damaged or cut short: get it anew\.$")


# --- which file a tensor comes from -----------------------------------------------------------------------------------

INDEX, EMBEDDING = "model.safetensors.index.json", "model.embed_tokens.weight"


def in_shards(path, family: str = "llama"):
    """A tiny model in several files: (the model, the files in the order that they are read in, tensor -> file)."""
    model = tiny_model(family, torch.float32)
    model.save_pretrained(path, max_shard_size="40KB")
    file_of = json.loads((path / INDEX).read_text())["weight_map"]
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    return model, shards, file_of


def add_to(shard, **tensors) -> None:
    save_file(load_file(shard) | tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize("place", [0, -1])
def test_a_tensor_comes_from_the_file_that_the_index_names(tmp_path, monkeypatch, straight, place):
    """A stale copy may lie in a file before or behind that; whoever reads the weights passes it over, and says so."""
    model, shards, file_of = in_shards(tmp_path)
    name = next(name for name, file in file_of.items() if file != shards[place].name and "proj" in name)
    add_to(shards[place], **{name: torch.ones_like(model.state_dict()[name])})
    if not straight:
        monkeypatch.setattr("tuningfork.models.hf.load._draft", lambda *_: None)
    loaded = load(str(tmp_path))
    same_weights(loaded.model, model)
    assert loaded.notes == (f"passed over, since {INDEX} takes it from another file: {name} in {shards[place].name}",)


def test_what_the_index_does_not_name_is_no_part_of_the_model(tmp_path):
    model, shards, _ = in_shards(tmp_path)
    save_file({EMBEDDING: torch.ones(97, 32)}, tmp_path / "model-00009-of-00009.safetensors")
    add_to(shards[1], old=torch.ones(2), older=torch.ones(3))
    loaded = load(str(tmp_path))
    same_weights(loaded.model, model)
    assert loaded.notes == (f"passed over, since {INDEX} does not name it: old in {shards[1].name}, and 1 more",)


def test_a_missing_tensor_that_the_index_forgot(tmp_path):
    _, _, file_of = in_shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {k: v for k, v in file_of.items() if k != EMBEDDING}}))
    refused(
        tmp_path, rf"lack 1 tensor .*first {EMBEDDING}; {file_of[EMBEDDING]} holds it, but {INDEX} does not name it"
    )


def test_an_index_that_names_a_file_for_a_tensor_that_it_does_not_hold(tmp_path):
    """Although another file holds it."""
    _, shards, file_of = in_shards(tmp_path)
    other = next(shard.name for shard in shards if shard.name != file_of[EMBEDDING])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": file_of | {EMBEDDING: other}}))
    refused(
        tmp_path, rf"{INDEX} takes {EMBEDDING} from {other}, which does not hold it; get files that belong together"
    )


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path):
    in_shards(tmp_path)
    other = tiny_model("llama", torch.float32, seed=1)
    save_file(other.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(str(tmp_path))
    same_model(loaded.model, plain_load(tmp_path))
    assert torch.equal(loaded.model.lm_head.weight, other.lm_head.weight)
    assert loaded.notes == (
        f"model.safetensors is read, as transformers does; {INDEX} and the files that it names are passed over",
    )


def test_older_files_obey_their_index_too(tmp_path):
    model = tiny_model("llama", torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = model.state_dict()
    torch.save({k: v for k, v in state.items() if k != EMBEDDING}, tmp_path / "pytorch_model-1.bin")
    torch.save({EMBEDDING: state[EMBEDDING], "lm_head.weight": torch.ones(97, 32)}, tmp_path / "pytorch_model-2.bin")
    file_of = {name: f"pytorch_model-{2 if name == EMBEDDING else 1}.bin" for name in state}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": file_of}))
    same_weights(load(str(tmp_path)).model, model)
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": file_of | {EMBEDDING: "pytorch_model-1.bin"}})
    )
    refused(tmp_path, rf"takes {EMBEDDING} from pytorch_model-1\.bin, which does not hold it")


# --- folders that readers read differently ----------------------------------------------------------------------------


def test_tied_weights_that_are_stored_apart_and_differ(tmp_path):
    """transformers 5 leaves them apart, 4 ties them: two models."""
    folder_of(tmp_path, "granite")
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[EMBEDDING] * 2}))
    refused(
        tmp_path,
        rf"config\.json ties lm_head\.weight to {EMBEDDING}, but the weights hold both, and they differ.*"
        "Set tie_word_embeddings to false",
    )
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    model = load(str(tmp_path)).model
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight * 2)


def test_an_adapter_beside_the_model(tmp_path):
    """Whether a reader adds it depends on what is installed there."""
    folder_of(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for loader in (load, load_config, load_tokenizer):
        with pytest.raises(ModelError, match=r"an adapter lies beside the model \(adapter_config\.json\).*Merge it"):
            loader(str(tmp_path))
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "an adapter lies beside the model")


@pytest.mark.parametrize("content", ["{not json", "[]", '"x"', "", '{"max_new_tokens": "many"}', '{"top_k": [}'])
def test_generation_settings_that_cannot_be_read(tmp_path, content):
    """Said at once: an export would hand them on, or fail after hours."""
    (folder_of(tmp_path) / "generation_config.json").write_text(content)
    for loader in (load, load_config, load_tokenizer):
        with pytest.raises(
            ModelError, match=r"generation_config\.json (cannot be read: .*|holds no JSON object\. )Mend it"
        ):
            loader(str(tmp_path))


def test_code_of_its_own_for_a_model_that_transformers_knows(tmp_path):
    """Its class is taken, nothing is run, and that is said."""
    edit(folder_of(tmp_path) / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "conf.C"})
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('run')")
    loaded = load(str(tmp_path))
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert len(loaded.notes) == 1 and "code of its own (auto_map), which is not run" in loaded.notes[0]


def test_a_tokenizer_with_code_of_its_own_only(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", never)
    folder_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tok.X", None]}}))
    (tmp_path / "vocab.own").write_text("a")
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"transformers_weights": "other.safetensors"}, "a file of its own for the weights"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config: a quantized model"),
    ],
)
def test_settings_by_which_others_would_read_other_weights(tmp_path, setting, match):
    edit(folder_of(tmp_path) / "config.json", **setting)
    refused(tmp_path, match)
