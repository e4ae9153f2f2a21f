"""Files of a run folder that people read: written as a whole, and a report replaces an earlier report only.

A command that reports has a folder of its own inside the run folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tuningfork.errors import NonFiniteError, RunFolderError
from tuningfork.files import check_plain, explained, plain, whole_file
from tuningfork.wording import escaped

_BEGINNING = 1000  # bytes, in which a report says what it is


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON as a whole, in place of what was there.

    What a terminal would obey is written as JSON's own escapes, for people look at such files with `cat`.

    Raises:
        NonFiniteError: a number is nan or infinite, which JSON cannot say.
        RunFolderError: the disk refuses (full, read-only); the file is named.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise NonFiniteError(f"{path}: a number to be written is nan or infinite.") from None
    write_text(path, escaped(text) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: after a crash at any moment it is the old one or the new one, never a part.

    Raises:
        RunFolderError: the disk refuses (full, read-only); the file is named.
    """
    # A lone surrogate has no UTF-8; backslashreplace makes it \udc80, which in a JSON string means the same.
    with whole_file(path) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


def check_folder(folder: Path) -> None:
    """Raise RunFolderError where no folder can be, before minutes are spent, or where there is a link.

    The run folder that it lies in may be one.
    """
    check_plain(folder, folder=True)
    place = next((path for path in (folder, *folder.parents) if path.exists() or path.is_symlink()), None)
    if place is not None and not place.is_dir():
        raise RunFolderError(f"{place} is a file, so {folder} cannot be made. Choose another output.dir.")


def check_file(path: Path, made_by: str, mark: str) -> None:
    """Raise RunFolderError where there is something that the command `made_by` has not written: its files have the
    `mark`, as no other files do, at their beginning."""
    check_plain(path)
    if path.exists() and not _has(path, mark):
        raise RunFolderError(
            f"{path} exists and was not made by `{made_by}`, so it is not replaced. Move it away or choose another "
            "output.dir."
        )


def _has(path: Path, mark: str) -> bool:
    with explained(path), open(path, "rb", opener=plain) as file:
        return mark.encode() in file.read(_BEGINNING)
