"""Steps by tokens: where each begins in the order of the examples, if all are to have about as many tokens.

A step is the longest run of next examples that have at most so many tokens together, over the ends of epochs too; an
example that alone has more is a step of its own. So where steps begin is a pure function of the order and of the
examples' sizes, and a run that is resumed finds them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

Epoch = Callable[[int], np.ndarray]
"""The number of an epoch (from 0) -> int64 [n], all examples in its order."""


def token_cuts(
    sizes: np.ndarray, most: int, epoch: Epoch, end: int, steps: int | None, done_steps: int, done_examples: int
) -> tuple[int, ...]:
    """The place of each step's first example among all that a run goes through, and of the last one's end.

    Args:
        sizes: int64 [n], tokens of each example.
        most: tokens of a step.
        end: how many examples the run goes through; not asked where `steps` says how many steps it has.
        done_steps, done_examples: those of the run so far. The next step begins behind them, wherever its last one,
            which may have been short, would have ended in a longer run.
    """
    before = _starts(0, sizes, most, epoch)
    cuts = [next(before) for _ in range(done_steps)]
    for start in _starts(done_examples, sizes, most, epoch):
        cuts.append(start if steps is not None else min(start, end))
        if (start >= end) if steps is None else len(cuts) > steps:
            return tuple(cuts)
    raise AssertionError("an order has no end")


def _starts(place: int, sizes: np.ndarray, most: int, epoch: Epoch) -> Iterator[int]:
    """Where a step begins, and then each next one."""
    number, ends = -1, np.zeros(0, np.int64)
    while True:
        yield place
        left, first = most, place
        while left > 0:
            turn, inside = divmod(place, len(sizes))
            if turn != number:
                number, ends = turn, np.cumsum(sizes[epoch(turn)])
            before = int(ends[inside - 1]) if inside else 0
            stop = int(np.searchsorted(ends, before + left, side="right"))
            left -= (int(ends[stop - 1]) if stop else 0) - before
            place += stop - inside
            if stop < len(sizes):
                break
        place = max(place, first + 1)
