"""How long things are, in tokens: percentiles, histograms, which answer is the longer one, what a limit would cost."""

from __future__ import annotations

import numpy as np

from tuningfork.data.summary.records import Histogram, LengthBias, Lengths, Truncation
from tuningfork.data.summary.sizes import Sizes
from tuningfork.data.tokens.truncate import OverLength

BARS = 40  # of a histogram, about: enough to show a shape, few enough to hover over
LIMITS = (512, 1024, 2048, 4096, 8192)  # values of max_length that are previewed, and on by doubling


def lengths(sizes: Sizes) -> dict[str, Lengths]:
    """Lengths of prompts, answers and whole sequences (prompt + one answer).

    Answers are "chosen", the first of several, and "rejected", all others; "answer" is one without a rival.
    """
    rivals = (sizes.answers > 1)[sizes.owner]
    values = {
        "prompt": sizes.prompt,
        "chosen": sizes.answer[sizes.first & rivals],
        "rejected": sizes.answer[~sizes.first],
        "answer": sizes.answer[~rivals],
        "sequence": sizes.sequence,
    }
    return {name: _describe(some) for name, some in values.items() if len(some)}


def length_bias(sizes: Sizes) -> LengthBias | None:
    """Whether the chosen answers are the longer ones, which a model may learn instead of what makes them better.

    None where no example has two answers.
    """
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


def preview_truncation(sizes: Sizes, recipe: int, policy: OverLength) -> list[Truncation]:
    """What several values of max_length would cost, the recipe's among them; `sizes` are those before any cut."""
    longest = sizes.longest
    tokens = int(sizes.sequence.sum())
    limits = [*LIMITS]
    while limits[-1] < longest.max():
        limits.append(2 * limits[-1])
    found: list[Truncation] = []
    for limit in sorted({*limits, recipe}):
        over = longest > limit
        lost = over & ~_can_be_cut(sizes, limit, policy)
        gone = np.where(lost[sizes.owner], sizes.sequence, _cut_off(sizes, limit, policy))
        n, cut, tokens_lost = int(lost.sum()), int((over & ~lost).sum()), int(gone[over[sizes.owner]].sum())
        if limit > LIMITS[-1] and limit != recipe and (found[-1].rows_lost, found[-1].rows_cut) == (n, cut):
            continue  # one endless row would draw a table of equal lines
        rows = len(longest)
        found.append(
            Truncation(limit, limit == recipe, cut, cut / rows, n, n / rows, tokens_lost, tokens_lost / max(1, tokens))
        )
    return found


def _can_be_cut(sizes: Sizes, limit: int, policy: OverLength) -> np.ndarray:
    """Bool [N], whether `truncate` would cut an example that is longer than the limit rather than drop it."""
    if policy == "truncate_answers":
        return sizes.prompt < limit
    if policy == "truncate_prompt_left":
        return sizes.prompt - (sizes.longest - limit) > sizes.opening
    if policy in ("pieces", "stream"):
        return (sizes.prompt <= 1) & (sizes.answers == 1)
    return np.zeros(len(sizes.prompt), dtype=bool)


def _cut_off(sizes: Sizes, limit: int, policy: OverLength) -> np.ndarray:
    """[M], tokens that cutting takes from each sequence of an example that is longer than the limit."""
    if policy == "truncate_answers":
        return np.maximum(0, sizes.sequence - limit)
    if policy in ("pieces", "stream"):
        return np.zeros_like(sizes.sequence)
    return (sizes.longest - limit)[sizes.owner]  # the prompt, by as much as the longest answer needs


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
