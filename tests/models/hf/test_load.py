"""From a Hugging Face folder to a model: what plain transformers would load is what is trained."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Chunk, ConversionOps, Transpose, WeightConverter
from transformers.models.llama.modeling_llama import LlamaModel

from tests.models.hf.folders import folder_of, never, plain_load, rewrite, same_model, same_weights
from tests.tiny import FAMILIES, tiny_model
from tuningfork.models.hf import attention, safetensors_reader
from tuningfork.models.hf import load as load_module
from tuningfork.models.hf.export import save
from tuningfork.models.hf.load import hold_weights, load, replace_weights


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
    monkeypatch.setattr("tuningfork.models.hf.load._LEAST_IN_8_BITS", 0)
    monkeypatch.setattr("tuningfork.models.hf.load._whole", never)
    monkeypatch.setattr("tuningfork.models.hf.safetensors_reader._PIECE", 1000)
    told: list[tuple[int, int]] = []
    loaded = load(str(tmp_path), dtype=held, progress=lambda done, total: told.append((done, total)))
    same_model(loaded.model, theirs)
    size = sum(weight.numel() for weight in loaded.model.parameters()) * stored.itemsize
    assert loaded.stored_bytes == size == told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.parametrize("piece", [16, 200, 1 << 20])  # bytes, where a row has 40
def test_some_columns_of_a_matrix_that_lies_in_two_are_read(tmp_path, monkeypatch, piece):
    monkeypatch.setattr("tuningfork.models.hf.safetensors_reader._PIECE", piece)
    above, below = torch.arange(130.0).view(13, 10), -torch.arange(70.0).view(7, 10)
    save_file({"a": above, "b": below}, tmp_path / "model.safetensors")
    found = safetensors_reader.stored_tensors(tmp_path).tensors
    target, done = torch.zeros(11, 3, dtype=torch.bfloat16), []
    some = safetensors_reader.Stack.of([found["a"], found["b"]]).rows(4, 11).columns(6, 3)
    safetensors_reader.read_weights([(target, some)], lambda *told: done.append(told))
    assert torch.equal(target, torch.cat([above, below])[4:15, 6:9].bfloat16())
    assert done[-1] == (11 * 40, 11 * 40)  # rows are read whole


def test_what_an_optimizer_of_8_bits_would_not_keep_in_8_bits_is_not_held_in_bfloat16():
    """Such as an embedding with an added token: its moments would be bfloat16, where small gradients are lost."""
    model = torch.nn.ModuleList([torch.nn.Embedding(4097, 576), torch.nn.Linear(64, 128), torch.nn.Linear(8, 32)])
    hold_weights(model, torch.bfloat16)
    odd, large, small = (module.weight.dtype for module in model)
    assert (odd, large, small) == (torch.float32, torch.bfloat16, torch.float32)
    assert model[1].bias.dtype == torch.float32


@pytest.fixture
def slow(monkeypatch) -> list[str]:
    """Grows with each model that goes the slow way: read as it is, and put together by the library."""
    gone, real = [], load_module._whole
    monkeypatch.setattr(
        load_module, "_whole", lambda config, path, *rest: gone.append(path) or real(config, path, *rest)
    )
    return gone


def test_weights_that_are_read_the_slow_way_are_held_alike(tmp_path, monkeypatch, slow):
    """A tied model with both copies in its files."""
    model = tiny_model("granite", torch.float32)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("tuningfork.models.hf.load._LEAST_IN_8_BITS", 0)
    loaded = load(str(tmp_path), dtype=torch.bfloat16)
    assert slow
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16, torch.float32}


def test_what_the_library_computes_itself_may_be_stored(tmp_path):
    """Old Llama folders hold rotary frequencies; they are read straight all the same."""
    rewrite(
        folder_of(tmp_path),
        lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    loaded = load(str(tmp_path))
    assert loaded.stored_bytes > 0
    same_model(loaded.model, plain_load(tmp_path))


OLD_MASKS = {
    "GPTNeoXConfig": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"),
    "GPT2Config": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("kind", OLD_MASKS)
def test_masks_that_older_versions_stored_are_passed_over(tmp_path, kind, dtype):
    """As bits or numbers, beside the number that fills them: they are no weights, so nothing here is quantized."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = getattr(transformers, kind)(**sizes, max_position_embeddings=64)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    mask, fill = OLD_MASKS[kind]
    old = {mask: torch.ones(1, 1, 64, 64).tril().to(dtype), fill: torch.tensor(-1e9)}
    rewrite(tmp_path, lambda weights: weights.update(old))
    loaded = load(str(tmp_path))
    assert loaded.stored_bytes > 0
    assert set(loaded.dtypes.values()) == {torch.float32} and not loaded.dtypes.keys() & old.keys()
    assert {name for name, _ in loaded.model.named_parameters()} <= loaded.dtypes.keys() | {"lm_head.weight"}
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
    monkeypatch.setattr("tuningfork.models.hf.load._whole", never)
    same_model(load(str(tmp_path)).model, plain_load(tmp_path))


