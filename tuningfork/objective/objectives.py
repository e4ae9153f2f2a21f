"""An objective: what the answers' log-probs of a batch are worth, named in a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tuningfork.errors import DataError
from tuningfork.objective import losses
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import TokenExample, column
from tuningfork.wording import counted

DEFAULT_GAMMA = 0.5  # simpo's target margin where the recipe sets none
_PER_TOKEN = {"dpo_norm", "ipo", "simpo"}
_OFFSET = {"dpo", "dpo_norm"}  # objectives that a row's own margin shifts


@dataclass(frozen=True, slots=True)
class BatchScale:
    """Sizes of the global batch, known before its first pack runs.

    Every mean of an objective divides by these, so a step's gradient does not depend on how the batch is cut.
    """

    examples: int
    chosen_tokens: int

    @classmethod
    def of(cls, examples: Iterable[TokenExample]) -> BatchScale:
        chosen = [example.answer_tokens(0) for example in examples]
        return cls(len(chosen), sum(chosen))


class PairTerms(NamedTuple):
    """What rows say about their pairs' losses, both float64 [N]."""

    weights: Tensor  # of the pair's loss
    margins: Tensor  # by which the chosen answer's reward should be ahead

    @classmethod
    def of(cls, examples: Sequence[TokenExample]) -> PairTerms | None:
        """None where no row says anything."""
        if all(example.weight == 1.0 and example.margin is None for example in examples):
            return None
        weights = [example.weight for example in examples]
        margins = [example.margin or 0.0 for example in examples]
        return cls(torch.tensor(weights, dtype=torch.float64), torch.tensor(margins, dtype=torch.float64))

    def of_answers(self, first: int, last: int) -> PairTerms:
        """Those of the pairs whose answers are numbered from `first` to before `last`."""
        return PairTerms(*(term[first // 2 : last // 2] for term in self))


class PreferenceObjective:
    """A loss on preference pairs, answer 0 chosen and answer 1 rejected, with an optional SFT term on the chosen."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.needs_reference = config.name != "simpo"

    def refusal(self, example: TokenExample) -> str:
        """What an example has that this objective cannot train on: it is no pair, or says what there is no place for.

        Empty where it can. Alike for examples that have it, so that it can be counted.
        """
        if example.margin is not None and self.config.name not in _OFFSET:
            return (
                f"a margin, which objective {self.config.name} has no place for. Use {' or '.join(sorted(_OFFSET))}, "
                "or remove the field 'margin' from the rows"
            )
        answers = len(example.answers)
        if answers != 2:
            cure = (
                "Single answers are not trained on yet: give rows with a chosen and a rejected answer"
                if answers < 2
                else "Rankings are not trained on yet: write pairs of their answers as chosen and rejected"
            )
            return f"{counted(answers, 'answer')}, objective {self.config.name} compares two. {cure}"
        return ""

    def check(self, examples: Sequence[TokenExample]) -> None:
        """Raises DataError for the first example that it cannot train on, and says how many are like it."""
        # Whether one is refused depends on these two alone, so one of each kind tells of all.
        kinds = np.stack([column(examples, "answers"), ~np.isnan(column(examples, "margin"))])
        _, first, rows = np.unique(kinds, axis=1, return_index=True, return_counts=True)
        for place, alike in sorted(zip(first.tolist(), rows.tolist(), strict=True)):
            if refusal := self.refusal(examples[place]):
                others = f" ({counted(alike - 1, 'other row is', 'other rows are')} like it.)" if alike > 1 else ""
                raise DataError(f"{examples[place].id}: has {refusal}.{others}")

    def terms(self, examples: Sequence[TokenExample]) -> PairTerms | None:
        """What the rows of a pack say about their pairs' losses: asked wherever a loss is computed.

        Raises:
            DataError: they have something that this objective refuses, so there is no loss of them.
        """
        self.check(examples)
        return PairTerms.of(examples)

    def rewards(self, logps: Tensor, reference_logps: Tensor | None, lengths: Tensor) -> Tensor:
        """What the policy values each answer at, see losses.py. All [N, 2], chosen first."""
        name, beta = self.config.name, self.config.beta
        if name == "simpo":
            rewards = beta * logps
        else:
            assert reference_logps is not None
            rewards = losses.log_ratio_rewards(logps, reference_logps, beta)
        return rewards / lengths if name in _PER_TOKEN else rewards

    def pair_losses(self, rewards: Tensor, terms: PairTerms | None = None) -> Tensor:
        """The preference loss of each pair, [N], from rewards [N, 2]; a pair's weight multiplies it.

        A pair's own margin is what its rewards must differ by before the loss counts them as apart: DPO with an offset
        (Amini et al. 2024, eq. 4), -log sigmoid(margin - offset).
        """
        config = self.config
        margins = rewards[:, 0] - rewards[:, 1]
        if terms is not None:
            margins = margins - terms.margins
        if config.name in ("ipo", "ipo_sum"):
            found = losses.identity_loss(margins, config.beta)
        elif config.name == "simpo":
            found = losses.target_margin_loss(margins, DEFAULT_GAMMA if config.gamma is None else config.gamma)
        else:
            found = losses.sigmoid_loss(margins, config.label_smoothing)
        return found if terms is None else terms.weights * found

    def loss(
        self,
        logps: Tensor,
        reference_logps: Tensor | None,
        lengths: Tensor,
        scale: BatchScale,
        terms: PairTerms | None = None,
    ) -> Tensor:
        """These pairs' share of the batch loss; the shares of all chunks, packs and ranks add up to it.

        Args:
            logps, reference_logps, lengths: [A] with the answers of whole pairs in order.
            scale: sizes of the global batch.
            terms: what the pairs' rows say, if they say anything.
        """
        pairs = logps.view(-1, 2), None if reference_logps is None else reference_logps.view(-1, 2), lengths.view(-1, 2)
        share = self.pair_losses(self.rewards(*pairs), terms).sum() / scale.examples
        if self.config.sft_weight:
            chosen = pairs[0][:, 0] if terms is None else terms.weights * pairs[0][:, 0]
            share = share - self.config.sft_weight * chosen.sum() / scale.chosen_tokens
        return share
