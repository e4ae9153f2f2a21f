"""What an objective is: one declaration of everything that a run asks of a loss.

A step knows all of its examples before the device computes anything. So a loss has three arguments: the policy's
log-probs, the `Answers` that they belong to, and the `BatchTotals` by which means over the whole batch are taken. The
head asks for it chunk by chunk; the shares of all chunks, packs and ranks add up to the loss of the batch.

PyTorch is imported by what is called, not by the module: recipes are checked against objectives before it is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tuningfork.errors import DataError
from tuningfork.records import ChunkLoss, Statistic, TokenExample, column, map_tensors
from tuningfork.wording import counted

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Answers:
    """What is known of the answers of some whole examples before the policy scores them.

    N examples have A answers together, in order; an example's answers are neighbours.
    """

    answers_per_example: tuple[int, ...]  # N of them, on the host
    lengths: Tensor  # float64 [A], tokens whose log-prob counts
    reference: Tensor | None  # float64 [A], log-probs under the reference; None for an objective without one
    weights: Tensor  # float64 [N], of each example's loss
    margins: Tensor  # float64 [N], by which an example's first answer should be ahead; 0 where its row has none
    labels: Tensor  # int8 [N], whether an example's one answer is wanted: 1, 0, or -1 where its row does not say
    text_bytes: Tensor  # float64 [A], UTF-8 length of the text that those tokens stand for; 0 where it is not known

    @classmethod
    def of(cls, examples: Sequence[TokenExample], lengths: Sequence[int], reference: np.ndarray | None) -> Answers:
        """The answers of these examples, on the host.

        Args:
            lengths: counted tokens of each answer.
            reference: float64 [A].
        """
        import torch

        weights, margins, labels = (column(examples, name) for name in ("weight", "margin", "label"))
        return cls(
            tuple(len(example.answers) for example in examples),
            torch.tensor(lengths, dtype=torch.float64),
            None if reference is None else torch.from_numpy(reference),
            torch.from_numpy(weights),
            torch.from_numpy(np.nan_to_num(margins, nan=0.0)),
            torch.from_numpy(labels),
            torch.tensor([a.text_bytes for example in examples for a in example.answers], dtype=torch.float64),
        )

    @property
    def boundaries(self) -> list[int]:
        """The first answer of each example, and A behind the last: N + 1 numbers."""
        return [0, *accumulate(self.answers_per_example)]

    def chunk(self, first: int, last: int) -> Answers:
        """The answers numbered from `first` to before `last`, which are all those of some examples."""
        boundaries = self.boundaries
        answers, examples = slice(first, last), slice(bisect_left(boundaries, first), bisect_left(boundaries, last))
        return Answers(
            self.answers_per_example[examples],
            self.lengths[answers],
            None if self.reference is None else self.reference[answers],
            self.weights[examples],
            self.margins[examples],
            self.labels[examples],
            self.text_bytes[answers],
        )

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """The answers of several parts, at least one, one part behind the other."""
        import torch

        def all_of(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        return cls(
            tuple(k for part in parts for k in part.answers_per_example),
            all_of("lengths"),
            None if parts[0].reference is None else all_of("reference"),
            all_of("weights"),
            all_of("margins"),
            all_of("labels"),
            all_of("text_bytes"),
        )

    def to(self, device: torch.device) -> Answers:
        """These answers on a device. From page-locked memory, the host goes on while the device is busy."""
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))

    def pinned(self) -> Answers:
        """These answers in page-locked memory, from which a GPU copies without blocking the host."""
        return map_tensors(self, lambda tensor: tensor.pin_memory())


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Sizes of the global batch, known before its first pack runs; in an evaluation, those of all held-out examples.

    Every mean of an objective divides by these, so a step's gradient does not depend on how the batch is cut.
    """

    examples: int
    tokens: int  # those that the objective's mean over tokens divides by
    coupling: Tensor | None = None  # what `Objective.coupling` found, for an objective that couples examples

    def to(self, device: torch.device) -> BatchTotals:
        """These totals with what is a tensor of them on a device."""
        return self if self.coupling is None else map_tensors(self, lambda tensor: tensor.to(device))

    def __add__(self, other: BatchTotals) -> BatchTotals:
        """The sizes of two batches together, whose coupling is not known by those of its parts."""
        return BatchTotals(self.examples + other.examples, self.tokens + other.tokens)


