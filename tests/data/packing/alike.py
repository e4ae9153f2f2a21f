"""Examples that begin alike, and what a forest says of them, read off slowly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from hypothesis import strategies as st

from tuningfork.data.packing.tree import Forest, Share
from tuningfork.records import ROOT, Source, TokenAnswer, TokenExample

SHARES: tuple[Share, ...] = ("none", "prompt", "tree")

_BASE = np.random.default_rng(0).integers(10, 60, 200).tolist()


def example_of(row: int, prompt: Sequence[int], *answers: Sequence[int], holes: bool = False) -> TokenExample:
    """An example of these tokens. With `holes` each answer's second token does not count."""
    found = []
    for ids in answers:
        mask = np.ones(len(ids), dtype=bool)
        if holes:
            mask[1:2] = False
        found.append(TokenAnswer(np.array(ids, dtype=np.int32), mask))
    return TokenExample(Source("alike", row), np.array(prompt, dtype=np.int32), tuple(found))


def sequences(example: TokenExample) -> list[tuple[int, ...]]:
    """Prompt and answer, for each answer."""
    return [(*example.prompt_ids.tolist(), *answer.ids.tolist()) for answer in example.answers]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    together = min(len(one), len(other))
    return next((n for n in range(together) if one[n] != other[n]), together)


def paths(forest: Forest) -> list[list[int]]:
    """The nodes from the root to each node."""
    found: list[list[int]] = []
    for n, node in enumerate(forest.nodes):
        found.append([n] if node.parent == ROOT else [*found[node.parent], n])
    return found


def tokens_of(forest: Forest, path: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for n in path for token in forest.nodes[n].ids.tolist())


def check_forest(forest: Forest, examples: Sequence[TokenExample]) -> None:
    """Every sequence is its path's tokens, and nodes are as Forest says."""
    on = paths(forest)
    for n, node in enumerate(forest.nodes):
        assert len(node.ids) > 0
        assert node.ids.dtype == np.int32
        # Depth first: it continues the node before it, or an ancestor of that one, or is a root.
        assert node.parent == ROOT or node.parent in on[n - 1]
        assert node.position == len(tokens_of(forest, on[n][:-1]))
    assert [len(leaves) for leaves in forest.leaves] == [len(example.answers) for example in examples]
    ends: set[int] = set()
    for example, leaves in zip(examples, forest.leaves, strict=True):
        for sequence, leaf in zip(sequences(example), leaves, strict=True):
            assert tokens_of(forest, [] if leaf == ROOT else on[leaf]) == sequence
            ends.add(leaf)
    # Each node is needed, and is cut only where paths part or one ends.
    children = np.bincount([node.parent for node in forest.nodes if node.parent != ROOT], minlength=len(forest.nodes))
    assert all(children[n] >= 2 or n in ends for n in range(len(forest.nodes)))


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to part items."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def _of_few_tokens(count: int, seed: int) -> list[TokenExample]:
    """Of two or three different tokens: they part at every place, end within each other, and are the same."""
    random = Random(seed)
    tokens, most = random.choice([2, 2, 3]), random.choice([1, 3, 9])

    def drawn(least: int, longest: int) -> list[int]:
        return random.choices(range(tokens), k=random.randint(least, longest))

    return [
        example_of(row, drawn(0, 6), *(drawn(1, 5) for _ in range(random.randint(1, most))), holes=row % 2 == 0)
        for row in range(count)
    ]


def _along_one_stem(count: int, seed: int) -> list[TokenExample]:
    """Beginnings of one long sequence, cut into prompt and answer anywhere, some with an end of their own."""
    random, examples = Random(seed), []
    for row in range(count):
        cut = random.randint(0, random.choice([75, 150]))
        answers = [
            _BASE[cut : cut + random.randint(1, 40)] + random.choices(range(4), k=random.choice([0, 1, 4]))
            for _ in range(random.randint(1, 3))
        ]
        examples.append(example_of(row, _BASE[:cut], *answers, holes=row % 2 == 0))
    return examples


def alike(most: int = 7) -> st.SearchStrategy[list[TokenExample]]:
    """Some examples, up to `most`, that begin alike in many ways."""
    kinds = st.sampled_from([_of_few_tokens, _along_one_stem])
    return st.builds(lambda kind, count, seed: kind(count, seed), kinds, st.integers(1, most), st.integers(0, 2**32))
