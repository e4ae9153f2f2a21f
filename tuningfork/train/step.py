"""One optimizer step: every pack of the batch forward and backward, then the weights move once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tuningfork.errors import NonFiniteError, ReferenceMismatch
from tuningfork.models.policy import Policy
from tuningfork.objective.head import Head
from tuningfork.objective.objectives import BatchScale, PairTerms, PreferenceObjective
from tuningfork.records import PackedBatch
from tuningfork.reference.build import unequal
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
    packs: Sequence[PackedBatch],
    reference: Sequence[np.ndarray] | None,
    max_grad_norm: float | None,
    starting: bool = False,
) -> StepOutcome:
    """Train on one batch, already cut into packs; how it is cut does not change the step.

    Args:
        reference: cached log-probs of each pack's answers, float64 [A]; None for an objective without a reference.
        starting: the weights are still those that the reference was scored with.

    Raises:
        DataError: the objective refuses an example.
        NonFiniteError: a log-prob or the gradient is not finite. The weights have not moved.
        ReferenceMismatch: a log-prob of a starting policy has not the cached one's bits. The weights have not moved.
    """
    scale = BatchScale.of(example for pack in packs for example in pack.examples)
    losses, logps, rewards = [], [], []
    optimizer.zero_grad(set_to_none=True)  # a step that failed may have left some

    for i, pack in enumerate(packs):
        pack = pack.to(policy.device)
        lengths = _on(policy.device, torch.tensor(pack.answer_lengths, dtype=torch.float64))
        ref = None if reference is None else _on(policy.device, torch.from_numpy(reference[i]))
        terms = objective.terms(pack.examples)
        terms = terms and PairTerms(*(_on(policy.device, term) for term in terms))

        def share(first: int, last: int, chunk_logps: Tensor, ref=ref, lengths=lengths, terms=terms) -> Tensor:  # type: ignore[no-untyped-def]
            of_chunk = None if ref is None else ref[first:last]
            return objective.loss(
                chunk_logps, of_chunk, lengths[first:last], scale, terms and terms.of_answers(first, last)
            )

        hidden = policy.hidden_rows(pack)
        loss, answer_logps = head.backward(hidden, policy.head_weight, pack, share, policy.head_bias)

        losses.append(loss)
        logps.append(answer_logps.view(-1, 2))
        rewards.append(objective.rewards(logps[-1], None if ref is None else ref.view(-1, 2), lengths.view(-1, 2)))

    norm = gradient_norm(optimizer)
    outcome = _read(torch.stack(losses).sum(), norm, torch.cat(logps), torch.cat(rewards))
    _check_finite(outcome, packs)
    if starting and reference is not None:
        _check_starting(outcome, packs, np.concatenate(reference))
    limit = max_grad_norm
    step(optimizer, limit / (norm + 1e-6) if limit is not None and outcome.grad_norm > limit else None)
    optimizer.zero_grad(set_to_none=True)
    return outcome


def _read(loss: Tensor, grad_norm: Tensor, logps: Tensor, rewards: Tensor) -> StepOutcome:
    """The step's numbers, from the device. Here the host waits for it, and nowhere else in a step."""
    return StepOutcome(float(loss), float(grad_norm), logps.cpu(), rewards.cpu())


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on a device. From pinned memory, so that the host goes on while the device is busy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _check_starting(outcome: StepOutcome, packs: Sequence[PackedBatch], cached: np.ndarray) -> None:
    """What training computes is what scoring computed; another graph, or way to keep activations, shows here."""
    examples = [example for pack in packs for example in pack.examples]
    wrong = unequal(examples, outcome.logps.flatten().numpy(), cached)
    if wrong:
        raise ReferenceMismatch(
            f"{len(wrong)} of {len(cached)} log-probs of the first training step are not those in the reference cache; "
            f"worst {wrong[0]}. No weight has moved, so they must be equal to the bit: training computes other numbers "
            "than scoring does. Set train.activation_memory to block, or model.compile to off."
        )


def _check_finite(outcome: StepOutcome, packs: Sequence[PackedBatch]) -> None:
    examples = [example for pack in packs for example in pack.examples]
    for example, row in zip(examples, outcome.logps.tolist(), strict=True):
        for answer, logp in enumerate(row):
            if not np.isfinite(logp):
                raise NonFiniteError(f"the log-prob of answer {answer} of {example.id} is {logp}.")
            if logp > 1e-3:
                raise NonFiniteError(f"the log-prob of answer {answer} of {example.id} is {logp}, above 0.")
    if not (np.isfinite(outcome.loss) and np.isfinite(outcome.grad_norm)):
        raise NonFiniteError(f"the loss is {outcome.loss} and the gradient norm {outcome.grad_norm}.")
