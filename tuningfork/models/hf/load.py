"""From a Hugging Face folder to a config, a tokenizer and a model; export.py goes back to a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import WeightRenaming  # private: transformers.core_model_loading

from tuningfork.errors import LOADING, ModelError, enough_memory, is_of_memory, is_panic
from tuningfork.models.hf import attention, checks, digests, folder, safetensors_reader, trust
from tuningfork.models.hf.folder import Origin
from tuningfork.models.hf.released import PARTS_OF_MORE, Released
from tuningfork.models.hf.safetensors_reader import Lying, Stack
from tuningfork.models.hf.support import check_config, check_modules
from tuningfork.models.hf.tokenizer_file import check_tokenizer_file
from tuningfork.wording import first_line

_CPU = torch.device("cpu")
_LEAST_IN_8_BITS = 4096  # private: torchao.optim.AdamW8bit

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
    stored_dtype: torch.dtype  # that most of its weights had on the disk
    stored_bytes: int = 0  # read from there; 0 where they lay in older files than safetensors
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of what lay on the disk, by the model's names
    released: Released | None = None  # how its files differ from it, in families of which we know it
    origin: Origin = field(default_factory=Origin)  # what else its folder held, for the export
    notes: tuple[str, ...] = ()  # what was done about something odd in the folder, for the user


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The folder's tokenizer. Raises ModelError, also where it loses the space between words.

    Some versions of transformers put another way of cutting texts in place of the folder's own (5.17 does so for
    DeepSeek-V3): what comes of it looks like tokens and trains a model to write without spaces.
    """
    load_config(path)  # which it reads, too: what is wrong there is not the tokenizer's
    folder.check_tokenizer(path)
    for file in (folder.TOKENIZER, folder.CONFIG):
        if (Path(path) / file).exists():
            trust.check_tokenizer(folder.read_json(path, file), file, path)
    if why := folder.no_tokenizer(path):  # of settings alone the library may make up one that knows no word
        raise ModelError(why)
    check_tokenizer_file(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        again = tokenizer.decode(tokenizer("one two", add_special_tokens=False)["input_ids"])
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        why = f"{first_line(error).rstrip('.')}.{folder.pointers(path)}"
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {why}") from error
    if "onetwo" in again:
        raise ModelError(
            f"{path}: as transformers {transformers.__version__} loads the tokenizer, it reads 'one two' and gives "
            f"back {again!r}: spaces are lost. Use another version of transformers, or mend tokenizer.json."
        )
    return tokenizer


def load_config(path: str) -> Any:
    """The folder's config, of a model that can be trained as far as a config shows. Raises ModelError."""
    config = _config(path)
    if getattr(config, "transformers_weights", None):
        raise ModelError(
            f"{path}: config.json names a file of its own for the weights (transformers_weights). Rename that file to "
            f"{safetensors_reader.ONE_FILE} or {safetensors_reader.INDEX}, and remove the setting."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{path}: config.json has a quantization_config: a quantized model. Get the model in float32, float16 or "
            "bfloat16."
        )
    check_config(config, path)
    return config


def _config(path: str) -> Any:
    """The folder's config of whatever model. Raises ModelError."""
    folder.check_folder(path)
    digests.check_export(path, weights=False)
    settings = folder.settings(path)
    kind, library = settings["model_type"], f"transformers {transformers.__version__}"
    trust.check_settings(settings, path)
    if kind in CONFIG_MAPPING:
        trust.check_names(settings, CONFIG_MAPPING[kind], path)
    try:
        # Without a word on code of the folder's own the library asks on the terminal whether to run it.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if kind in CONFIG_MAPPING:
            raise ModelError(f"{path}: config.json cannot be read: {first_line(error)}") from error
        own = "; it names code of its own for it (auto_map), which is never run here" if "auto_map" in settings else ""
        raise ModelError(
            f"{path}: {library} knows no model of type {kind!r}, which config.json names{own}. If the model is newer, "
            "use a transformers that is newer, too; else train a model of a type that transformers has."
        ) from error
    if config.model_type in PARTS_OF_MORE:
        whole, config = config, config.get_text_config()
        if getattr(whole, "quantization_config", None) is not None:  # of all parts
            config.quantization_config = whole.quantization_config
    trust.take_no_kernels(config)
    # What a model hands out beside its hidden states, and how: nobody here asks for more, and with our attention the
    # library saves no config that does. An export says what config.json says.
    config.output_attentions, config.output_hidden_states, config.return_dict = False, False, True
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
        OutOfMemory: the machine or the device has not the memory for them.
    """
    with loading(path):
        draft, loaded = opened(path, progress)
        model = loaded.model
        if device.type == "cpu":
            kinds = ((there, held_dtype(weight, there.shape, dtype)) for weight, there in draft.unread)
            checks.check_room(sum(there.shape.numel() * kind.itemsize for there, kind in kinds))
        for weight, there in draft.unread:
            weight.data = torch.empty(there.shape, dtype=held_dtype(weight, there.shape, dtype), device=device)
        hold_weights(model, dtype)
        model.to(device)  # type: ignore[arg-type]
        read(draft, path, progress)
    model.train()  # one mode for scoring and training, so that both run the same code; there is no dropout
    return loaded


def replace_weights(model: PreTrainedModel, path: str) -> tuple[str, ...]:
    """Read the weights of another folder, whose config is `comparable` to the model's, into this model.

    They go from the disk to where the model's own are, so that no device holds two models. Weights in other formats
    are read on the CPU first.

    Returns:
        What there is to know of the folder, see `Loaded.notes`.

    Raises:
        ModelError: as for `load`. If the disk fails or a weight is no number, the model has some weights of each.
    """
    with loading(path):
        draft, loaded = opened(path)
    ours, names = dict(all_tensors(model)), {id(weight): name for name, weight in all_tensors(loaded.model)}
    for weight, _ in draft.unread:
        weight.data = ours[names[id(weight)]].data
    read(draft, path)
    model.load_state_dict(loaded.model.state_dict())  # what lies elsewhere; the rest is its own already
    return loaded.notes


def loading(path: str) -> AbstractContextManager[None]:
    """Around what asks for memory: an allocation that is refused is an OutOfMemory that names the folder."""
    size = safetensors_reader.bytes_in(Path(path)) / 1e9
    return enough_memory(f"loading the weights of {path}, {size:,.1f} GB on the disk", LOADING)


def opened(path: str, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[Draft, Loaded]:
    """What a folder holds, the weights of its model or some of them yet to be read. Raises ModelError."""
    config = load_config(path)
    origin, notes = folder.read_origin(path)
    if not folder.has_weights(path):
        looked = f"looked for {', '.join(safetensors_reader.FILES)}"
        raise ModelError(f"{path}: no weights found ({looked}).{folder.other_formats(Path(path))}")
    digests.check_export(path, weights=True)
    try:
        found = safetensors_reader.stored_tensors(Path(path))
        pickled = _pickled(path) if found is None else {}
        names = pickled.keys() if found is None else found.tensors.keys()
        checks.check_layers(config, names)
        released = Released.of(config, names)
        stored: dict[str, Lying] = {} if found is None else {**found.tensors}
        if released is not None:
            stored, pickled = released.joined(stored, Stack.of), released.joined(pickled, torch.cat)
        draft = None if found is None else _draft(config, path, stored, released is not None)
        draft = draft or _whole(config, path, pickled or _in_memory(stored, progress))
    except Exception as error:
        if is_of_memory(error):
            raise
        why = folder.unknown_value(path, error) or f"{first_line(error).rstrip('.')}.{folder.pointers(path)}"
        if isinstance(error, safetensors.SafetensorError):
            why += " A file of its weights is damaged or cut short: get it anew."
        raise ModelError(f"{path}: the model cannot be loaded: {why}") from error
    model = draft.model
    checks.check_names(model, draft.info, found, path, released)
    checks.check_ties(model, path)
    checks.check_dtypes(model, draft.dtypes, path)
    check_modules(model, path)
    size = sum(there.bytes for there in stored.values())
    notes += (found.notes if found else ()) + (released.note() if released else ())
    stored_dtype = _stored_dtype(model, draft.dtypes, config)
    return draft, Loaded(model, stored_dtype, size, draft.dtypes, released, origin, notes)


def read(draft: Draft, path: str, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Fill the weights that are still on the disk alone. Raises ModelError, also where a weight is no number."""
    try:
        safetensors_reader.read_weights(((weight.detach(), there) for weight, there in draft.unread), progress)
    except OSError as error:
        raise ModelError(f"{path}: the weights cannot be read: {first_line(error)}") from error
    checks.check_finite(draft.model, path)


def without_memory(config: Any) -> PreTrainedModel:
    """The model of a config on the meta device, with our attention under it."""
    with torch.device("meta"):
        # A kind of attention that config.json asks for need not be installed: ours takes its place.
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, trust_remote_code=False)


