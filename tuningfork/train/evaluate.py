"""Scores of the policy on held-out pairs, and the check that a start really is the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from tuningfork.errors import ReferenceMismatch
from tuningfork.records import PackedBatch
from tuningfork.reference.build import by_file, wrongly_cached
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.metrics import Evaluation, PairSums, pair_statistics
from tuningfork.train.setup import Start


def evaluate(
    start: Start,
    packs: Iterable[PackedBatch],
    reference: ReferenceStore | None,
    scored: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Score every pair of the packs; nothing is trained. Raises DataError for an example that the objective refuses."""
    sums, loss, pairs, begun = PairSums(), 0.0, 0, time.perf_counter()
    for pack in packs:
        terms = start.objective.terms(pack.examples)  # first of all, for what it refuses may be no pairs
        logps = start.score(pack).cpu()
        lengths = torch.tensor(pack.answer_lengths, dtype=torch.float64)
        ref = None if reference is None else torch.from_numpy(reference.lookup(pack.examples)).view(-1, 2)
        rewards = start.objective.rewards(logps.view(-1, 2), ref, lengths.view(-1, 2))
        sums += pair_statistics(rewards[:, 0], rewards[:, 1], logps[0::2], logps[1::2])
        loss += float(start.objective.pair_losses(rewards, terms).sum())
        pairs += len(pack.examples)
        scored(len(pack.examples))
    return Evaluation(pairs, loss / max(pairs, 1), sums, time.perf_counter() - begun)


def check_start(start: Start, packs: Sequence[PackedBatch], reference: ReferenceStore) -> int:
    """The policy at its start *is* the reference: every log-prob must have the very bits of the cached one.

    Any other layout, batch, kernel or rounding between policy and
    reference shows here, and so does a cache with wrong numbers in it.

    Returns:
        The number of pairs checked.

    Raises:
        ReferenceMismatch: some log-prob differs. It names the files of the cache that have such, and the worst.
    """
    wrong = wrongly_cached(reference, packs, start.score)
    pairs = sum(len(pack.examples) for pack in packs)
    if wrong:
        raise ReferenceMismatch(
            f"step-0 check: {len(wrong)} of {2 * pairs} log-probs of the starting model are not those in the cache "
            f"{reference.folder}; worst {wrong[0]}. At the start the two must be equal to the bit, and the margin "
            "exactly 0. The wrong ones lie in",
            *by_file(reference, wrong),
            "They are spoiled, or were scored by other code. Remove these files: their rows are then scored again.",
        )
    return pairs
