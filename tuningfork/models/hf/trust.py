"""What a model folder may not decide: which code runs. Its files are data, whoever made them.

transformers runs code of a folder's own where it is told to (`trust_remote_code`), which it is not here, and no setting
tells it. These are the other ways in which a folder can name code: kernels that are fetched from the hub, another
config.json, and a tokenizer's class that is no tokenizer, for that may load anything, with questions of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase

# private: transformers.tokenizer_class_from_name
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from tuningfork.errors import ModelError
from tuningfork.models.hf import attention

CODE = (".py", ".pyc", ".so", ".sh", ".pkl", ".pickle")
"""How the names of files end that are programs: no export has them, whatever else their names are."""

# A kernel is taken by what these name, and fetched where that is named like something on the hub.
# private: transformers._attn_implementation, transformers._experts_implementation
_BY_NAME = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_ELSEWHERE = {
    "configuration_files": "other files that hold the config in its place",
    "fusion_config": "changes to the model's code",
}


def check_settings(settings: Mapping[str, Any], path: str) -> None:
    """Refuse a config.json that other files or code stand behind, before a class is built of it. Raises ModelError."""
    for key, what in _ELSEWHERE.items():
        if settings.get(key) is not None:
            raise ModelError(
                f"{path}: config.json names {what} ({key}), which are not used here. Put what the model needs into "
                "config.json itself, and remove that setting."
            )


def check_names(settings: Mapping[str, Any], kind: type, path: str) -> None:
    """Refuse names in a config.json that its class has for something else than a setting, before they take its place
    or the class fails at them. Raises ModelError."""
    for name in sorted(settings):
        there = getattr(kind, name, None)
        fixed = isinstance(there, property) and there.fset is None
        if fixed or callable(there) or (name.startswith("__") and hasattr(kind, name)):
            what = "is fixed by" if fixed else "is a part of"
            raise ModelError(
                f"{path}: config.json sets {name}, which is no setting: it {what} the class that reads it. Remove it."
            )


def take_no_kernels(config: Any) -> None:
    """Make a config ask for our attention, and for no kernel by name, in place of what its config.json asks for."""
    config._attn_implementation = attention.NAME  # private: transformers._attn_implementation
    config._experts_implementation = None  # private: transformers._experts_implementation


def kernels_of_the_hub(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a config.json that have a kernel fetched from the hub and run, each with the kernel that it names."""
    found = {}
    for key in _BY_NAME:
        value = settings.get(key)
        names = value.values() if isinstance(value, dict) else [value]
        if named := [name for name in names if isinstance(name, str) and "/" in name]:
            found[key] = named[0]
    return found


def check_tokenizer(settings: Mapping[str, Any], file: str, path: str) -> None:
    """Refuse a folder whose `file` names a tokenizer's class that is none, or one in Python. Raises ModelError.

    The library calls whatever it has by that name: its loaders of models, too, which ask whether to run the folder's
    code. Tokenizers in Python read what their settings name, some of it libraries, and none of them tells which
    characters a token covers.
    """
    name = settings.get("tokenizer_class")
    if not isinstance(name, str):
        return
    plain = name.removesuffix("Fast")
    for kind in map(tokenizer_class_from_name, (name, plain, plain + "Fast")):  # it tries all of them
        if kind is None or getattr(kind, "is_dummy", False):  # it takes its own; or says which package it lacks
            continue
        if not isinstance(kind, type) or not issubclass(kind, PreTrainedTokenizerBase):
            what = f"is no tokenizer of transformers {transformers.__version__}"
        elif issubclass(kind, PreTrainedTokenizer) and kind is not PreTrainedTokenizer:
            what = "is a slow one and cannot tell which characters a token covers"
        else:
            continue
        raise ModelError(
            f"{path}: the tokenizer cannot be loaded: {file} sets tokenizer_class to {name!r}, which {what}. Use a "
            "folder with a tokenizer.json and the class PreTrainedTokenizerFast."
        )
