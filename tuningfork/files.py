"""Files and folders that are whole or absent: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import xxhash

from tuningfork.errors import RunFolderError

ASIDE = ".partial"  # the ending of what is not whole yet; a kill may leave one behind, see clear_abandoned
DIGESTS = "digests.json"  # file name -> checksum, of all other files of a sealed folder
CURE = (
    "Make room or permit it, then give the command again, with --resume if the run had begun; or choose another folder."
)

SCRATCH_CURE = "Temporary files lie there: make room or permit it, or set TMPDIR to another folder."

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotAFile(OSError):
    """What has a file's name is a pipe, a socket or a device. `strerror` says which."""


def opened(path: str | Path) -> io.BufferedReader:
    """A regular file, open for reading. Whatever else has the name is not opened, nor waited for: a pipe gives nothing
    until somebody writes to it, and a device may have no end.

    Raises NotAFile for those; other kinds of OSError as `open`, for a folder too.
    """
    _check_regular(path, os.stat(path).st_mode)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for what may have taken its place meanwhile
    try:
        _check_regular(path, os.fstat(handle).st_mode)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check_regular(path: str | Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise NotAFile(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file", str(path))


@contextmanager
def explained(path: Path, cure: str = CURE) -> Iterator[None]:
    """Turn an OSError into a RunFolderError that names the file and the way out, the `cure`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror or error}. {cure}") from error


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
def whole_folder(path: Path, cure: str = CURE) -> Iterator[Path]:
    """A new empty folder to fill; it becomes `path` once the block ends, or is removed if the block fails.

    `path` must not exist yet. Raises RunFolderError as `whole_file`, with this `cure`; an OSError of the block counts
    as the disk's refusal.
    """
    aside = path.with_name(path.name + ASIDE)
    with explained(path, cure):
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


def seal(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Write the checksums of a folder's files beside them; those that are `known`, by name, are not read for it.

    Raises OSError.
    """
    known = known or {}
    digests = {file.name: known.get(file.name) or checksum(file) for file in sorted(folder.iterdir())}
    (folder / DIGESTS).write_text(json.dumps(digests))


def check_sealed(folder: Path, names: Iterable[str] = ()) -> None:
    """Raise ValueError where a file of a sealed folder is not as it was written, or one of these `names` is not sealed;
    OSError where one cannot be read. What was put there later is passed over."""
    with opened(folder / DIGESTS) as content:
        try:
            digests = json.loads(content.read())
        except RecursionError as error:
            raise ValueError(f"{DIGESTS} is damaged") from error
    if not isinstance(digests, dict) or not digests.keys() >= {*names}:
        raise ValueError(f"{DIGESTS} is damaged")
    for name, digest in digests.items():
        if checksum(folder / name) != digest:
            raise ValueError(f"{name} is damaged: it is not as it was written")


def checksum(file: Path) -> str:
    """A checksum of a file's bytes. Raises OSError."""
    with opened(file) as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


class Hashed(io.BufferedIOBase):
    """A file that is written from beginning to end, and hashed on the way: its checksum takes no second pass."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        self._digest.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        super().close()
        self._file.close()

    def checksum(self) -> str:
        """What `checksum` says of the file."""
        return self._digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder. A folder is renamed first, so that a kill leaves none that looks whole."""
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(path.name.removesuffix(ASIDE) + ASIDE)
        path.rename(aside)
        shutil.rmtree(aside)
    else:
        path.unlink()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for temporary files, removed in the end. Raises RunFolderError where there is no place for one."""
    with explained(Path(os.environ.get("TMPDIR", "/tmp")), SCRATCH_CURE):
        folder = tempfile.TemporaryDirectory(prefix="tuningfork-", ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name)


def clear_abandoned(folder: Path) -> None:
    """Remove files that a kill left half written: those that no process holds locked any more."""
    for path in folder.glob(f"*{ASIDE}"):
        with suppress(OSError), opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path, waiting: Callable[[], None] | None = None, cure: str = CURE) -> Iterator[None]:
    """Hold a folder for this process alone, making it if need be; one that is still empty in the end is removed again.

    Where another process holds it, `waiting` is called and that process waited for. Raises RunFolderError in that case
    without `waiting`, or where the disk refuses.
    """
    handle = _locked(folder, waiting, cure)
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # refuses a folder that has anything in it
        os.close(handle)


def _locked(folder: Path, waiting: Callable[[], None] | None, cure: str) -> int:
    """A locked handle of the folder."""
    while True:
        with explained(folder, cure):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except FileExistsError as error:
                raise RunFolderError(f"{folder} is not a folder. {cure}") from error
            try:
                handle = os.open(folder, os.O_RDONLY)
            except FileNotFoundError:  # removed just now
                continue
        try:
            _lock(handle, folder, waiting)
            if _is(folder, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the process that held it has removed it


def _lock(handle: int, folder: Path, waiting: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            raise RunFolderError(f"{folder} is in use: another process is running there. Wait for it to end.") from None
        waiting()
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks: then keeping runs apart is the user's


def _is(folder: Path, handle: int) -> bool:
    """Whether the handle is of the folder that has this name now."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Bring renames inside a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
