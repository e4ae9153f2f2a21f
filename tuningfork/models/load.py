"""From a Hugging Face folder to a config, a tokenizer and a model, and back to a folder."""

from __future__ import annotations

import difflib
import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import WeightRenaming

from tuningfork.errors import ModelError, first_line
from tuningfork.models import attention, weights
from tuningfork.models.support import check_config, check_modules
from tuningfork.models.weights import Stored

_WEIGHT_FILES = (weights.ONE_FILE, weights.INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_CPU = torch.device("cpu")
_LEAST_IN_8_BITS = 4096
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_NUMBERS_DO_NOT_DEPEND_ON = (
    *("_name_or_path", "transformers_version", "dtype", "architectures", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "output_attentions", "output_hidden_states", "return_dict"),
)


_AS_WE_NEED_IT: dict[str, Any] = {
    "dtype": torch.float32,
    "attn_implementation": attention.NAME,
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,  # refused below, with the name of the tensor
}


@dataclass(frozen=True)
class Loaded:
    """A model on its device."""

    model: PreTrainedModel
    stored_dtype: torch.dtype  # that its weights had on the disk
    stored_bytes: int = 0  # read from there; 0 where the library read them


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. Raises ModelError, also where it loses the space between words.

    Some versions of transformers put another way of cutting texts in place of the folder's own (5.17 does so for
    DeepSeek-V3): what comes of it looks like tokens and trains a model to write without spaces.
    """
    _check_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        again = tokenizer.decode(tokenizer("one two", add_special_tokens=False)["input_ids"])
    except Exception as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {first_line(error)}") from error
    if "onetwo" in again:
        raise ModelError(
            f"{path}: as transformers {transformers.__version__} loads the tokenizer, it reads 'one two' and gives "
            f"back {again!r}: spaces are lost. Use another version of transformers, or mend tokenizer.json."
        )
    return tokenizer


def load_config(path: str) -> Any:
    """The folder's config, of a model that can be trained as far as a config shows. Raises ModelError."""
    _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: config.json cannot be read: {first_line(error)}") from error
    check_config(config, path)
    return config


