"""A trained model as a Hugging Face folder that every reader of the starting folder reads, and as the same model."""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel

from tuningfork.errors import SAVING, ModelError, enough_memory
from tuningfork.files import scratch
from tuningfork.models.hf import digests, own
from tuningfork.models.hf.comparable import comparable
from tuningfork.models.hf.folder import CONFIG, GENERATION, to_json
from tuningfork.models.hf.load import Loaded, only_renamed
from tuningfork.models.hf.released import Place, Released
from tuningfork.models.hf.safetensors_reader import ONE_FILE
from tuningfork.wording import first_line


def save(loaded: Loaded, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model as it is now, with what its starting folder held beside the weights.

    Tokenizer, chat template, generation settings and licence are the starting folder's to the byte, and config.json
    holds what it held, for training changes none of that: a library that wrote them anew would write them for its own
    version. The model in memory stays as it is. Checksums of all files lie beside them (digests.py).

    Args:
        dtype: of the weights; None for the one that each tensor had on the disk.

    Raises:
        OSError: the disk refuses.
        OutOfMemory: the machine has no room for a copy of the weights.
    """
    with enough_memory("exporting the model", SAVING):
        write_weights(loaded, folder, {name: tensor.detach() for name, tensor in state_of(loaded).items()}, dtype)
    write_beside(loaded, folder, dtype)
    digests.write(folder)


def write_beside(loaded: Loaded, folder: Path, dtype: torch.dtype | None) -> None:
    """Write all of an export but its weights and checksums. Raises OSError."""
    for name, content in loaded.origin.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    write_config(loaded, folder, dtype)


def write_config(loaded: Loaded, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json, and of a class of ours the files that plain transformers loads it by. Raises OSError."""
    config = exported_config(loaded.origin.config, loaded.model, dtype or loaded.stored_dtype)
    if family := own.FAMILIES.get(config["model_type"]):
        config["auto_map"] = family.auto_map
        for file in family.files:
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / CONFIG).write_bytes(to_json(config))


def check_exportable(loaded: Loaded, path: str) -> None:
    """Try what an export does, but for the weights: what the library objects to must not cost a run its model.

    Raises:
        ModelError: it cannot save the model of the folder `path`.
        RunFolderError: there is no place for temporary files.
    """
    model = loaded.model
    with scratch() as folder:
        try:
            _save_by_the_library(model, folder, {})
            to_json(exported_config(loaded.origin.config, model, loaded.stored_dtype))
        except Exception as error:  # of whatever kind the library's are
            raise ModelError(
                f"{path}: the model could be trained, but not exported: with its config.json, transformers "
                f"{transformers.__version__} cannot save it: {first_line(error).rstrip('.')}. Correct config.json."
            ) from error


def exported_config(start: Mapping[str, Any], model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    """The starting config.json with what an export changes, and what older readers need to read the same in it.

    Since version 5 transformers writes rotary settings as `rope_parameters` alone. Older ones, and servers built on
    them, pass over that name and take their defaults without a word, so the names that they know stand beside it.
    """
    loaded: Any = model.config
    config = _of_this_model(start, loaded)
    own = (kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))  # not that of a spread model
    config["architectures"] = [next(own).__name__]
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    for key, value in _known_to_older_readers(config, model):
        if (key not in config or config[key] != value) and _reads_the_same(type(loaded), config, {key: value}):
            config[key] = value
    return config


def exported_dtype(stored: torch.dtype, most: torch.dtype, matrix: bool, asked: torch.dtype | None) -> torch.dtype:
    """What a tensor is exported in that was `stored` in a model whose weights `most` are stored in another, or that.

    A norm that was kept in float32 beside bfloat16 matrices is not rounded to theirs. Whole numbers are never cast.
    """
    if asked is None or not stored.is_floating_point:
        return stored
    return asked if matrix or stored == most else torch.promote_types(stored, asked)


def state_of(loaded: Loaded) -> dict[str, torch.Tensor]:
    """What an export has of the model, by the model's names, of which tied weights, one parameter, have several."""
    return loaded.model.state_dict(keep_vars=True)


