"""Files and folders that are whole or absent: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tuningfork.errors import RunFolderError

ASIDE = ".partial"  # the ending of what is not whole yet; a kill may leave one behind, and the next write removes it


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunFolderError that names the file and the way out."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be written: {error.strerror or error}. "
            "Make room or permit it, then continue with --resume; or choose another folder."
        ) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file open for writing that replaces `path` as a whole, or not at all if the block fails.

    Raises RunFolderError, naming the file, where the disk refuses (full, read-only).
    """
    aside = path.with_name(path.name + ASIDE)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new empty folder to fill; it becomes `path` once the block ends, or is removed if the block fails.

    `path` must not exist yet. Raises RunFolderError as `whole_file`.
    """
    aside = path.with_name(path.name + ASIDE)
    with explained(path):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
            for folder, _, names in os.walk(aside):
                for name in names:
                    with open(os.path.join(folder, name), "rb") as file:
                        os.fsync(file.fileno())
                _sync_folder(Path(folder))
            os.rename(aside, path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Bring renames inside a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
