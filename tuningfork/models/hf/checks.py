"""Whether the weights of a folder are whole, and those of the model that its config.json describes.

Each check takes the `path` of the folder, to name it in errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tuningfork.errors import ModelError
from tuningfork.models.hf import safetensors_reader
from tuningfork.models.hf.released import Released
from tuningfork.models.hf.safetensors_reader import Found
from tuningfork.wording import counted

CONSTANT = r"(rotary_emb\.inv_freq|\.masked_bias)$"
"""Names of buffers that older versions of the library stored, and that have one value for all models of a config."""
_SLACK = 1 << 27  # numbers, half a GB; masks that some small models have as buffers are nearly as large
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_layers(config: Any, stored: Collection[str]) -> None:
    """Before a model is built, which takes a while for each layer: every layer has a tensor at least.

    Raises:
        ValueError: there are fewer tensors in the weights than config.json has layers.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > len(stored):
        # private: transformers.attribute_map
        name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise ValueError(
            f"config.json sets {name} to {layers:,}, but the weights hold {counted(len(stored), 'tensor')}; get "
            "config.json and weights that belong together"
        )


def check_size(model: PreTrainedModel, stored: Mapping[str, Any]) -> None:
    """Before a model gets memory: it is not much larger than what is stored. `model` is a draft on the meta device.

    A tensor that is missing, or has another shape, is refused by its name later; the library makes it for that.

    Args:
        stored: what lies in the folder's weight files, each with its shape.

    Raises:
        ValueError: weights and buffers of the model have many more numbers than the files have.
    """
    sizes = {
        name: tensor.numel() for part in (model.named_parameters(), model.named_buffers()) for name, tensor in part
    }
    there = sum(tensor.shape.numel() for tensor in stored.values())
    if sum(sizes.values()) <= 2 * there + _SLACK:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    shape = tuple(model.get_parameter_or_buffer(largest).shape)
    factors = {
        key: value
        for key, value in model.config.to_dict().items()
        if type(value) is int and value > 1 and max(shape) % value == 0
    }
    settings = [f"{key} to {value:,}" for key, value in factors.items() if value == max(factors.values())]
    raise ValueError(
        f"config.json describes a model of {sum(sizes.values()):,} numbers, its {largest} of shape {shape}, but the "
        f"weights hold {there:,} numbers. It sets {' and '.join(settings) or 'sizes that are too large'}; get "
        "config.json and weights that belong together"
    )


def check_room(needed: int) -> None:
    """Before so many bytes are asked of the host: it gives out memory that it does not have, and ends whoever uses it.

    Raises:
        MemoryError: the whole of the machine's memory is smaller.
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise MemoryError(f"they need {needed / 1e9:,.1f} GB, and this machine has {there / 1e9:,.1f} GB of memory")


def check_names(
    model: PreTrainedModel, info: dict[str, Any], found: Found | None, path: str, released: Released | None = None
) -> None:
    """The weights are those that the model has, by name and shape: none is missing, and none is left over.

    Args:
        info: what transformers said of the names when it loaded the model (its `output_loading_info`).
        found: the tensors in the folder's safetensors files; None where the weights lie in older files.
        released: how the files' tensors belong to the model's, where names or parts differ.

    Raises:
        ModelError: a tensor is missing, has no place in the model, or has another shape; it names the first.
    """
    parts = released.missing if released else ()
    missing = sorted({*info["missing_keys"], *parts})
    if missing:
        elsewhere = found.unnamed.get(missing[0]) if found else None
        hint = f"; {elsewhere.name} holds it, but {safetensors_reader.INDEX} does not name it" if elsewhere else ""
        lacking = f"{path}: the weights lack {counted(len(missing), 'tensor')} of the model, first {missing[0]}{hint}."
        head: Any = model.get_output_embeddings()
        of_head = {id(weight) for weight in head.parameters()} if head is not None else set()
        if not (hint or parts) and all(id(model.get_parameter_or_buffer(name)) in of_head for name in missing):
            lacking += (
                " That is its output head: this is a base model or a classifier. Get the model that generates text, or "
                "set tie_word_embeddings to true in config.json if its head is its input embedding."
            )
        raise ModelError(lacking)
    # Buffers that older versions stored, and the copy of a tied head, are in nobody's way.
    tied = getattr(model.config, "tie_word_embeddings", False)
    extra = [
        key
        for key in sorted(info["unexpected_keys"])
        if not (re.search(CONSTANT, key) or (tied and key == "lm_head.weight"))
    ]
    if extra:
        raise ModelError(
            f"{path}: the weights hold {counted(len(extra), 'tensor')} that config.json has no place for, first "
            f"{extra[0]}. Training would leave them out; get config.json and weights that belong together."
        )
    wrong = sorted((name, tuple(stored), tuple(expected)) for name, stored, expected in info.get("mismatched_keys", ()))
    if wrong:
        name, stored, expected = wrong[0]
        name = " + ".join(released.names.get(name, (name,)) if released else (name,))
        raise ModelError(
            f"{path}: {counted(len(wrong), 'tensor has', 'tensors have')} another shape than config.json says, first "
            f"{name}: {stored} and not {expected}. Get config.json and weights that belong together."
        )


def check_ties(model: PreTrainedModel, path: str) -> None:
    """Weights that config.json ties and the files hold apart are two models: some readers tie them, others do not.

    Raises:
        ModelError: there are such, and they differ.
    """
    # private: transformers.get_expanded_tied_weights_keys
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(target) is not model.get_parameter_or_buffer(source):
            raise ModelError(
                f"{path}: config.json ties {target} to {source}, but the weights hold both, and they differ. Readers "
                f"disagree on which is meant. Set tie_word_embeddings to false in config.json to train them apart, or "
                f"remove {target} from the weights to train them as one."
            )


def check_dtypes(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], path: str) -> None:
    """Weights stored as whole numbers, or in 8 bits, are a quantized model's; training needs the model itself.

    Args:
        dtypes: of the stored tensors, by the model's names. Buffers may be of any.

    Raises:
        ModelError: a weight is stored so.
    """
    buffers = {name for name, _ in model.named_buffers()}
    for name, dtype in dtypes.items():
        if dtype not in _TRAINABLE and name not in buffers:
            kind = str(dtype).removeprefix("torch.")
            raise ModelError(
                f"{path}: weights are stored in {kind}, such as {name}: a quantized model. Get the model in float32, "
                "float16 or bfloat16."
            )


def check_finite(model: PreTrainedModel, path: str) -> None:
    """No weight is infinite or NaN, as far as it lies on this process.

    Least and greatest of a tensor are finite exactly if all of it is; they take one pass, no memory, one wait.

    Raises:
        ModelError: some weight is; it names the first tensor that has such.
    """
    here = {name: weight.detach() for name, weight in model.named_parameters()}
    here = {name: weight.to_local() if isinstance(weight, DTensor) else weight for name, weight in here.items()}
    names = [name for name, weight in here.items() if weight.numel()]
    ends = [torch.stack(here[name].aminmax()) for name in names]
    finite = torch.stack([end.isfinite().all() for end in ends]).tolist() if ends else []
    bad = [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    if bad:
        raise ModelError(f"{path}: NaN or infinite weights in {len(bad)} tensors, first {bad[0]}. Get the model anew.")
