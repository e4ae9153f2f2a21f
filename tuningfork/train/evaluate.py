"""Scores of the policy on held-out examples, and the check that a start really is the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tuningfork.data.packing.pack import PackLimits
from tuningfork.distributed.ranks import Ranks
from tuningfork.errors import ReferenceMismatch
from tuningfork.objective.base import Answers
from tuningfork.records import PackedBatch, TokenExample, column, taken
from tuningfork.reference.build import Difference, by_file, wrongly_cached
from tuningfork.reference.store import ReferenceStore
from tuningfork.report.run.metrics import Evaluation, Means
from tuningfork.train.session import Session

_AT_ONCE = 4096  # examples whose numbers are added up together

_INHERITED = "They are spoiled, or were scored by other code. Remove these files: their rows are then scored again."
_OF_THIS_RUN = (
    "These were scored for this run, moments ago and by the same code, so to remove them would not help. Either the "
    "weights have moved since, or this model's log-probs depend on what else lies in a pack, or are not the same twice "
    "on this machine: then no margin of a run would be exact. See whether train.device: cpu or model.compile: off "
    "changes that, and report it with the model's config.json."
)


def evaluate(
    session: Session,
    examples: Sequence[TokenExample],
    limits: PackLimits,
    reference: ReferenceStore | None,
    scored: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Score every example; nothing is trained.

    They are one batch to the objective, so the loss is its mean over all of them, and an objective that couples
    examples couples all of them. Sums are taken in the order of the examples, so that they do not depend on how these
    are cut into packs and shared out over ranks.

    Args:
        scored: called after each pack with the number of examples in it and in its fellows on other ranks.

    Raises:
        DataError: the objective refuses an example.
    """
    objective, ranks, begun = session.objective, session.ranks, time.perf_counter()
    objective.check(examples)  # first of all, for what it refuses may be no pairs
    mine = Places(session.mine(examples))
    found = torch.empty(mine.answers, dtype=torch.float64)
    for pack in session.packs(examples, limits):
        found[mine.of(pack.examples)] = session.scorer.score(pack).cpu()
        scored(ranks.total(len(pack.examples)))
    logps = _in_order(examples, found, ranks)
    totals, parts = objective.totals(examples), [*_parts(examples, logps, reference)]
    if objective.couples_examples and parts:
        totals = replace(totals, coupling=objective.coupling(logps, Answers.joined([answers for _, answers in parts])))
    loss = sum(float(objective.evaluation_loss(some, answers, totals)) for some, answers in parts)
    means = sum((Means.of(objective.statistics(some, answers)) for some, answers in parts), Means())
    seconds, derived = time.perf_counter() - begun, objective.derived(means.values()) if parts else {}
    return Evaluation(totals.examples, objective.unit, loss, means, seconds, derived)


class Places:
    """Where the answers of some examples lie among all of theirs, one behind the other. An example may be there more
    than once; each is asked for as often as it is there."""

    def __init__(self, examples: Sequence[TokenExample]) -> None:
        counts = column(examples, "answers").astype(np.int64)
        self.answers = int(counts.sum())
        self._waiting: dict[bytes, list[tuple[int, int]]] = {}
        for content, first, count in zip(column(examples, "content"), np.cumsum(counts) - counts, counts, strict=True):
            self._waiting.setdefault(bytes(content), []).append((int(first), int(count)))

    def of(self, examples: Sequence[TokenExample]) -> Tensor:
        """The places of these examples' answers, int64."""
        found = [self._waiting[bytes(content)].pop() for content in column(examples, "content")]
        return torch.tensor([first + n for first, count in found for n in range(count)], dtype=torch.int64)


def _in_order(examples: Sequence[TokenExample], own: Tensor, ranks: Ranks) -> Tensor:
    """Log-probs of all answers in the order of the examples, from those that each worker has of its own."""
    counts = column(examples, "answers").astype(np.int64)
    firsts = np.cumsum(counts) - counts
    shares = [
        np.repeat(firsts[places] - (np.cumsum(counts[places]) - counts[places]), counts[places])
        + np.arange(counts[places].sum())
        for places in ranks.dealt(len(counts))
    ]
    logps = torch.empty(int(counts.sum()), dtype=torch.float64)
    for places, found in zip(shares, ranks.of_workers(own, [*map(len, shares)]), strict=True):
        logps[torch.from_numpy(places)] = found
    return logps


def _parts(
    examples: Sequence[TokenExample], logps: Tensor, reference: ReferenceStore | None
) -> Iterator[tuple[Tensor, Answers]]:
    """The answers and their log-probs, some examples at a time."""
    first = 0
    for begin in range(0, len(examples), _AT_ONCE):
        some = taken(examples, np.arange(begin, min(begin + _AT_ONCE, len(examples))))
        lengths = [example.answer_tokens(i) for example in some for i in range(len(example.answers))]
        cached = None if reference is None else reference.lookup(some)
        yield logps[first : first + len(lengths)], Answers.of(some, lengths, cached)
        first += len(lengths)


def check_start(session: Session, packs: Iterable[PackedBatch], reference: ReferenceStore) -> int:
    """The policy at its start *is* the reference: every log-prob must have the very bits of the cached one.

    Any other layout, batch, kernel or rounding between policy and reference shows here, and so does a cache with wrong
    numbers in it.

    Returns:
        The number of examples checked.

    Raises:
        ReferenceMismatch: some log-prob differs. It names the files of the cache that have such, and the worst, and
            says whether they are of before or were scored for this run.
    """
    seen: list[tuple[int, int]] = []

    def noted(packs: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        for pack in packs:
            seen.append((len(pack.examples), len(pack.answer_lengths)))
            yield pack

    wrong = wrongly_cached(reference, noted(packs), session.scorer.score)
    examples, answers = (sum(counts) for counts in zip(*seen, strict=True)) if seen else (0, 0)
    if wrong:
        raise ReferenceMismatch(
            f"step-0 check: {len(wrong)} of {answers} log-probs of the starting model are not those in the cache "
            f"{reference.folder}; worst {wrong[0]}. At the start the two must be equal to the bit, and the margin "
            "exactly 0. The wrong ones lie in",
            *_by_origin(reference, wrong),
        )
    return examples


def _by_origin(reference: ReferenceStore, wrong: Sequence[Difference]) -> Iterator[str]:
    """Lines on the files with wrong log-probs, and on what to do: first those of before, then those of this run."""
    files = reference.files_of([difference.example for difference in wrong])
    for inherited, advice in ((True, _INHERITED), (False, _OF_THIS_RUN)):
        some = [one for one, file in zip(wrong, files, strict=True) if reference.is_inherited(file) == inherited]
        if some:
            yield from by_file(reference, some)
            yield advice
