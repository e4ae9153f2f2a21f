"""Pairs that have answers in common, and hidden states of their logit rows without a model.

A row's hidden state is drawn from the tokens of its path. So it is the same in every layout, as a model's is, and rows
of different packs are matched by their paths.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
import xxhash

from tuningfork.records import ROOT, PackedBatch, Segment, Source, TokenAnswer, TokenExample

GROUPS = (20, 18, 4, 2)
"""Answers of each group of `shared_pairs`."""


def shared_pairs(vocabulary: int, margins: bool = False) -> list[TokenExample]:
    """Three chosen and three rejected answers on each of two prompts, and pairs that share as little as can be.

    The prompts begin alike; answers begin with parts of each other, one is all of another's beginning, one is of one
    token. Masks have holes, and one answer has two masks. Of the last three pairs, the first two have in common nothing
    but the first one's last logit row; the third has nothing in common with any. Each has a weight of its own.
    """
    rng = np.random.default_rng(0)

    def draw(n: int, before: np.ndarray | None = None) -> np.ndarray:
        ids = rng.integers(3, vocabulary, n).astype(np.int32)
        return ids if before is None else np.concatenate([before, ids])

    def answer(ids: np.ndarray, *holes: int) -> TokenAnswer:
        mask = np.ones(len(ids), dtype=bool)
        mask[list(holes)] = False
        return TokenAnswer(ids, mask)

    system, pairs = draw(34), []
    for again in (True, False):
        prompt, long = draw(9, system), draw(50)
        chosen = [answer(long, 5, 6), answer(draw(6, long[:40]), 0), answer(draw(9))]
        rejected = [answer(long[:36]), answer(draw(1)), answer(draw(20), 4)]
        pairs += [(prompt, *pair) for pair in product(chosen, rejected)]
        if again:
            pairs.append((prompt, answer(long, 1, 2, 3), answer(draw(12))))
    prompt, one = draw(4), answer(draw(1))
    pairs += [
        (prompt, answer(draw(3)), one),
        (prompt, one, answer(draw(5))),
        (draw(2), answer(draw(7)), answer(draw(2))),
    ]
    return [
        TokenExample(
            Source("pairs", row), prompt, two, weight=0.5 + row / 7, margin=row / 10 - 0.4 if margins else None
        )
        for row, (prompt, *two) in enumerate(pairs, start=1)
    ]


def paths(batch: PackedBatch) -> list[bytes]:
    """Of each logit row, the tokens that it sees, its own with them."""
    segments = [Segment(*line) for line in batch.layout.segments.tolist()]
    ids = batch.input_ids.cpu().numpy().astype("<i4")

    def path(row: int) -> bytes:
        (entry,) = (n for n, segment in enumerate(segments) if segment.start <= row < segment.end)
        parts = [ids[segments[entry].start : row + 1]]
        while (entry := segments[entry].parent) != ROOT:
            parts.append(ids[segments[entry].start : segments[entry].end])
        return np.concatenate(parts[::-1]).tobytes()

    return [path(row) for row in batch.logit_rows.tolist()]


def paths_alone(example: TokenExample, answer: int) -> tuple[list[bytes], list[int]]:
    """Of an answer's counted tokens, the paths that they follow, and they themselves."""
    ids = np.concatenate([example.prompt_ids, example.answers[answer].ids]).astype("<i4")
    counted = np.flatnonzero(example.answers[answer].mask) + len(example.prompt_ids)
    return [ids[:t].tobytes() for t in counted if t], [int(ids[t]) for t in counted if t]


def state(path: bytes, width: int) -> np.ndarray:
    """The hidden state of a row that sees these tokens, float64 [width]."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest(path)).standard_normal(width)


def hidden_states(batch: PackedBatch, width: int) -> torch.Tensor:
    """Those of a pack's logit rows, float64 [R, width]."""
    return torch.from_numpy(np.stack([state(path, width) for path in paths(batch)]))
