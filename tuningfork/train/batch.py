"""The batch of a step, with all that is known of it before the device computes: made in the loader's thread, so that no
host work stands between one step's numbers and the next step's first kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tuningfork.data.packing.pack import Bin
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
    places: list[Tensor]  # of each worker: where the answers of its packs lie among all, int64
    totals: BatchTotals
    tokens: int  # as a plain trainer counts them: the prompt once per answer
    unique_tokens: int  # as the packs of all ranks have them: what several answers begin with once, where it is shared
    answer_tokens: int  # that count in the loss, of each answer
    rows: int  # of the packs of all ranks, padding included

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
        answers = sum(len(pack.answer_lengths) for pack in packs)
        rows, used = (sum(of_pack) for of_pack in zip(*((len(p.input_ids), p.used_slots) for p in packs), strict=True))
        places = [torch.arange(answers)]
        return cls._of(examples, packs, places, 0, objective, reference, rows, used, pin_memory)

    @classmethod
    def shared_out(
        cls,
        examples: Sequence[TokenExample],
        bins: Sequence[Sequence[Bin]],
        packs: Sequence[PackedBatch],
        objective: Objective,
        reference: np.ndarray | None,
        ranks: Ranks = ONE_PROCESS,
        pin_memory: bool = False,
    ) -> StepBatch:
        """The batch of these examples, which some ranks share.

        Args:
            bins: those of each worker, which together have the examples, each once.
            packs: this rank's bins, laid; pinned already where `pin_memory` is set.
            reference: cached log-probs of all answers in the order of the examples, float64; None without a reference.

        Raises:
            DataError: the objective refuses an example.
        """
        rows = sum(found.slots for of_rank in bins for found in of_rank)
        used = sum(found.forest.rows for of_rank in bins for found in of_rank)
        places = _places(examples, bins)
        return cls._of(examples, packs, places, ranks.worker, objective, reference, rows, used, pin_memory)

    @classmethod
    def _of(
        cls,
        examples: Sequence[TokenExample],
        packs: Sequence[PackedBatch],
        places: list[Tensor],
        worker: int,
        objective: Objective,
        reference: np.ndarray | None,
        rows: int,
        used: int,
        pin_memory: bool,
    ) -> StepBatch:
        objective.check(examples)
        lengths = [example.answer_tokens(i) for example in examples for i in range(len(example.answers))]
        own = Answers.of(
            [example for pack in packs for example in pack.examples],
            [length for pack in packs for length in pack.answer_lengths],
            None if reference is None else reference[places[worker].numpy()],
        )
        return cls(
            packs=packs,
            examples=examples,
            answers=Answers.of(examples, lengths, reference),
            own=own.pinned() if pin_memory else own,
            places=places,
            totals=objective.totals(examples),
            tokens=int(column(examples, "plain_tokens").sum()),
            unique_tokens=used,
            answer_tokens=sum(lengths),
            rows=rows,
        )

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
        for places, own in zip(self.places, ranks.of_workers(logps, [*map(len, self.places)]), strict=True):
            found[places] = own
        return found


def _places(examples: Sequence[TokenExample], bins: Sequence[Sequence[Bin]]) -> list[Tensor]:
    """Of each worker: where the answers of its bins lie among those of all examples."""
    first, waiting = 0, dict[int, list[range]]()
    for example in examples:  # one may be there several times, where a step goes round the data
        waiting.setdefault(id(example), []).append(range(first, first + len(example.answers)))
        first += len(example.answers)
    return [
        torch.tensor(
            [place for found in of_rank for example in found.examples for place in waiting[id(example)].pop(0)],
            dtype=torch.int64,
        )
        for of_rank in bins
    ]
