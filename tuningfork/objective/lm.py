"""Language modelling: each token of a document is predicted from those before it. docs/glossary.md has the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tuningfork.objective.base import Answers, BatchTotals, Objective
from tuningfork.records import PerToken, Statistic, TokenExample
from tuningfork.wording import counted

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 700.0  # nats whose exponential is a float


@dataclass(frozen=True)
class LM(Objective):
    """The mean negative log-prob of all target tokens of a step: the cross-entropy of pre-training.

    A target is a token that has a predictor: all of a document's but its first, and that too where a BOS stands in
    front. It is a mean over the step's tokens, not over means of packs or documents. A row's weight multiplies its part
    of the sum, and not what the sum is divided by.
    """

    name: ClassVar[str] = "lm"
    needs_reference: ClassVar[bool] = False
    linear: ClassVar[bool] = True
    answers: ClassVar[int] = 1
    unit: ClassVar[str] = "examples"
    statistics_defined: ClassVar[Mapping[str, str]] = {
        "nll/token": "Negative log-prob of a target token, mean over all of them, without weights, nats.",
        "bits/byte": "Bits of all target tokens / UTF-8 bytes of the text that they stand for, without weights; what a "
        "coder by this model needs of each byte. It compares models of any tokenizers.",
    }
    derived_defined: ClassVar[Mapping[str, str]] = {
        "perplexity": "The exponential of nll/token; null where no float is so large.",
    }
    headline: ClassVar[Mapping[str, str]] = {"bits/byte": "bits/byte"}

    def loss(self, logps: Tensor, answers: Answers, totals: BatchTotals) -> Tensor:
        """These examples' share of the batch loss; see `Objective.loss`."""
        return -(answers.weights * logps).sum() / totals.tokens

    def loss_size(self, totals: BatchTotals) -> int:
        """The target tokens of a batch."""
        return totals.tokens

    def totals(self, examples: Sequence[TokenExample]) -> BatchTotals:
        """Examples, and their target tokens, without weights."""
        return BatchTotals(len(examples), sum(example.answer_tokens(0) for example in examples))

    def statistics(self, logps: Tensor, answers: Answers) -> dict[str, Statistic]:
        """Sums over each example's target tokens, and over its bytes, of the numbers in `statistics_defined`."""
        return {
            "nll/token": PerToken(-logps, answers.lengths),
            "bits/byte": PerToken(-logps / math.log(2), answers.text_bytes),
        }

    def derived(self, means: Mapping[str, float | None]) -> dict[str, float | None]:
        nll = means["nll/token"]
        return {"perplexity": None if nll is None or nll > _LARGEST else math.exp(nll)}

    def refusal(self, example: TokenExample) -> str:
        """An example of several answers, or with a prompt, a label or a margin; see `Objective.refusal`."""
        answers = len(example.answers)
        if answers != 1:
            return (
                f"{counted(answers, 'answer')}, objective {self.name} reads documents. Give rows of text, or compare "
                "the answers with another objective, as dpo"
            )
        if len(example.prompt_ids) > 1:
            return (
                f"a prompt, whose tokens objective {self.name} would not learn. Give rows of text, or set "
                "objective.name: sft to imitate answers"
            )
        if example.label is not None or example.margin is not None:
            what = "label" if example.label is not None else "margin"
            return (
                f"a {what}, which objective {self.name} has no place for. Leave it out: data.columns: {{{what}: null}}"
            )
        return ""


OBJECTIVES: dict[str, type[Objective]] = {LM.name: LM}
