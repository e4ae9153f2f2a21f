"""How long things are, in tokens: percentiles, histograms, which answer is the longer one, what a limit would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuningfork.data.summary.cost import Sizes
from tuningfork.records import TokenExample

BARS = 40  # of a histogram, about: enough to show a shape, few enough to hover over
LIMITS = (512, 1024, 2048, 4096, 8192)  # values of max_length that are previewed, and on by doubling


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts[i] values lie in [i * width, (i + 1) * width), and `beyond` values past the last of these."""

    width: int
    counts: list[int]
    beyond: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Some lengths in tokens. Percentiles lie between two lengths by linear interpolation, as numpy's do."""

    total: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: int
    histogram: Histogram


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Which answer of a pair is the longer one; differences are tokens of chosen - tokens of rejected.

    An example of more answers makes a pair of its first with each of the others.
    """

    longer: int  # pairs whose chosen answer is longer
    equal: int
    shorter: int
    longer_share: float
    median: float
    mean: float
    longer_by: Histogram  # of difference - 1, so that its first bar begins with a difference of 1
    shorter_by: Histogram  # of -difference - 1; the same width as longer_by


@dataclass(frozen=True, slots=True)
class Truncation:
    """What a value of data.max_length costs: examples with a longer sequence are dropped whole."""

    max_length: int
    recipe: bool  # it is the recipe's
    rows_lost: int
    rows_lost_share: float
    tokens_lost: int  # of those rows, the prompt once per answer
    tokens_lost_share: float


def lengths(examples: Sequence[TokenExample]) -> dict[str, Lengths]:
    """Lengths of prompts, answers and whole sequences (prompt + one answer).

    Answers are "chosen", the first of several, and "rejected", all others; "answer" is one without a rival.
    """
    sizes = Sizes.of(examples)
    rivals = (sizes.answers > 1)[sizes.owner]
    values = {
        "prompt": sizes.prompt,
        "chosen": sizes.answer[sizes.first & rivals],
        "rejected": sizes.answer[~sizes.first],
        "answer": sizes.answer[~rivals],
        "sequence": sizes.sequence,
    }
    return {name: _describe(some) for name, some in values.items() if len(some)}


def length_bias(examples: Sequence[TokenExample]) -> LengthBias | None:
    """Whether the chosen answers are the longer ones, which a model may learn instead of what makes them better.

    None where no example has two answers.
    """
    sizes = Sizes.of(examples)
    difference = (sizes.answer[sizes.first][sizes.owner] - sizes.answer)[~sizes.first]
    if not len(difference):
        return None
    longer, shorter = difference[difference > 0], -difference[difference < 0]
    width = _width(np.abs(difference[difference != 0]) - 1, BARS // 2)
    return LengthBias(
        longer=len(longer),
        equal=len(difference) - len(longer) - len(shorter),
        shorter=len(shorter),
        longer_share=len(longer) / len(difference),
        median=float(np.median(difference)),
        mean=float(difference.mean()),
        longer_by=_histogram(longer - 1, width, BARS // 2),
        shorter_by=_histogram(shorter - 1, width, BARS // 2),
    )


def preview_truncation(examples: Sequence[TokenExample], recipe: int) -> list[Truncation]:
    """What several values of max_length would cost, the recipe's among them; `examples` are of any length."""
    sizes = Sizes.of(examples)
    longest = sizes.longest
    tokens = np.bincount(sizes.owner, weights=sizes.sequence).astype(np.int64)
    limits = [*LIMITS]
    while limits[-1] < longest.max():
        limits.append(2 * limits[-1])
    found: list[Truncation] = []
    for limit in sorted({*limits, recipe}):
        lost = longest > limit
        rows, share = int(lost.sum()), float(lost.mean())
        lost_tokens = int(tokens[lost].sum())
        if limit > LIMITS[-1] and limit != recipe and found[-1].rows_lost == rows:
            continue  # one endless row would draw a table of equal lines
        found.append(
            Truncation(limit, limit == recipe, rows, share, lost_tokens, lost_tokens / max(1, int(tokens.sum())))
        )
    return found


def _describe(values: np.ndarray) -> Lengths:
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return Lengths(
        total=int(values.sum()),
        mean=float(values.mean()),
        p50=float(p50),
        p95=float(p95),
        p99=float(p99),
        max=int(values.max()),
        histogram=_histogram(values, _width(values, BARS), BARS),
    )


def _width(values: np.ndarray, bars: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 .. with which so many bars hold 99 % of the values."""
    reach = int(np.percentile(values, 99, method="inverted_cdf")) + 1 if len(values) else 1
    return next(step * ten for ten in (10**n for n in range(12)) for step in (1, 2, 5) if step * ten * bars >= reach)


def _histogram(values: np.ndarray, width: int, bars: int) -> Histogram:
    counts = np.bincount(np.minimum(values // width, bars), minlength=bars + 1)
    *inside, beyond = (int(count) for count in counts)
    return Histogram(width, inside, beyond)
