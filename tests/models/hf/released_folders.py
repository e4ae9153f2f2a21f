"""Folders of hybrid models as their makers publish them, and as transformers saves them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny import tiny_model

KEYS, VALUES = 16, 48  # channels of the tiny models' convolutions
OLD_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


def written(path: Path, weights: dict[str, Tensor], config: transformers.PreTrainedConfig, kind: str) -> Path:
    """A folder of these weights and this config, in bfloat16 but for what is float32 in `weights`."""
    config.save_pretrained(path)
    content = json.loads((path / "config.json").read_text()) | {"architectures": [kind], "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(content))
    save_file({name: t.clone() for name, t in weights.items()}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def olmo_hybrid(path: Path, old_norms: bool = False) -> Path:
    """Three convolutions a layer; with `old_norms` recurrent blocks have the names of older exports."""
    model = tiny_model("olmo_hybrid", torch.bfloat16)
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix("conv1d.weight")
        if stem != name:
            for part, rows in zip("qkv", tensor.split([KEYS, KEYS, VALUES]), strict=True):
                weights[f"{stem}{part}_conv1d.weight"] = rows
        elif old_norms and "layers.3." not in name:
            found = re.fullmatch(r"(.*layers\.\d+\.)(\w+)(\.weight)", name)
            weights[found[1] + OLD_NORMS.get(found[2], found[2]) + found[3] if found else name] = tensor
        else:
            weights[name] = tensor
    return written(path, weights, model.config, "OlmoHybridForCausalLM")


def qwen3_next(path: Path) -> Path:
    """Names as the class has them, and tensors of a layer that predicts several tokens."""
    model = tiny_model("qwen3_next", torch.bfloat16)
    weights = {**model.state_dict(), "mtp.fc.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    return written(path, weights, model.config, "Qwen3NextForCausalLM")


def qwen3_5(path: Path, tied: bool = False) -> Path:
    """A model of text and images, of which the language model's tensors have a prefix; some of them in float32."""
    model = tiny_model("qwen3_5_text", torch.bfloat16)
    weights = {}
    for name, tensor in model.state_dict().items():
        fine = name.endswith(("A_log", "linear_attn.norm.weight"))
        name = re.sub(r"^model\.", "model.language_model.", name)
        weights[name] = (tensor.float() + 1e-4) if fine else tensor  # more digits than bfloat16 has
    if tied:
        model.config.tie_word_embeddings = True
        del weights["lm_head.weight"]
    weights["model.visual.patch_embed.proj.weight"] = torch.ones(4, 3, dtype=torch.bfloat16)
    weights["mtp.fc.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(
        text_config=model.config.to_dict(), vision_config=vision, tie_word_embeddings=tied
    )
    return written(path, weights, config, "Qwen3_5ForConditionalGeneration")


def saved(path: Path, family: str) -> Path:
    """As transformers saves a model that it has not loaded."""
    tiny_model(family, torch.float32).save_pretrained(path)
    return path


RELEASED: dict[str, Callable[[Path], Path]] = {
    "olmo_hybrid": olmo_hybrid,
    "olmo_hybrid with old names": lambda path: olmo_hybrid(path, old_norms=True),
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5 with tied weights": lambda path: qwen3_5(path, tied=True),
}


def forms(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Dtype and shape of all tensors of a language model in a folder, by name."""
    tensors = load_file(path / "model.safetensors")
    return {n: (t.dtype, t.shape) for n, t in tensors.items() if not n.startswith(("mtp.", "model.visual."))}


def plain(path: Path) -> PreTrainedModel:
    """What plain transformers makes of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
