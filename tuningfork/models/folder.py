"""What a model folder holds beside its weights: checked before hours of work, and kept as it is for the export."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from tuningfork.errors import ModelError, first_line

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
_ADAPTER = "adapter_config.json"

_TRAVELS = (  # tokenizers of all makes, their chat templates, how to generate, and the licence
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("tekken.json", "chat_template*", "additional_chat_templates/*.jinja", GENERATION, "LICENSE*", "NOTICE*"),
)


@dataclass(frozen=True)
class Origin:
    """A model folder as it was read: an export hours later needs nothing of what has become of it since."""

    config: Mapping[str, Any] = field(default_factory=dict)  # config.json
    files: Mapping[str, bytes] = field(default_factory=dict)  # what an export has as it is, by path in the folder


def check(path: str) -> None:
    """Refuse what is no model folder, or one that other readers of it would take for another model.

    Raises:
        ModelError: no folder, no config.json, an adapter beside the model, or a generation_config.json that is broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        parent = folder.parent if folder.parent.is_dir() else Path()
        near = difflib.get_close_matches(folder.name, [p.name for p in parent.iterdir() if p.is_dir()], n=1)
        hint = f" Did you mean {parent / near[0]}?" if near else ""
        raise ModelError(f"model.path: {path} is not a folder.{hint} Give a Hugging Face model folder on this machine.")
    if not (folder / CONFIG).exists():
        adapter = f" {_ADAPTER} makes it an adapter: merge it into its model first." if _has_adapter(folder) else ""
        raise ModelError(f"{path}: no config.json, so this is not a Hugging Face model folder.{adapter}")
    if _has_adapter(folder):
        raise ModelError(
            f"{path}: an adapter lies beside the model ({_ADAPTER}), which transformers adds to it where peft is "
            "installed and leaves out where it is not. Merge it into the weights (peft's merge_and_unload) or remove "
            "its files."
        )
    if (folder / GENERATION).exists():
        read_json(path, GENERATION)
        try:
            GenerationConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:
            raise _broken(path, GENERATION, error) from error


def read(path: str) -> tuple[Origin, tuple[str, ...]]:
    """A folder that passes `check`, and notes on what of it an export leaves out. Raises ModelError."""
    folder = Path(path)
    config = read_json(path, CONFIG)
    there = sorted({file for pattern in _TRAVELS for file in folder.glob(pattern) if file.is_file()})
    files = {str(file.relative_to(folder)): file.read_bytes() for file in there}
    notes: tuple[str, ...] = ()
    if config.pop("auto_map", None):
        notes += (
            "config.json names code of its own (auto_map), which is not run: the model is transformers' own of that "
            "type, and is exported as that",
        )
    if TOKENIZER in files:
        as_it_is = read_json(path, TOKENIZER)
        known = known_to_older_readers(as_it_is)
        if known.pop("auto_map", None):
            notes += (f"{TOKENIZER} names code of its own (auto_map), which is not run, and is exported without",)
        if known != as_it_is:
            files[TOKENIZER] = to_json(known)
    return Origin(config, files), notes


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
    """The object in one of the folder's JSON files. Raises ModelError."""
    try:
        content = json.loads((Path(path) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, name, error) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: {name} holds no JSON object. Mend it or get it anew.")
    return content


def to_json(content: Mapping[str, Any]) -> bytes:
    """As transformers lays out such a file, but in the order given."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _has_adapter(folder: Path) -> bool:
    return (folder / _ADAPTER).exists()


def _broken(path: str, name: str, error: Exception) -> ModelError:
    otherwise = "remove it: readers then take their defaults" if name == GENERATION else "get it anew"
    return ModelError(f"{path}: {name} cannot be read: {first_line(error)}. Mend it, or {otherwise}.")
