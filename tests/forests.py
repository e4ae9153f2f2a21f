"""Random forests of sequences, laid in every way, and who of their rows is who.

What a row is, its *path* says: the tokens from its sequence's first to its own. Rows of equal paths in different packs,
or in one that repeats them, are one row, and must have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.tree import grow
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.records import ROOT, PackedBatch, Segment, Source, TokenAnswer, TokenExample

VOCAB = 50_000
MOST_PATHS = 2**14


def random_forest(seed: int, roots: int = 2, depth: int = 4, longest: int = 300, most: int = 24) -> list[TokenExample]:
    """At most so many examples, whose sequences part at, before and behind multiples of 32 and 64, and anywhere.

    Some end within others' prompts, some have two answers, and stretches of a single row are among them.
    """
    rng = np.random.default_rng(seed)
    sequences: list[tuple[np.ndarray, int]] = []  # and where the last stretch of it begins

    def go_on(path: np.ndarray, left: int) -> None:
        for _ in range(int(rng.integers(1, 4)) if len(path) else roots):
            if len(sequences) >= most:
                return
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
    assert int(rows.max()) < MOST_PATHS
    return torch.randn(MOST_PATHS, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)[rows]


class Case(NamedTuple):
    """What a call of attention may ask for."""

    heads: int = 2
    kv_heads: int = 2
    width: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_width: int | None = None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Heads and their width, of queries, keys and values."""
        value_width = self.value_width or self.width
        return [(self.heads, self.width), (self.kv_heads, self.width), (self.kv_heads, value_width)]

    @property
    def names(self) -> list[str]:
        return ["out", "d query", "d key", "d value"] + ["d sinks"] * self.has_sinks


def attended(
    form: Any,
    batch: PackedBatch,
    numbers: torch.Tensor,
    case: Case,
    dtype: torch.dtype,
    rounded: torch.dtype | None = None,
    share_of: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """What a form makes of a pack whose rows have numbers of their own, in a dtype.

    Args:
        rounded: a dtype to which inputs are rounded before; else the same.
        share_of: [T], by which a row's upstream gradient is multiplied.

    Returns:
        Its output, and the gradients of a random sum of it by query, key, value and sinks; on the layout's device.
    """
    rounded, device = rounded or dtype, batch.layout.position_of_row.device
    given = [normal(numbers, *shape, seed=seed) for seed, shape in enumerate(case.shapes)]
    leaves = [t.to(rounded).to(device, dtype).requires_grad_() for t in given]
    upstream = normal(numbers, case.heads, case.shapes[2][1], seed=9)
    if share_of is not None:
        upstream *= share_of[:, None, None]
    upstream = upstream.to(rounded).to(device, dtype)
    sinks = normal(torch.arange(case.heads), seed=8).float().to(device, torch.promote_types(dtype, torch.float32))
    leaves += [sinks.requires_grad_()] * case.has_sinks
    more = {"sinks": leaves[3]} if case.has_sinks else {}
    how = {"scale": case.width**-0.5, "window": case.window, "softcap": case.softcap}
    out = form.prepare(batch.layout).attend(*leaves[:3], **how, **more)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def check_paths_decide_bits(form: Any, packs: Sequence[PackedBatch], case: Case, dtype: torch.dtype) -> None:
    """Rows of equal paths have equal outputs and gradients of queries, in whichever pack they lie, and how often."""
    known = Known()
    first: list[torch.Tensor] = []  # by path: output, gradient of the query
    met = 0
    for batch in packs:
        cpu = batch.to(torch.device("cpu"))
        numbers = known.rows(cpu)
        found = [t.cpu() for t in attended(form, batch, numbers, case, dtype)[:2]]
        assert all(t.isfinite().all() for t in found)
        if not first:
            first = [t.new_full((MOST_PATHS, *t.shape[1:]), float("nan")) for t in found]
        for seen, ours in zip(first, found, strict=True):
            new = seen[numbers].isnan().flatten(1).all(1)
            met += int((~new).sum())
            seen[numbers[new]] = ours[new]
            assert torch.equal(seen[numbers], ours)
    assert met > len(packs[0].input_ids)


def ways_to_lie(seed: int) -> list[PackedBatch]:
    """A forest as a tree, as forks and repeated; in another order and company; and with other tokens here and there."""
    examples = random_forest(seed)
    others = random_forest(seed + 1000, roots=1, depth=2)
    changed = [other_branch(e, -1 if n % 2 else 0) if n % 3 == 0 else e for n, e in enumerate(examples)]
    return [
        laid(examples, "tree"),
        laid(examples, "prompt"),
        laid(examples, "none"),
        laid([*others, *examples[::-1]], "tree", smallest_stem=32),
        laid(examples[::2], "tree"),
        laid(changed, "tree"),
    ]


def check_error_and_repeat(form: Any, batch: PackedBatch, case: Case, dtype: torch.dtype, times: float = 2) -> None:
    """A form's error to the truth is at most `times` the plain one's, and another run has the same bits."""
    numbers = Known().rows(batch.to(torch.device("cpu")))
    plain, ours, again = (attended(kind, batch, numbers, case, dtype) for kind in (PlainAttention, form, form))
    truth = attended(PlainAttention, batch, numbers, case, torch.float64, rounded=dtype)
    for name, o, a, p, t in zip(case.names, ours, again, plain, truth, strict=True):
        no_worse(o, p, t, name, times)
        assert torch.equal(o, a), f"{name}: another run has other bits"


def no_worse(fast: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, what: str, times: float = 2) -> None:
    """A fast form's error to the truth, which is float64, is at most `times` what the plain one loses in its dtype."""
    assert torch.isfinite(fast).all(), f"{what}: not every element was written"
    error, allowed = (fast.double() - truth).norm(), times * (plain.double() - truth).norm()
    # A plain version that happens to be exact still allows the rounding of one result.
    assert error <= allowed + torch.finfo(fast.dtype).eps * truth.norm(), f"{what}: {error:.3e} > {allowed:.3e}"