class Objective(ABC):
    """A loss, and everything that a run asks of one. A kind of it is a frozen dataclass.

    Its fields are the settings of `objective` that it reads; any other one in a recipe is refused. A kind is immutable
    and holds no state of a run.
    """

    name: ClassVar[str]
    """As recipes call it."""
    needs_reference: ClassVar[bool] = True
    """Whether `Answers.reference` is there."""
    couples_examples: ClassVar[bool] = False
    """Whether the loss of an example depends on other examples of the batch: `coupling` is then asked for first."""
    linear: ClassVar[bool] = False
    """Whether the loss is a weighted sum of log-probs, so that its gradient by them is known before they are. The head
    then takes one product of an answer's logits, however long the answer is."""
    answers: ClassVar[int]
    """How many answers each of its examples has."""
    unit: ClassVar[str]
    """What its examples are, in the plural."""
    statistics_defined: ClassVar[Mapping[str, str]] = {}
    """Each number that `statistics` gives -> its definition and unit."""
    derived_defined: ClassVar[Mapping[str, str]] = {}
    """Each number that `derived` gives -> its definition and unit."""
    headline: ClassVar[Mapping[str, str]] = {}
    """Heading -> the statistic that the progress line and the tables show under it."""

    @property
    def loss_names(self) -> tuple[str, str]:
        """What the loss of steps is called, and what that of evaluations is, which may lack a term of the other."""
        return "loss", "loss"

    @classmethod
    def settings(cls) -> frozenset[str]:
        """The settings that this kind reads."""
        return frozenset(item.name for item in fields(cls))  # type: ignore[arg-type]  # kinds are dataclasses

    @abstractmethod
    def refusal(self, example: TokenExample) -> str:
        """What an example has that this objective cannot train on, and the remedy; empty where it can.

        It depends on the number of answers and on whether there is a label, a margin and a prompt of more than a BOS,
        on nothing else, and is worded alike for all examples that have it.
        """

    @abstractmethod
    def totals(self, examples: Sequence[TokenExample]) -> BatchTotals:
        """The sizes of a global batch of these examples."""

    @abstractmethod
    def loss(self, logps: Tensor, answers: Answers, totals: BatchTotals) -> Tensor:
        """The share that some whole examples have in the loss of the batch, each with its weight.

        Args:
            logps: [A], differentiable: each answer's summed log-prob under the policy.
            totals: sizes of the global batch.
        """

    def evaluation_loss(self, logps: Tensor, answers: Answers, totals: BatchTotals) -> Tensor:
        """The share that some whole held-out examples have in the loss that an evaluation reports.

        An evaluation is one batch of all held-out examples, so its loss is the same mean as that of a step, unless the
        objective leaves a term out.

        Args:
            totals: sizes of all held-out examples together, and the coupling of their log-probs where there is one.
        """
        return self.loss(logps, answers, totals)

    def loss_size(self, totals: BatchTotals) -> int:
        """How many items the loss of a batch is a mean over; losses of several batches are averaged in proportion."""
        return totals.examples

    @abstractmethod
    def statistics(self, logps: Tensor, answers: Answers) -> dict[str, Statistic]:
        """The numbers of `statistics_defined`."""

    def derived(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        """The numbers of `derived_defined`, which follow from the means of an evaluation's statistics."""
        return {}

    def coupling(self, logps: Tensor, answers: Answers) -> Tensor:
        """What an objective that couples examples needs of the whole batch's log-probs, without a gradient.

        It reaches `loss` as `BatchTotals.coupling`. The batch is then scored once before it is trained on. In an
        evaluation, `logps` and `answers` are those of all held-out examples.
        """
        raise NotImplementedError(f"{type(self).__name__} does not couple examples")

    def of_chunks(self, answers: Answers, totals: BatchTotals) -> ChunkLoss:
        """The loss of a pack's answers, as the head asks for it."""
        return lambda first, last, logps: self.loss(logps, answers.chunk(first, last), totals)

    def check(self, examples: Sequence[TokenExample]) -> None:
        """Raises DataError for the first example that it cannot train on, and says how many are like it."""
        # Whether one is refused depends on these four alone, so one of each kind tells of all.
        of_margin, of_label = ~np.isnan(column(examples, "margin")), column(examples, "label") >= 0
        kinds = np.stack([column(examples, "answers"), of_margin, of_label, column(examples, "prompt") > 1])
        _, first, rows = np.unique(kinds, axis=1, return_index=True, return_counts=True)
        refused: dict[str, list[tuple[int, int]]] = {}
        for place, alike in sorted(zip(first.tolist(), rows.tolist(), strict=True)):
            if refusal := self.refusal(examples[place]):
                refused.setdefault(refusal, []).append((place, alike))
        for refusal, kinds_of_it in refused.items():
            place, others = kinds_of_it[0][0], sum(alike for _, alike in kinds_of_it) - 1
            more = f" ({counted(others, 'other row is', 'other rows are')} like it.)" if others else ""
            raise DataError(f"{examples[place].id}: has {refusal}.{more}")
