"""The batch of a step, with all that is known of it before the device computes: made in the loader's thread, so that no
host work stands between one step's numbers and the next step's first kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tuningfork.objective.objectives import BatchScale, PairTerms, PreferenceObjective
from tuningfork.records import PackedBatch, TokenExample, column


@dataclass(frozen=True, slots=True)
class PackOfPairs:
    """A pack, and beside its rows what the loss takes of its answers. On the host, pinned for a GPU, or on a device."""

    pack: PackedBatch
    lengths: Tensor  # float64 [A], counted tokens
    reference: Tensor | None  # float64 [A]; None for an objective without a reference
    terms: PairTerms | None

    @classmethod
    def of(
        cls, pack: PackedBatch, objective: PreferenceObjective, reference: np.ndarray | None, pin_memory: bool = False
    ) -> PackOfPairs:
        """Of a pack and the cached log-probs of its answers, see `StepBatch.of`."""

        def kept(tensor: Tensor) -> Tensor:
            return tensor.pin_memory() if pin_memory else tensor

        terms = objective.terms(pack.examples)
        return cls(
            pack,
            kept(torch.tensor(pack.answer_lengths, dtype=torch.float64)),
            None if reference is None else kept(torch.from_numpy(reference)),
            terms and PairTerms(*map(kept, terms)),
        )

    def to(self, device: torch.device) -> PackOfPairs:
        """The same on a device. From pinned memory, the host goes on while the device is busy."""

        def there(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        reference = None if self.reference is None else there(self.reference)
        terms = self.terms and PairTerms(*map(there, self.terms))
        return PackOfPairs(self.pack.to(device), there(self.lengths), reference, terms)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Whole examples in packs, and their sizes; how they are cut into packs does not change the step."""

    packs: list[PackOfPairs]
    examples: list[TokenExample]  # in the order of the packs
    scale: BatchScale
    tokens: int  # as a plain trainer counts them: the prompt once per answer
    unique_tokens: int
    answer_tokens: int
    rows: int  # of the packs, padding included

    @classmethod
    def of(
        cls,
        packs: Sequence[PackedBatch],
        objective: PreferenceObjective,
        reference: np.ndarray | None,
        pin_memory: bool = False,
    ) -> StepBatch:
        """Of packs that are pinned already where `pin_memory` is set.

        Args:
            reference: cached log-probs of all answers in the order of the packs, float64; None without a reference.

        Raises:
            DataError: the objective refuses an example.
        """
        answers = [len(pack.answer_lengths) for pack in packs]
        references = [None] * len(packs) if reference is None else np.split(reference, np.cumsum(answers)[:-1])
        examples = [example for pack in packs for example in pack.examples]
        return cls(
            packs=[
                PackOfPairs.of(pack, objective, logps, pin_memory)
                for pack, logps in zip(packs, references, strict=True)
            ],
            examples=examples,
            scale=BatchScale.of(examples),
            tokens=int(column(examples, "plain_tokens").sum()),
            unique_tokens=sum(pack.used_slots for pack in packs),
            answer_tokens=sum(sum(pack.answer_lengths) for pack in packs),
            rows=sum(len(pack.input_ids) for pack in packs),
        )
