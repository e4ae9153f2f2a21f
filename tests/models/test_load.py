"""From a Hugging Face folder and back: what plain transformers would load is what is trained and exported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import Chunk, ConversionOps, Transpose, WeightConverter

from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.tiny import FAMILIES, tiny_model
from tuningfork.errors import ModelError
from tuningfork.models import attention, weights
from tuningfork.models.load import hold_weights, load, load_config, load_tokenizer, save

IDS = torch.tensor([[5, 9, 13, 2, 60, 7]])


@pytest.fixture(scope="module", autouse=True)
def _without_progress_bars():
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if shown:  # other rooms' tests may be without them, too
        logging.enable_progress_bar()


def folder_of(path: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """A tiny model as transformers itself saves it."""
    tiny_model(family, dtype).save_pretrained(path)
    return path


def plain_load(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logits(model) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_load_gives_the_weights_in_float32_under_our_attention(tmp_path, family):
    loaded = load(str(folder_of(tmp_path, family)))
    plain = plain_load(tmp_path)
    ours, theirs = loaded.model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == torch.float32 for key in ours)
    assert loaded.model.config._attn_implementation == attention.NAME
    assert loaded.model.training
    assert loaded.stored_dtype == torch.float32


def test_bfloat16_weights_become_float32_masters(tmp_path):
    loaded = load(str(folder_of(tmp_path, dtype=torch.bfloat16)))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert loaded.stored_dtype == torch.bfloat16


def test_stored_dtype_is_that_of_the_weights(tmp_path):
    config = json.loads((folder_of(tmp_path, dtype=torch.bfloat16) / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(str(tmp_path)).stored_dtype == torch.bfloat16


def same_model(ours, theirs) -> None:
    """Equal weights and buffers to the bit, the same ties, the same settings."""
    for of in (lambda model: model.named_parameters(remove_duplicate=False), lambda model: model.named_buffers()):
        a, b = dict(of(ours)), dict(of(theirs))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
        assert not any(tensor.is_meta for tensor in a.values())
    assert len(list(ours.parameters())) == len(list(theirs.parameters()))
    assert all(weight.requires_grad and weight.is_contiguous() for weight in ours.parameters())
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.name_or_path == theirs.name_or_path


def never(*args, **kwargs):
    raise AssertionError("the library reads the weights")


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_straight_is_what_the_library_loads(tmp_path, monkeypatch, family, stored, held):
    """In shards, and in pieces smaller than most tensors."""
    tiny_model(family, stored).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    theirs = plain_load(tmp_path)
    for weight in theirs.parameters():  # norms and biases stay float32
        weight.data = weight.data.to(held if weight.ndim == 2 and weight.numel() % 256 == 0 else torch.float32)
    monkeypatch.setattr("tuningfork.models.load._LEAST_IN_8_BITS", 0)
    monkeypatch.setattr("tuningfork.models.load._whole", never)
    monkeypatch.setattr("tuningfork.models.weights._PIECE", 1000)
    told: list[tuple[int, int]] = []
    loaded = load(str(tmp_path), dtype=held, progress=lambda done, total: told.append((done, total)))
    same_model(loaded.model, theirs)
    size = sum(weight.numel() for weight in loaded.model.parameters()) * stored.itemsize
    assert loaded.stored_bytes == size == told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_what_an_optimizer_of_8_bits_would_not_keep_in_8_bits_is_not_held_in_bfloat16():
    """Such as an embedding with an added token: its moments would be bfloat16, where small gradients are lost."""
    model = torch.nn.ModuleList([torch.nn.Embedding(4097, 576), torch.nn.Linear(64, 128), torch.nn.Linear(8, 32)])
    hold_weights(model, torch.bfloat16)
    odd, large, small = (module.weight.dtype for module in model)
    assert (odd, large, small) == (torch.float32, torch.bfloat16, torch.float32)
    assert model[1].bias.dtype == torch.float32


def test_weights_that_transformers_reads_are_held_alike(tmp_path, monkeypatch):
    """A tied model with both copies in its files, which goes the slow way."""
    model = tiny_model("granite", torch.float32)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("tuningfork.models.load._LEAST_IN_8_BITS", 0)
    loaded = load(str(tmp_path), dtype=torch.bfloat16)
    assert loaded.stored_bytes == 0
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_model_is_refused(tmp_path, dtype):
    """Without a quantization_config in config.json, transformers would cast it and say nothing."""
    rewrite(
        folder_of(tmp_path),
        lambda weights: weights.update({name: w.to(dtype) for name, w in weights.items() if w.ndim == 2}),
    )
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ModelError, match=rf"safetensors: weights are stored in {kind}, such as .*a quantized"):
        load(str(tmp_path))


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(tmp_path, content):
    tiny_model("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json has no weight_map"):
        load(str(tmp_path))


def test_what_the_library_computes_itself_may_be_stored(tmp_path):
    """Old Llama folders hold rotary frequencies; they are read straight all the same."""
    rewrite(
        folder_of(tmp_path),
        lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    loaded = load(str(tmp_path))
    assert loaded.stored_bytes > 0
    same_model(loaded.model, plain_load(tmp_path))


def test_generation_settings_of_the_folder_are_kept(tmp_path):
    model = tiny_model("llama", torch.float32)
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path)
    assert load(str(tmp_path)).model.generation_config.max_length == 77
    same_model(load(str(tmp_path)).model, plain_load(tmp_path))
    (tmp_path / "generation_config.json").unlink()
    same_model(load(str(tmp_path)).model, plain_load(tmp_path))


def test_names_that_the_library_maps_to_others_are_mapped_and_still_read_straight(tmp_path, monkeypatch):
    """A folder of the bare decoder, as some are published: its names lack the first word."""
    tiny_model("granite", torch.float32).model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr("tuningfork.models.load._whole", never)
    same_model(load(str(tmp_path)).model, plain_load(tmp_path))


@pytest.mark.parametrize("equal", [True, False])
def test_both_copies_of_a_tied_weight_are_left_to_the_library(tmp_path, equal):
    """It ties them if they are equal and else warns and does not."""
    folder_of(tmp_path, "granite")

    def store_both(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * (1 if equal else 2)

    rewrite(tmp_path, store_both)
    same_model(load(str(tmp_path)).model, plain_load(tmp_path))


def cut_in_two(weights):
    for layer in range(4):
        parts = [weights.pop(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        weights[f"model.layers.{layer}.mlp.gate_up.weight"] = torch.cat(parts)
    return ["mlp.gate_up.weight"], ["mlp.gate_proj.weight", "mlp.up_proj.weight"], Chunk(dim=0)


def transposed_square(weights):
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.{{}}.weight"
        weights[name.format("out")] = weights.pop(name.format("o_proj")).t().contiguous()
    return ["self_attn.out.weight"], ["self_attn.o_proj.weight"], Transpose(0, 1)


class Interleaved(ConversionOps):
    """The rows' two halves in turns, as rotations of old layouts are put in order."""

    def convert(self, input_dict, source_patterns, target_patterns, **_):
        [tensor] = input_dict.values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        halves = tensor.view(2, len(tensor) // 2, *tensor.shape[1:])
        return {target_patterns[0]: halves.transpose(0, 1).reshape(tensor.shape)}


def permuted_rotation(weights):
    """To its stand-in nothing happens: a tensor of one number looks the same in any order."""
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.{{}}.weight"
        weights[name.format("turned")] = weights.pop(name.format("q_proj"))
    return ["self_attn.turned.weight"], ["self_attn.q_proj.weight"], Interleaved()


@pytest.mark.parametrize("layout", [cut_in_two, transposed_square, permuted_rotation])
def test_a_layout_that_the_library_converts_is_left_to_it(tmp_path, monkeypatch, layout):
    """Whatever does not become one weight as it is."""
    conversion = []

    def change(weights):
        stored, wanted, operation = layout(weights)
        conversion.append(WeightConverter(stored, wanted, operations=[operation]))

    rewrite(folder_of(tmp_path), change)
    monkeypatch.setattr("transformers.modeling_utils.get_model_conversion_mapping", lambda *_, **__: list(conversion))
    loaded, expected = load(str(tmp_path)), plain_load(tmp_path).state_dict()
    assert loaded.stored_bytes == 0
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.model.state_dict().items())
    plain = tiny_model("llama", torch.float32).state_dict()
    assert all(torch.equal(weight, plain[name]) for name, weight in expected.items()) != (layout is permuted_rotation)