@dataclass(frozen=True)
class Draft:
    """A model, what the library said while it loaded it, and the weights that are still on the disk alone."""

    model: PreTrainedModel
    info: dict[str, Any]
    unread: list[tuple[Tensor, Lying]]
    dtypes: dict[str, torch.dtype]  # of stored tensors, by the model's names or, of those it converts, their own


def _draft(config: Any, path: str, stored: dict[str, Lying], renamed: bool) -> Draft | None:
    """The model with weights of the right shape but without memory, each with its place on the disk.

    The library loads stand-ins of a single number each. So it decides as ever which stored tensor becomes which weight,
    what is missing or left over and what is tied, and computes the buffers; only the reading is ours: its own passes
    the GPU's weights through the host, casts them there, and reads no faster than page faults come.

    `renamed`: what is stored has the model's names already, see released.py.

    None where a stored tensor does not become one weight as it is: where the library converts a family's old layout, or
    where the folder holds both copies of tied weights, which the library compares.
    """
    model, info, traced = _traced(config, path, stored)
    unread = {name: (weight, stored[name]) for name, weight in traced.values()}
    dtypes = {own: stored[name].dtype for own, (name, _) in traced.items()}
    # A conversion may leave a stand-in's shape and place as they are, such as a permuted rotation: only its name tells.
    if not renamed and not only_renamed(model):
        return None
    refused = {*info["unexpected_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    if len(unread) + len(refused | _computed(model, stored.keys() - unread.keys())) != len(stored):
        return None
    return Draft(model, info, list(unread.values()), dtypes)


def only_renamed(model: PreTrainedModel) -> bool:
    """Whether the library does no more to the tensors of a loaded model, between disk and memory, than to name them."""
    conversions = getattr(model, "_weight_conversions", None)  # private: transformers._weight_conversions
    return conversions is not None and all(isinstance(conversion, WeightRenaming) for conversion in conversions)


def _pickled(path: str) -> dict[str, Tensor]:
    checks.check_room(safetensors_reader.bytes_in(Path(path)))
    return safetensors_reader.pickled_tensors(Path(path))


def _in_memory(stored: dict[str, Lying], progress: Callable[[int, int], None]) -> dict[str, Tensor]:
    checks.check_room(sum(there.bytes for there in stored.values()))
    state = {name: torch.empty(there.shape, dtype=there.dtype) for name, there in stored.items()}
    safetensors_reader.read_weights(((state[name], there) for name, there in stored.items()), progress)
    return state


def _whole(config: Any, path: str, state: dict[str, Tensor]) -> Draft:
    """The model with its weights on the CPU; which tensors it gets is ours to say, all else the library's."""
    _, _, traced = _traced(config, path, state)
    dtypes = {own: state[name].dtype for own, (name, _) in traced.items()}
    model, info = _from_state(config, path, state)
    converted = state.keys() - {name for name, _ in traced.values()}
    converted -= _computed(model, converted)
    return Draft(model, info, [], dtypes | {name: state[name].dtype for name in converted})


def _computed(model: PreTrainedModel, left: Iterable[str]) -> set[str]:
    """Of stored tensors that became no weight as they are: what older versions stored, such as masks, and the library
    computes itself. It is passed over without a word."""
    # private: transformers._keys_to_ignore_on_load_unexpected
    ignored = [checks.CONSTANT, *(model._keys_to_ignore_on_load_unexpected or ())]
    return {name for name in left if any(re.search(pattern, name) for pattern in ignored)}


def _traced(
    config: Any, path: str, stored: Mapping[str, Lying] | Mapping[str, Tensor]
) -> tuple[PreTrainedModel, dict[str, Any], dict[str, tuple[str, Tensor]]]:
    """The library's model of stand-ins, what it says of them, and by the model's names which became what in it."""
    stand_ins = {
        # Of whole numbers too, which the library does not cast: float32 would round them.
        name: torch.zeros((), dtype=None if there.dtype.is_floating_point else there.dtype).expand(there.shape)
        for name, there in stored.items()
    }
    model, info = _from_state(config, path, stand_ins)
    origin = {tensor.data_ptr(): name for name, tensor in stand_ins.items()}
    traced = {}
    for own, weight in all_tensors(model):
        name = origin.get(weight.data_ptr())
        if name is not None and weight.shape == stored[name].shape:
            traced[own] = (name, weight)
    return model, info, traced


def _from_state(config: Any, path: str, state: dict[str, Tensor]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The library's model with these tensors as its weights, and what it says of them."""
    model = without_memory(config)
    kind: Any = type(model)
    checks.check_size(model, state)
    # private: transformers.from_pretrained by state_dict
    model, info = kind.from_pretrained(None, config=config, state_dict=state, trust_remote_code=False, **_AS_WE_NEED_IT)
    model.name_or_path = model.config.name_or_path = path
    try:
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # there is none; what config.json says of generating is the next best
        # private: transformers._from_model_config
        model.generation_config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )
    return model, info


def all_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers by all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def hold_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep a model's matrices in `dtype`.

    Weights whose moments an optimizer of 8 bits would not keep in 8 bits stay as they are, all norms among them: it
    keeps those moments in the weight's own dtype, and bfloat16 is too coarse for a moment.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(held_dtype(weight, weight.shape, dtype))


def bears_8_bits(shape: torch.Size) -> bool:
    """Whether an optimizer of 8 bits keeps moments of this shape in 8 bits: torchao's rule for its blocks of 256."""
    return shape.numel() >= _LEAST_IN_8_BITS and shape.numel() % 256 == 0


def held_dtype(weight: Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.dtype:
    """In what a weight or buffer of this shape is kept in a model whose matrices are kept in `dtype`."""
    matrix = isinstance(weight, nn.Parameter) and len(shape) >= 2
    return dtype if matrix and bears_8_bits(shape) else weight.dtype


def _stored_dtype(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], config: Any) -> torch.dtype:
    """The dtype that most numbers of the weights have on the disk; what config.json says may be missing or untrue."""
    sizes: Counter[torch.dtype] = Counter()
    for name, weight in model.named_parameters():
        if name in dtypes:
            sizes[dtypes[name]] += weight.numel()
    if sizes:
        return sizes.most_common(1)[0][0]
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
