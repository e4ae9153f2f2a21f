"""The session: what a run works with, from its start to its end, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tuningfork.accounts import DataReport
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.loader import packs_in_windows
from tuningfork.data.packing.pack import PackLimits, pack_of
from tuningfork.distributed.layout import ONE, Layout
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.models.hf.load import Loaded
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.objective.base import Objective
from tuningfork.records import PackedBatch, TokenExample, taken
from tuningfork.train.checks.kernel_check import KernelCheck


@dataclass(frozen=True)
class Data:
    """Examples to train on and held-out ones, each with the account of its file. The objective takes all of them.

    Without training data, as to evaluate, its account is empty.
    """

    train: Sequence[TokenExample]
    train_report: DataReport
    held_out: Sequence[TokenExample]
    held_out_report: DataReport | None
    limits: PackLimits
    stages: tuple[int, ...] = ()  # how many to train on each line of train.length_steps has, and the rest of the run


@dataclass(frozen=True)
class Session:
    """The model, ready to score and to train, and the objective that it is trained by."""

    scorer: Scorer
    objective: Objective
    loaded: Loaded
    check: KernelCheck | None = None  # where blocks are compiled, or kernels are not the plain ones
    ranks: Ranks = ONE_PROCESS
    layout: Layout = ONE

    @property
    def policy(self) -> Policy:
        return self.scorer.policy

    @property
    def compiled(self) -> bool:
        """Whether the policy's blocks are compiled."""
        return self.policy.compiled

    @property
    def pin_memory(self) -> bool:
        """Whether packs are kept in page-locked memory, from which a GPU copies without blocking the host."""
        return self.scorer.device.type == "cuda"

    def counting(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """`advance` for what all ranks have scored, from what this one has; all ranks must score pack by pack."""
        return lambda count: advance(self.ranks.total(count))

    def mine(self, examples: Sequence[TokenExample]) -> Sequence[TokenExample]:
        """Those of the examples that this rank scores."""
        ranks = self.ranks
        return examples if ranks.workers == 1 else taken(examples, ranks.dealt(len(examples))[ranks.worker])

    def packs(self, examples: Sequence[TokenExample], limits: PackLimits) -> Iterator[PackedBatch]:
        """This rank's of the examples in packs, for scoring: each is built, and pinned for a GPU, while the one before
        is scored. Packs of padding alone follow, until all ranks are done. What was gathered of weights that are spread
        over ranks is let go in the end."""
        mine = packs_in_windows(self.mine(examples), limits, pin_memory=self.pin_memory)
        empty = pack_of([], limits)
        try:
            yield from self.ranks.in_step(mine, lambda: lay(empty.examples, empty.forest, empty.slots))
        finally:
            if self.policy.spread is not None:
                self.policy.spread.release()