def test_older_files_are_left_to_the_library(tmp_path):
    model = tiny_model("llama", torch.bfloat16)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load(str(tmp_path))
    same_model(loaded.model, plain_load(tmp_path))
    assert loaded.stored_dtype == torch.bfloat16


def test_a_shard_that_is_not_there(tmp_path):
    tiny_model("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="40KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    refused(tmp_path, "the model cannot be loaded.*model-00002")


def test_nothing_is_read_of_weights_that_do_not_fit(tmp_path, monkeypatch):
    rewrite(folder_of(tmp_path), lambda weights: weights.pop("model.norm.weight"))
    monkeypatch.setattr("tuningfork.models.weights._Piece.read", never)
    refused(tmp_path, "the weights lack 1 tensors")


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    folder_of(tmp_path)
    real = weights.read

    def cut_first(tensors, progress):
        os.truncate(tmp_path / "model.safetensors", 5000)
        real(tensors, progress)

    monkeypatch.setattr(weights, "read", cut_first)
    refused(tmp_path, r"the weights cannot be read: .*model\.safetensors ends too early")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("granite", torch.float32),
        ("granite", torch.bfloat16),
    ],
)
def test_an_export_is_what_transformers_itself_would_write(tmp_path, family, dtype):
    """open-instruct#1820. Equal keys, equal logits; granite ties its embeddings."""
    original = folder_of(tmp_path / "original", family, dtype)
    loaded = load(str(original))
    save(loaded.model, byte_bpe(chat_template=CHATML), tmp_path / "export", dtype)

    theirs, ours = load_file(original / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == dtype for key in ours)
    assert torch.equal(logits(plain_load(tmp_path / "export")), logits(plain_load(original)))
    again = load(str(tmp_path / "export"))
    assert (again.model.get_output_embeddings().weight is again.model.get_input_embeddings().weight) == (
        family == "granite"
    )


