"""Whether what a command writes would be data the next time, told from names alone and without a library."""

from __future__ import annotations

import fnmatch
from pathlib import Path

_WRITTEN = (".json", ".jsonl")  # kinds of files that we write and that may be data


def would_read(source: str, folder: Path) -> bool:
    """Whether a source, a folder or a pattern of files at any depth, takes files of a folder that may not be there yet
    for data."""
    path = Path(source)
    if path.is_dir():
        inside = folder.resolve().is_relative_to(path.resolve())
        # Names that are hidden are left out of a folder.
        return inside and not any(part.startswith(".") for part in folder.resolve().relative_to(path.resolve()).parts)
    if not any(mark in source for mark in "*?["):
        return False
    file, pattern = (folder / "any.json").resolve(), path.parent.resolve() / path.name
    deep = "**" in path.parts or len(pattern.parts) == len(file.parts)
    return deep and any(fnmatch.fnmatch(str(file.with_suffix(suffix)), str(pattern)) for suffix in _WRITTEN)