def load(
    path: str,
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Loaded:
    """Load a model folder, with our attention under the model.

    Matrices are kept in `dtype`, all else in float32. Weights in safetensors files go from the disk to the device and
    are cast there.

    Args:
        progress: told the bytes read so far, and all that will be.

    Raises:
        ModelError: no folder, no config, no or incomplete weights, NaN in the weights, or a model that cannot be
            packed correctly.
    """
    config = load_config(path)
    if not any((Path(path) / name).exists() for name in _WEIGHT_FILES):
        raise ModelError(f"{path}: no weights found (looked for {', '.join(_WEIGHT_FILES)}).")
    try:
        stored = weights.stored_tensors(Path(path))
        draft = None if stored is None else _draft(config, path, stored)
        draft = draft or _whole(path)
    except Exception as error:
        raise ModelError(f"{path}: the model cannot be loaded: {first_line(error)}") from error
    model = draft.model
    _check_names(model, draft.info, path)
    _check_stored(model, draft.unread, stored or {}, path)
    check_modules(model, path)
    for weight, there in draft.unread:
        weight.data = torch.empty(there.shape, dtype=_held(weight, there.shape, dtype), device=device)
    hold_weights(model, dtype)
    model.to(device)  # type: ignore[arg-type]
    try:
        weights.read(((weight.detach(), there) for weight, there in draft.unread), progress)
    except OSError as error:
        raise ModelError(f"{path}: the weights cannot be read: {first_line(error)}") from error
    _check_finite(model, path)
    model.train()  # one mode for scoring and training, so that both run the same code; there is no dropout
    size = sum(there.bytes for _, there in draft.unread)
    return Loaded(model, _stored_dtype(stored, config), size)


@dataclass(frozen=True)
class _Draft:
    """A model, what the library said while it loaded it, and the weights that are still on the disk alone."""

    model: PreTrainedModel
    info: dict[str, Any]
    unread: list[tuple[Tensor, Stored]]


def _draft(config: Any, path: str, stored: dict[str, Stored]) -> _Draft | None:
    """The model with weights of the right shape but without memory, each with its place on the disk.

    The library loads stand-ins of a single number each. So it decides as ever which stored tensor becomes which weight,
    what is missing or left over and what is tied, and computes the buffers; only the reading is ours: its own passes
    the GPU's weights through the host, casts them there, and reads no faster than page faults come.

    None where a stored tensor does not become one weight as it is: where the library converts a family's old layout,
    where the folder holds both copies of tied weights, which the library compares, or where other rules hold at all
    (quantized weights, adapters).
    """
    if getattr(config, "quantization_config", None) or (Path(path) / "adapter_config.json").exists():
        return None
    stand_ins = {name: torch.zeros(()).expand(there.shape) for name, there in stored.items()}
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    model, info = kind.from_pretrained(None, config=config, state_dict=stand_ins, **_AS_WE_NEED_IT)
    origin = {tensor.data_ptr(): name for name, tensor in stand_ins.items()}
    unread: dict[str, tuple[Tensor, Stored]] = {}
    for weight in [*model.parameters(), *model.buffers()]:
        name = origin.get(weight.data_ptr())
        if name is not None and weight.shape == stored[name].shape:
            unread[name] = (weight, stored[name])
    # A conversion may leave a stand-in's shape and place as they are, such as a permuted rotation: only its name tells.
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None or not all(isinstance(conversion, WeightRenaming) for conversion in conversions):
        return None
    refused = {*info["unexpected_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    # What older versions stored and the library computes itself is neither: it is passed over without a word.
    computed = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    if len(unread) + len(refused | computed) != len(stored):
        return None
    model.name_or_path = model.config.name_or_path = path
    try:
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # there is none; what config.json says of generating is the next best
        model.generation_config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )
    return _Draft(model, info, list(unread.values()))


def _whole(path: str) -> _Draft:
    """The model with its weights on the CPU, all by the library."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **_AS_WE_NEED_IT)
    model, info = loaded
    return _Draft(model, info, [])


def hold_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep a model's matrices in `dtype`.

    Weights whose moments an optimizer of 8 bits would not keep in 8 bits stay as they are, all norms among them: it
    keeps those moments in the weight's own dtype, and bfloat16 is too coarse for a moment.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(_held(weight, weight.shape, dtype))


def bears_8_bits(shape: torch.Size) -> bool:
    """Whether an optimizer of 8 bits keeps moments of this shape in 8 bits: torchao's rule for its blocks of 256."""
    return shape.numel() >= _LEAST_IN_8_BITS and shape.numel() % 256 == 0


def _held(weight: Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.dtype:
    matrix = isinstance(weight, nn.Parameter) and len(shape) >= 2
    return dtype if matrix and bears_8_bits(shape) else weight.dtype


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
    exported = {name: cast[id(weight)] for name, weight in state.items()}
    in_memory = model.config.dtype
    try:
        model.save_pretrained(folder, state_dict=exported)
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


def _check_names(model: PreTrainedModel, info: dict[str, Any], path: str) -> None:
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


def _check_stored(
    model: PreTrainedModel, unread: list[tuple[Tensor, Stored]], stored: dict[str, Stored], path: str
) -> None:
    """Weights stored as whole numbers, or in 8 bits, are a quantized model's; training needs the model itself."""
    weights_of = dict(model.named_parameters())
    found = [(name, there) for name, there in stored.items() if name in weights_of]
    found += [("", there) for weight, there in unread if isinstance(weight, nn.Parameter)]
    for name, there in found:
        if there.dtype not in _TRAINABLE:
            kind = str(there.dtype).removeprefix("torch.") + (f", such as {name}" if name else "")
            raise ModelError(
                f"{there.path}: weights are stored in {kind}: a quantized model. Get the model in float32, float16 or "
                "bfloat16."
            )


def _check_finite(model: PreTrainedModel, path: str) -> None:
    """Least and greatest of a tensor are finite exactly if all of it is; they take one pass, no memory, one wait."""
    names = [name for name, weight in model.named_parameters() if weight.numel()]
    ends = [torch.stack(weight.detach().aminmax()) for weight in model.parameters() if weight.numel()]
    finite = torch.stack([end.isfinite().all() for end in ends]).tolist()
    bad = [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    if bad:
        raise ModelError(f"{path}: NaN or infinite weights in {len(bad)} tensors, first {bad[0]}. Get the model anew.")


def _stored_dtype(stored: dict[str, Stored] | None, config: Any) -> torch.dtype:
    """The dtype of the weights on the disk; what config.json says of it may be missing or untrue."""
    for _, there in sorted((stored or {}).items()):
        if len(there.shape) >= 2:
            return there.dtype
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
