"""Filling the cache: score what is missing with the frozen model, by the same code that will train it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch import Tensor

from tuningfork.records import PackedBatch
from tuningfork.reference.store import ReferenceStore

_FLUSH_SECONDS = 20.0  # a kill costs no more work than this


def fill(
    store: ReferenceStore,
    packs: Iterable[PackedBatch],
    score: Callable[[PackedBatch], Tensor],
    scored: Callable[[int], None] = lambda count: None,
) -> None:
    """Score examples and store their log-probs; what is stored survives a kill.

    Args:
        packs: of what `ReferenceStore.missing` gave; built as they are needed, if it is an iterator.
        score: summed log-probs of a pack's answers under the frozen model, [A].
        scored: told the number of examples after each pack.
    """
    flushed = time.monotonic()
    try:
        for pack in packs:
            store.add(pack.examples, score(pack).tolist())
            scored(len(pack.examples))
            if time.monotonic() - flushed > _FLUSH_SECONDS:
                store.flush()
                flushed = time.monotonic()
    finally:
        store.flush()