@pytest.mark.parametrize("family", ["llama", "granite", "gemma3"])
def test_an_export_is_the_same_to_the_byte_whoever_read_the_weights(tmp_path, family):
    original = folder_of(tmp_path / "original", family, torch.bfloat16)
    save(load(str(original)).model, byte_bpe(), tmp_path / "ours", torch.bfloat16)
    save(plain_load(original), byte_bpe(), tmp_path / "theirs", torch.bfloat16)
    ours, theirs = sorted((tmp_path / "ours").iterdir()), sorted((tmp_path / "theirs").iterdir())
    assert [file.name for file in ours] == [file.name for file in theirs]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, theirs, strict=True))


def test_a_trained_weight_reaches_the_export_and_the_model_in_memory_keeps_its_own(tmp_path):
    loaded = load(str(folder_of(tmp_path / "original")))
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.up_proj.weight[3, 4] = 1.0 + 2**-20  # too fine for bfloat16
    before = {key: t.clone() for key, t in loaded.model.state_dict().items()}
    config_dtype = loaded.model.config.dtype
    save(loaded.model, byte_bpe(), tmp_path / "export", torch.bfloat16)
    assert all(torch.equal(t, before[key]) for key, t in loaded.model.state_dict().items())
    assert loaded.model.config.dtype == config_dtype
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported["model.layers.1.mlp.up_proj.weight"][3, 4] == 1.0
    assert all(torch.equal(exported[key], before[key].to(torch.bfloat16)) for key in exported)


