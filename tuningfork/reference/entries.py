"""The entries of a reference cache: a folder for each fingerprint, so that any number of models share one cache.

An entry is named by a hash of its fingerprint, and is never changed or removed for another's sake.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tuningfork.errors import RunFolderError
from tuningfork.files import check_plain, read_plain
from tuningfork.json_files import as_object
from tuningfork.reference.fingerprint import differing_facts, text_digest
from tuningfork.reference.store import FINGERPRINT, ReferenceStore
from tuningfork.wording import counted

_HASHES = ("weights", "config", "code", "model code")  # facts whose values tell a reader nothing


def open_entry(
    cache: Path, fingerprint: dict[str, str], notice: Callable[[str], None] = lambda text: None
) -> ReferenceStore:
    """The entry of a cache folder that has this fingerprint, made if need be; `notice` is told which it is.

    Raises ReferenceMismatch where it is damaged, RunFolderError where it is a link, or the disk refuses.
    """
    entry = place(cache, fingerprint)
    check_plain(entry, folder=True)
    others = [] if os.path.exists(entry) else _fingerprints(cache)
    earlier = os.path.exists(cache / FINGERPRINT)
    store = ReferenceStore(entry, fingerprint)
    answers = len(store)
    said = f"reference cache: {entry}, {counted(answers, 'answer') if answers else 'new'}"
    if others:
        said += f"; {_nearest(fingerprint, others)}"
    notice(said)
    if earlier:
        notice(f"{cache / FINGERPRINT} and the rows beside it are of an earlier version's cache; they stay, unused")
    return store


def place(cache: Path, fingerprint: Mapping[str, str]) -> Path:
    """Where the entry with this fingerprint is, or would be."""
    return cache / text_digest(json.dumps(sorted(fingerprint.items())))


def _fingerprints(cache: Path) -> list[tuple[str, dict[str, str]]]:
    """(name, fingerprint) of all entries; one that cannot be read is none."""
    found = []
    for path in sorted(cache.glob(f"*/{FINGERPRINT}")):
        try:
            check_plain(path.parent, folder=True)
            found.append((path.parent.name, as_object(read_plain(path))))
        except (OSError, ValueError, RunFolderError):
            continue
    return found


def _nearest(ours: Mapping[str, str], others: list[tuple[str, dict[str, str]]]) -> str:
    """In what the entry that is most like ours differs, which of all models' that has the same weights, if any does."""

    def unlike(other: tuple[str, dict[str, str]]) -> tuple[bool, int]:
        return ours.get("weights") != other[1].get("weights"), len(differing_facts(ours, other[1]))

    name, theirs = min(others, key=unlike)
    facts = [
        fact if fact in _HASHES else f"{fact} (here {mine!r}, there {other!r})"
        for fact, mine, other in differing_facts(ours, theirs)
    ]
    there = counted(len(others), "other entry", "other entries")
    return f"of {there} the nearest, {name}, differs in {', '.join(facts)}"
