"""The batch of a step, with all that is known of it before the device computes: made in the loader's thread, so that no
host work stands between one step's numbers and the next step's first kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.objective.base import Answers, BatchTotals, Objective
from tuningfork.records import PackedBatch, TokenExample, column


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Whole examples, and this rank's of them in packs; how they are cut into packs and shared out over ranks does not
    change the step, and every number of it is taken in the order of the examples."""

    packs: Sequence[PackedBatch]  # of this rank; every rank has as many
    examples: Sequence[TokenExample]  # of all ranks, in the order of the step
    answers: Answers  # all of theirs, on the host
    own: Answers  # those of the packs, in the order of the packs
    places: Tensor  # int64: where the answers of the packs lie among all
    shares: list[Tensor]  # of each worker: the places of its answers, rising
    totals: BatchTotals
    tokens: int  # as a plain trainer counts them: the prompt once per answer
    answer_tokens: int  # that count in the loss, of each answer

    @classmethod
    def of(
        cls,
        packs: Sequence[PackedBatch],
        objective: Objective,
        reference: np.ndarray | None,
        pin_memory: bool = False,
    ) -> StepBatch:
        """The batch that these packs are, of one process; its examples are in the order of the packs.

        Args:
            reference: cached log-probs of all answers, float64; None without a reference.
            pin_memory: whether the packs are pinned.

        Raises:
            DataError: the objective refuses an example.
        """
        examples = [example for pack in packs for example in pack.examples]
        return cls.shared_out(examples, [examples], packs, objective, reference, pin_memory=pin_memory)

    @classmethod
    def shared_out(
        cls,
        examples: Sequence[TokenExample],
        of_workers: Sequence[Iterable[TokenExample]],
        packs: Sequence[PackedBatch],
        objective: Objective,
        reference: np.ndarray | None,
        ranks: Ranks = ONE_PROCESS,
        pin_memory: bool = False,
    ) -> StepBatch:
        """The batch of these examples, which some ranks share.

        Args:
            of_workers: the examples of each worker in any order, which together are all of them.
            packs: this worker's; pinned already where `pin_memory` is set.
            reference: cached log-probs of all answers in the order of the examples, float64; None without a reference.

        Raises:
            DataError: the objective refuses an example.
        """
        objective.check(examples)
        lengths = [example.answer_tokens(i) for example in examples for i in range(len(example.answers))]
        spans = _spans(examples, of_workers)
        in_packs = [example for pack in packs for example in pack.examples]
        places = _numbered(spans[ranks.worker][id(example)].pop() for example in in_packs)
        shares = [
            places.sort().values
            if worker == ranks.worker
            else _numbered(span for same in of_worker.values() for span in same).sort().values
            for worker, of_worker in enumerate(spans)
        ]
        own = Answers.of(
            in_packs,
            [length for pack in packs for length in pack.answer_lengths],
            None if reference is None else reference[places.numpy()],
        )
        return cls(
            packs=packs,
            examples=examples,
            answers=Answers.of(examples, lengths, reference),
            own=own.pinned() if pin_memory else own,
            places=places,
            shares=shares,
            totals=objective.totals(examples),
            tokens=int(column(examples, "plain_tokens").sum()),
            answer_tokens=sum(lengths),
        )

    @property
    def unique_tokens(self) -> int:
        """Of this rank's packs, as they have them: what several answers begin with once, where a pack shares it."""
        return sum(pack.used_slots for pack in self.packs)

    @property
    def rows(self) -> int:
        """Of this rank's packs, padding included."""
        return sum(len(pack.input_ids) for pack in self.packs)

    @property
    def logit_rows(self) -> int:
        """Of this rank's packs: one for each of their answer_tokens, but one alone where several answers share it."""
        return sum(len(pack.logit_rows) for pack in self.packs)

    def with_answers(self, own: Answers) -> Iterator[tuple[PackedBatch, Answers]]:
        """Each pack with its own of the packs' answers, wherever these are."""
        first = 0
        for pack in self.packs:
            last = first + len(pack.answer_lengths)
            yield pack, own.chunk(first, last)
            first = last

    def together(self, logps: Tensor, ranks: Ranks) -> Tensor:
        """The log-probs of all answers in the order of the examples, float64 on the host, from those of each
        worker's packs."""
        found = torch.empty(len(self.answers.lengths), dtype=torch.float64)
        rising = logps[self.places.argsort()]
        for places, own in zip(self.shares, ranks.of_workers(rising, [*map(len, self.shares)]), strict=True):
            found[places] = own
        return found


def _spans(
    examples: Sequence[TokenExample], of_workers: Sequence[Iterable[TokenExample]]
) -> list[dict[int, list[range]]]:
    """Of each worker, by the identity of its examples: which answers among all are theirs. An example may be there
    several times, where a step goes round the data."""
    first, waiting = 0, dict[int, list[range]]()
    for example in examples:
        waiting.setdefault(id(example), []).append(range(first, first + len(example.answers)))
        first += len(example.answers)
    found = []
    for own in of_workers:
        spans: dict[int, list[range]] = {}
        for example in own:
            spans.setdefault(id(example), []).append(waiting[id(example)].pop())
        found.append(spans)
    return found


def _numbered(spans: Iterable[range]) -> Tensor:
    return torch.tensor([place for span in spans for place in span], dtype=torch.int64)