def test_both_copies_of_a_tied_weight_are_compared_by_the_library(tmp_path, slow):
    folder_of(tmp_path, "granite")
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    loaded = load(str(tmp_path))
    assert slow
    same_model(loaded.model, plain_load(tmp_path))


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
def test_a_layout_that_the_library_converts_is_left_to_it(tmp_path, monkeypatch, slow, layout):
    """Whatever does not become one weight as it is."""
    conversion = []

    def change(weights):
        stored, wanted, operation = layout(weights)
        conversion.append(WeightConverter(stored, wanted, operations=[operation]))

    rewrite(folder_of(tmp_path), change)
    monkeypatch.setattr("transformers.modeling_utils.get_model_conversion_mapping", lambda *_, **__: list(conversion))
    loaded, expected = load(str(tmp_path)), plain_load(tmp_path).state_dict()
    assert slow
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.model.state_dict().items())
    plain = tiny_model("llama", torch.float32).state_dict()
    assert all(torch.equal(weight, plain[name]) for name, weight in expected.items()) != (layout is permuted_rotation)


@pytest.mark.parametrize("legacy", [False, True])
def test_older_files(tmp_path, legacy):
    """In either form that torch has written; a norm in float32 beside matrices in bfloat16 is known as such."""
    model = tiny_model("granite", torch.bfloat16)
    model.save_pretrained(tmp_path)
    model.model.norm.float()
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    loaded = load(str(tmp_path))
    same_model(loaded.model, plain_load(tmp_path))
    assert loaded.stored_dtype == torch.bfloat16 and loaded.stored_bytes == 0
    assert loaded.dtypes["model.norm.weight"] == torch.float32


@pytest.mark.parametrize("older", [False, True])
def test_names_that_the_library_maps_to_others_keep_their_dtypes(tmp_path, older):
    """As a base model stores them, without the prefix that the whole model has."""
    model = tiny_model("granite", torch.bfloat16)
    model.save_pretrained(tmp_path)
    model.model.norm.float()
    base = {name: weight.detach().clone() for name, weight in model.model.state_dict().items()}
    if older:
        (tmp_path / "model.safetensors").unlink()
        torch.save(base, tmp_path / "pytorch_model.bin")
    else:
        save_file(base, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(str(tmp_path))
    assert loaded.stored_dtype == torch.bfloat16 and loaded.dtypes["model.norm.weight"] == torch.float32
    save(loaded, tmp_path / "export")
    kinds = {name: weight.dtype for name, weight in load_file(tmp_path / "export" / "model.safetensors").items()}
    assert kinds.pop("model.norm.weight") == torch.float32
    assert set(kinds.values()) == {torch.bfloat16}


def counting_llama(monkeypatch) -> torch.Tensor:
    """Llama with a buffer of whole numbers that float32 cannot hold; what it holds unless it is loaded is returned."""
    begin = LlamaModel.__init__

    def beginning(self, config):
        begin(self, config)
        self.register_buffer("counts", torch.arange(2))

    monkeypatch.setattr(LlamaModel, "__init__", beginning)
    return torch.arange(2)


@pytest.mark.parametrize("straight", [True, False])
def test_whole_numbers_are_loaded_as_they_are(tmp_path, monkeypatch, straight):
    drawn = counting_llama(monkeypatch)
    counts = torch.tensor([2**24 + 1, -3])
    rewrite(folder_of(tmp_path), lambda weights: weights.update({"model.counts": counts}))
    if not straight:
        monkeypatch.setattr(load_module, "_draft", lambda *_: None)
    loaded = load(str(tmp_path), dtype=torch.bfloat16)
    assert torch.equal(loaded.model.model.counts, counts) and not torch.equal(counts, drawn)
    save(loaded, tmp_path / "export", torch.bfloat16)
    exported = load_file(tmp_path / "export" / "model.safetensors")["model.counts"]
    assert torch.equal(exported, counts) and exported.dtype == torch.int64


def test_loading_does_not_change_the_folder(tmp_path):
    folder_of(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    load(str(tmp_path / "model"))
    for file in (tmp_path / "copy").iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()
    assert len(list((tmp_path / "model").iterdir())) == len(list((tmp_path / "copy").iterdir()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_weights_of_another_folder_are_read_to_where_the_models_own_are(tmp_path, monkeypatch, family, held):
    """To the bit what `load` gives of that folder, and no second model beside the first."""
    monkeypatch.setattr("tuningfork.models.hf.load._LEAST_IN_8_BITS", 0)
    first, second = folder_of(tmp_path / "first", family), tmp_path / "second"
    shutil.copytree(first, second)
    rewrite(second, lambda stored: [weight.mul_(-1.5).add_(0.01) for weight in stored.values()])
    model = load(str(first), dtype=held).model
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    read, filled = safetensors_reader.read_weights, set()

    def noting(tensors, *args):
        tensors = list(tensors)
        filled.update(tensor.data_ptr() for tensor, _ in tensors)
        read(tensors, *args)

    monkeypatch.setattr(safetensors_reader, "read_weights", noting)
    replace_weights(model, str(second))
    assert filled == set(places.values())
    assert places == {name: weight.data_ptr() for name, weight in model.named_parameters()}
    same_weights(model, load(str(second), dtype=held).model)
    assert model.training and model.name_or_path == str(first)


def test_weights_that_are_read_the_slow_way_replace_others_too(tmp_path, slow):
    """A tied model with both copies in its files."""
    model = tiny_model("granite", torch.float32)
    model.save_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    save_file(
        {name: 2 * weight for name, weight in model.state_dict().items()},
        tmp_path / "second" / "model.safetensors",
        metadata={"format": "pt"},
    )
    ours = load(str(tmp_path / "first")).model
    replace_weights(ours, str(tmp_path / "second"))
    assert slow
    same_weights(ours, load(str(tmp_path / "second")).model)
