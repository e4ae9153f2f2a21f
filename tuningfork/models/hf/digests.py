"""Checksums of an exported model, in a file beside it.

They show what a disk or a copy has spoilt, in the weights or in the few settings by which a model is read: most wrong
bits give another model that works. They protect from nobody, for whoever changes a file can change its checksum too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tuningfork.errors import ModelError
from tuningfork.files import checksum
from tuningfork.json_files import read_object
from tuningfork.wording import first_line

NAME = "tuningfork_digests.json"  # readers of the model pass it over
_KIND = "xxh3_128"
_ABOUT = "Checksums of these files as tuningfork exported them. Remove this file to change one of them on purpose."
_CURE = (
    "Get the folder anew; that of a run is exported again if it is removed and the run continued with --resume. If "
    f"files were changed on purpose, remove {NAME}."
)


def write(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of all files of a folder beside them; those that are `known`, by name, are not read for it.

    Raises OSError.
    """
    known = known or {}
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = {str(file.relative_to(folder)): file for file in files}
    digests = {name: known.get(name) or checksum(file) for name, file in names.items()}
    (folder / NAME).write_text(json.dumps({"about": _ABOUT, _KIND: digests}, indent=2) + "\n")


def check_export(path: str, weights: bool) -> None:
    """Whether an exported model is as it was exported; a folder without checksums is not looked at.

    Args:
        weights: look at the weights, which takes as long as reading them, or at all else.

    Raises:
        ModelError: a file is missing or is not as it was exported.
    """
    folder = Path(path)
    if not (folder / NAME).exists():
        return
    try:
        digests = read_object(folder / NAME).get(_KIND)
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise ValueError(f"it has no {_KIND}")
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in digests):
            raise ValueError("it names files elsewhere")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {NAME} is damaged: {first_line(error)}. {_CURE}") from error
    for name, digest in digests.items():
        if name.endswith(".safetensors") != weights:
            continue
        try:
            spoilt = checksum(folder / name) != digest
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {name} cannot be read: {first_line(error)}. {_CURE}") from error
        if spoilt:
            raise ModelError(f"{path}: {name} is not as it was exported. {_CURE}")
