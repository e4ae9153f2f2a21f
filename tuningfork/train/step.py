"""One optimizer step: every pack of the batch forward and backward, then the weights move once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tuningfork.errors import NonFiniteError, ReferenceMismatch
from tuningfork.models.policy import Policy
from tuningfork.objective.head import Head
from tuningfork.objective.objectives import PreferenceObjective
from tuningfork.reference.build import unequal
from tuningfork.train.batch import PackOfPairs, StepBatch
from tuningfork.train.optimizer import gradient_norm, step


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step computed, on the host. Pairs are in the order of the packs."""

    loss: float  # mean over the batch's examples, SFT term included
    grad_norm: float  # before clipping
    logps: Tensor  # float64 [N, 2], before the weights moved
    rewards: Tensor  # float64 [N, 2]


def train_step(
    policy: Policy,
    head: Head,
    objective: PreferenceObjective,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    max_grad_norm: float | None,
    starting: bool = False,
) -> StepOutcome:
    """Train on one batch.

    Args:
        starting: the weights are still those that the reference was scored with.

    Raises:
        NonFiniteError: a log-prob or the gradient is not finite. The weights have not moved.
        ReferenceMismatch: a log-prob of a starting policy has not the cached one's bits. The weights have not moved.
    """
    losses, logps, rewards = [], [], []
    optimizer.zero_grad(set_to_none=True)  # a step that failed may have left some

    for pairs in batch.packs:
        pairs = pairs.to(policy.device)
        ref, lengths = pairs.reference, pairs.lengths

        def share(first: int, last: int, chunk_logps: Tensor, pairs: PackOfPairs = pairs) -> Tensor:
            ref, lengths, terms = pairs.reference, pairs.lengths[first:last], pairs.terms
            of_chunk = None if ref is None else ref[first:last]
            return objective.loss(chunk_logps, of_chunk, lengths, batch.scale, terms and terms.of_answers(first, last))

        hidden = policy.hidden_rows(pairs.pack)
        loss, answer_logps = head.backward(hidden, policy.head_weight, pairs.pack, share, policy.head_bias)

        losses.append(loss)
        logps.append(answer_logps.view(-1, 2))
        rewards.append(objective.rewards(logps[-1], None if ref is None else ref.view(-1, 2), lengths.view(-1, 2)))

    norm = gradient_norm(optimizer)
    outcome = _read(torch.stack(losses).sum(), norm, torch.cat(logps), torch.cat(rewards))
    _check_finite(outcome, batch)
    if starting:
        _check_starting(outcome, batch)
    limit = max_grad_norm
    step(optimizer, limit / (norm + 1e-6) if limit is not None and outcome.grad_norm > limit else None)
    optimizer.zero_grad(set_to_none=True)
    return outcome


def _read(loss: Tensor, grad_norm: Tensor, logps: Tensor, rewards: Tensor) -> StepOutcome:
    """The step's numbers, from the device. Here the host waits for it, and nowhere else in a step."""
    return StepOutcome(float(loss), float(grad_norm), logps.cpu(), rewards.cpu())


def _check_starting(outcome: StepOutcome, batch: StepBatch) -> None:
    """What training computes is what scoring computed; another graph, or way to keep activations, shows here."""
    references = [pairs.reference.numpy() for pairs in batch.packs if pairs.reference is not None]
    cached = np.concatenate(references) if references else None
    wrong = [] if cached is None else unequal(batch.examples, outcome.logps.flatten().numpy(), cached)
    if wrong:
        raise ReferenceMismatch(
            f"{len(wrong)} of {outcome.logps.numel()} log-probs of the first training step are not those in the "
            f"reference cache; worst {wrong[0]}. No weight has moved, so they must be equal to the bit: training "
            "computes other numbers than scoring does. Set train.activation_memory to block, or model.compile to off."
        )


def _check_finite(outcome: StepOutcome, batch: StepBatch) -> None:
    logps = outcome.logps.numpy()
    for place, answer in np.argwhere(~np.isfinite(logps) | (logps > 1e-3)).tolist()[:1]:
        logp = float(logps[place, answer])
        above = ", above 0" if np.isfinite(logp) else ""
        raise NonFiniteError(f"the log-prob of answer {answer} of {batch.examples[place].id} is {logp}{above}.")
    if not (np.isfinite(outcome.loss) and np.isfinite(outcome.grad_norm)):
        raise NonFiniteError(f"the loss is {outcome.loss} and the gradient norm {outcome.grad_norm}.")
