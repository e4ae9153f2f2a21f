"""The reference cache: answer log-probs of the frozen model, under the hash of exactly what was scored.

An entry's folder (entries.py) holds `fingerprint.json` and shards of rows (shards.py). Shards are written whole and
never changed, so a kill loses at most the rows not flushed yet, several runs may fill one entry, and it grows when the
data does. A process that has written many small ones joins them into one, but leaves those of other processes alone:
what one of them scored wrongly stays to be found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuningfork.errors import ReferenceMismatch
from tuningfork.files import clear_abandoned, read_plain, whole_file
from tuningfork.json_files import as_object
from tuningfork.records import TokenExample, column, taken
from tuningfork.reference import shards
from tuningfork.reference.fingerprint import differing_facts
from tuningfork.reference.shards import Shard

FINGERPRINT = "fingerprint.json"
_MANY = 16  # small shards of this process, which are then joined


class ReferenceStore:
    """Reference log-probs by content. An entry serves one fingerprint."""

    def __init__(self, folder: Path, fingerprint: dict[str, str]) -> None:
        """Open an entry's folder, or start one.

        Raises:
            ReferenceMismatch: the folder belongs to another fingerprint, or a shard of it is damaged.
            RunFolderError: a file of it is a link, or cannot be written.
        """
        self.folder = folder
        self.fingerprint = fingerprint
        self._origin = json.dumps(sorted(fingerprint.items())).encode()
        path, rows = folder / FINGERPRINT, any(folder.glob("rows-*"))  # of other versions, too
        if os.path.lexists(path):
            _check_fingerprint(path, fingerprint)
        elif rows:
            raise ReferenceMismatch(
                f"{folder} has rows, but no fingerprint.json says what they belong to. Remove that folder to build it "
                "anew, or choose another reference.cache."
            )
        else:
            with whole_file(path) as file:
                file.write(json.dumps(fingerprint, indent=2).encode() + b"\n")
        clear_abandoned(folder)
        self._old = self._read()  # of other processes, or of this one before
        self._inherited = {shard.path for shard in self._old if shard.path is not None}
        self._own: list[Shard] = []
        self._new: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # content, answers, log-probs; not flushed

    def __len__(self) -> int:
        """Answers in the cache."""
        known, count = list[Shard](), 0
        for shard in self._shards():
            again = np.zeros(len(shard.contents), dtype=bool)
            for other in known:  # two processes may have scored the same
                again |= other.find(shard.contents) >= 0
            count += int((~again).sum())
            known.append(shard)
        return count

    def missing(self, examples: Sequence[TokenExample]) -> Sequence[TokenExample]:
        """The examples that are not cached, each content once. Raises ReferenceMismatch as `lookup`, but for holes."""
        contents = column(examples, "content")
        places = np.flatnonzero(self._entries(examples)[0] < 0)
        _, first = np.unique(contents[places], return_index=True)
        return taken(examples, places[np.sort(first)])

    def add(self, examples: Sequence[TokenExample], logps: Sequence[float]) -> None:
        """Keep the log-probs of all answers of these examples, in order. `flush` brings them to the disk."""
        answers = column(examples, "answers")
        found = np.array(logps, dtype=np.float64)
        if len(found) != answers.sum():
            raise ValueError(f"{len(found)} log-probs for {answers.sum()} answers")
        for place in np.flatnonzero(~np.isfinite(found))[:1].tolist():
            example = examples[int(np.searchsorted(np.cumsum(answers), place, side="right"))]
            raise ReferenceMismatch(
                f"{example.id}: the starting model gives an answer a log-prob of {found[place]}. Nothing of its pack "
                "was stored. Look at that example and at the model's weights."
            )
        self._new.append((column(examples, "content"), answers, found))

    def flush(self) -> None:
        """Write what was added since the last flush as one new shard."""
        new = self._pending()
        self._new.clear()
        if len(new.contents):
            self._own.append(new.written(self.folder, self._origin))
        if len(self._own) >= _MANY:
            self.join()

    def join(self) -> None:
        """Make one shard of all that this process has written."""
        if len(self._own) > 1:
            small, self._own = self._own, [Shard.joined(self._own).written(self.folder, self._origin)]
            for shard in small:  # the whole is on the disk before its parts go
                if shard.path is not None:
                    shard.path.unlink(missing_ok=True)

    def reopen(self) -> None:
        """Read what other processes of this run have added; all of this one's must be flushed. What was inherited is
        what was there before any did."""
        self._old, self._own = self._read(), []

    def lookup(self, examples: Sequence[TokenExample]) -> np.ndarray:
        """Log-probs of all answers of these examples, float64 [A].

        Raises:
            ReferenceMismatch: an example is not cached, or a shard has other answers of it. A hole is never filled with
                a number.
        """
        owners, entries = self._entries(examples)
        holes = np.flatnonzero(owners < 0)
        if len(holes):
            raise ReferenceMismatch(
                f"{self.folder}: {len(holes)} of {len(examples)} examples are not in the cache, first "
                f"{examples[int(holes[0])].id}. Build it with: tuningfork reference <recipe>."
            )
        answers = column(examples, "answers")
        starts = np.cumsum(answers) - answers
        entry_of = np.repeat(entries - starts, answers) + np.arange(answers.sum())
        owner_of, found = np.repeat(owners, answers), np.empty(answers.sum())
        for number, shard in enumerate(self._shards()):
            of_shard = owner_of == number
            found[of_shard] = shard.logps[entry_of[of_shard]]
        return found

    def inherited(self, examples: Sequence[TokenExample]) -> list[tuple[Path, np.ndarray]]:
        """Each shard that was there when this store was opened, and the places of the examples that it serves."""
        owners, _ = self._find(column(examples, "content"))
        served = [(shard.path, np.flatnonzero(owners == number)) for number, shard in enumerate(self._old)]
        return [(path, places) for path, places in served if path in self._inherited and len(places)]

    def is_inherited(self, file: Path) -> bool:
        """Whether a shard was there when this store was opened, and so is of an earlier run or of another."""
        return file in self._inherited

    def files_of(self, examples: Sequence[TokenExample]) -> list[Path]:
        """The shard that has each of these examples, which are cached; the folder for what is in memory alone."""
        owners, _ = self._find(column(examples, "content"))
        places = [shard.path or self.folder for shard in self._shards()]
        return [places[owner] for owner in owners.tolist()]

    def _entries(self, examples: Sequence[TokenExample]) -> tuple[np.ndarray, np.ndarray]:
        """What `_find` says of the examples, each with all of its answers. Raises ReferenceMismatch."""
        contents, answers = column(examples, "content"), column(examples, "answers").astype(np.int64)
        owners, entries = self._find(contents)
        for number, shard in enumerate(self._shards()):
            here = owners == number
            if here.any():
                shard.check(entries[here], contents[here], answers[here])
        return owners, entries

    def _find(self, contents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each content: its shard's number among `_shards`, and its first entry there; -1 where there is none."""
        owners, entries = np.full(len(contents), -1), np.full(len(contents), -1)
        wanted = np.arange(len(contents))
        for number, shard in enumerate(self._shards()):
            found = shard.find(contents[wanted])
            here = found >= 0
            owners[wanted[here]], entries[wanted[here]] = number, found[here]
            wanted = wanted[~here]
        return owners, entries

    def _shards(self) -> list[Shard]:
        """All there are; those that were there at the start come first, the largest before all others."""
        return [*self._old, *self._own, *([self._pending()] if self._new else [])]

    def _pending(self) -> Shard:
        """What was added and not flushed, each content once and none that a shard has."""
        if len(self._new) > 1:
            contents, answers, logps = map(np.concatenate, zip(*self._new, strict=True))
            self._new[:] = [(contents, answers, logps)]
        if not self._new:
            return Shard(np.zeros(0, "S16"), np.zeros(0))
        contents, answers, logps = self._new[0]
        known = np.zeros(len(contents), dtype=bool)
        for shard in (*self._old, *self._own):
            known |= shard.find(contents) >= 0
        _, first = np.unique(contents, return_index=True)
        kept = ~known & np.isin(np.arange(len(contents)), first)
        return Shard.of(contents[kept], answers[kept], logps[np.repeat(kept, answers)])

    def _read(self) -> list[Shard]:
        """The folder's shards, the largest first. Another process may just be joining some of its own."""
        while True:
            try:
                found = [shards.read_shard(path, self._origin) for path in sorted(self.folder.glob(shards.PATTERN))]
            except FileNotFoundError:
                continue
            return sorted(found, key=lambda shard: -len(shard.contents))


def _check_fingerprint(path: Path, ours: dict[str, str]) -> None:
    try:
        theirs = as_object(read_plain(path))
    except OSError as error:
        raise ReferenceMismatch(
            f"{path} cannot be read: {error.strerror or error}. Permit it, or choose another reference.cache."
        ) from error
    except ValueError:
        raise ReferenceMismatch(f"{path} is damaged. Remove the folder {path.parent} to build it anew.") from None
    different = differing_facts(ours, theirs)
    if different:
        lines = [
            f"  {name}: this run has {mine!r}, the cache was built with {other!r}" for name, mine, other in different
        ]
        if {"code", "model code"} & {name for name, *_ in different}:
            lines.append("  so it was built by other code than this run would score with, and equal bits are not known")
        raise ReferenceMismatch(
            f"{path.parent} holds the reference log-probs of another set-up:",
            *lines,
            "They would not equal this run's. Choose another reference.cache, or remove that folder to build it anew.",
        )
