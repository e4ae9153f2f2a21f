"""What a model folder holds beside its weights: checked before hours of work, and kept as it is for the export."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import transformers
from transformers import GenerationConfig

from tuningfork.errors import ModelError
from tuningfork.files import opened
from tuningfork.json_files import read_object
from tuningfork.models.hf import own, safetensors_reader, trust
from tuningfork.wording import first_line, from_here, shortened

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
BESIDE_TOKENIZER = (TOKENIZER, "special_tokens_map.json", "added_tokens.json")
_ADAPTER = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/"  # how the file begins that stands for one in Git LFS
_OTHER_FORMATS = {
    "*.gguf": "GGUF, which llama.cpp reads",
    "tf_model.h5": "the format of TensorFlow",
    "flax_model.msgpack": "the format of Flax",
    "consolidated*": "the layout of its authors' own code",
    "*.nemo": "the format of NeMo",
    "*.onnx": "ONNX",
}
_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    *("n_layer", "n_embd", "n_head", "n_positions"),  # of older families
)
# Settings by which a config builds lists, and those by which a model builds tensors: more than any model has.
_COUNTED, _MOST = {"layer", "layers", "block", "blocks", "labels", "experts"}, 100_000
_SIZES, _LARGEST = re.compile(r"(^|_)(size|dim|rank|heads?|embd|inner|positions|embeddings)(_|$)|^d_"), 2**31 - 1
_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja", ".model")  # of files that a model may need
_LARGEST_BESIDE = 1 << 30  # bytes of all that an export takes over as it is
LARGEST_TOKENIZER = (
    128 << 20
)  # bytes of one of its files, which a library reads whole; the largest have some 35 million
_LARGEST_TEMPLATE = 1 << 20  # bytes, as of a recipe's
_TEMPLATES = "additional_chat_templates"
_READ_WHOLE = {  # by libraries, which have no bounds: the most bytes of files by these names
    **dict.fromkeys(("chat_template*", f"{_TEMPLATES}/*"), _LARGEST_TEMPLATE),
    **dict.fromkeys(
        ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "special_tokens_map.json"),
        LARGEST_TOKENIZER,
    ),
}
_TOKENIZERS = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_DTYPES = ("float32", "float16", "bfloat16", "float64")

_TRAVELS = (  # tokenizers of all makes, their chat templates, how to generate, and the licence
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("tekken.json", "chat_template*", f"{_TEMPLATES}/*.jinja", GENERATION, "LICENSE*", "NOTICE*"),
)


@dataclass(frozen=True)
class Origin:
    """A model folder as it was read: an export hours later needs nothing of what has become of it since."""

    config: Mapping[str, Any] = field(default_factory=dict)  # config.json
    files: Mapping[str, bytes] = field(default_factory=dict)  # what an export has as it is, by path in the folder


def check_folder(path: str) -> None:
    """Refuse what is no model folder, or one that other readers of it would take for another model.

    Raises:
        ModelError: no folder, no config.json, an adapter beside the model, or a generation_config.json that is broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        parent = folder.parent if folder.parent.is_dir() else Path()
        near = difflib.get_close_matches(folder.name, [p.name for p in parent.iterdir() if p.is_dir()], n=1)
        hint = f" Did you mean {parent / near[0]}?" if near else from_here(folder)
        if folder.is_file():
            hint += _named_format(folder)
        elif not near and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not folder.parent.exists():
            hint += f" If it is the name of a published model, get it first: hf download {path} --local-dir FOLDER."
        raise ModelError(f"model.path: {path} is not a folder.{hint} Give a Hugging Face model folder on this machine.")
    if _has_adapter(folder) and not has_weights(path):
        base = read_json(path, _ADAPTER).get("base_model_name_or_path")
        raise ModelError(
            f"{path}: an adapter ({_ADAPTER}) without its model{f', {base}' if base else ''}. Merge it into that "
            "(peft's merge_and_unload), save the whole with its tokenizer, and train it."
        )
    if _has_adapter(folder):
        raise ModelError(
            f"{path}: an adapter lies beside the model ({_ADAPTER}), which transformers adds to it where peft is "
            "installed and leaves out where it is not. Merge it into the weights (peft's merge_and_unload) or remove "
            "its files."
        )
    _check_files(folder)
    if not (folder / CONFIG).exists():
        raise ModelError(f"{path}: no config.json, so this is not a Hugging Face model folder.{other_formats(folder)}")
    if (folder / GENERATION).exists():
        read_json(path, GENERATION)
        try:
            GenerationConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:
            raise _broken(path, GENERATION, error) from error


