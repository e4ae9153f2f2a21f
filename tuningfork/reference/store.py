"""The reference cache: answer log-probs of the frozen model, under the hash of exactly what was scored.

A folder holds `fingerprint.json` and shards of rows. Shards are written whole and never changed, so a kill loses at
most the rows not flushed yet, several runs may fill one folder, and the cache grows when the data does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tuningfork.errors import ReferenceMismatch
from tuningfork.files import clear_abandoned, whole_file
from tuningfork.records import TokenExample
from tuningfork.reference.fingerprint import differences

_KEY_BYTES = 16


class ReferenceStore:
    """Reference log-probs by content. One folder serves one fingerprint."""

    def __init__(self, folder: Path, fingerprint: dict[str, str]) -> None:
        """Open a cache folder, or start one.

        Raises:
            ReferenceMismatch: the folder belongs to another fingerprint, or a shard of it is damaged.
        """
        self.folder = folder
        self.fingerprint = fingerprint
        self._rows: dict[bytes, float] = {}
        self._new: dict[bytes, float] = {}
        self._origin = _origin(fingerprint)
        path = folder / "fingerprint.json"
        shards = sorted(folder.glob("rows-*.npz"))
        if path.exists():
            _check_fingerprint(path, fingerprint)
        elif shards:
            raise ReferenceMismatch(
                f"{folder} has rows, but no fingerprint.json says what they belong to. Remove that folder to build it "
                "anew, or choose another reference.cache."
            )
        else:
            with whole_file(path) as file:
                file.write(json.dumps(fingerprint, indent=2).encode() + b"\n")
        clear_abandoned(folder)
        for shard in shards:
            self._rows.update(_read_shard(shard, self._origin))

    def __len__(self) -> int:
        return len(self._rows)

    def missing(self, examples: Iterable[TokenExample]) -> list[TokenExample]:
        """The examples of which an answer is not cached, each content once."""
        found: dict[bytes, TokenExample] = {}
        for example in examples:
            keys = example_keys(example)
            if any(key not in self._rows for key in keys):
                found.setdefault(b"".join(keys), example)
        return list(found.values())

    def add(self, examples: Sequence[TokenExample], logps: Sequence[float]) -> None:
        """Keep the log-probs of all answers of these examples, in order. `flush` brings them to the disk."""
        owners = [(key, example) for example in examples for key in example_keys(example)]
        found = list(zip(owners, logps, strict=True))
        for (_, example), logp in found:
            if not np.isfinite(logp):
                raise ReferenceMismatch(
                    f"{example.id}: the starting model gives an answer a log-prob of {logp}. Nothing of its pack was "
                    "stored. Look at that example and at the model's weights."
                )
        for (key, _), logp in found:
            self._rows[key] = self._new[key] = float(logp)

    def flush(self) -> None:
        """Write what was added since the last flush as one new shard."""
        if not self._new:
            return
        keys = np.frombuffer(b"".join(self._new), dtype=np.uint8).reshape(-1, _KEY_BYTES)
        logps = np.fromiter(self._new.values(), dtype=np.float64)
        digest = _digest(keys, logps, self._origin)
        # Named by content: whoever scores the same rows again, after a kill perhaps, writes the same file.
        with whole_file(self.folder / f"rows-{digest.hex()}.npz") as file:
            np.savez(file, keys=keys, logps=logps, digest=np.frombuffer(digest, dtype=np.uint8))
        self._new.clear()

    def lookup(self, examples: Sequence[TokenExample]) -> np.ndarray:
        """Log-probs of all answers of these examples, float64 [A].

        Raises:
            ReferenceMismatch: an answer is not cached. A hole is never filled with a number.
        """
        logps = [[self._rows.get(key) for key in example_keys(example)] for example in examples]
        holes = [example.id for example, row in zip(examples, logps, strict=True) if None in row]
        if holes:
            raise ReferenceMismatch(
                f"{self.folder}: {len(holes)} of {len(examples)} examples are not in the cache, first {holes[0]}. "
                "Build it with: tuningfork reference <recipe>."
            )
        return np.array([logp for row in logps for logp in row], dtype=np.float64)


def answer_key(prompt_ids: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> bytes:
    """The hash of one answer's content: prompt ids, answer ids, and which answer tokens count."""
    digest = hashlib.blake2b(len(prompt_ids).to_bytes(8, "little"), digest_size=_KEY_BYTES)
    for part, dtype in ((prompt_ids, np.int32), (ids, np.int32), (mask, np.bool_)):
        digest.update(np.ascontiguousarray(part, dtype=dtype).tobytes())
    return digest.digest()


def example_keys(example: TokenExample) -> list[bytes]:
    """The key of each answer of an example: the content of all of it, and the answer's place.

    An answer that is chosen in one row and rejected in another has two entries. Attention no longer needs that: its
    bits depend on the prompt and the answer alone.
    """
    parts = [answer_key(example.prompt_ids, answer.ids, answer.mask) for answer in example.answers]
    return [
        hashlib.blake2b(b"".join(parts) + place.to_bytes(4, "little"), digest_size=_KEY_BYTES).digest()
        for place in range(len(parts))
    ]


def _check_fingerprint(path: Path, ours: dict[str, str]) -> None:
    try:
        theirs = json.loads(path.read_bytes())
        if not isinstance(theirs, dict):
            raise ValueError
    except ValueError:
        raise ReferenceMismatch(f"{path} is damaged. Remove the folder {path.parent} to build it anew.") from None
    different = differences(ours, theirs)
    if different:
        lines = [
            f"  {name}: this run has {mine!r}, the cache was built with {other!r}" for name, mine, other in different
        ]
        if {"code", "model code"} & {name for name, *_ in different}:
            lines.append("  so it was built by other code than this run would score with, and equal bits are not known")
        raise ReferenceMismatch(
            f"{path.parent} holds the reference log-probs of another set-up:\n" + "\n".join(lines) + "\n"
            "They would not equal this run's. Choose another reference.cache, or remove that folder to build it anew."
        )


def _read_shard(path: Path, origin: bytes) -> dict[bytes, float]:
    try:
        with np.load(path, allow_pickle=False) as shard:
            keys, logps, digest = shard["keys"], shard["logps"], shard["digest"]
        intact = digest.tobytes() == _digest(keys, logps, origin) and keys.shape == (len(logps), _KEY_BYTES)
    except Exception:  # a damaged archive fails in a dozen ways, and all of them mean the same
        intact = False
    if not intact:
        raise ReferenceMismatch(
            f"{path} is damaged, or belongs to another cache. Remove that file: its rows are then scored again."
        )
    return {key.tobytes(): float(logp) for key, logp in zip(keys, logps, strict=True)}


def _origin(fingerprint: dict[str, str]) -> bytes:
    return json.dumps(sorted(fingerprint.items())).encode()


def _digest(keys: np.ndarray, logps: np.ndarray, origin: bytes) -> bytes:
    """A checksum of a shard's content, which also ties it to the fingerprint of its cache."""
    return hashlib.blake2b(keys.tobytes() + logps.tobytes() + origin, digest_size=16).digest()
