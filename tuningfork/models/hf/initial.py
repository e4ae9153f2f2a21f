"""A model from a config and a seed, without weights: written as a folder, which is then loaded like any other.

So all that works on a folder works on it: weights spread over processes as they are read, checksums, exports, a run
that is resumed, another run that starts from it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import RopeParameters

from tuningfork.errors import ConfigError, ModelError, RunFolderError, enough_memory
from tuningfork.files import check_plain, remove, whole_folder
from tuningfork.json_files import read_object
from tuningfork.models.hf import byte_tokenizer, digests, export
from tuningfork.models.hf.folder import CONFIG, TOKENIZER, Origin, check_values, to_json, unknown_value
from tuningfork.models.hf.load import Loaded, load_config, without_memory
from tuningfork.models.hf.released import PARTS_OF_MORE
from tuningfork.models.hf.support import check_modules, positions
from tuningfork.models.hf.tokenizer_file import check_tokenizer_file
from tuningfork.wording import did_you_mean, first_line

FACTS = "made_from.json"
"""In the folder of a model that was made: from what."""

_OLDER_NAMES = {"torch_dtype", "rope_theta", "rope_scaling", "architectures", "model_type"}  # that configs take, too
_OF_ROTATION = {"type", "mrope_interleaved"}  # that rope_parameters have, too


def make(
    folder: Path,
    given: str | Mapping[str, Any],
    seed: int,
    tokenizer: str,
    weights: bool = True,
    may_replace: bool = True,
    max_length: int | None = None,
) -> bool:
    """Make a model's folder, unless it is there and made from the same; whether it was made now.

    A folder without weights, which only `weights=False` leaves, is made anew where it was made from something else.

    Args:
        given: the settings of its config.json, or the path of one, or of a folder that has one.
        seed: of its initial values, see `initial_model`.
        tokenizer: ``bytes``, or the folder of a tokenizer. The config's vocabulary and marks follow it where they are
            not given.
        weights: whether weights are needed; without them, only config and tokenizer are, which no seed decides.
        may_replace: whether that goes for one with weights, too: to a run that has not begun, and nobody else.
        max_length: tokens of the longest sequence that it will be given.

    Raises:
        ConfigError: a setting that the model's config does not have, with the nearest that it has; or fewer positions
            than `max_length`.
        ModelError: the config is of no model that can be trained, as one with dropout, or a rule of its family leaves a
            weight without a value.
        RunFolderError: the disk refuses, or something else lies there, or a model made from something else that may not
            be replaced.
    """
    settings, words = _settings(given), _tokenizer(tokenizer)
    for key, value in _of_tokenizer(words).items():
        settings.setdefault(key, value)
    _check_settings(settings)
    check_values(settings, "model.init", "Correct it.", "Set it to float32, float16 or bfloat16, or leave it out.")
    identity = hashlib.sha256(words.backend_tokenizer.to_str().encode()).hexdigest()  # type: ignore[attr-defined]
    facts = {"config": settings, "seed": seed, "tokenizer": identity, "weights": weights}
    if _is_made_from(folder, facts):
        _check_positions(load_config(str(folder)), max_length)
        return False
    if folder.exists():
        if not may_replace and has_weights(folder):
            raise RunFolderError(
                f"{folder} is the model that a run begins from, and was made from another config, seed or tokenizer "
                f"than these: {FACTS} there has its own. Give model.init, model.init_seed and model.tokenizer as they "
                "are there, or choose another output.dir."
            )
        with suppress(FileNotFoundError):  # a process of another machine has, on a disk that both have
            remove(folder)
    try:
        with whole_folder(folder) as aside:
            _write(aside, settings, seed, words, weights, max_length)
            (aside / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
            digests.write(aside)
    except RunFolderError:
        if not _is_made_from(folder, facts):  # by a process of another machine, on a disk that both have
            raise
    return True


def _write(
    folder: Path,
    settings: dict[str, Any],
    seed: int,
    words: PreTrainedTokenizerBase,
    weights: bool,
    max_length: int | None,
) -> None:
    words.save_pretrained(folder)
    (folder / CONFIG).write_bytes(to_json(settings))
    with _said_of_settings(folder):
        config = load_config(str(folder))
    if config.vocab_size < len(words):
        raise ConfigError(
            f"model.init sets vocab_size to {config.vocab_size:,}, but the tokenizer has {len(words):,} tokens. Set it "
            f"to {len(words):,} or more, or leave it out."
        )
    _check_heads(config)
    _check_positions(config, max_length)
    with _said_of_settings(folder):
        check_modules(_empty(config, folder), str(folder))
    if not weights:
        return
    with enough_memory("making the model"):
        model = initial_model(config, seed)
        loaded = Loaded(model, torch.float32, origin=Origin(settings))
        export.write_weights(loaded, folder, {name: w.detach() for name, w in export.state_of(loaded).items()}, None)
        export.write_config(loaded, folder, torch.float32)
    del model, loaded
    gc.collect()  # modules refer to each other, and the next thing that is done is to read the weights


@contextmanager
def _said_of_settings(folder: Path) -> Iterator[None]:
    """Say of model.init what a ModelError says of the config.json that is written of it, which is nowhere yet."""
    try:
        yield
    except ModelError as error:
        words = (str(line).replace(f"{folder}: {CONFIG}", "model.init") for line in error.args)
        raise ModelError(
            *(w.replace(str(folder), "model.init").replace(CONFIG, "model.init") for w in words)
        ) from error


def initial_model(config: Any, seed: int) -> PreTrainedModel:
    """A model on the CPU in float32 with the initial values that its family's own code gives it.

    The library's rule for each module (`_init_weights` of its model class: normal numbers of `initializer_range`, zeros
    for biases, ones for norms, or what the family does instead) is carried out module by module, children first, as the
    library does. Before each, PyTorch's generator is seeded by (seed, the module's name). So a tensor's values depend
    on the seed, its module's name and shapes, and the rule: not on the device, the dtype or the processes that a run
    computes with, nor on other modules, such as the number of layers. Memory for each weight is there once.

    Raises:
        ModelError: the family's code cannot build it, or its rules leave a weight without a value.
    """
    model = _empty(config).to_empty(device="cpu").float()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)
        _initialize(model, "", model, seed)
        model.tie_weights()
    unset = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    if unset:
        raise ModelError(
            f"model.init: the initialisation of {type(model).__name__} leaves {unset[0]} without a value"
            f"{f', and {len(unset) - 1:,} others' if unset[1:] else ''}. Start from a folder with weights: model.path."
        )
    return model


def _empty(config: Any, folder: Path | None = None) -> PreTrainedModel:
    """The model without values. Raises ModelError where the family's code cannot build it, with the setting of the
    folder's config.json that this is about, if that can be told."""
    try:
        return without_memory(config)
    except Exception as error:  # whatever the family's code comes upon, such as an activation that there is not
        if folder is not None and (said := unknown_value(str(folder), error)):
            raise ModelError(f"{folder}: {said}") from error
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(
            f"model.init: transformers cannot build a {config.model_type} model of these settings ({why}). Correct the "
            "setting that this is about."
        ) from error


