"""Filling the cache: score what is missing with the frozen model, by the same code that will train it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from tuningfork.records import PackedBatch, TokenExample
from tuningfork.reference.store import ReferenceStore

_WINDOW = 1024  # examples packed together: enough to fill packs well, few enough to begin at once
_FLUSH_SECONDS = 20.0  # a kill costs no more work than this


def fill(
    store: ReferenceStore,
    examples: Sequence[TokenExample],
    packs_of: Callable[[Sequence[TokenExample]], list[PackedBatch]],
    score: Callable[[PackedBatch], Tensor],
    scored: Callable[[int], None] = lambda count: None,
) -> None:
    """Score the missing examples and store their log-probs; what is stored survives a kill.

    Args:
        examples: what `ReferenceStore.missing` gave.
        packs_of: lays examples out in packs.
        score: summed log-probs of a pack's answers under the frozen model, [A].
        scored: told the number of examples after each pack.
    """
    flushed = time.monotonic()
    try:
        for start in range(0, len(examples), _WINDOW):
            for pack in packs_of(examples[start : start + _WINDOW]):
                store.add(pack.examples, score(pack).tolist())
                scored(len(pack.examples))
                if time.monotonic() - flushed > _FLUSH_SECONDS:
                    store.flush()
                    flushed = time.monotonic()
    finally:
        store.flush()
