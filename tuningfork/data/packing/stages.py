"""An order made of parts: steps on one set of examples, then on another, as where documents are cut into longer pieces
as a run goes on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tuningfork.data.packing.loader import EpochOrder


@dataclass(frozen=True, slots=True)
class StagedOrder:
    """One order behind another, each of examples of its own: the first part's examples come first among all.

    As with each part, what a step has is a pure function of the step. A part begins a pass over its examples, wherever
    the one before was in its own.
    """

    parts: tuple[EpochOrder, ...]

    groups: None = None  # none of its examples are kept together

    @property
    def examples(self) -> int:
        """Of all parts."""
        return sum(part.examples for part in self.parts)

    @property
    def total_examples(self) -> int:
        """That the run goes through, in all parts."""
        return sum(part.total_examples for part in self.parts)

    @property
    def total_steps(self) -> int:
        return sum(part.total_steps for part in self.parts)

    def indices(self, step: int) -> list[int]:
        """The examples of step `step` (from 0), counted through all parts."""
        place, inside = self._at(step)
        first = sum(part.examples for part in self.parts[:place])
        return [first + index for index in self.parts[place].indices(inside)]

    def used_indices(self) -> np.ndarray:
        """int64: the examples that the run uses at all, in the order of the parts and their files."""
        firsts = [0, *accumulate(part.examples for part in self.parts)]
        return np.concatenate([first + part.used_indices() for first, part in zip(firsts, self.parts, strict=False)])

    def epoch_after(self, step: int) -> float:
        """Passes over the data completed after step `step` (from 0): those of each part, added up."""
        place, inside = self._at(step)
        before = sum(part.epoch_after(part.total_steps - 1) for part in self.parts[:place])
        return before + self.parts[place].epoch_after(inside)

    def _at(self, step: int) -> tuple[int, int]:
        """The part that a step lies in, and which step of it that is."""
        ends = [*accumulate(part.total_steps for part in self.parts)]
        place = min(bisect_right(ends, step), len(ends) - 1)
        return place, step - (ends[place - 1] if place else 0)


def staged(
    sizes: np.ndarray, examples: Sequence[int], steps: Sequence[int], tokens_per_step: int, seed: int, max_steps: int
) -> StagedOrder:
    """An order by tokens of several sets of examples.

    Args:
        sizes: int64 [n], tokens of each example of all sets, one set behind the other.
        examples: how many each set has.
        steps: how many each set but the last is trained on, which has the rest of `max_steps`.
    """
    each = [*steps, max_steps - sum(steps)]
    of_sets = np.split(sizes, np.cumsum(examples)[:-1])
    return StagedOrder(
        tuple(
            EpochOrder.by_tokens(own, tokens_per_step, seed, 1.0, many) for own, many in zip(of_sets, each, strict=True)
        )
    )
