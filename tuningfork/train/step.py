"""One optimizer step: every pack of the batch forward and backward, then the weights move once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.errors import NonFiniteError, ReferenceMismatch
from tuningfork.models.scorer import Scorer
from tuningfork.objective.base import Objective
from tuningfork.ranges import phase
from tuningfork.records import ChunkLoss, PerToken, Statistic
from tuningfork.reference.build import unequal
from tuningfork.train.batch import StepBatch
from tuningfork.train.optimizer import gradient_norm, move_weights

_ROUNDING = 1e-3  # nats: more above 0 is no log-prob of any kernel that only rounds


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step computed, on the host. Answers are in the order of the batch's examples, those of all ranks."""

    loss: float  # of the batch, as the objective defines it; as the log-probs, the same however many ranks there are
    grad_norm: float  # before clipping
    logps: Tensor  # float64 [A], before the weights moved
    statistics: Mapping[str, Statistic]  # the objective's, of these log-probs, and what the model's mixers noted
    skipped: bool = False  # the gradient was not finite at this loss scale: the weights have not moved


def train_step(
    scorer: Scorer,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    max_grad_norm: float | None,
    starting: bool = False,
    ranks: Ranks = ONE_PROCESS,
    loss_scale: float | None = None,
) -> StepOutcome:
    """Train on one batch.

    Args:
        max_grad_norm: a longer gradient is scaled down to this length; None scales none.
        starting: the weights are still those that the reference was scored with.
        ranks: the processes that share the batch.
        loss_scale: a power of two that gradients are multiplied by on their way, see loss_scale.py. Where one is not
            finite, the step is skipped.

    Raises:
        NonFiniteError: a log-prob, or without a loss scale the gradient, is not finite. The weights have not moved.
        ReferenceMismatch: a log-prob of a starting policy has not the cached one's bits. The weights have not moved.
    """
    optimizer.zero_grad(set_to_none=True)  # a step that failed may have left some
    own, totals = batch.own.to(scorer.device), batch.totals
    if objective.couples_examples:
        logps = batch.together(torch.cat([*map(scorer.score, batch.packs)]).cpu(), ranks)
        totals = replace(totals, coupling=objective.coupling(logps, batch.answers))
    there = totals.to(scorer.device)

    scores, notes = [], []
    for number, (pack, of_pack) in enumerate(batch.with_answers(own), start=1):
        last = number == len(batch.packs)
        share = objective.of_chunks(of_pack, there)
        _, pack_logps = scorer.backward(pack, _scaled(share, loss_scale), last, objective.linear)
        scores.append(pack_logps)
        notes.append(scorer.policy.noted)

    norm = gradient_norm(optimizer, scorer.policy.spread)
    if loss_scale is not None:
        norm = norm / loss_scale
    grad_norm, own_logps, noted = _read(norm, torch.cat(scores), notes)
    logps = batch.together(own_logps, ranks)
    loss = float(objective.loss(logps, batch.answers, totals))
    skipped = loss_scale is not None and not math.isfinite(grad_norm)
    _check_finite(loss, 0.0 if skipped else grad_norm, logps, batch)
    if starting:
        _check_starting(logps, batch)
    scale = None if loss_scale is None else torch.ones_like(norm) / loss_scale
    if max_grad_norm is not None and grad_norm > max_grad_norm:
        clipped = max_grad_norm / (norm + 1e-6)
        scale = clipped if scale is None else clipped * scale
    if not skipped:
        with phase("optimizer"):
            move_weights(optimizer, scale)
    optimizer.zero_grad(set_to_none=True)
    # Statistics come last: the device moves the weights meanwhile.
    statistics = {**objective.statistics(logps, batch.answers), **_of_mixers(noted, batch, ranks)}
    return StepOutcome(loss, grad_norm, logps, statistics, skipped)


def _scaled(loss: ChunkLoss, scale: float | None) -> ChunkLoss:
    """A loss times a scale, and so all gradients that the head and the model take of it."""
    return loss if scale is None else lambda first, last, logps: scale * loss(first, last, logps)


def _read(
    grad_norm: Tensor, logps: Tensor, notes: Sequence[Mapping[str, Tensor]]
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """A step's numbers, from the device. Here the host waits for it, and nowhere else in a step."""
    noted = {}
    if notes and notes[0]:
        sums = torch.stack([torch.stack([*of_pack.values()]) for of_pack in notes]).sum(0)
        noted = dict(zip(notes[0], sums.cpu(), strict=True))
    return float(grad_norm), logps.cpu(), noted


def _of_mixers(noted: Mapping[str, Tensor], batch: StepBatch, ranks: Ranks) -> dict[str, PerToken]:
    """What mixers noted of this worker's packs, over the tokens of all workers'."""
    if not noted:
        return {}
    own = torch.stack([*noted.values(), torch.tensor(float(batch.unique_tokens), dtype=torch.float64)])
    *sums, tokens = torch.stack(ranks.of_workers(own, [len(own)] * ranks.workers)).sum(0)[:, None].unbind()
    return {name: PerToken(total, tokens) for name, total in zip(noted, sums, strict=True)}


def _check_starting(logps: Tensor, batch: StepBatch) -> None:
    """What training computes is what scoring computed; another graph, or way to keep activations, shows here."""
    cached = batch.answers.reference
    wrong = [] if cached is None else unequal(batch.examples, logps.numpy(), cached.numpy())
    if wrong:
        raise ReferenceMismatch(
            f"{len(wrong)} of {len(logps)} log-probs of the first training step are not those in the "
            f"reference cache; worst {wrong[0]}. No weight has moved, so they must be equal to the bit: training "
            "computes other numbers than scoring does. Set train.activation_memory to block, or model.compile to off."
        )


def _check_finite(loss: float, grad_norm: float, logps: Tensor, batch: StepBatch) -> None:
    for place in torch.nonzero(~logps.isfinite() | (logps > _ROUNDING)).flatten()[:1].tolist():
        boundaries, logp = batch.answers.boundaries, float(logps[place])
        example = bisect_right(boundaries, place) - 1
        answer = f"answer {place - boundaries[example]} of {batch.examples[example].id}"
        above = ", above 0" if math.isfinite(logp) else ""
        raise NonFiniteError(f"the log-prob of {answer} is {logp}{above}.")
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise NonFiniteError(f"the loss is {loss} and the gradient norm {grad_norm}.")
