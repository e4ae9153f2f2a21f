"""From a Hugging Face folder to a config, a tokenizer and a model, and back to a folder."""

from __future__ import annotations

import difflib
import errno
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tuningfork.errors import ModelError, first_line
from tuningfork.models import attention
from tuningfork.models.support import check_config, check_modules

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


_NUMBERS_DO_NOT_DEPEND_ON = (
    *("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "output_attentions", "output_hidden_states", "return_dict"),
)


@dataclass(frozen=True)
class Loaded:
    """A model in float32 on the CPU, and the dtype its weights were stored in."""

    model: PreTrainedModel
    stored_dtype: torch.dtype


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. Raises ModelError."""
    _check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {first_line(error)}") from error


def load_config(path: str) -> Any:
    """The folder's config, of a model that can be trained as far as a config shows. Raises ModelError."""
    _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: config.json cannot be read: {first_line(error)}") from error
    check_config(config, path)
    return config


def load(path: str) -> Loaded:
    """Load a model folder, with our attention under the model.

    Raises:
        ModelError: no folder, no config, no or incomplete weights, NaN in the weights, or a model that cannot be
            packed correctly.
    """
    config = load_config(path)
    if not any((Path(path) / name).exists() for name in _WEIGHT_FILES):
        raise ModelError(f"{path}: no weights found (looked for {', '.join(_WEIGHT_FILES)}).")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the name of the tensor
        )
    except Exception as error:
        raise ModelError(f"{path}: the model cannot be loaded: {first_line(error)}") from error
    model, info = loaded
    _check_weights(model, info, path)
    check_modules(model, path)
    model.train()  # one mode for scoring and training, so that both run the same code; there is no dropout
    return Loaded(model, _stored_dtype(Path(path), config))


def comparable(config: Any) -> dict[str, Any]:
    """What of a config decides a model's numbers: all but names, versions, special ids and the stored dtype."""
    values = config.to_dict()
    for key in _NUMBERS_DO_NOT_DEPEND_ON:
        values.pop(key, None)
    return values


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder that plain transformers loads: weights in `dtype`, tokenizer, chat template.

    The model in memory stays as it is.
    """
    # Tied weights are one parameter under several names, and stay one tensor; one that merely shares memory with
    # another, such as a part of it, is a tensor of its own.
    state = model.state_dict(keep_vars=True)
    cast = {id(weight): weight.detach().to("cpu", dtype) for weight in state.values()}
    weights = {name: cast[id(weight)] for name, weight in state.items()}
    in_memory = model.config.dtype
    try:
        model.save_pretrained(folder, state_dict=weights)
    except safetensors.SafetensorError as error:  # a full disk, in its own words
        raise OSError(errno.EIO, str(error)) from error
    finally:
        model.config.dtype = in_memory
    # transformers notes the dtype of the model in memory, and would load the export in that.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)


def _check_folder(path: str) -> None:
    folder = Path(path)
    if not folder.is_dir():
        parent = folder.parent if folder.parent.is_dir() else Path()
        near = difflib.get_close_matches(folder.name, [p.name for p in parent.iterdir() if p.is_dir()], n=1)
        hint = f" Did you mean {parent / near[0]}?" if near else ""
        raise ModelError(f"model.path: {path} is not a folder.{hint} Give a Hugging Face model folder on this machine.")
    if not (folder / "config.json").exists():
        raise ModelError(f"{path}: no config.json, so this is not a Hugging Face model folder.")


def _check_weights(model: PreTrainedModel, info: dict[str, Any], path: str) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{path}: the weights lack {len(missing)} tensors of the model, first {missing[0]}.")
    # Buffers that older versions stored, and the copy of a tied head, are in nobody's way.
    tied = getattr(model.config, "tie_word_embeddings", False)
    extra = [
        key
        for key in sorted(info["unexpected_keys"])
        if not (key.endswith("rotary_emb.inv_freq") or (tied and key == "lm_head.weight"))
    ]
    if extra:
        raise ModelError(
            f"{path}: the weights hold {len(extra)} tensors that config.json has no place for, first {extra[0]}. "
            "Training would leave them out; get config.json and weights that belong together."
        )
    wrong = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if wrong:
        raise ModelError(f"{path}: {len(wrong)} tensors have another shape than config.json says, first {wrong[0]}.")
    bad = [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]
    if bad:
        raise ModelError(f"{path}: NaN or infinite weights in {len(bad)} tensors, first {bad[0]}. Get the model anew.")


def _stored_dtype(folder: Path, config: Any) -> torch.dtype:
    """The dtype of the weights on the disk; what config.json says of it may be missing or untrue."""
    for path in sorted(folder.glob("*.safetensors"))[:1]:
        with safetensors.safe_open(path, framework="pt") as file:
            names = file.keys()
            matrix = next((name for name in names if len(file.get_slice(name).get_shape()) >= 2), None)
            if matrix is not None:
                return file.get_slice(matrix)[:1].dtype  # of one row: an embedding is large
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
