"""Supervised fine-tuning: single answers are imitated. docs/glossary.md writes the formulas out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tuningfork.objective.base import Answers, BatchTotals, Objective
from tuningfork.records import PerToken, Statistic, TokenExample
from tuningfork.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

MeanOver = Literal["tokens", "examples"]


@dataclass(frozen=True)
class SFT(Objective):
    """The mean negative log-prob of the counted tokens: cross-entropy with what the answers say.

    Over tokens, each counted token of the batch weighs alike, so that long answers weigh more; over examples, each
    answer's mean does. An example's weight multiplies its part of the sum, and not what the sum is divided by.
    """

    mean_over: MeanOver = "tokens"

    name: ClassVar[str] = "sft"
    needs_reference: ClassVar[bool] = False
    linear: ClassVar[bool] = True
    answers: ClassVar[int] = 1
    unit: ClassVar[str] = "examples"
    statistics_defined: ClassVar[Mapping[str, str]] = {
        "nll/token": "Negative log-prob of a counted token, mean over all of them, without weights, nats; "
        "its exponential is the perplexity.",
        "logps/answer": "Mean log-prob of a whole answer under the model, summed over its counted tokens, nats.",
        "tokens/answer": "Mean number of counted tokens of an answer.",
    }
    headline: ClassVar[Mapping[str, str]] = {"nll/token": "nll/token"}

    def loss(self, logps: Tensor, answers: Answers, totals: BatchTotals) -> Tensor:
        """These examples' share of the batch loss; see `Objective.loss`."""
        if self.mean_over == "tokens":
            return -(answers.weights * logps).sum() / totals.tokens
        return -(answers.weights * logps / answers.lengths).sum() / totals.examples

    def loss_size(self, totals: BatchTotals) -> int:
        """The counted tokens of a batch, or its examples."""
        return totals.tokens if self.mean_over == "tokens" else totals.examples

    def totals(self, examples: Sequence[TokenExample]) -> BatchTotals:
        """Examples, and the counted tokens of their answers, without weights."""
        return BatchTotals(len(examples), sum(example.answer_tokens(0) for example in examples))

    def statistics(self, logps: Tensor, answers: Answers) -> dict[str, Statistic]:
        """One value an example of each number in `statistics_defined`, and sums over its tokens of `nll/token`."""
        return {
            "nll/token": PerToken(-logps, answers.lengths),
            "logps/answer": logps,
            "tokens/answer": answers.lengths,
        }

    def refusal(self, example: TokenExample) -> str:
        """An example of several answers, or with a label or a margin; see `Objective.refusal`."""
        answers = len(example.answers)
        if answers != 1:
            return (
                f"{counted(answers, 'answer')}, objective {self.name} imitates one. Set data.answers: best to imitate "
                "the first of them, which is the chosen one of a pair; or compare them with another objective, as dpo"
            )
        if example.label is not None:
            return (
                f"a label, and objective {self.name} would imitate unwanted answers like wanted ones. Keep the rows "
                "with wanted answers, and leave the label out: data.columns: {label: null}"
            )
        if example.margin is not None:
            return (
                f"a margin, which objective {self.name} has no place for. Leave it out: data.columns: {{margin: null}}"
            )
        return ""


OBJECTIVES: dict[str, type[Objective]] = {SFT.name: SFT}
