"""Ranks: the processes that share a run, and what they must agree on. Today a run has one.

Whatever differs between one process and many goes through this record, so that the rest of the house asks and does not
know: who prints and writes, which examples of a step are whose, what a sum over all ranks is, and when all stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from tuningfork.distributed.balance import balance_examples

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The process at `rank` of `size`. Where it sums or asks the others, all must do so, in one order."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process prints, and writes what a run has once: its settings, log, numbers, account of rows."""
        return self.rank == 0

    def mine(self, items: Sequence[Item], cost: Callable[[Item], int]) -> Sequence[Item]:
        """This rank's of the items of a step, in their order, so that all ranks are done at the same time.

        Every rank has the same items and finds the shares of all by itself.

        Args:
            cost: of one item, in any whole unit. It is not asked for where there is one rank.
        """
        if self.size == 1:
            return items
        return [items[place] for place in balance_examples([cost(item) for item in items], self.size).ranks[self.rank]]

    def sum(self, share: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on each of them."""
        self._alone()
        return share

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank: all go on, or all stop."""
        self._alone()
        return flag

    def _alone(self) -> None:
        if self.size > 1:
            raise NotImplementedError(f"{self.size} ranks have nothing to talk through: a run has one process")


ONE_PROCESS = Ranks()
"""The only rank of a run in one process: sums are identities, and it agrees with itself."""
