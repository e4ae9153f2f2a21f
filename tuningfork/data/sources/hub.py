"""Names of data sets on the hub, with the commit that is meant: without one, a name means another data set whenever its
owner changes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub

from tuningfork.data.tables.read import HUB, HUB_NAME, SUFFIXES, suffix_of

Sources = str | list[str]
Commit = Callable[[str, str | None], str | None]
"""The commit of (owner/name, revision); None where it is not known."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BARE = re.compile(rf"{HUB_NAME}(?::[\w.+-]+)?")


def pinned_sources(sources: Sources, commit: Commit) -> Sources:
    """The sources with those of the hub as ``hub:owner/name@commit:split``, where `commit` knows their commit.

    ``owner/name`` is one without `hub:`, if there is neither such a file nor a folder `owner` here.
    """
    if not isinstance(sources, str):
        return [_pinned(source, commit) for source in sources]
    return _pinned(sources, commit)


def newest_commit(repository: str, revision: str | None) -> str | None:
    """What a revision of a data set is on the hub now; None where the hub cannot be asked."""
    try:
        return huggingface_hub.HfApi().dataset_info(repository, revision=revision, timeout=20.0).sha
    except Exception:  # without a network, what was loaded before is read; the run knows its examples by their hash
        return None


def commit_in(before: Sources | None) -> Commit:
    """The commits that the sources of a run have, by owner/name."""
    named = [before] if isinstance(before, str) else before or []
    known = {
        repository: revision
        for repository, revision, _ in map(_parts, filter(_is_hub, named))
        if revision is not None and _COMMIT.fullmatch(revision)
    }
    return lambda repository, revision: known.get(repository) if revision is None else None


def _pinned(source: str, commit: Commit) -> str:
    here = os.path.lexists(source) or os.path.isdir(os.path.dirname(source))
    if not here and _BARE.fullmatch(source) and suffix_of(Path(source)) not in SUFFIXES:
        source = HUB + source
    if not _is_hub(source):
        return source
    repository, revision, split = _parts(source)
    if revision is not None and _COMMIT.fullmatch(revision):
        return source
    found = commit(repository, revision)
    return source if found is None else f"{HUB}{repository}@{found}{split}"


def _is_hub(source: str) -> bool:
    return source.startswith(HUB)


def _parts(source: str) -> tuple[str, str | None, str]:
    """owner/name, revision, and the split with its colon."""
    name, colon, split = source.removeprefix(HUB).partition(":")
    repository, _, revision = name.partition("@")
    return repository, revision or None, colon + split
