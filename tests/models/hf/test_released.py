"""Folders of hybrid models: read as they are published and as transformers saves them, and written as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.models.hf.folders import edit, logits, never, refused, rewrite, same_weights
from tests.models.hf.released_folders import KEYS, RELEASED, VALUES, forms, olmo_hybrid, plain, qwen3_5, saved
from tests.tiny import HYBRIDS, tiny_model
from tuningfork.models.hf.export import save
from tuningfork.models.hf.load import Loaded, load, replace_weights
from tuningfork.models.hf.safetensors_reader import Stack, Stored

LEFT_OUT = {
    "qwen3_next": "1 tensor of the weights, mtp.*,",
    "qwen3_5": "2 tensors of the weights, model.visual.* and mtp.*,",
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_folder_is_loaded_as_transformers_loads_it(tmp_path, name, monkeypatch):
    monkeypatch.setattr("tuningfork.models.hf.load._whole", never)  # a tensor is read where it lies, in parts too
    path = RELEASED[name](tmp_path)
    loaded = load(str(path))
    same_weights(loaded.model, plain(path))
    assert loaded.stored_dtype == torch.bfloat16
    found = next((said for family, said in LEFT_OUT.items() if name.startswith(family)), None)
    if found is None:
        assert not loaded.notes
    else:
        [note] = loaded.notes
        assert note.startswith(found) and "an export is without them" in note


@pytest.mark.parametrize("name", RELEASED)
def test_an_export_has_the_names_shapes_and_dtypes_of_its_folder_and_is_the_same_model(tmp_path, name):
    path = RELEASED[name](tmp_path / "released")
    loaded = load(str(path))
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.mul_(1.25)  # exact in every dtype
    save(loaded, tmp_path / "export")
    assert forms(tmp_path / "export") == forms(path)
    before, after = load_file(path / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    for key, tensor in after.items():
        assert torch.equal(tensor, (before[key].float() * 1.25).to(tensor.dtype)), key
    exported, again = plain(tmp_path / "export"), load(str(tmp_path / "export"))
    same_weights(again.model, exported)
    assert torch.equal(logits(exported), logits(again.model))
    assert not again.notes
    assert type(exported.config).model_type == loaded.model.config.model_type


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_transformers_saves_is_loaded_and_exported_in_the_published_cuts(tmp_path, family):
    path = saved(tmp_path / "saved", family)
    loaded = load(str(path))
    same_weights(loaded.model, plain(path))
    save(loaded, tmp_path / "export")
    same_weights(plain(tmp_path / "export"), loaded.model)
    weights = load_file(tmp_path / "export" / "model.safetensors")
    if family == "olmo_hybrid":
        cuts = [len(weights[f"model.layers.0.linear_attn.{part}_conv1d.weight"]) for part in "qkv"]
        assert cuts == [KEYS, KEYS, VALUES]
        assert "model.layers.3.post_attention_layernorm.weight" in weights  # saved by the name of another kind of block
        assert "model.layers.0.feedforward_layer_norm.weight" in weights
    else:
        assert forms(tmp_path / "export").keys() == forms(path).keys()


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_that_was_built_is_exported_as_it_is_published(tmp_path, family):
    model = tiny_model(family, torch.float32)
    save(Loaded(model, torch.float32), tmp_path)
    same_weights(plain(tmp_path), tiny_model(family, torch.float32))
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not any("layer_norm" in name for name in names)
    assert ("model.layers.0.linear_attn.q_conv1d.weight" in names) == (family == "olmo_hybrid")


def test_vectors_keep_their_digits_where_an_export_is_asked_for_in_bfloat16(tmp_path):
    loaded = load(str(qwen3_5(tmp_path / "released")))
    save(loaded, tmp_path / "export", torch.bfloat16)
    kinds = forms(tmp_path / "export")
    assert {name for name, (dtype, _) in kinds.items() if dtype == torch.float32} == {
        f"model.language_model.layers.{layer}.linear_attn.{name}"
        for layer in range(3)
        for name in ("A_log", "norm.weight")
    }


def test_older_files_than_safetensors_are_read_by_the_same_map(tmp_path):
    path = olmo_hybrid(tmp_path, old_norms=True)
    expected = load(str(path)).model
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    loaded = load(str(path))
    same_weights(loaded.model, expected)
    assert loaded.stored_bytes == 0
    save(loaded, tmp_path / "export")
    assert any("feedforward_layer_norm" in name for name in load_file(tmp_path / "export" / "model.safetensors"))


def test_weights_of_another_layout_replace_a_models(tmp_path):
    model = load(str(olmo_hybrid(tmp_path / "one"))).model
    other = saved(tmp_path / "two", "olmo_hybrid")
    replace_weights(model, str(other))
    same_weights(model, plain(other))


def test_two_names_of_one_tensor_are_refused(tmp_path):
    path = olmo_hybrid(tmp_path, old_norms=True)

    def both(weights):
        weights["model.layers.1.input_layernorm.weight"] = torch.ones(32)

    rewrite(path, both)
    said = refused(path, "the weights hold both ")
    assert "layers.1.attention_layer_norm" in said and "layers.1.input_layernorm" in said


def test_a_convolution_whole_and_in_parts_is_refused(tmp_path):
    path = olmo_hybrid(tmp_path)
    rewrite(path, lambda weights: weights.update({"model.layers.1.linear_attn.conv1d.weight": torch.ones(80, 1, 4)}))
    refused(path, r"the weights hold both model\.layers\.1\.linear_attn\.\w+\.weight and .*, which are one tensor")


def test_a_part_that_is_missing_or_does_not_fit_is_refused(tmp_path):
    path = olmo_hybrid(tmp_path)
    part = "model.layers.1.linear_attn.v_conv1d.weight"
    other = part.replace("v_conv1d", "k_conv1d")
    rewrite(path, lambda weights: weights.pop(part))
    assert f"the weights lack 1 tensor of the model, first {part}." in refused(path, "the weights lack")
    rewrite(path, lambda weights: weights.pop(other))
    assert f"the weights lack 2 tensors of the model, first {other}." in refused(path, "the weights lack")
    rewrite(path, lambda weights: weights.update({other: torch.ones(16, 1, 4), part: torch.ones(46, 1, 4)}))
    said = refused(path, "1 tensor has another shape than config.json says, first ")
    assert f"{part.replace('v_conv1d', 'q_conv1d')} + {other} + {part}: (78, 1, 4) and not (80, 1, 4)" in said
    rewrite(path, lambda weights: weights.update({part: torch.ones(48, 1, 3)}))
    refused(path, "parts of one have shapes that do not fit")


def test_rows_of_a_stack_are_those_of_its_parts():
    parts = [Stored(Path(str(n)), 0, torch.float32, torch.Size((n, 2))) for n in (3, 4, 5)]
    stack = Stack.of(parts)
    assert stack.shape == (12, 2) and stack.bytes == 96 and stack.dtype == torch.float32

    def rows(lying) -> list[tuple[str, int]]:
        return [(part.path.name, part.offset // 8 + row) for part in lying.parts for row in range(part.shape[0])]

    everything = rows(stack)
    for start in range(13):
        for count in range(13 - start):
            some = stack.rows(start, count)
            assert rows(some) == everything[start : start + count]
            assert some.shape == (count, 2)


def test_a_text_model_of_a_model_of_more_has_its_text_config(tmp_path):
    loaded = load(str(qwen3_5(tmp_path / "released")))
    assert loaded.model.config.model_type == "qwen3_5_text"
    save(loaded, tmp_path / "export")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "export")
    assert config.model_type == "qwen3_5_text" and config.architectures == ["Qwen3_5ForCausalLM"]


def test_a_quantized_model_of_more_is_refused(tmp_path):
    path = qwen3_5(tmp_path)
    edit(path / "config.json", quantization_config={"quant_method": "fp8"})
    refused(path, "has a quantization_config: a quantized model")
