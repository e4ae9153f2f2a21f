"""Compilations that come late: behind the steps and the evaluation in which all that a run needs is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tuningfork.distributed.ranks import Ranks
from tuningfork.models.compilations import Compilations
from tuningfork.report.run.console import Console
from tuningfork.report.run.metrics import StepResult

FIRST_STEPS = 3
_SAID = 8  # of one step or evaluation: a kernel that is tuned for each length may have dozens in each


class LateCompilations:
    """Counts what is compiled or tuned late, on all ranks, and warns of each.

    The first steps of a process compile what training needs, whatever the number of the first one. So does its first
    evaluation between steps for what scoring needs, which a run that continues may not have scored anything with
    before. On a GPU a graph holds for packs of any size, so nothing is left for a last, short pack.

    Attributes:
        total: how many came late so far.
    """

    def __init__(self, console: Console, ranks: Ranks) -> None:
        self.console, self.ranks = console, ranks
        self.total = 0
        self._steps = self._evaluations = 0

    def step(self, step: StepResult) -> StepResult:
        """The step, with the total so far. All ranks must come here."""
        self._steps += 1
        if step.compilations and self._steps > FIRST_STEPS:
            self._late(f"step {step.step}", step.compiled_here)
        return replace(step, late_compilations=self.total)

    @contextmanager
    def evaluation(self, after: int) -> Iterator[None]:
        """Around an evaluation behind step `after`. All ranks must come here."""
        compilations = Compilations()
        yield
        self._evaluations += 1
        found = [*map(str, compilations.taken())]
        if self._evaluations > 1 and self.ranks.any(len(found) > 0):
            self._late(f"the evaluation after step {after}", found)

    def _late(self, when: str, found: Sequence[str]) -> None:
        of_ranks = self.ranks.all(found)
        texts = [
            text if self.ranks.size == 1 else f"rank {rank}: {text}"
            for rank, texts in enumerate(of_ranks)
            for text in texts
        ]
        self.total += len(texts)
        for text in texts[:_SAID]:
            self.console.print(f"! late compilation in {when}, which stops it for seconds: {text}")
        if len(texts) > _SAID:
            self.console.print(f"! late compilations in {when}: {len(texts) - _SAID} more")
