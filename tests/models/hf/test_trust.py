"""Model folders that somebody else made: whatever code they bring or name, none of it is run and none is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils
from transformers import AutoConfig, PreTrainedModel

from tests.data.tiny_tokenizers import byte_bpe
from tests.models.hf.folders import edit, folder_of, never, refused, same_weights
from tests.payload import Payload
from tests.tiny import tiny_model
from tuningfork.errors import ModelError
from tuningfork.models.hf import attention, export
from tuningfork.models.hf.load import load, load_config, load_tokenizer

AUTO_MAP = {
    **{f"Auto{name}": "own.X" for name in ("Config", "Model", "ModelForCausalLM", "Processor", "FeatureExtractor")},
    "AutoTokenizer": ["own.X", "own.X"],
}
KERNEL = "kernels-community/somebodys-attention"


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once code of the folder has been run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with its tokenizer and code of its own. Nothing may ask on the terminal or load a kernel."""
    folder = folder_of(tmp_path / "model")
    byte_bpe().save_pretrained(folder)
    code = f"import os\nos.mkdir({str(ran)!r})\nclass X: pass\n"
    (folder / "own.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    monkeypatch.setattr("builtins.input", never)
    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", never)
    return folder


# --- code in the folder -----------------------------------------------------------------------------------------------


def test_code_beside_a_model_that_transformers_has(folder, ran):
    """Its own classes are taken, nothing is run or asked, and that is said."""
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        edit(folder / name, auto_map=AUTO_MAP, trust_remote_code=True)
    loaded = load(str(folder))
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert [note.partition(",")[0] for note in loaded.notes] == [
        "config.json names code of its own (auto_map)",
        "tokenizer_config.json names code of its own (auto_map)",
    ]
    load_tokenizer(str(folder))
    assert not ran.exists()


@pytest.mark.parametrize("loader", [load, load_config, load_tokenizer])
def test_code_for_a_model_that_transformers_has_not(folder, ran, loader):
    edit(folder / "config.json", model_type="somebodys", auto_map=AUTO_MAP)
    with pytest.raises(
        ModelError,
        match=r"knows no model of type 'somebodys', which config\.json names; it names code of its own for it "
        r"\(auto_map\), which is never run here\. .* use a transformers that is newer",
    ):
        loader(str(folder))
    assert not ran.exists()


def test_what_is_wrong_beside_code_is_not_blamed_on_the_code(folder):
    edit(folder / "config.json", num_hidden_layers="two", auto_map=AUTO_MAP)
    refused(folder, r"config\.json cannot be read: .*num_hidden_layers")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, r"is no tokenizer of transformers") for name in (
            *("AutoProcessor", "AutoProcessorFast", "AutoModelForCausalLM", "AutoConfig", "AutoTokenizer"),
            *("LlamaForCausalLM", "Trainer", "pipeline", "pipelines", "logging", "RagTokenizer"),
        )),
        ("BertJapaneseTokenizer", "is a slow one"),  # its settings name a configuration that loads libraries
        ("CTRLTokenizer", "is a slow one"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_none(folder, ran, monkeypatch, file, name, why):
    """transformers calls whatever it has by that name: a processor asks whether to run the folder's code, and a model
    loads the kernels that config.json names."""
    edit(folder / "tokenizer_config.json", tokenizer_class=None)
    edit(folder / "config.json", auto_map=AUTO_MAP, attn_implementation=KERNEL)
    edit(folder / file, tokenizer_class=name)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", never)
    with pytest.raises(ModelError, match=rf"{file} sets tokenizer_class to '{name}', which {why}"):
        load_tokenizer(str(folder))
    assert not ran.exists()


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "GPT2TokenizerFast", "GPT2Tokenizer",
                                  "PreTrainedTokenizer", "SomebodysTokenizer", "SomebodysTokenizerFast"])  # fmt: skip
