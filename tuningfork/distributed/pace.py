"""How fast each rank computes, and how long it waits for weights: told apart inside a step in which all end together.

A block's forward pass begins when its weights are there and has no exchange within it. So its time is the rank's own,
and the time between two blocks is what the second waited for its weights. On a GPU both are read off its own clock,
with events on the stream, once the step's numbers are there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

SLOW = 1.3  # times the others' time for the same work: more than cards of a kind differ
STEPS = 20  # of whose half a rank must have been so slow: one step may be disturbed by anything
_KEPT = 8192  # passes of blocks: those of a long scoring, which nobody asks for, must not fill the memory


class Seconds(NamedTuple):
    """Of forward passes: in which blocks computed, and in which they waited for their weights."""

    computing: float
    waiting: float


class Pace:
    """Reads the clock around each block's forward pass. To be made before the blocks are sharded, so that its hooks
    stand within those of FSDP."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._marks: deque[tuple[int, Any, Any]] = deque(maxlen=_KEPT)  # block, begin, end
        self._begun: Any = None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(lambda *_, number=number: self._end(number))

    def _begin(self, *_: Any) -> None:
        self._begun = self._mark()

    def _end(self, number: int) -> None:
        self._marks.append((number, self._begun, self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Forget what was read so far."""
        self._marks.clear()

    def take(self) -> Seconds:
        """Those of all forward passes since the last call, or since `restart`. The device must be done with them."""
        computing = waiting = 0.0
        last = None
        for number, begin, end in self._marks:
            computing += _between(begin, end)
            if number and last is not None:
                waiting += _between(last, begin)
            last = end
        self._marks.clear()
        return Seconds(computing, waiting)


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    return begin.elapsed_time(end) / 1e3


class SlowRank(NamedTuple):
    """A rank that usually computes more slowly than the others."""

    rank: int
    times: float  # the others' time for the same work, which is the lower median of all


class PaceWatch:
    """Finds a rank that is slow in most of many steps: a card that is hot, or shared with another program."""

    def __init__(self) -> None:
        self._last: deque[np.ndarray] = deque(maxlen=STEPS)
        self._named: set[int] = set()

    def add(self, seconds_per_flop: Sequence[float]) -> SlowRank | None:
        """A step's paces of all ranks; the slowest rank, where it has been slow for long and was not named before. All
        ranks that had nothing to do, and so no pace, have NaN."""
        paces = np.asarray(seconds_per_flop, dtype=np.float64)
        if not np.isfinite(paces).any():
            return None
        self._last.append(paces / np.nanquantile(paces, 0.5, method="lower"))
        if len(self._last) < STEPS:
            return None
        paces = np.stack(self._last)
        ranks = np.flatnonzero(np.isfinite(paces).any(axis=0))  # that had something to do
        usual = np.nanmedian(paces[:, ranks], axis=0)
        slowest = int(usual.argmax())
        rank = int(ranks[slowest])
        if not usual[slowest] > SLOW or rank in self._named:
            return None
        self._named.add(rank)
        return SlowRank(rank, float(usual[slowest]))
