"""Shards of the reference cache: log-probs in the order of their examples' contents, mapped from files.

A file has two columns, one behind the other, with an entry for each of A answers:

    content  bytes16 [A]  the hash of the answer's example (records.content_digest), in ascending order
    logp     float64 [A]  the answer's log-prob; an example's answers lie side by side, in their order

Its name holds a checksum of its content and of what it was scored with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tuningfork.errors import ReferenceMismatch
from tuningfork.files import plain, whole_file

PATTERN = "rows-*.bin"
_CONTENT, _LOGP = np.dtype("S16"), np.dtype("<f8")
_ENTRY = _CONTENT.itemsize + _LOGP.itemsize


@dataclass(frozen=True, eq=False)
class Shard:
    """Log-probs [A] under their examples' contents [A], ascending. `path` is None where they are in memory alone."""

    contents: np.ndarray
    logps: np.ndarray
    path: Path | None = None

    @classmethod
    def of(cls, contents: np.ndarray, answers: np.ndarray, logps: np.ndarray) -> Shard:
        """Of examples in any order: content [n], answers of each [n], log-probs of all answers [A]."""
        of_answer = np.repeat(contents, answers)
        order = np.argsort(of_answer, kind="stable")
        return cls(of_answer[order], logps[order])

    @classmethod
    def joined(cls, shards: Sequence[Shard]) -> Shard:
        """Several shards that have no content in common, as one."""
        contents, logps = (np.concatenate([getattr(s, name) for s in shards]) for name in ("contents", "logps"))
        return cls.of(contents, np.ones(len(contents), dtype=np.int64), logps)

    def find(self, contents: np.ndarray) -> np.ndarray:
        """int64 [n]: the entry of each content's first answer; -1 where there is none."""
        if not len(self.contents):
            return np.full(len(contents), -1)
        places = np.searchsorted(self.contents, contents)
        places[places == len(self.contents)] = 0
        return np.where(self.contents[places] == contents, places, -1)

    def check(self, entries: np.ndarray, contents: np.ndarray, answers: np.ndarray) -> None:
        """The entries of each content, from its first one on, are as many as its example has answers.

        Raises ReferenceMismatch where they are not, whatever the checksum says: log-probs of other answers, or none,
        would be taken for those that are missing.
        """
        after = entries + answers
        last = np.minimum(after, len(self.contents)) - 1
        whole = (after <= len(self.contents)) & (answers > 0) & (self.contents[last] == contents)
        more = self.contents[np.minimum(after, len(self.contents) - 1)] == contents
        if not (whole & ~((after < len(self.contents)) & more)).all():
            raise ReferenceMismatch(_not_ours(self.path, "has other answers of an example than there are"))

    def written(self, folder: Path, origin: bytes) -> Shard:
        """This shard, in a file of a folder: whoever scores the same again, after a kill perhaps, writes the same.

        Another process that has written it too may have joined it with others meanwhile. It is then on the disk within
        that shard, and stays in memory here. Raises RunFolderError where the disk refuses.
        """
        digest = _digest(self.contents.tobytes() + self.logps.tobytes(), origin)
        path = folder / f"rows-{digest}.bin"
        with whole_file(path) as file:
            file.write(np.ascontiguousarray(self.contents).data.cast("B"))
            file.write(np.ascontiguousarray(self.logps).data)
        try:
            return read_shard(path, origin)
        except FileNotFoundError:
            return self


def read_shard(path: Path, origin: bytes) -> Shard:
    """A shard, mapped. Raises ReferenceMismatch where it is not as it was written; RunFolderError where it is a link;
    FileNotFoundError."""
    try:
        with open(path, "rb", opener=plain) as file:
            raw = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ReferenceMismatch(
            f"{path} cannot be read: {error.strerror or error}. Permit it, or remove that file: its rows are then "
            "scored again."
        ) from error
    except ValueError:  # it is empty
        raw = np.zeros(0, np.uint8)
    if not len(raw) or len(raw) % _ENTRY or path.name != f"rows-{_digest(raw.data, origin)}.bin":
        raise ReferenceMismatch(_not_ours(path, "is damaged, or belongs to another cache"))
    split = len(raw) // _ENTRY * _CONTENT.itemsize
    contents, logps = raw[:split].view(_CONTENT), raw[split:].view(_LOGP)
    # A checksum holds for whatever somebody wrote; entries are found by halves, and taken side by side.
    if (contents[1:] < contents[:-1]).any() or not np.isfinite(logps).all():
        raise ReferenceMismatch(_not_ours(path, "holds what tuningfork does not write"))
    return Shard(contents, logps, path)


def _not_ours(path: Path | None, why: str) -> str:
    return f"{path or 'a shard in memory'} {why}. Remove that file: its rows are then scored again."


def _digest(content: bytes | memoryview, origin: bytes) -> str:
    """A checksum of a shard's bytes, which also ties it to the fingerprint of its cache."""
    digest = xxhash.xxh3_128(content)
    digest.update(origin)
    return digest.hexdigest()