def _initialize(module: nn.Module, name: str, owner: PreTrainedModel, seed: int) -> None:
    """Initialise a module behind all that it holds, by the rule of the innermost model that it is a part of."""
    for child_name, child in module.named_children():
        inner = child if isinstance(child, PreTrainedModel) else owner
        _initialize(child, f"{name}.{child_name}" if name else child_name, inner, seed)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))  # the CPU's, which fork_rng puts back
    owner._init_weights(module)  # private: transformers._init_weights


def _settings(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json holds, or a mapping that stands in its place. Raises ConfigError."""
    settings = dict(given) if isinstance(given, Mapping) else _read(Path(given))
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        hint = did_you_mean(kind, CONFIG_MAPPING.keys()) if isinstance(kind, str) else ""
        what = "names no model_type" if kind is None else f"has model_type {kind!r}, which transformers does not know"
        raise ConfigError(f"model.init {what}.{hint} It says what model this is, such as llama.")
    if kind in PARTS_OF_MORE:
        part = CONFIG_MAPPING[kind]().get_text_config().model_type
        raise ConfigError(
            f"model.init has model_type {kind}, of which the language model is a part. Give that part's settings "
            f"alone, which a config.json has under text_config: model_type {part}."
        )
    return settings


def _read(path: Path) -> dict[str, Any]:
    file = path / CONFIG if path.is_dir() else path
    try:
        return dict(read_object(file))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ConfigError(f"model.init: {file} cannot be read as a config.json: {why}.") from error


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a setting that the config of this type does not have, at whatever depth: the library would
    keep it without a word, and use the default of what was meant."""
    name = settings["model_type"]
    _check_names(settings, CONFIG_MAPPING[name], f"of {name} models")


def _check_names(settings: Mapping[str, Any], kind: Any, whose: str) -> None:
    default, own = kind(), {*kind.attribute_map, *_OLDER_NAMES}  # private: transformers.attribute_map
    for key in settings:
        if key not in own and not _has(default, key):
            names = [name for name in (*default.to_dict(), *own) if not name.startswith("_")]
            raise ConfigError(f"model.init: {key} is no setting {whose}.{did_you_mean(key, names, cutoff=0.5)}")
    for key, part in kind.sub_configs.items():  # private: transformers.sub_configs
        given = settings.get(key)
        if isinstance(given, Mapping):
            part = CONFIG_MAPPING.get(str(given.get("model_type"))) if part is AutoConfig else part
            if part is not None:
                _check_names(given, part, f"of the {key} {whose}")
    rotation = getattr(default, "rope_parameters", None) or {}
    layers = {*(getattr(default, "layer_types", None) or ()), *(settings.get("layer_types") or ())}
    layers |= {key for key, value in rotation.items() if isinstance(value, Mapping)}
    for key in ("rope_parameters", "rope_scaling"):
        _check_rotation(settings.get(key), rotation, layers, key)


def _has(config: Any, key: str) -> bool:
    """Whether a config has a setting, also one that it has for each layer and will not tell for all."""
    try:
        return hasattr(config, key) and not callable(getattr(type(config), key, None))
    except Exception:  # that it differs from layer to layer
        return True


def _check_rotation(given: Any, default: Mapping[str, Any], layers: Collection[str], where: str) -> None:
    """Raises ConfigError for a setting of rotation that nobody reads. Kinds of layers may have their own."""
    known = {*RopeParameters.__annotations__, *_OF_ROTATION, *default} - {*layers}
    for key, value in given.items() if isinstance(given, Mapping) else ():
        if key in layers:
            _check_rotation(value, default, (), f"{where}.{key}")
        elif key not in known or isinstance(value, Mapping):
            what = "kind of layer that the model has" if isinstance(value, Mapping) else "setting of it"
            hint = did_you_mean(key, layers if isinstance(value, Mapping) else known, cutoff=0.5)
            raise ConfigError(f"model.init: {where} has {key}, which is no {what}.{hint}")


def _check_heads(config: Any) -> None:
    """Raises ConfigError where query heads cannot share the key heads: the library builds such a model all the same."""
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
        raise ConfigError(
            f"model.init sets num_attention_heads to {heads} and num_key_value_heads to {keys}. Make the first a "
            "multiple of the second, so that each key head is shared by as many query heads."
        )


def _check_positions(config: Any, max_length: int | None) -> None:
    """Raises ConfigError where the longest sequence has more tokens than the model would know positions."""
    longest = positions(config)
    if longest is not None and max_length is not None and longest < max_length:
        raise ConfigError(
            f"model.init makes a model that knows {longest:,} positions, and data.max_length is {max_length:,}. Set "
            f"max_position_embeddings of model.init to {max_length} or more, or data.max_length to {longest} or less."
        )


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of this name or folder. Raises ConfigError, and ModelError for a file that is not to be read."""
    if name == byte_tokenizer.NAME:
        return byte_tokenizer.byte_tokenizer()
    if not (Path(name) / "tokenizer.json").is_file():
        raise ConfigError(f"model.tokenizer is {name}, which is neither bytes nor a folder with a tokenizer.json.")
    check_tokenizer_file(name)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelError(f"model.tokenizer: {name}/{TOKENIZER} cannot be loaded: {first_line(error)}") from error


def _of_tokenizer(words: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a config says of its tokenizer."""
    marks = {f"{mark}_token_id": getattr(words, f"{mark}_token_id") for mark in ("bos", "eos", "pad")}
    return {"vocab_size": -(-len(words) // 64) * 64, **marks}


def has_weights(folder: Path) -> bool:
    """Whether a folder is there that was made with weights."""
    try:
        return bool(read_object(folder / FACTS).get("weights"))
    except (OSError, ValueError):
        return False


def _is_made_from(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether a folder is there and made from these. Raises RunFolderError where it is no folder that was made."""
    check_plain(folder, folder=True)
    if not folder.exists():
        return False
    try:
        found = read_object(folder / FACTS)
    except FileNotFoundError as error:
        if not folder.exists():  # any more: a process of another machine has removed it
            return False
        raise RunFolderError(f"{folder} is no model that was made here: it has no {FACTS}. Move it away.") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{folder} is no model that was made here: {FACTS} cannot be read. Move it away."
        ) from error
    if not facts["weights"]:  # those that nobody needs do no harm, whatever their seed
        found, facts = ({key: of[key] for key in of if key not in ("weights", "seed")} for of in (found, facts))
    return found == dict(facts)