def test_tokenizers_of_other_names_are_read_from_their_file(folder, name):
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    assert load_tokenizer(str(folder)).is_fast


def test_weights_that_are_a_program(folder, ran):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload(ran)}, folder / "pytorch_model.bin")
    message = refused(folder, r"pytorch_model\.bin: it calls for 'posix\.mkdir'.*Nothing of it was run")
    assert "Get the model in safetensors files" in message and "weights_only" not in message
    state = tiny_model("llama", torch.float32).state_dict()
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-1.bin")
    file_of = dict.fromkeys(state, "pytorch_model-1.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": file_of}))
    refused(folder, r"pytorch_model-1\.bin: it calls for 'posix\.mkdir'")
    assert not ran.exists()


# --- code that config.json names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", [KERNEL, KERNEL + "@main:flash", {"": KERNEL}, {"text_config": KERNEL}])
def test_a_kernel_of_the_hub_is_not_fetched(folder, tmp_path, key, value):
    edit(folder / "config.json", **{key: value})
    assert load_config(str(folder))._attn_implementation == attention.NAME  # before a class is built of it
    loaded = load(str(folder))
    assert loaded.model.config._attn_implementation == attention.NAME
    assert len(loaded.notes) == 1 and f"names code of the hub ({key}: {KERNEL}" in loaded.notes[0]
    export.save(loaded, tmp_path / "export")
    assert KERNEL not in (tmp_path / "export" / "config.json").read_text()
    same_weights(load(str(tmp_path / "export")).model, loaded.model)


@pytest.mark.parametrize("key", ["experts_implementation", "_experts_implementation"])
def test_a_kernel_for_experts_is_not_asked_for(folder, key):
    """Only mixtures have them; for any model the library looks for what config.json names."""
    for value in (KERNEL, "nobodys", {"": KERNEL}):
        edit(folder / "config.json", **{key: value})
        assert load_config(str(folder))._experts_implementation is None
        assert len(load(str(folder)).notes) == (value != "nobodys")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("use_return_dict", "is fixed by"), ("__dict__", "is a part of"), ("__class__", "is a part of")),
        *(("to_dict", "is a part of"), ("get_text_config", "is a part of"), ("__doc__", "is a part of")),
    ],
)
def test_what_is_no_setting_is_refused_before_a_class_is_built(folder, monkeypatch, name, what):
    """It would take the place of a function, or the library would print all of the file with its error."""
    edit(folder / "config.json", **{name: {}})
    monkeypatch.setattr(AutoConfig, "from_pretrained", never)
    for loader in (load, load_config, load_tokenizer):
        with pytest.raises(
            ModelError, match=rf"config\.json sets {name}, which is no setting: it {what} the class that"
        ):
            loader(str(folder))


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash_attention_2"])
def test_attention_by_a_name_of_the_library_stays_in_an_export(folder, tmp_path, name):
    edit(folder / "config.json", attn_implementation=name)
    loaded = load(str(folder))
    assert loaded.model.config._attn_implementation == attention.NAME and loaded.notes == ()
    export.save(loaded, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["attn_implementation"] == name


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"configuration_files": ["config.4.0.0.json"]}, r"names other files that hold the config .*configuration_fil"),
        ({"fusion_config": {"patch_embeddings": True}}, r"names changes to the model's code \(fusion_config\)"),
        ({"quantization_config": {}}, "has a quantization_config"),
        ({"quantization_config": {"quant_method": "awq", "backend": KERNEL}}, "has a quantization_config"),
    ],
)
def test_settings_that_put_something_else_in_the_place_of_the_config(folder, settings, why):
    """Another config.json would be read past every check of this one."""
    (folder / "config.4.0.0.json").write_text((folder / "config.json").read_text())
    edit(folder / "config.json", **settings)
    for loader in (load, load_config, load_tokenizer):  # a model's type may name a tokenizer that loads others
        with pytest.raises(ModelError, match=why):
            loader(str(folder))
