"""What `data.train` and `data.eval` name -> the tables they stand for, and how many examples of each a mix takes.

A source is a file, a pattern with * or ?, a folder (of files, or as `datasets` saves one), or a data set of the hub:

    pairs.jsonl.gz    shards/*.parquet    shards/    saved-by-datasets/    saved-by-datasets/train
    hub:owner/name    hub:owner/name:test    hub:owner/name@revision:test

A folder or a hub name may hold splits. Training takes its training split, evaluation its validation or else its test
split. Where names do not tell which that is, the source is refused with the names, and its user names one of them.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tuningfork.data.read import (
    HUB,
    SUFFIXES,
    check_hub_name,
    check_there,
    hub_splits,
    is_saved_dataset,
    read_names,
    suffix_of,
)
from tuningfork.errors import DataError
from tuningfork.wording import counted

Use = Literal["train", "eval"]
"""What a source is for: the setting that names it, behind `data.`."""

KINDS: dict[Use, tuple[str, ...]] = {"train": ("train",), "eval": ("validation", "test")}
"""The kinds of split that a use takes: the first of them that is there."""

_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation", "heldout"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


@dataclass(frozen=True, slots=True)
class Tables:
    """What a source stands for: the tables to read, in order, and those beside them that are for the other use."""

    source: str
    taken: list[str]
    left: list[str]


def expand(source: str, use: Use = "train") -> Tables:
    """The tables of one source: each a file, a saved data set or a hub name with its split.

    Raises DataError where there is none, or where it is not told which of several splits is meant.
    """
    try:
        Path(source).resolve().is_file()
        return _expand(source, use)
    except (OSError, ValueError, RuntimeError) as error:  # too long, closed to us, a NUL in it, links in a circle
        why = getattr(error, "strerror", None) or error
        at = getattr(error, "filename", None) or source
        raise DataError(f"{at}: cannot be looked up ({why}). Check the path in the recipe, and its rights.") from error


def _expand(source: str, use: Use) -> Tables:
    path = Path(source)
    if path.is_file() or is_saved_dataset(path):
        return Tables(source, [source], [])
    if source.startswith(HUB):
        return _of_hub(source, use)
    if path.is_dir():
        splits = read_names(path)
        if splits:
            return _split(source, {name: str(path / name) for name in splits}, use)
        return _of_folder(source, path, use)
    if any(mark in source for mark in "*?["):
        files = sorted(p for p in map(Path, glob.glob(source, recursive=True)) if not p.is_dir())
        if not files:
            raise DataError(f"{source}: no file matches this pattern.")
        return Tables(source, list(map(str, files)), [])
    return Tables(source, [source], [])  # there is no such file, which reading it says best


def expand_all(sources: str | Sequence[str], use: Use = "train") -> list[Tables]:
    """The tables of each source. Raises DataError as `expand`, and where one table would be read twice."""
    found = [expand(source, use) for source in ([sources] if isinstance(sources, str) else sources)]
    seen: dict[str, str] = {}
    for tables in found:
        for table in tables.taken:
            real = table if table.startswith(HUB) else str(Path(table).resolve())
            if real in seen:
                raise DataError(f"{table}: is named twice (the other time as {seen[real]}). Name each file once.")
            seen[real] = table
    return found


def check_sources(sources: str | Sequence[str], use: Use) -> None:
    """Raise DataError where a source cannot be found, before minutes are spent on others. Nothing is opened."""
    for tables in expand_all(sources, use):
        for table in tables.taken:
            check_there(table)


def kind_of_split(name: str) -> str | None:
    """train, validation or test, by a word in a split's name or in a file's path; the last part of it that has one."""
    for part in reversed(Path(name.lower()).parts):
        words = re.split(r"[^a-z]+", re.sub(r"held[-_. ]?out", "heldout", part))
        found = next((_WORDS[word] for word in words if word in _WORDS), None)
        if found is not None:
            return found
    return None


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
    place alone. Raises DataError where a source has fewer examples than `counts` asks for, or where its share is so
    small that it comes to none.
    """
    wanted = list(sizes)
    if counts is not None:
        wanted = list(counts)
        for name, size, count in zip(names, sizes, counts, strict=True):
            if count > size:
                raise DataError(
                    f"{name}: data.counts asks for {counted(count, 'example')}, but only {size:,} can be used."
                )
    elif shares is not None:
        whole = min(size / share for size, share in zip(sizes, shares, strict=True))
        wanted = [min(size, round(whole * share)) for size, share in zip(sizes, shares, strict=True)]
        for name, share, count in zip(names, shares, wanted, strict=True):
            if count == 0:
                least = min(range(len(sizes)), key=lambda i: sizes[i] / shares[i])
                raise DataError(
                    f"{name}: data.shares gives it {share:g} beside {shares[least]:g} for {names[least]}, which has "
                    f"{counted(sizes[least], 'example')}. That comes to {whole * share:.2g} of an example, so none. "
                    "Raise its share or leave it out."
                )
    return [
        np.sort(np.random.default_rng([seed, place]).permutation(size)[:count])
        for place, (size, count) in enumerate(zip(sizes, wanted, strict=True))
    ]


