"""Files and folders that are whole or absent: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tuningfork.errors import RunFolderError

ASIDE = ".partial"  # the ending of what is not whole yet; a kill may leave one behind, see clear_abandoned


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
    # A name of its own, for another process may be writing the same file.
    aside = path.with_name(f"{path.stem}.{uuid.uuid4().hex[:8]}{path.suffix}{ASIDE}")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                with suppress(OSError):  # not every file system knows locks, and this one only protects from tidying
                    fcntl.flock(file, fcntl.LOCK_EX)
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


def clear_abandoned(folder: Path) -> None:
    """Remove files that a kill left half written: those that no process holds locked any more."""
    for path in folder.glob(f"*{ASIDE}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a folder for this process alone, making it if need be; one that is still empty in the end is removed again.

    Where another process holds it, `waiting` is called and that process waited for. Raises RunFolderError in that case
    without `waiting`, or where the disk refuses.
    """
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)  # FileExistsError where a file has that name
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise RunFolderError(
                    f"{folder} is in use: another process is running there. Wait for it to end."
                ) from None
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: then keeping runs apart is the user's
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # refuses a folder that has anything in it
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Bring renames inside a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
