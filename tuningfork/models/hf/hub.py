"""Models by their name on the hub: fetched once into its cache, and from there on a folder like any other.

What is fetched is data: weights in safetensors files, JSON, tokenizers. Pickles and code stay where they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from tqdm.auto import tqdm

from tuningfork.errors import ModelError
from tuningfork.wording import first_line

HUB = "hub:"  # may stand in front of owner/name; without it a local folder of that name wins
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(?!.*\.\.)(\w[\w.+/-]*))?")

WEIGHTS = ("*.safetensors",)
BESIDE = (
    *("*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("LICENSE*", "NOTICE*"),
)
"""Patterns of the files that a folder needs beside its weights."""
NEVER = (
    *("*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.h5", "*.msgpack", "*.onnx", "*.gguf"),
    *("consolidated*", "*/*.safetensors", "*/*.json", "*/*.model"),  # the same model in another layout
)

_UNKNOWN = (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all as far as they are known)."""


class HubName(NamedTuple):
    """``owner/name`` on the hub, and its revision: a branch, a tag or a commit; None for the newest."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")

    @property
    def is_fixed(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return re.fullmatch(r"[0-9a-f]{40}", self.revision or "") is not None


def hub_name(path: str) -> HubName | None:
    """What a model's path names on the hub; None where it is a path on this machine: one that is there, or whose folder
    is."""
    found = _NAME.fullmatch(path.removeprefix(HUB))
    here = os.path.lexists(path) or os.path.isdir(os.path.dirname(path))
    if found is None or (here and not path.startswith(HUB)):
        return None
    return HubName(found[1], found[2])


def fetch(name: HubName, weights: bool = True, progress: Progress = lambda done, total: None) -> tuple[str, HubName]:
    """The folder of a model in the hub's cache, and its name with the commit that it is.

    What the cache lacks is fetched, where there is a network and HF_HUB_OFFLINE is not set; without one the cache's
    newest copy of that revision serves.

    Args:
        weights: fetch them, too.

    Raises:
        ModelError: it is not to be had. It says how to get it.
    """
    patterns = [*WEIGHTS, *BESIDE] if weights else [*BESIDE]
    asked: dict[str, Any] = {"revision": name.revision, "allow_patterns": patterns, "ignore_patterns": [*NEVER]}
    try:
        folder = huggingface_hub.snapshot_download(name.repository, **asked, tqdm_class=_reporting(progress))
    except Exception as error:  # the library raises whatever its own libraries raise
        if isinstance(error, _UNKNOWN):
            raise ModelError(*_how_to_get(name, error)) from error
        try:  # what some versions of the library do by themselves, and others not for a commit
            folder = huggingface_hub.snapshot_download(name.repository, **asked, local_files_only=True)
        except Exception:
            raise ModelError(*_how_to_get(name, error)) from error
    return folder, HubName(name.repository, Path(folder).name)


def _how_to_get(name: HubName, error: Exception) -> tuple[str, ...]:
    """Why a model was not to be had, and the ways to it, line by line."""
    if isinstance(error, _UNKNOWN):
        why = "Check the name and the revision; for a model that wants a login: hf auth login."
    elif constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set; unset it where there is a network."
    else:
        why = "Check the network."
    revision = f" --revision {name.revision}" if name.revision else ""
    patterns = " ".join(f"'{pattern}'" for pattern in (*WEIGHTS, *BESIDE))
    copy = f"models--{name.repository.replace('/', '--')}"
    return (
        f"model.path: there is no folder {name} here, and the model of that name cannot be had from the hub: "
        f"{first_line(error).rstrip('.')}. {why}",
        f"Where there is no network, get it on another machine: hf download {name.repository}{revision} --include "
        f"{patterns} --local-dir FOLDER",
        f"Copy FOLDER here and set model.path to it. Or copy that machine's {copy} from its hub cache into "
        f"{constants.HF_HUB_CACHE}, and set HF_HUB_OFFLINE=1.",
    )


def _reporting(progress: Progress) -> type:
    """A bar for the library that shows nothing and reports its bytes."""

    class Reporting(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            # Some versions have a second bar of bytes, for what goes over the network.
            # private: huggingface_hub.snapshot_download by tqdm_class
            self._counts = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading")
            self._done = 0
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                self._done += int(n or 0)
                progress(self._done, int(self.total or 0))

    return Reporting
