"""What may be replaced of reports that a command writes into a folder of its own inside the run folder: its own."""

from __future__ import annotations

from pathlib import Path

from tuningfork.errors import RunFolderError
from tuningfork.files import check_plain, explained, plain

_BEGINNING = 1000  # bytes, in which a report says what it is


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