def _check_files(folder: Path) -> None:
    """Refuse entries that a reader would wait for, or read without an end; and what has a model file's name and is
    none, such as a link into a cache that is gone: a reader may go on without that file."""
    for entry in sorted([*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")]):
        name = entry.relative_to(folder)
        if entry.is_file():
            most = next((most for pattern, most in _READ_WHOLE.items() if fnmatchcase(str(name), pattern)), math.inf)
            if (size := entry.stat().st_size) > most:
                raise ModelError(
                    f"{folder}: {name} has {size:,} bytes, {most:,} at most, and would be read as a whole. Get it "
                    "anew, or remove it."
                )
            continue
        if entry.exists() and not entry.is_dir():
            raise ModelError(
                f"{folder}: {name} is neither a file nor a folder, but a pipe, a socket or a device. Remove it."
            )
        if entry.suffix in _SUFFIXES:
            what = "a folder" if entry.is_dir() else "a link that leads nowhere"
            raise ModelError(f"{folder}: {name} is {what}, not a file. Put the file itself there, or remove it.")


def check_tokenizer(path: str) -> None:
    """Refuse JSON beside a tokenizer that its library might not survive. Raises ModelError."""
    for name in BESIDE_TOKENIZER:
        if (Path(path) / name).exists():
            read_json(path, name)


def has_weights(path: str) -> bool:
    """Whether a folder has weights of a whole model, in a format that is read."""
    return any((Path(path) / name).exists() for name in safetensors_reader.FILES)


def other_formats(folder: Path) -> str:
    """A sentence on a file of the folder that holds weights in a format that is not read; none if there is none."""
    found = sorted(file for pattern in _OTHER_FORMATS for file in folder.glob(pattern))
    return _named_format(found[0]) if found else ""


def _named_format(file: Path) -> str:
    for pattern, name in _OTHER_FORMATS.items():
        if file.match(pattern):
            return (
                f" {file.name} is in {name}; get the model as it is published for transformers, in safetensors files."
            )
    return ""


def no_tokenizer(path: str) -> str:
    """A sentence on a folder that has no tokenizer; none if it has one."""
    if any(file.is_file() for pattern in _TOKENIZERS for file in Path(path).glob(pattern)):
        return ""
    looked = f"looked for {', '.join(_TOKENIZERS)}"
    return f"no tokenizer files in {path} ({looked}). Copy those of the model's own tokenizer there."


def unknown_value(path: str, error: Exception) -> str:
    """A sentence on the setting whose value is a key that a table of the library lacks; none for other errors."""
    if not isinstance(error, KeyError) or len(error.args) != 1:
        return ""
    for name, value in _flat(read_json(path, CONFIG)):
        if value == error.args[0]:
            return f"config.json sets {name} to {error}, which transformers {transformers.__version__} does not know."
    return ""


def _flat(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{within}{name}.")
        else:
            yield within + name, value


def pointers(path: str) -> str:
    """A sentence on the folder's files that only stand for the real ones, as a checkout without Git LFS leaves them."""
    for file in sorted(Path(path).iterdir()):
        with suppress(OSError), opened(file) as content:  # such as a folder's
            if content.read(len(_POINTER)) == _POINTER:
                return f" {file.name} is no more than a pointer into Git LFS: fetch the file itself (git lfs pull)."
    return ""


def settings(path: str) -> dict[str, Any]:
    """What config.json holds, with what no reader of it can do without. Raises ModelError."""
    config = read_json(path, CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{path}: config.json names no model_type, so it is not known what model this is. Get it anew."
        )
    check_values(
        config,
        f"{path}: {CONFIG}",
        f"Correct {CONFIG}, or get it anew.",
        f"Get the model in float32, float16 or bfloat16, or correct {CONFIG} if its weights are.",
    )
    return config


def check_values(config: Mapping[str, Any], whose: str, cure: str, cure_of_dtype: str) -> None:
    """Raises ModelError for a dtype that is not trained, or a size that no model has. `whose` config it is, and what is
    to be done about it, begin and end what is said."""
    for key in ("dtype", "torch_dtype"):
        if config.get(key) not in (None, "auto", *_DTYPES, *(f"torch.{name}" for name in _DTYPES)):
            raise ModelError(f"{whose} sets {key} to {config[key]!r}. {cure_of_dtype}")
    for name, value in _flat(config):
        key = name.rpartition(".")[2]
        most = _MOST if _is_count(key) else _LARGEST if _SIZES.search(key) else None
        if not isinstance(value, int):
            continue
        if (name in _AT_LEAST_ONE and value < 1) or (most is not None and abs(value) > most):
            raise ModelError(f"{whose} sets {name} to {shortened(str(value), 40)}; there is no such model. {cure}")


def _is_count(key: str) -> bool:
    """Whether a setting says how many of something there are: ``num_hidden_layers``, ``n_layer``."""
    *before, last = key.split("_")
    return last in _COUNTED and not {"n", "num"}.isdisjoint(before)


def read_origin(path: str) -> tuple[Origin, tuple[str, ...]]:
    """A folder that passes `check_folder`, and notes on what of it an export leaves out. Raises ModelError."""
    folder = Path(path)
    config = read_json(path, CONFIG)
    there = sorted({file for pattern in _TRAVELS for file in folder.glob(pattern) if file.is_file()})
    there = [file for file in there if file.suffix not in trust.CODE]
    _check_links(folder, there)
    if sum(file.stat().st_size for file in there) > _LARGEST_BESIDE:
        largest = max(there, key=lambda file: file.stat().st_size)
        raise ModelError(
            f"{path}: what lies beside the weights is larger than {_LARGEST_BESIDE:,} bytes; the largest is "
            f"{largest.name}, and an export would have it too. Remove what is no part of the model."
        )
    try:
        files = {str(file.relative_to(folder)): _content(file) for file in there}
    except OSError as error:
        raise ModelError(f"{path}: {error.filename} cannot be read: {error.strerror or error}. Permit it.") from error
    notes: tuple[str, ...] = ()
    if config.pop("auto_map", None) and config.get("model_type") not in own.FAMILIES:
        notes += (
            "config.json names code of its own (auto_map), which is not run: the model is transformers' own of that "
            "type, and is exported as that",
        )
    for key, kernel in trust.kernels_of_the_hub(config).items():
        del config[key]
        notes += (f"config.json names code of the hub ({key}: {kernel}), which is not run, and is exported without",)
    if TOKENIZER in files:
        as_it_is = read_json(path, TOKENIZER)
        known = known_to_older_readers(as_it_is)
        if known.pop("auto_map", None):
            notes += (f"{TOKENIZER} names code of its own (auto_map), which is not run, and is exported without",)
        if known != as_it_is:
            files[TOKENIZER] = to_json(known)
    return Origin(config, files), notes


def _check_links(folder: Path, files: list[Path]) -> None:
    """Raise ModelError for a link out of the folder: an export would carry whatever private file it leads to.

    A folder may be a copy of another by links alone, as in the hub's cache: where its config.json leads is its own.
    """
    own = (folder.resolve(), (folder / CONFIG).resolve().parent)
    for file in files:
        if not any(file.resolve().is_relative_to(place) for place in own):
            raise ModelError(
                f"{folder}: {file.relative_to(folder)} is a link that leads out of the folder, to {file.resolve()}, "
                "and an export would carry what lies there. Put a copy in its place, or remove it."
            )


def known_to_older_readers(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json in the names that all versions of transformers have for what it says.

    Version 5 has new ones for a class and for a list of tokens; version 4, and servers built on it, fail on both.
    """
    known = dict(tokenizer)
    if known.get("tokenizer_class") == "TokenizersBackend":
        known["tokenizer_class"] = "PreTrainedTokenizerFast"
        known.pop("backend", None)
    extra = known.get("extra_special_tokens")
    if isinstance(extra, list):
        del known["extra_special_tokens"]
        before = known.get("additional_special_tokens") or []
        known["additional_special_tokens"] = [*before, *(token for token in extra if token not in before)]
    return known


def read_json(path: str, name: str) -> dict[str, Any]:
    """The object in one of the folder's JSON files. Raises ModelError, also where a setting is NaN or infinite."""
    try:
        content = read_object(Path(path) / name)
        for setting, value in _flat(content):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{setting} is {value}, which is no number of JSON")
    except (OSError, ValueError) as error:
        raise _broken(path, name, error) from error
    return content


def _content(file: Path) -> bytes:
    with opened(file) as content:
        return content.read()


def to_json(content: Mapping[str, Any]) -> bytes:
    """As transformers lays out such a file, but in the order given."""
    # A lone surrogate has no UTF-8; backslashreplace makes it \\ud800, which in a JSON string means the same.
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _has_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER).exists()


def _broken(path: str, name: str, error: Exception) -> ModelError:
    otherwise = "remove it: readers then take their defaults" if name == GENERATION else "get it anew"
    return ModelError(f"{path}: {name} cannot be read: {first_line(error)}. Mend it, or {otherwise}.")
