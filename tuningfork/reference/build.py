"""Filling the cache: score what is missing with the frozen model, by the same code that will train it; and scoring some
of what others have put there again, to see whether they did the same."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tuningfork.errors import ReferenceMismatch
from tuningfork.records import PackedBatch, TokenExample
from tuningfork.reference.store import ReferenceStore
from tuningfork.wording import counted

RESCORED = 64  # examples at most, if no more shards; of a large set, a tenth of wrong rows passes once in 800 times
SHARE = 1 / 10  # of those that are cached: to check a small set must not take as long as to score it

_FLUSH_SECONDS = 20.0  # a kill costs no more work than this

Score = Callable[[PackedBatch], Tensor]
"""Summed log-probs of a pack's answers under the frozen model, [A]."""


def fill(
    store: ReferenceStore,
    packs: Iterable[PackedBatch],
    score: Score,
    scored: Callable[[int], None] = lambda count: None,
    keep: bool = True,
) -> None:
    """Score examples and store their log-probs; what is stored survives a kill.

    Args:
        packs: of what `ReferenceStore.missing` gave; built as they are needed, if it is an iterator.
        scored: told the number of examples after each pack.
        keep: whether this process stores what it scores, or another that computes the same with it.
    """
    flushed = time.monotonic()
    try:
        for pack in packs:
            logps = score(pack).tolist()
            if keep:
                store.add(pack.examples, logps)
            scored(len(pack.examples))
            if time.monotonic() - flushed > _FLUSH_SECONDS:
                store.flush()
                flushed = time.monotonic()
    finally:
        store.flush()
    store.join()


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer whose log-prob is not the cached one."""

    example: TokenExample
    answer: int
    now: float
    cached: float

    def __str__(self) -> str:
        return f"{self.example.id}, answer {self.answer}: model {self.now:.6f}, cache {self.cached:.6f}"

    @property
    def size(self) -> float:
        """How far apart they are; a number and none are further apart than any two numbers."""
        size = abs(self.now - self.cached)
        return size if np.isfinite(size) else np.inf


def wrongly_cached(
    store: ReferenceStore,
    packs: Iterable[PackedBatch],
    score: Score,
    scored: Callable[[int], None] = lambda count: None,
) -> list[Difference]:
    """The answers that score to other bits than the cache has for them, the worst first."""
    found = []
    for pack in packs:
        found += unequal(pack.examples, score(pack).cpu().numpy(), store.lookup(pack.examples))
        scored(len(pack.examples))
    return sorted(found, key=lambda difference: -difference.size)


def unequal(examples: Sequence[TokenExample], now: np.ndarray, cached: np.ndarray) -> list[Difference]:
    """Where log-probs of the examples' answers, [A] both, have not the same bits, the worst first."""
    answers = [(example, answer) for example in examples for answer in range(len(example.answers))]
    places = np.flatnonzero(now != cached).tolist()
    found = [Difference(*answers[place], now[place], cached[place]) for place in places]
    return sorted(found, key=lambda difference: -difference.size)


def to_rescore(store: ReferenceStore, parts: Sequence[Sequence[TokenExample]]) -> list[tuple[int, np.ndarray]]:
    """Some of the examples whose log-probs this process finds in the cache: (part, places in it).

    They come from every older shard, and of each from every part that it serves, such as the training and the held-out
    set: a shard is of one process, and so of one code. Within these they are spread by a fixed seed. A few wrong rows
    of a small set may pass; those of the first step are all compared by the step-0 check.
    """
    groups = [(part, places) for part, of in enumerate(parts) for _, places in store.inherited(of)]
    wanted = min(RESCORED, SHARE * sum(len(places) for _, places in groups))
    each = max(1, int(wanted / max(len(groups), 1)))
    draw = np.random.default_rng(0)
    chosen = [(part, draw.choice(places, min(each, len(places)), replace=False)) for part, places in groups]
    return [(part, np.sort(places)) for part, places in chosen]


def check_rescored(
    store: ReferenceStore,
    packs: Iterable[PackedBatch],
    score: Score,
    scored: Callable[[int], None] = lambda count: None,
) -> None:
    """Score what `to_rescore` chose again. Every log-prob must have the very bits of the cached one.

    Raises:
        ReferenceMismatch: some have not. It names their shards and the worst row of each.
    """
    wrong = wrongly_cached(store, packs, score, scored)
    if wrong:
        raise ReferenceMismatch(
            f"{store.folder}: log-probs of before are not those that the starting model has now:",
            *by_file(store, wrong),
            "Their fingerprint is this run's, so they are spoiled, or were scored by code or on a machine that differs "
            "in what no fingerprint names. Remove these files: their rows are then scored again.",
        )


def by_file(store: ReferenceStore, wrong: Sequence[Difference]) -> list[str]:
    """A line for each file of the cache that has wrong log-probs: how many, and the worst three. `wrong` has the worst
    first."""
    files = store.files_of([difference.example for difference in wrong])
    lines = []
    for file, count in Counter(files).items():
        worst = [str(difference) for difference, path in zip(wrong, files, strict=True) if path == file][:3]
        lines.append(f"  {file}: {counted(count, 'log-prob')}, worst {'; '.join(worst)}")
    return lines
