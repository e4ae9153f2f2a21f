"""The order of examples through a run, and packs of them, which a thread builds ahead of their use.

The order is a pure function of (seed, step), so the loader's whole resumable state is the number of steps done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Protocol, TypeVar

import numpy as np

from tuningfork.data.packing.groups import Groups
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import WINDOW, Bin, PackLimits, pack_evenly, pack_stream, portions_of
from tuningfork.data.packing.portions import Portion
from tuningfork.data.packing.token_steps import token_cuts
from tuningfork.records import PackedBatch, TokenExample

Item = TypeVar("Item")


class Order(Protocol):
    """What a run goes through its examples by: a pure function of the step."""

    @property
    def examples(self) -> int:
        """That there are."""

    @property
    def total_examples(self) -> int:
        """That the run goes through, one as often as it comes."""

    @property
    def groups(self) -> Groups | None:
        """Whose members it keeps together."""

    @property
    def total_steps(self) -> int: ...

    def indices(self, step: int) -> list[int]:
        """The examples of step `step` (from 0)."""

    def used_indices(self) -> np.ndarray:
        """int64, rising: the examples that the run uses at all."""

    def epoch_after(self, step: int) -> float:
        """Passes over the data completed after step `step` (from 0)."""


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """Shuffled passes over the data, laid end to end and cut into steps.

    A step holds exactly `examples_per_step` examples, also where it straddles two epochs; only the very last step of a
    run by epochs may hold fewer. A run that is made longer goes on behind that step's last example: `done_examples`
    are those of its first `done_steps` steps. So within each epoch every example appears exactly once. With `groups`
    an epoch is shuffled by pieces of these, which steps may cut. With `cuts` a step has the examples between two of
    them instead, see token_steps.py.
    """

    examples: int
    examples_per_step: int
    seed: int
    total_examples: int
    done_steps: int = 0
    done_examples: int = 0
    groups: Groups | None = None
    cuts: tuple[int, ...] | None = None

    @classmethod
    def plan(
        cls,
        examples: int,
        examples_per_step: int,
        seed: int,
        epochs: float,
        max_steps: int | None,
        done_steps: int = 0,
        done_examples: int = 0,
        groups: Groups | None = None,
    ) -> EpochOrder:
        total = max(1, round(epochs * examples))
        if max_steps is not None:
            total = done_examples + (max_steps - done_steps) * examples_per_step
        return cls(examples, examples_per_step, seed, total, done_steps, done_examples, groups)

    @classmethod
    def by_tokens(
        cls,
        sizes: np.ndarray,
        tokens_per_step: int,
        seed: int,
        epochs: float,
        max_steps: int | None,
        done_steps: int = 0,
        done_examples: int = 0,
        groups: Groups | None = None,
    ) -> EpochOrder:
        """Steps of at most so many tokens; `sizes` int64 [n] are those of the examples."""
        n = len(sizes)
        done = (done_steps, done_examples)
        end = max(1, round(epochs * n))
        cuts = token_cuts(sizes, tokens_per_step, lambda k: _permutation(n, seed, k, groups), end, max_steps, *done)
        return cls(n, max(1, round(cuts[-1] / (len(cuts) - 1))), seed, cuts[-1], *done, groups, cuts)

    @property
    def total_steps(self) -> int:
        if self.cuts is not None:
            return len(self.cuts) - 1
        return self.done_steps + ceil((self.total_examples - self.done_examples) / self.examples_per_step)

    def indices(self, step: int) -> list[int]:
        """The examples of step `step` (from 0)."""
        places = range(self._first(step), min(self._first(step + 1), self.total_examples))
        return [int(self._epoch(n // self.examples)[n % self.examples]) for n in places]

    def used_indices(self) -> np.ndarray:
        """int64: the examples that the run uses at all, in the file's order; fewer than all in less than an epoch."""
        if self.total_examples >= self.examples:
            return np.arange(self.examples)
        return np.sort(self._epoch(0)[: self.total_examples])

    def epoch_after(self, step: int) -> float:
        """Passes over the data completed after step `step` (from 0)."""
        return min(self._first(step + 1), self.total_examples) / self.examples

    def _epoch(self, epoch: int) -> np.ndarray:
        """int64 [examples]: all examples in the order of one epoch (from 0)."""
        return _permutation(self.examples, self.seed, epoch, self.groups)

    def _first(self, step: int) -> int:
        """The place of a step's first example among all that the run goes through; its end behind the last step."""
        if self.cuts is not None:
            return self.cuts[step]
        if step < self.done_steps:
            return step * self.examples_per_step
        return self.done_examples + (step - self.done_steps) * self.examples_per_step


@lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int, groups: Groups | None) -> np.ndarray:
    random = np.random.default_rng([seed, epoch])
    return random.permutation(examples) if groups is None else groups.permutation(random)


class PackLoader:
    """The examples and packs of any step, built as they are asked for; `ahead` does it while others are used."""

    def __init__(
        self, examples: Sequence[TokenExample], order: Order, limits: PackLimits, pin_memory: bool = False
    ) -> None:
        self.examples = examples
        self.order = order
        self.limits = limits
        self.pin_memory = pin_memory

    def examples_of(self, step: int) -> list[TokenExample]:
        """The examples of one step, of all ranks."""
        return [self.examples[i] for i in self.order.indices(step)]

    def portions(self, examples: Sequence[TokenExample]) -> list[Portion]:
        """What ranks can share out of these examples of a step: one by one, or trees of them."""
        return portions_of(examples, self.limits)

    def packs(self, bins: Iterable[Bin]) -> list[PackedBatch]:
        """Bins as packs."""
        return _laid(bins, self.pin_memory)

    def step(self, step: int) -> list[PackedBatch]:
        """The packs of one step, of a run in one process."""
        return self.packs(pack_evenly(self.portions(self.examples_of(step)), self.limits))


def ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; while one is used, a thread makes the next. What it raises is raised where that one is taken."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, source, end)
            yield item  # type: ignore[misc]


def packs_in_windows(
    examples: Sequence[TokenExample], limits: PackLimits, window: int = WINDOW, pin_memory: bool = False
) -> Iterator[PackedBatch]:
    """All examples in packs, each built while the one before is used. They are chosen from a window of examples at a
    time: enough to fill packs well, few enough to begin at once and to keep in memory."""
    packs = (lay(found.examples, found.forest, found.slots) for found in pack_stream(examples, limits, window))
    return ahead(pack.pinned() for pack in packs) if pin_memory else ahead(packs)


def build_packs(examples: Sequence[TokenExample], limits: PackLimits, pin_memory: bool = False) -> list[PackedBatch]:
    """Pack the examples and lay each bin out as tensors."""
    return _laid(pack_evenly(portions_of(examples, limits), limits), pin_memory)


def _laid(bins: Iterable[Bin], pin_memory: bool) -> list[PackedBatch]:
    packs = [lay(found.examples, found.forest, found.slots) for found in bins]
    return [pack.pinned() for pack in packs] if pin_memory else packs
