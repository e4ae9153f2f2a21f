"""Random forests of sequences, laid in every way, and who of their rows is who.

What a row is, its *path* says: the tokens from its sequence's first to its own. Rows of equal paths in different packs,
or in one that repeats them, are one row, and must have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.tree import grow
from tuningfork.records import ROOT, PackedBatch, Segment, Source, TokenAnswer, TokenExample

VOCAB = 50_000


def random_forest(seed: int, roots: int = 2, depth: int = 4, longest: int = 300) -> list[TokenExample]:
    """Examples whose sequences part at, before and behind multiples of 32 and 64, and anywhere.

    Some end within others' prompts, some have the answers of one prompt, and stretches of a single row are among them.
    """
    rng = np.random.default_rng(seed)
    sequences: list[tuple[np.ndarray, int]] = []  # and where the last stretch of it begins

    def go_on(path: np.ndarray, left: int) -> None:
        for _ in range(int(rng.integers(1, 4)) if len(path) else roots):
            to_grid = -len(path) % int(rng.choice([32, 64]))
            own = int(rng.choice([1, int(rng.integers(1, 70)), max(1, to_grid + int(rng.integers(-1, 2)))]))
            whole = np.concatenate([path, rng.integers(1, VOCAB, own)]).astype(np.int32)
            if left > 1 and len(whole) < longest and rng.random() < 0.85:
                if rng.random() < 0.3:
                    sequences.append((whole, len(path)))
                go_on(whole, left - 1)
            else:
                sequences.append((whole, len(path)))

    go_on(np.zeros(0, np.int32), depth)
    examples = []
    for row, (ids, begin) in enumerate(sequences, start=1):
        prompt = begin if rng.random() < 0.5 else int(rng.integers(0, len(ids)))
        answers = [ids[prompt:]]
        if rng.random() < 0.3:
            answers.append(rng.integers(1, VOCAB, int(rng.integers(1, 40))).astype(np.int32))
        tokens = tuple(TokenAnswer(answer, np.ones(len(answer), bool)) for answer in answers)
        examples.append(TokenExample(Source("forest", row), ids[:prompt], tokens))
    return examples


def stem_of_many(readers: int, answers: int) -> list[TokenExample]:
    """A prompt of 70 tokens, with so many rows in so many answers behind it."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, VOCAB, 70).astype(np.int32)
    parts = np.array_split(rng.integers(1, VOCAB, readers).astype(np.int32), answers)
    return [TokenExample(Source("stem", 1), prompt, tuple(TokenAnswer(ids, np.ones(len(ids), bool)) for ids in parts))]


def laid(examples: Sequence[TokenExample], share: str, smallest_stem: int = 1) -> PackedBatch:
    """All of them in one pack, with a few rows of padding."""
    forest = grow(examples, share, smallest_stem).of(range(len(examples)))
    return lay(examples, forest, -(-(forest.rows + 7) // 64) * 64)


def other_branch(example: TokenExample, position: int) -> TokenExample:
    """The example with another token at one place of its first answer."""
    first, *others = example.answers
    ids = first.ids.copy()
    ids[position] += 1
    return replace(example, answers=(replace(first, ids=ids), *others))


def paths(batch: PackedBatch) -> list[np.ndarray]:
    """The rows that each row sees, itself last, from the parents of segments alone."""
    whole: dict[int, np.ndarray] = {ROOT: np.zeros(0, np.int64)}  # by the segment that ends it
    found: list[np.ndarray] = []
    for entry, segment in enumerate(Segment(*numbers) for numbers in batch.layout.segments.tolist()):
        above = whole[segment.parent]
        whole[entry] = np.concatenate([above, np.arange(segment.start, segment.end)])
        found += [whole[entry][: len(above) + n + 1] for n in range(segment.end - segment.start)]
    return found


class Known:
    """Numbers for paths: the same one wherever a path is met again."""

    def __init__(self) -> None:
        self.of_path: dict[bytes, int] = {}

    def rows(self, batch: PackedBatch) -> torch.Tensor:
        """int64 [T], the number of each row of a pack."""
        ids = batch.input_ids.numpy()
        keys = [ids[path].tobytes() for path in paths(batch)]
        return torch.tensor([self.of_path.setdefault(key, len(self.of_path)) for key in keys])


def mask_of(batch: PackedBatch, window: int | None = None) -> torch.Tensor:
    """bool [T, T], written from the definition alone: each row sees its own path, or what the window leaves of it."""
    mask = torch.zeros(len(batch.input_ids), len(batch.input_ids), dtype=torch.bool)
    for row, path in enumerate(paths(batch)):
        mask[row, path[-window:] if window else path] = True
    return mask


def normal(rows: torch.Tensor, *shape: int, seed: int) -> torch.Tensor:
    """Normal numbers [T, *shape] that depend on each row's number alone; float64 on the CPU."""
    most = 2**14
    assert int(rows.max()) < most
    return torch.randn(most, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[rows]
