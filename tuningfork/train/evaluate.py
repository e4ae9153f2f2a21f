"""Scores of the policy on held-out examples, and the check that a start really is the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from tuningfork.errors import ReferenceMismatch
from tuningfork.objective.base import Answers, BatchTotals
from tuningfork.records import PackedBatch
from tuningfork.reference.build import by_file, wrongly_cached
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.metrics import Evaluation, Means
from tuningfork.train.session import Session


def evaluate(
    session: Session,
    packs: Iterable[PackedBatch],
    reference: ReferenceStore | None,
    scored: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Score every example of the packs; nothing is trained.

    They are one batch to the objective, so the loss is its mean over all of them, however they are cut into packs, and
    an objective that couples examples couples all of them.

    Args:
        scored: called after each pack with the number of its examples.

    Raises:
        DataError: the objective refuses an example.
    """
    objective, means, totals = session.objective, Means(), BatchTotals(0, 0)
    scores: list[tuple[torch.Tensor, Answers]] = []  # a few numbers for each answer
    begun = time.perf_counter()
    for pack in packs:
        objective.check(pack.examples)  # first of all, for what it refuses may be no pairs
        cached = None if reference is None else reference.lookup(pack.examples)
        answers = Answers.of(pack.examples, pack.answer_lengths, cached)
        logps = session.scorer.score(pack).cpu()
        means += Means.of(objective.statistics(logps, answers))
        totals += objective.totals(pack.examples)
        scores.append((logps, answers))
        scored(len(pack.examples))
    if objective.couples_examples and scores:
        logps, answers = torch.cat([logps for logps, _ in scores]), Answers.joined([answers for _, answers in scores])
        totals = replace(totals, coupling=objective.coupling(logps, answers))
    loss = sum(float(objective.evaluation_loss(logps, answers, totals)) for logps, answers in scores)
    return Evaluation(totals.examples, objective.unit, loss, means, time.perf_counter() - begun)


def check_start(session: Session, packs: Sequence[PackedBatch], reference: ReferenceStore) -> int:
    """The policy at its start *is* the reference: every log-prob must have the very bits of the cached one.

    Any other layout, batch, kernel or rounding between policy and reference shows here, and so does a cache with wrong
    numbers in it.

    Returns:
        The number of examples checked.

    Raises:
        ReferenceMismatch: some log-prob differs. It names the files of the cache that have such, and the worst.
    """
    wrong = wrongly_cached(reference, packs, session.scorer.score)
    examples = sum(len(pack.examples) for pack in packs)
    answers = sum(len(pack.answer_lengths) for pack in packs)
    if wrong:
        raise ReferenceMismatch(
            f"step-0 check: {len(wrong)} of {answers} log-probs of the starting model are not those in the cache "
            f"{reference.folder}; worst {wrong[0]}. At the start the two must be equal to the bit, and the margin "
            "exactly 0. The wrong ones lie in",
            *by_file(reference, wrong),
            "They are spoiled, or were scored by other code. Remove these files: their rows are then scored again.",
        )
    return examples
