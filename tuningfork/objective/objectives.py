"""An objective: what the answers' log-probs of a batch are worth, named in a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tuningfork.errors import DataError
from tuningfork.objective import losses
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import TokenExample

DEFAULT_GAMMA = 0.5  # simpo's target margin where the recipe sets none
_PER_TOKEN = {"dpo_norm", "ipo", "simpo"}


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


class PreferenceObjective:
    """A loss on preference pairs, answer 0 chosen and answer 1 rejected, with an optional SFT term on the chosen."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.needs_reference = config.name != "simpo"

    def check(self, examples: Iterable[TokenExample]) -> None:
        """Raises DataError if an example is not a pair."""
        for example in examples:
            if len(example.answers) != 2:
                raise DataError(
                    f"{example.id}: has {len(example.answers)} answers, objective {self.config.name} compares two."
                )

    def rewards(self, logps: Tensor, reference_logps: Tensor | None, lengths: Tensor) -> Tensor:
        """What the policy values each answer at, see losses.py. All [N, 2], chosen first."""
        name, beta = self.config.name, self.config.beta
        if name == "simpo":
            rewards = beta * logps
        else:
            assert reference_logps is not None
            rewards = losses.log_ratio_rewards(logps, reference_logps, beta)
        return rewards / lengths if name in _PER_TOKEN else rewards

    def pair_losses(self, rewards: Tensor) -> Tensor:
        """The preference loss of each pair, [N], from rewards [N, 2]."""
        config = self.config
        margins = rewards[:, 0] - rewards[:, 1]
        if config.name in ("ipo", "ipo_sum"):
            return losses.identity_loss(margins, config.beta)
        if config.name == "simpo":
            return losses.target_margin_loss(margins, DEFAULT_GAMMA if config.gamma is None else config.gamma)
        return losses.sigmoid_loss(margins, config.label_smoothing)

    def loss(self, logps: Tensor, reference_logps: Tensor | None, lengths: Tensor, scale: BatchScale) -> Tensor:
        """These pairs' share of the batch loss; the shares of all chunks, packs and ranks add up to it.

        Args:
            logps, reference_logps, lengths: [A] with the answers of whole pairs in order.
            scale: sizes of the global batch.
        """
        pairs = logps.view(-1, 2), None if reference_logps is None else reference_logps.view(-1, 2), lengths.view(-1, 2)
        share = self.pair_losses(self.rewards(*pairs)).sum() / scale.examples
        if self.config.sft_weight:
            share = share - self.config.sft_weight * pairs[0][:, 0].sum() / scale.chosen_tokens
        return share
