"""The batch of a step, with all that is known of it before the device computes: made in the loader's thread, so that no
host work stands between one step's numbers and the next step's first kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tuningfork.objective.base import Answers, BatchTotals, Objective
from tuningfork.records import PackedBatch, TokenExample, column


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Whole examples in packs, and their sizes; how they are cut into packs does not change the step."""

    packs: Sequence[PackedBatch]
    examples: list[TokenExample]  # in the order of the packs
    answers: Answers  # of all packs, on the host
    totals: BatchTotals
    tokens: int  # as a plain trainer counts them: the prompt once per answer
    unique_tokens: int  # as the packs have them: what several answers begin with once, where a pack shares it
    answer_tokens: int  # that count in the loss, of each answer
    logit_rows: int  # of the packs: one for each of these tokens, but one alone where several answers share it
    rows: int  # of the packs, padding included

    @classmethod
    def of(
        cls,
        packs: Sequence[PackedBatch],
        objective: Objective,
        reference: np.ndarray | None,
        totals: BatchTotals | None = None,
        pin_memory: bool = False,
    ) -> StepBatch:
        """The batch of these packs, which are pinned already where `pin_memory` is set.

        Args:
            reference: cached log-probs of all answers in the order of the packs, float64; None without a reference.
            totals: of the examples of all ranks; None where these are all.

        Raises:
            DataError: the objective refuses an example.
        """
        examples = [example for pack in packs for example in pack.examples]
        objective.check(examples)
        lengths = [length for pack in packs for length in pack.answer_lengths]
        answers = Answers.of(examples, lengths, reference)
        return cls(
            packs=packs,
            examples=examples,
            answers=answers.pinned() if pin_memory else answers,
            totals=totals or objective.totals(examples),
            tokens=int(column(examples, "plain_tokens").sum()),
            unique_tokens=sum(pack.used_slots for pack in packs),
            answer_tokens=sum(lengths),
            logit_rows=sum(len(pack.logit_rows) for pack in packs),
            rows=sum(len(pack.input_ids) for pack in packs),
        )

    def with_answers(self, answers: Answers) -> Iterator[tuple[PackedBatch, Answers]]:
        """Each pack with its own of the batch's answers, wherever these are."""
        first = 0
        for pack in self.packs:
            last = first + len(pack.answer_lengths)
            yield pack, answers.chunk(first, last)
            first = last
