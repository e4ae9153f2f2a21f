"""Ranks: the processes that share a run, and what their hosts tell each other.

Whatever differs between one process and many goes through this record, so that the rest of the house asks and does not
know: who prints and writes, which of a step's work is whose, what the others found, and when all stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tuningfork.errors import RankError, SaidElsewhere

Item = TypeVar("Item")

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Ranks:
    """The process at `rank` of `size`. Where it asks the others, all must do so, in one order; else none goes on.

    Neighbours of a tensor group compute each product together, on the same examples: the group is one worker, and all
    work is dealt out to workers.

    Raises:
        RankError: of whatever asks the others: one of them has ended, or has not answered in time.
    """

    rank: int = 0
    size: int = 1
    on_node: int = 0  # its number among the processes of its machine
    per_node: int = 1
    tensor: int = 1  # processes of a tensor group
    host: Any = None  # the process group that hosts talk through, whatever their devices do meanwhile

    @property
    def first(self) -> bool:
        """Whether this process prints, and writes what a run has once: its settings, log, numbers, account of rows."""
        return self.rank == 0

    @property
    def workers(self) -> int:
        """How many share out the examples."""
        return self.size // self.tensor

    @property
    def worker(self) -> int:
        """Which of them this process belongs to."""
        return self.rank // self.tensor

    @property
    def speaks(self) -> bool:
        """Whether this process is the one of its worker that writes what the worker has found."""
        return self.rank % self.tensor == 0

    def dealt(self, count: int) -> list[np.ndarray]:
        """The places of `count` things that are dealt out, of each worker, rising: BLOCK neighbours at a time, for what
        begins alike often lies together, or fewer where there are not so many."""
        block = max(1, min(BLOCK, -(-count // self.workers)))
        worker_of = np.arange(count) // block % self.workers
        return [np.flatnonzero(worker_of == worker) for worker in range(self.workers)]

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank: all go on, or all stop."""
        return any(self.all(flag))

    def all(self, item: Item) -> list[Item]:
        """What each rank has, in their order: small things, that can be pickled."""
        if self.size == 1:
            return [item]
        found: list[Any] = [None] * self.size
        with answered():
            dist.all_gather_object(found, item, group=self.host)
        return found

    def total(self, count: int) -> int:
        """The sum of what each worker has counted."""
        return sum(self.all(count)[:: self.tensor])

    def from_first(self, item: Item) -> Item:
        """What the first rank has."""
        if self.size == 1:
            return item
        there = [item]
        with answered():
            dist.broadcast_object_list(there, src=0, group=self.host)
        return there[0]

    def gather(self, values: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The numbers of each rank, float64 on the host, where rank r has `counts[r]` of them."""
        if self.size == 1:
            return [values]
        longest = max(counts)
        own = torch.zeros(longest, dtype=torch.float64)
        own[: len(values)] = values
        found = [torch.empty_like(own) for _ in range(self.size)]
        with answered():
            dist.all_gather(found, own, group=self.host)
        return [values[:count] for values, count in zip(found, counts, strict=True)]

    def of_workers(self, values: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The numbers of each worker, float64 on the host, where worker w has `counts[w]` of them."""
        return self.gather(values, [count for count in counts for _ in range(self.tensor)])[:: self.tensor]

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        if self.size > 1:
            with answered():
                dist.barrier(group=self.host)

    @contextmanager
    def first_of_each_node(self) -> Iterator[None]:
        """Around what the first process of each machine does before the others, which then find it done: to read data
        into a cache. Where one fails, those that wait are told by RankError."""
        if self.on_node:
            self.barrier()
        try:
            yield
        finally:
            if not self.on_node:
                self.barrier()

    def apart(self) -> Ranks:
        """The same, who talk through a group of their own: in a thread, beside what they say here meanwhile.
        There they may wait for each other for torch's own 30 minutes, for disks differ more than steps do."""
        return self if self.size == 1 else replace(self, host=dist.new_group(backend="gloo"))

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Around what each rank does for itself: where it fails on one, it ends on all. That one keeps its error, and
        the others get `SaidElsewhere`. Within, nobody may ask the others."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except (RankError, SaidElsewhere):
            raise
        except BaseException:
            with suppress(RankError):
                self.any(True)
            raise
        if self.any(False):
            raise SaidElsewhere()

    def in_step(self, items: Iterable[Item], rest: Callable[[], Item]) -> Iterator[Item]:
        """The items of this rank, then as many of `rest` as the rank with most items has more: where a model is spread
        over ranks, each of them takes part in every pass of any."""
        if self.size == 1:
            yield from items
            return
        source = iter(items)
        end = object()
        while True:
            item: Any = next(source, end)
            if not self.any(item is not end):
                return
            yield rest() if item is end else item


ONE_PROCESS = Ranks()
"""The only rank of a run in one process: it has everything, and agrees with itself."""


@contextmanager
def answered() -> Iterator[None]:
    """Turn the failure of a collective, which is within, into a RankError."""
    try:
        yield
    except RuntimeError as error:  # which those of torch.distributed are
        raise unanswered(error) from error


def unanswered(error: BaseException) -> RankError:
    """What the failure of a collective means to a user."""
    return RankError(
        "another process of the run has ended, or did not answer in time (parallel.timeout_minutes); its own words, "
        f"if it had any, stand above, or on its machine. What was saved is whole: continue with --resume. ({error})"
    )


def lost(rank: int) -> RankError:
    """What it means to a user that a process is gone, where another one waits for it in vain."""
    return RankError(
        f"process {rank} of the run has ended, and others wait for it; its own words, if it had any, stand above, or "
        "on its machine. What was saved is whole: continue with --resume."
    )


def of_a_collective(error: BaseException) -> bool:
    """Whether an error comes from what processes exchange, wherever that is: FSDP does it within the model's passes."""
    # Gloo's are bare RuntimeErrors, with the place in its own source.
    # private: torch by its words for a failed collective
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
