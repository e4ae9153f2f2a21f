"""Files and folders that are whole or absent: written aside, flushed to the disk, then renamed into place.

They lie in folders that may come from a stranger: the run folder, the caches. Nothing there is written or read through
a link, and nothing is removed but what bears a name that only we give, see `plain` and `clear_abandoned`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

import xxhash

from tuningfork.errors import RunFolderError

_ASIDE = re.compile(r"\..+\.tuningfork-[0-9a-f]{16}\.partial", re.DOTALL)
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
DIGESTS = "digests.json"  # file name -> checksum, of all other files of a sealed folder
LARGEST = 64 << 20  # bytes of a small file of ours
CURE = (
    "Make room or permit it, then give the command again, with --resume if the run had begun; or choose another folder."
)

SCRATCH_CURE = "Temporary files lie there: make room or permit it, or set TMPDIR to another folder."


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
        raise NotAFile(errno.EINVAL, f"it is {_kind(mode)}, not a file", str(path))


def _kind(mode: int) -> str:
    """What lies under a name, in words."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "of no known kind")


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
    aside = _aside(path)
    with explained(path):
        check_plain(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("xb") as file:
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

    `path` must not exist yet. All files get the mode that `open` would give them, for libraries keep what they write to
    its owner. Raises RunFolderError as `whole_file`, with this `cure`; an OSError of the block counts as the disk's
    refusal.
    """
    aside = _aside(path)
    with explained(path, cure):
        aside.mkdir(parents=True)
        mode = aside.stat().st_mode & 0o666  # what the umask, or the parent's default rights, leave of it
        try:
            yield aside
            for folder, _, names in os.walk(aside):
                for name in names:
                    with open(os.path.join(folder, name), "rb") as file:
                        if os.fstat(file.fileno()).st_mode & 0o666 != mode:
                            os.fchmod(file.fileno(), mode)
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


def check_sealed(folder: Path, names: Iterable[str] = (), only: Collection[str] | None = None) -> None:
    """Raise ValueError where a file of a sealed folder is not as it was written, or one of these `names` is not sealed;
    OSError where one cannot be read; RunFolderError as `plain`. What was put there later is passed over. `only` these
    files are looked at, if they are given."""
    try:
        digests = json.loads(read_plain(folder / DIGESTS))
    except RecursionError as error:
        raise ValueError(f"{DIGESTS} is damaged") from error
    if not isinstance(digests, dict) or not digests.keys() >= {*names}:
        raise ValueError(f"{DIGESTS} is damaged")
    if any(name in ("", "..") or Path(name).name != name for name in digests):  # they lead out of the folder
        raise ValueError(f"{DIGESTS} is damaged")
    for name, digest in digests.items():
        if only is not None and name not in only:
            continue
        check_plain(folder / name)
        if checksum(folder / name) != digest:
            raise ValueError(f"{name} is damaged: it is not as it was written")


def checksum(file: Path) -> str:
    """A checksum of a file's bytes; a link to a file is one. Raises OSError, also for what is no regular file."""
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


def remove(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a kill leaves none that looks whole."""
    aside = _aside(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for temporary files, removed in the end. Raises RunFolderError where there is no place for one."""
    with explained(Path(os.environ.get("TMPDIR", "/tmp")), SCRATCH_CURE):
        folder = tempfile.TemporaryDirectory(prefix="tuningfork-", ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name)


def clear_abandoned(folder: Path, held: bool = False) -> None:
    """Remove what a kill left half written: files that no process holds locked any more; or all such files and folders
    where the caller has `held` this folder, or one above it, for itself alone.

    They are known by their names, see `_aside`. Whatever else lies there stays, links by such a name too.
    """
    for path in [path for path in _entries(folder) if is_aside(path.name)]:
        with suppress(OSError, RunFolderError):
            if not held:
                with open(path, "rb", opener=plain) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            elif stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path)
            else:
                check_plain(path)
                path.unlink()


def is_aside(name: str) -> bool:
    """Whether a name is one that we give to what is not whole yet, and nobody else."""
    return _ASIDE.fullmatch(name) is not None


def plain(path: str, flags: int) -> int:
    """An `opener` for `open`, of files in our folders: plain ones only, and none through a link.

    A file that is written to must have no other name either. Raises RunFolderError, naming the file; OSError. The
    folders above it may be links: people keep their runs on another disk.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR) != 0
    with suppress(FileNotFoundError):  # before it is opened: opening is enough to set some devices going
        _check_kind(Path(path), os.lstat(path), folder=False, writes=writes)
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        _check_kind(Path(path), os.fstat(handle), folder=False, writes=writes)
    except BaseException:
        os.close(handle)
        raise
    return handle


def append_plain(path: Path, errors: str = "strict") -> TextIO:
    """A text file in one of our folders, to be appended to, and made if need be. Raises OSError, RunFolderError as
    `plain`; `errors` as of `open`."""
    return open(path, "a", encoding="utf-8", errors=errors, opener=plain)


def read_plain(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a file in one of our folders. Raises OSError; RunFolderError as `plain`, and where it has more
    bytes than any that we write."""
    with open(path, "rb", opener=plain) as file:
        content = file.read(largest + 1) if os.fstat(file.fileno()).st_size <= largest else None
    if content is None or len(content) > largest:
        raise RunFolderError(
            f"{path} has more than {largest:,} bytes, and nothing that tuningfork keeps under that name is so large. "
            "Put back what was there, or remove it."
        )
    return content


def check_plain(path: Path, folder: bool = False, writes: bool = False) -> None:
    """Raise RunFolderError where `path` is there and is no plain file, or no `folder`: a link, a pipe, a device; or
    where it has another name too and we shall write to it.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    _check_kind(path, status, folder, writes)


def _check_kind(path: Path, status: os.stat_result, folder: bool, writes: bool) -> None:
    found = _kind(status.st_mode)
    if found == "a link":
        raise RunFolderError(
            f"{path} is a link, and what tuningfork keeps there is never written or read through one. Remove it, or "
            "put what it leads to in its place. The folder as a whole may be a link."
        )
    wanted = "a folder" if folder else "a file"
    if found != wanted:
        raise RunFolderError(
            f"{path} is {found}, and tuningfork keeps {wanted} under that name. Move it away, or choose another folder."
        )
    if writes and status.st_nlink > 1:
        raise RunFolderError(
            f"{path} is a file with {status.st_nlink} names (hard links), and writing to it would change it under all. "
            "Put a copy in its place."
        )


def _aside(path: Path) -> Path:
    """A new name beside `path` for what is not whole yet, or not any more; a kill may leave it behind."""
    return path.with_name(f".{path.name}.tuningfork-{secrets.token_hex(8)}.partial")


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name; nothing where there is none."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def exclusive(folder: Path, waiting: Callable[[], None] | None = None, cure: str = CURE) -> Iterator[None]:
    """Hold a folder for this process alone. One that was made for it and is still empty in the end is removed again.

    Where another process holds it, `waiting` is called and that process waited for. Raises RunFolderError in that case
    without `waiting`, or where the disk refuses.
    """
    handle, made = _locked(folder, waiting, cure)
    try:
        yield
    finally:
        if made:
            with suppress(OSError):
                folder.rmdir()  # refuses a folder that has anything in it
        os.close(handle)


def _locked(folder: Path, waiting: Callable[[], None] | None, cure: str) -> tuple[int, bool]:
    """A locked handle of the folder, and whether it was made for that."""
    while True:
        made = True
        with explained(folder, cure):
            try:
                folder.mkdir(parents=True)
            except FileExistsError as error:
                made = False
                if not folder.is_dir():
                    if not os.path.lexists(folder):  # removed just now
                        continue
                    raise RunFolderError(f"{folder} is not a folder. {cure}") from error
            try:
                handle = os.open(folder, os.O_RDONLY)
            except FileNotFoundError:  # removed just now
                continue
        try:
            _lock(handle, folder, waiting)
            if _is(folder, handle):
                return handle, made
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
