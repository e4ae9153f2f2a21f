"""Model folders that the tests make and break, and what plain transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from tuningfork.errors import ModelError
from tuningfork.models.hf.load import load

IDS = torch.tensor([[5, 9, 13, 2, 60, 7]])


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


def same_weights(ours, theirs) -> None:
    """Equal weights and buffers to the bit, and the same ties."""
    for of in (lambda model: model.named_parameters(remove_duplicate=False), lambda model: model.named_buffers()):
        a, b = dict(of(ours)), dict(of(theirs))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
        assert not any(tensor.is_meta for tensor in a.values())
    assert len(list(ours.parameters())) == len(list(theirs.parameters()))
    assert all(weight.requires_grad and weight.is_contiguous() for weight in ours.parameters())


def same_model(ours, theirs) -> None:
    """The same weights and settings, from the same folder."""
    same_weights(ours, theirs)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.name_or_path == theirs.name_or_path


def never(*args, **kwargs):
    raise AssertionError("the library reads the weights")


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def refused(path: Path | str, match: str) -> str:
    with pytest.raises(ModelError, match=match) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path: Path, **values) -> None:
    """Change settings in a JSON file; None takes one out."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
