"""What `data.train` names -> the tables it stands for, and how many of each table's examples a mix takes.

A source is a file, a pattern with * or ?, a folder (of files, or as `datasets` saves one), or a data set of the hub:

    pairs.jsonl.gz    shards/*.parquet    shards/    saved-by-datasets/    saved-by-datasets/train
    hub:owner/name    hub:owner/name:test    hub:owner/name@revision:test
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuningfork.data.read import HUB, SUFFIXES, is_saved_dataset, read_names, suffix_of
from tuningfork.errors import DataError


def expand(source: str) -> list[str]:
    """The tables of one source, in order: each a file, a saved data set or a hub name. Raises DataError."""
    path = Path(source)
    if source.startswith(HUB) or path.is_file() or is_saved_dataset(path):
        return [source]
    if path.is_dir():
        splits = read_names(path)
        if splits:
            return [str(path / split) for split in splits]
        files = sorted(
            p for p in path.rglob("*") if p.is_file() and suffix_of(p) in SUFFIXES and not _hidden(p.relative_to(path))
        )
        if not files:
            raise DataError(f"{source}: this folder has no {', '.join(SUFFIXES)} file, plain or with .gz.")
        return list(map(str, files))
    if any(mark in source for mark in "*?["):
        files = sorted(p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file())
        if not files:
            raise DataError(f"{source}: no file matches this pattern.")
        return list(map(str, files))
    return [source]  # there is no such file, which reading it says best


def expand_all(sources: str | Sequence[str]) -> list[list[str]]:
    """The tables of each source. Raises DataError where one table would be read twice."""
    found = [expand(source) for source in ([sources] if isinstance(sources, str) else sources)]
    seen: dict[str, str] = {}
    for tables in found:
        for table in tables:
            real = table if table.startswith(HUB) else str(Path(table).resolve())
            if real in seen:
                raise DataError(f"{table}: is named twice (the other time as {seen[real]}). Name each file once.")
            seen[real] = table
    return found


def mix(
    sizes: Sequence[int],
    names: Sequence[str],
    shares: Sequence[float] | None,
    counts: Sequence[int] | None,
    seed: int,
) -> list[np.ndarray]:
    """Which examples of each source a mix takes: sorted int64 indices into each source's examples.

    `shares` are the parts of the whole that the sources should make up, in any unit; as many examples are taken as can
    be without taking one twice. `counts` are numbers of examples. Which ones is decided by `seed` and each source's
    place alone. Raises DataError where a source has fewer examples than `counts` asks for.
    """
    wanted = list(sizes)
    if counts is not None:
        wanted = list(counts)
        for name, size, count in zip(names, sizes, counts, strict=True):
            if count > size:
                raise DataError(f"{name}: data.counts asks for {count:,} examples, but only {size:,} can be used.")
    elif shares is not None:
        whole = min(size / share for size, share in zip(sizes, shares, strict=True))
        wanted = [min(size, round(whole * share)) for size, share in zip(sizes, shares, strict=True)]
    return [
        np.sort(np.random.default_rng([seed, place]).permutation(size)[:count])
        for place, (size, count) in enumerate(zip(sizes, wanted, strict=True))
    ]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