def test_weights_that_begin_at_one_place_in_memory_are_not_taken_for_tied(tmp_path):
    """Only one and the same parameter under two names is: a norm that is the first row of the head is a norm."""
    model = tiny_model("llama", torch.float32)
    norm = torch.nn.Parameter(model.lm_head.weight.detach()[0])
    assert norm.data_ptr() == model.lm_head.weight.data_ptr()
    model.model.norm.weight = norm
    save(model, byte_bpe(), tmp_path, torch.bfloat16)
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], norm.detach().bfloat16())
    assert torch.equal(exported["lm_head.weight"], model.lm_head.weight.detach().bfloat16())


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
)
def test_the_exported_config_names_the_dtype_of_the_weights(tmp_path, dtype):
    """transformers loads in the dtype of config.json, so that a wrong one doubles the memory of every user."""
    loaded = load(str(folder_of(tmp_path / "original")))
    save(loaded.model, byte_bpe(), tmp_path / "export", dtype)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert load(str(tmp_path / "export")).stored_dtype == dtype
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == dtype


def test_an_export_says_nothing_of_us(tmp_path):
    """Anyone can load it who has never heard of our attention."""
    loaded = load(str(folder_of(tmp_path / "original")))
    save(loaded.model, byte_bpe(chat_template=CHATML), tmp_path / "export", torch.float32)
    for file in (tmp_path / "export").glob("*.json"):
        assert attention.NAME not in file.read_text(), file.name
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"


def test_tokenizer_and_chat_template_travel_along(tmp_path):
    tokenizer = byte_bpe([("Ġ", "a")], chat_template=CHATML, pad="</s>")
    save(tiny_model("llama", torch.float32), tokenizer, tmp_path, torch.float32)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template == again.chat_template == CHATML
    text = "as a tuning fork"
    assert again(text).input_ids == tokenizer(text).input_ids
    assert (again.eos_token, again.pad_token, again.bos_token) == ("</s>", "</s>", "<s>")


def refused(path: Path | str, match: str) -> str:
    with pytest.raises(ModelError, match=match) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_not_a_folder_names_the_nearest_one(tmp_path):
    folder_of(tmp_path / "my-model")
    message = refused(tmp_path / "my-modle", "is not a folder")
    assert f"Did you mean {tmp_path / 'my-model'}?" in message
    assert "Did you mean" not in refused(tmp_path / "my-model" / "config.json", "is not a folder")
    refused(tmp_path / "nowhere" / "at" / "all", "is not a folder")
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
    refused(tmp_path, r"config\.json cannot be read")


def test_no_weights(tmp_path):
    (folder_of(tmp_path) / "model.safetensors").unlink()
    refused(tmp_path, r"no weights found \(looked for model\.safetensors")


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_missing_tensors_are_counted_and_never_drawn_at_random(tmp_path):
    rewrite(folder_of(tmp_path), lambda weights: [weights.pop(key) for key in list(weights) if "layers.2" in key])
    refused(tmp_path, r"the weights lack 9 tensors of the model, first model\.layers\.2\.input_layernorm\.weight")


def test_a_missing_head_is_missing_unless_it_is_tied(tmp_path):
    rewrite(folder_of(tmp_path), lambda weights: weights.pop("lm_head.weight"))
    refused(tmp_path, r"lack 1 tensors of the model, first lm_head\.weight")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path, bad):
    def spoil(weights):
        weights["model.layers.1.self_attn.k_proj.weight"][2, 3] = bad

    rewrite(folder_of(tmp_path), spoil)
    refused(tmp_path, r"NaN or infinite weights in 1 tensors, first model\.layers\.1\.self_attn\.k_proj\.weight")


def test_weights_of_another_shape(tmp_path):
    config = json.loads((folder_of(tmp_path) / "config.json").read_text())
    config["intermediate_size"] = 48
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load(str(tmp_path))


def test_half_a_weight_file(tmp_path):
    path = folder_of(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(tmp_path, "the model cannot be loaded")


def test_no_tokenizer(tmp_path):
    folder_of(tmp_path)
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_loses_spaces(tmp_path):
    tokenizer = byte_bpe()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "")
    tokenizer.save_pretrained(folder_of(tmp_path))
    with pytest.raises(ModelError, match=r"reads 'one two' and gives back 'onetwo': spaces are lost"):
        load_tokenizer(str(tmp_path))


def test_loading_does_not_change_the_folder(tmp_path):
    folder_of(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    load(str(tmp_path / "model"))
    for file in (tmp_path / "copy").iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()
    assert len(list((tmp_path / "model").iterdir())) == len(list((tmp_path / "copy").iterdir()))