def _of_hub(source: str, use: Use) -> Tables:
    """A hub name with the split that it says, else with `train`, or for evaluation with what the hub has for it."""
    check_hub_name(source)
    if ":" in source.removeprefix(HUB):
        return Tables(source, [source], [])
    if use == "train":
        return Tables(source, [f"{source}:train"], [])  # without asking the hub, which also works without a network
    return _split(source, {name: f"{source}:{name}" for name in hub_splits(source)}, use)


def _split(source: str, splits: Mapping[str, str], use: Use) -> Tables:
    """The one split of several, name -> table, that is for this use. A single one is meant, whatever its name."""
    names = list(splits)
    for kind in KINDS[use]:
        found = [name for name in names if kind_of_split(name) == kind]
        found = [kind] if kind in found else found  # rather than train_prefs
        if len(names) > 1 and found:
            names = found
            break
    if len(names) != 1:
        raise DataError(
            f"{source}: has the splits {', '.join(splits)}, and which of them is meant as data.{use} is not told by "
            f"their names. Name one: {splits[names[0]]}"
        )
    return Tables(source, [splits[names[0]]], [table for name, table in splits.items() if name != names[0]])


def _of_folder(source: str, path: Path, use: Use) -> Tables:
    """The files of a folder, or those of its files that are for this use."""
    files = sorted(p for p in _files_under(path) if suffix_of(p) in SUFFIXES)
    if not files:
        raise DataError(f"{source}: this folder has no {', '.join(SUFFIXES)} file, plain or with .gz.")
    kinds = {str(file): kind_of_split(str(file.relative_to(path))) for file in files}
    there = set(kinds.values())
    if len(there) == 1 or (use == "train" and there == {"train", None}):
        return Tables(source, list(kinds), [])
    wanted = next((kind for kind in KINDS[use] if kind in there), None)
    if None in there or wanted is None:
        first = {kind or "neither": name for name, kind in reversed(kinds.items())}
        named = ", ".join(f"{kind}: {Path(name).relative_to(path)}" for kind, name in sorted(first.items()))
        raise DataError(
            f"{source}: has files for several uses ({named}), and which of them are meant as data.{use} is not told "
            f"by their names. Name files or a pattern, such as {first['neither' if None in there else min(first)]}"
        )
    return Tables(
        source,
        [name for name, kind in kinds.items() if kind == wanted],
        [name for name, kind in kinds.items() if kind != wanted],
    )


def _files_under(folder: Path) -> Iterator[Path]:
    """All that is no folder, hidden names left out. What cannot be read is there, too, so that reading it fails: a link
    to nothing or a closed folder may be a part of the data. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place) / name for name in names if not name.startswith("."))