def exported_dtypes(loaded: Loaded, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """In what each tensor of `state_of` is exported, tied weights in one dtype."""
    most, state = loaded.stored_dtype, state_of(loaded)
    finest = reduce(torch.promote_types, (kind for kind in loaded.dtypes.values() if kind.is_floating_point), most)
    found: dict[int, torch.dtype] = {}
    for name, tensor in state.items():
        if name in loaded.dtypes or id(tensor) not in found:
            matrix = isinstance(tensor, nn.Parameter) and tensor.ndim >= 2
            # Of what the library put together from several tensors, a vector may have been stored as finely as any.
            unknown = (most if matrix else finest) if tensor.is_floating_point() else tensor.dtype
            found[id(tensor)] = exported_dtype(loaded.dtypes.get(name, unknown), most, matrix, dtype)
    return {name: found[id(tensor)] for name, tensor in state.items()}


def write_weights(loaded: Loaded, folder: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Write the weights files of all tensors of `state_of`: by the library's own names and layout or, in families whose
    released folders we know, by those."""
    # Tied weights stay one tensor; one that merely shares memory with another, such as a part of it, is one of its own.
    cast: dict[int, torch.Tensor] = {}
    kinds, owners = exported_dtypes(loaded, dtype), {name: id(owner) for name, owner in state_of(loaded).items()}
    for name, owner in owners.items():
        if owner not in cast:
            cast[owner] = tensors[name].to("cpu", kinds[name])
    places = _released(loaded)
    if places is None:
        _save_by_the_library(loaded.model, folder, {name: cast[owner] for name, owner in owners.items()})
        return
    # Parts in memory of their own: of tensors that share some, the library writes one.
    parts = {name: place.of(cast[owners[place.name]]).clone() for name, place in places.items()}
    _save_by_the_library(loaded.model, folder, parts, save_original_format=False)


def places_on_disk(loaded: Loaded) -> dict[str, Place] | None:
    """The name in the weights files -> where in `state_of` it is, each tensor once; None where the library does more to
    tensors than to name them.

    The library saves stand-ins of a single number each, and so decides as ever which name of tied weights counts, and
    by what names older versions know the family's tensors.

    Raises:
        RunFolderError: there is no place for temporary files.
    """
    places = _released(loaded)
    if places is not None:
        return places
    if not only_renamed(loaded.model):
        return None
    names, state = [*state_of(loaded)], state_of(loaded)
    numbers = {id(tensor): torch.tensor([number]) for number, tensor in enumerate(state.values())}
    with scratch() as folder:
        _save_by_the_library(loaded.model, folder, {name: numbers[id(tensor)] for name, tensor in state.items()})
        stood = load_file(folder / ONE_FILE)
    return {name: Place(names[int(number)]) for name, number in stood.items()}


def _released(loaded: Loaded) -> dict[str, Place] | None:
    """The same as `places_on_disk` in families whose released folders we know; None in others."""
    released = loaded.released or Released.of(loaded.model.config)
    if released is None:
        return None
    names: dict[int, str] = {}  # of tied weights, which are one, that which the starting folder had
    for name, tensor in state_of(loaded).items():
        if id(tensor) not in names or (name in released.names and names[id(tensor)] not in released.names):
            names[id(tensor)] = name
    return released.published(names.values())


def _save_by_the_library(model: PreTrainedModel, folder: Path, tensors: dict[str, torch.Tensor], **how: Any) -> None:
    """What transformers writes of a model, which stays as it is: files of these weights, and a config.json."""
    in_memory, generation = model.config.dtype, model.generation_config
    # What the library finds wrong with generation settings, as with many published ones, must not cost the export.
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=tensors, **how)
    except safetensors.SafetensorError as error:  # a full disk, in its own words
        raise OSError(errno.EIO, str(error)) from error
    finally:
        model.config.dtype, model.generation_config = in_memory, generation
    (folder / GENERATION).unlink(missing_ok=True)


def _of_this_model(start: Mapping[str, Any], loaded: Any) -> dict[str, Any]:
    """What the starting config.json says, or that part of it which is the language model's; of a model that was built
    and not loaded, what the library says."""
    for config in (start, start.get("text_config")):
        if isinstance(config, Mapping) and config.get("model_type") == loaded.model_type:
            return copy.deepcopy(dict(config))
    return json.loads(loaded.to_json_string())  # type: ignore[no-any-return]


def _known_to_older_readers(config: Mapping[str, Any], model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """(key, value) by which readers from before `rope_parameters` would read the same, in all families' names.

    Each family has its own names for these; to the others such a key is a stranger.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    yield "tie_word_embeddings", head.weight is embedding.weight  # its default is not the same in all versions
    parameters = getattr(model.config, "rope_parameters", None)
    if not parameters:
        return
    everywhere = parameters.get("full_attention") or parameters
    if "rope_theta" not in everywhere:
        return
    for key in ("rope_theta", "rotary_emb_base", "global_rope_theta"):
        yield key, everywhere["rope_theta"]
    local = parameters.get("sliding_attention") or {}
    if "rope_theta" in local:
        for key in ("rope_local_base_freq", "local_rope_theta"):
            yield key, local["rope_theta"]
    if "partial_rotary_factor" in everywhere:
        for key in ("partial_rotary_factor", "rotary_pct"):
            yield key, everywhere["partial_rotary_factor"]
    if not config.get("rope_scaling"):  # what stands there goes before rope_parameters in all versions
        scaling = {k: v for k, v in everywhere.items() if k not in ("rope_theta", "partial_rotary_factor")}
        yield "rope_scaling", None if scaling.get("rope_type", "default") == "default" else scaling


def _reads_the_same(kind: Any, config: Mapping[str, Any], more: Mapping[str, Any]) -> bool:
    """Whether this version of the library, which trained the model, reads a config.json alike with `more` in it.

    Where it does not, a key means something else, or nothing, to the family.
    """
    try:
        one, other = (comparable(kind.from_dict(copy.deepcopy({**config, **extra}))) for extra in ({}, more))
    except Exception:  # a family's own objections to the key, of whatever kind
        return False
    return one == other
