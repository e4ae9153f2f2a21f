"""Lengths of preference pairs as real data sets have them, in any number; deterministic.

Tokens of prompts, chosen and rejected answers under SmolLM2's tokenizer and chat template. `hh` is the test set of
Anthropic's helpful-base (2,354 pairs, many short turns), `dpo_en` the demo set of LLaMA-Factory (300 pairs, long
answers). Draws are log-normal with the median and the 95 % quantile that were measured, cut at the largest.
"""

from __future__ import annotations

import math

import numpy as np

from tuningfork.records import Source, TokenAnswer, TokenExample

# median, 95 % quantile, largest of: prompt, chosen, rejected
QUANTILES = {
    "hh": ((128, 407, 1012), (43, 161, 769), (32, 127, 511)),
    "dpo_en": ((188, 1378, 4100), (317, 646, 1183), (342, 673, 1029)),
}
_Z95 = 1.6449  # the 95 % quantile of a standard normal


def draw(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Lengths of `count` pairs of a named data set, int64 [count, 3]: prompt, chosen, rejected."""
    rng = np.random.default_rng(seed)
    columns = []
    for median, quantile, largest in QUANTILES[name]:
        drawn = rng.lognormal(math.log(median), math.log(quantile / median) / _Z95, count)
        columns.append(np.clip(np.rint(drawn), 1, largest).astype(np.int64))
    return np.stack(columns, axis=1)


def examples_of(lengths: np.ndarray) -> list[TokenExample]:
    """Pairs of these lengths, [n, 3]. Their ids are all zero and share memory, so that a million fit."""
    longest = int(lengths.max(initial=0))
    ids, mask = np.zeros(longest, np.int32), np.ones(longest, bool)
    answers = [TokenAnswer(ids[:n], mask[:n]) for n in range(longest + 1)]
    return [
        TokenExample(Source("drawn", row), answers[prompt].ids, (answers[chosen], answers[rejected]))
        for row, (prompt, chosen, rejected) in enumerate(lengths.tolist(), start=1)
    ]
