"""Objectives of preference pairs: DPO and its kin. docs/glossary.md writes the formulas out.

Each is a loss of the reward margin, r(chosen) - r(rejected), where an answer's reward r is what the policy is taken to
value it at. A kind says what its rewards are, and what loss a margin has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tuningfork.objective import losses
from tuningfork.objective.base import Answers, BatchTotals, Objective
from tuningfork.records import Statistic, TokenExample
from tuningfork.wording import counted

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PairObjective(Objective):
    """A loss on preference pairs, answer 0 chosen and answer 1 rejected, with an optional SFT term on the chosen."""

    beta: float = 0.1
    sft_weight: float = 0.0

    answers: ClassVar[int] = 2
    unit: ClassVar[str] = "pairs"
    takes_margins: ClassVar[bool] = False
    """Whether a row may say by how much its chosen answer should be ahead."""
    statistics_defined: ClassVar[Mapping[str, str]] = {
        "rewards/chosen": "Mean reward of the chosen answers, nats, as the objective defines rewards.",
        "rewards/rejected": "Mean reward of the rejected answers, as that of the chosen ones.",
        "rewards/margin": "Mean of (reward of chosen - reward of rejected), nats.",
        "rewards/accuracy": "Share of pairs whose chosen answer has the higher reward; a tie counts half.",
        "logps/chosen": "Mean log-prob of a whole chosen answer under the model, summed over its tokens, nats.",
        "logps/rejected": "Mean log-prob of a whole rejected answer under the model, summed over its tokens, nats.",
    }
    headline: ClassVar[Mapping[str, str]] = {"margin": "rewards/margin", "accuracy": "rewards/accuracy"}

    @property
    def loss_names(self) -> tuple[str, str]:
        return ("loss with SFT term", "loss without SFT term") if self.sft_weight else ("loss", "loss")

    @abstractmethod
    def rewards(self, logps: Tensor, answers: Answers) -> Tensor:
        """What the policy is taken to value each answer at, nats, [A]."""

    @abstractmethod
    def margin_losses(self, margins: Tensor) -> Tensor:
        """The loss of each pair by its reward margin, [N]."""

    def example_losses(self, logps: Tensor, answers: Answers) -> Tensor:
        """The preference loss of each pair, [N], without an SFT term; a pair's weight multiplies it.

        A pair's own margin is what its rewards must differ by before the loss counts them as apart: DPO with an offset
        (Amini et al. 2024, eq. 4), -log sigmoid(margin - offset).
        """
        chosen, rejected = self.rewards(logps, answers).view(-1, 2).unbind(1)
        return answers.weights * self.margin_losses(chosen - rejected - answers.margins)

    def evaluation_loss(self, logps: Tensor, answers: Answers, totals: BatchTotals) -> Tensor:
        """These pairs' share of the mean preference loss, without an SFT term; see `Objective.evaluation_loss`."""
        return self.example_losses(logps, answers).sum() / totals.examples

    def loss(self, logps: Tensor, answers: Answers, totals: BatchTotals) -> Tensor:
        """These pairs' share of the batch loss, the SFT term included; see `Objective.loss`.

        The SFT term is the mean negative log-prob over the chosen tokens of the whole batch.
        """
        share = self.evaluation_loss(logps, answers, totals)
        if self.sft_weight:
            share = share - self.sft_weight * (answers.weights * logps.view(-1, 2)[:, 0]).sum() / totals.tokens
        return share

    def totals(self, examples: Sequence[TokenExample]) -> BatchTotals:
        """Pairs, and the tokens of their chosen answers."""
        return BatchTotals(len(examples), sum(example.answer_tokens(0) for example in examples))

    def statistics(self, logps: Tensor, answers: Answers) -> dict[str, Statistic]:
        """One value a pair of each number in `statistics_defined`."""
        chosen, rejected = self.rewards(logps, answers).view(-1, 2).unbind(1)
        margin = chosen - rejected
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).double() + 0.5 * (margin == 0),
            "logps/chosen": logps[0::2],
            "logps/rejected": logps[1::2],
        }

    def refusal(self, example: TokenExample) -> str:
        """An example that is no pair, or that has a margin where there is no place for one; see `Objective.refusal`."""
        if example.margin is not None and not self.takes_margins:
            takers = [name for name, kind in OBJECTIVES.items() if kind.takes_margins]
            return (
                f"a margin, which objective {self.name} has no place for. Use {' or '.join(takers)}, "
                "or remove the field 'margin' from the rows"
            )
        answers = len(example.answers)
        if answers != 2:
            return f"{counted(answers, 'answer')}, objective {self.name} compares two. {_cure(example)}"
        return ""


def _cure(example: TokenExample) -> str:
    """What to do with an example that is no pair."""
    if len(example.answers) > 2:
        return "Rankings are not trained on yet: write pairs of their answers as chosen and rejected"
    pairs = "give rows with a chosen and a rejected answer"
    if example.label is not None:
        return f"Single answers with a label are not trained on yet: {pairs}"
    return f"Set objective.name: sft to imitate single answers, or {pairs}"


@dataclass(frozen=True)
class LogRatioObjective(PairObjective):
    """A loss of pairs whose rewards are log-ratios to the reference, summed over an answer's tokens or their mean."""

    per_token: ClassVar[bool] = False
    """Whether a reward is the mean over its answer's tokens."""

    def rewards(self, logps: Tensor, answers: Answers) -> Tensor:
        assert answers.reference is not None
        ratios = losses.log_ratio_rewards(logps, answers.reference, self.beta)
        return ratios / answers.lengths if self.per_token else ratios


@dataclass(frozen=True)
class DPO(LogRatioObjective):
    """DPO (Rafailov et al. 2023, eq. 7), conservative with label smoothing (Mitchell 2023)."""

    label_smoothing: float = 0.0

    name: ClassVar[str] = "dpo"
    takes_margins: ClassVar[bool] = True

    def margin_losses(self, margins: Tensor) -> Tensor:
        return losses.sigmoid_loss(margins, self.label_smoothing)


@dataclass(frozen=True)
class DPONorm(DPO):
    """DPO with log-ratios averaged over an answer's tokens."""

    name: ClassVar[str] = "dpo_norm"
    per_token: ClassVar[bool] = True


@dataclass(frozen=True)
class IPOSum(LogRatioObjective):
    """IPO (Azar et al. 2023, eq. 17) as the paper has it, with log-ratios summed over an answer's tokens."""

    name: ClassVar[str] = "ipo_sum"

    def margin_losses(self, margins: Tensor) -> Tensor:
        return losses.identity_loss(margins, self.beta)


@dataclass(frozen=True)
class IPO(IPOSum):
    """IPO with log-ratios averaged over an answer's tokens, as most trainers have it."""

    name: ClassVar[str] = "ipo"
    per_token: ClassVar[bool] = True


@dataclass(frozen=True)
class SimPO(PairObjective):
    """SimPO (Meng et al. 2024, eq. 6): rewards are mean log-probs of a token, and no reference is needed."""

    gamma: float = 0.5

    name: ClassVar[str] = "simpo"
    needs_reference: ClassVar[bool] = False

    def rewards(self, logps: Tensor, answers: Answers) -> Tensor:
        return self.beta * logps / answers.lengths

    def margin_losses(self, margins: Tensor) -> Tensor:
        return losses.target_margin_loss(margins, self.gamma)


OBJECTIVES: dict[str, type[PairObjective]] = {kind.name: kind for kind in (DPO, DPONorm, IPO, IPOSum, SimPO)}
