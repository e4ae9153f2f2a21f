"""What sequences begin with in common, as trees: a prompt with its answers, or all examples of a step.

A *sequence* is an example's prompt with one of its answers. Sorted by their tokens, those that begin alike are
neighbours, so the trees of all of them follow from what each has in common with the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from tuningfork.records import ROOT, Span, TokenExample

Share = Literal["none", "prompt", "tree"]
"""What of a pack's examples is laid once: see `grow`."""

SMALLEST_STEM = 32
"""Rows that a cut saves at least: below, a segment of its own costs more than it saves."""


class Node(NamedTuple):
    """Consecutive tokens of a path, which several sequences may have in common."""

    parent: int  # ROOT if there is none
    position: int  # of its first token
    ids: np.ndarray  # int32


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of some examples. Nodes lie depth first."""

    nodes: list[Node]
    leaves: list[list[int]]  # of each example, for each answer: the node with which its sequence ends; ROOT if empty

    @property
    def rows(self) -> int:
        return sum(len(node.ids) for node in self.nodes)

    @classmethod
    def joined(cls, parts: Sequence[Forest]) -> Forest:
        """Trees of several forests side by side."""
        nodes: list[Node] = []
        leaves: list[list[int]] = []
        for part in parts:
            first = len(nodes)
            nodes += (node if node.parent == ROOT else node._replace(parent=node.parent + first) for node in part.nodes)
            leaves += ([leaf if leaf == ROOT else leaf + first for leaf in of] for of in part.leaves)
        return cls(nodes, leaves)


@dataclass(frozen=True, slots=True)
class Trie:
    """All that some examples begin with in common, before it is settled which of them share a pack.

    Node n has the tokens from position start[n] to before end[n] of the sequences of rank low[n] to before high[n].
    A sequence's *rank* is its place in the order of tokens; it ends with the node leaf[rank].
    """

    examples: Sequence[TokenExample]
    example_of: np.ndarray  # [ranks], places in `examples`
    answer_of: np.ndarray  # [ranks]
    parent: np.ndarray  # [nodes], as those that follow
    start: np.ndarray
    end: np.ndarray
    low: np.ndarray
    high: np.ndarray
    leaf: np.ndarray  # [ranks]
    ranks_of: np.ndarray  # [ranks], those of the first example, then those of the second, and so on
    offsets: np.ndarray  # [examples + 1], where each example's begin there

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each node."""
        return self.end - self.start

    def in_order(self, members: Sequence[int]) -> list[int]:
        """Some of the examples in the order of the ranks of their first sequences."""
        places = np.array(members, dtype=np.int64)
        found: list[int] = places[np.argsort(self.ranks_of[self.offsets[places]])].tolist()
        return found

    def users(self) -> tuple[np.ndarray, np.ndarray]:
        """Which example needs which node: pairs (nodes, examples), sorted, each once."""
        spread = self.high - self.low
        nodes = np.repeat(np.arange(len(spread)), spread)
        ranks = np.arange(spread.sum()) + np.repeat(self.low - (np.cumsum(spread) - spread), spread)
        pairs = np.unique(nodes * len(self.examples) + self.example_of[ranks])
        return pairs // len(self.examples), pairs % len(self.examples)

    def of(self, members: Sequence[int]) -> Forest:
        """The trees of some of the examples: their nodes, joined where no other path turns off between two of them."""
        chosen = [self.ranks_of_member(member) for member in members]
        ranks = np.sort(np.concatenate([*chosen, np.zeros(0, np.int64)]))
        last = np.unique(self.leaf[ranks])
        level, levels = last, [last]
        while len(level := np.unique(self.parent[level[level != ROOT]])):
            levels.append(level)
        used = np.unique(np.concatenate(levels))
        used = used[used != ROOT]
        above = np.searchsorted(used, self.parent[used])  # the parent's place among them, if it has one
        has_parent = self.parent[used] != ROOT
        children = np.bincount(above[has_parent], minlength=len(used))
        needless = (children == 1) & ~np.isin(used, last)
        place = np.cumsum(~needless) - 1
        witness = ranks[np.searchsorted(ranks, self.low[used])]  # the first that passes each
        nodes: list[Node] = []
        taken_over: dict[int, tuple[int, int]] = {}  # of a needless node: what its child starts with, parent and start
        for n, node in enumerate(used.tolist()):
            parent, start = int(above[n]) if has_parent[n] else ROOT, int(self.start[node])
            if parent in taken_over:
                parent, start = taken_over[parent]
            elif parent != ROOT:
                parent = int(place[parent])
            if needless[n]:
                taken_over[n] = parent, start
            else:
                nodes.append(Node(parent, start, self._ids(int(witness[n]), start, int(self.end[node]))))
        ends = {int(node): int(at) for node, at in zip(used, place, strict=True)} | {ROOT: ROOT}
        leaves = []
        for of_member in chosen:
            by_answer = of_member[np.argsort(self.answer_of[of_member])]
            leaves.append([ends[leaf] for leaf in self.leaf[by_answer].tolist()])
        return Forest(nodes, leaves)

    def spans(self, members: Sequence[int]) -> list[Span]:
        """Those of the nodes of `of(members)`, without their tokens: what a step costs is asked of all its portions."""
        ends = {leaf for member in members for leaf in self.leaf[self.ranks_of_member(member)].tolist() if leaf != ROOT}
        above: dict[int, int] = {}  # of each node that they use, its parent
        for node in ends:
            while node != ROOT and node not in above:
                above[node] = int(self.parent[node])
                node = above[node]
        children = Counter(above.values())
        starts: dict[int, int] = {}  # of a needless node: what its child starts with
        found = []
        for node, parent in sorted(above.items()):
            start = starts[parent] if parent in starts else int(self.start[node])
            if children[node] == 1 and node not in ends:
                starts[node] = start
            else:
                found.append(Span(start, int(self.end[node]) - start))
        return found

    def ranks_of_member(self, member: int) -> np.ndarray:
        """Those of an example's sequences."""
        return self.ranks_of[self.offsets[member] : self.offsets[member + 1]]

    def _ids(self, rank: int, start: int, end: int) -> np.ndarray:
        """Tokens of a sequence from one position to before another."""
        example = self.examples[self.example_of[rank]]
        prompt, answer = example.prompt_ids, example.answers[self.answer_of[rank]].ids
        p = len(prompt)
        if end <= p:
            return prompt[start:end]
        return answer[start - p : end - p] if start >= p else np.concatenate([prompt[start:], answer[: end - p]])


def grow(examples: Sequence[TokenExample], share: Share, smallest_stem: int = SMALLEST_STEM) -> Trie:
    """The trees of some examples.

    Args:
        share: none: each sequence is a tree of its own. prompt: each example is one, its answers behind its prompt.
            tree: whatever examples begin with in common is there once, if that saves `smallest_stem` rows or more; it
            never takes more rows than `prompt`.
    """
    owners = [(place, answer) for place, example in enumerate(examples) for answer in range(len(example.answers))]
    if share != "tree":
        return _forks(examples, owners, share == "prompt")
    keys = [_key(examples[place], answer) for place, answer in owners]
    order = sorted(range(len(owners)), key=keys.__getitem__)
    owners = [owners[n] for n in order]
    sequences = [np.frombuffer(keys[n], dtype=">u4") for n in order]
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    common = np.array([0, *map(in_common, sequences, sequences[1:])], dtype=np.int64)[: len(lengths)]
    nodes, leaf, turn = _branches(lengths.tolist(), common.tolist())
    example_of = np.array([place for place, _ in owners], dtype=np.int64)
    needed = _partings(example_of, common, turn)
    return _trie(examples, owners, *_without_small(nodes, leaf, needed, smallest_stem))


def _key(example: TokenExample, answer: int) -> bytes:
    """A sequence's tokens as bytes that sort as they do: ids are not negative, the most significant byte is first."""
    return np.concatenate([example.prompt_ids, example.answers[answer].ids]).astype(">u4").tobytes()


def in_common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with in common."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter


def _forks(examples: Sequence[TokenExample], owners: list[tuple[int, int]], share_prompts: bool) -> Trie:
    """Trees of the examples each by itself."""
    nodes: list[_Branch] = []
    leaf: list[int] = []
    for example in examples:
        p, root, rank = len(example.prompt_ids), ROOT, len(leaf)
        if share_prompts and p:
            root = len(nodes)
            nodes.append(_Branch(ROOT, 0, p, rank, rank + len(example.answers)))
        for answer in example.answers:
            start = p if share_prompts else 0
            if p + len(answer.ids) > start:
                nodes.append(_Branch(root, start, p + len(answer.ids), len(leaf), len(leaf) + 1))
                leaf.append(len(nodes) - 1)
            else:
                leaf.append(root)
    return _trie(examples, owners, nodes, leaf)


class _Branch(NamedTuple):
    """A node of a Trie."""

    parent: int
    start: int
    end: int
    low: int
    high: int


def _trie(
    examples: Sequence[TokenExample], owners: list[tuple[int, int]], nodes: list[_Branch], leaf: list[int]
) -> Trie:
    parent, start, end, low, high = np.array(nodes, dtype=np.int64).reshape(-1, len(_Branch._fields)).T
    example_of, answer_of = np.array(owners, dtype=np.int64).reshape(-1, 2).T
    return Trie(
        examples,
        example_of,
        answer_of,
        parent,
        start,
        end,
        low,
        high,
        leaf=np.array(leaf, dtype=np.int64),
        ranks_of=np.argsort(example_of, kind="stable"),
        offsets=np.concatenate([[0], np.cumsum(np.bincount(example_of, minlength=len(examples)))]),
    )


def _branches(lengths: list[int], common: list[int]) -> tuple[list[_Branch], list[int], list[int]]:
    """Every place at which sequences part or end, as a tree.

    Args:
        lengths: tokens of each sequence, in the order of their tokens.
        common: tokens that each begins with in common with the one before it; 0 for the first.

    Returns:
        Nodes, depth first; the node with which each sequence ends; the node at the end of what each begins with in
        common with the one before it. ROOT where that is nothing.
    """
    parents: list[int] = []  # of each node, as it was made; and so of its end, and of its first and last rank
    ends: list[int] = []
    lows: list[int] = []
    highs: list[int] = []
    leaf: list[int] = []
    turn: list[int] = []
    path: list[int] = []  # nodes that the last sequence passes

    def add(parent: int, end: int, low: int) -> int:
        parents.append(parent)
        ends.append(end)
        lows.append(low)
        highs.append(len(lengths))
        return len(ends) - 1

    for rank, (length, shared) in enumerate(zip(lengths, common, strict=True)):
        left = ROOT
        while path and ends[path[-1]] > shared:
            left = path.pop()
            highs[left] = rank
        if left != ROOT and shared > (ends[path[-1]] if path else 0):  # the two part within this node
            path.append(add(parents[left], shared, lows[left]))
            parents[left] = path[-1]
        turn.append(path[-1] if path else ROOT)
        if length > (ends[path[-1]] if path else 0):
            path.append(add(turn[-1], length, rank))
        leaf.append(path[-1] if path else ROOT)
    order = sorted(range(len(ends)), key=lambda n: (lows[n], ends[n]))
    place = {n: i for i, n in enumerate(order)} | {ROOT: ROOT}
    nodes = [
        _Branch(place[parents[n]], 0 if parents[n] == ROOT else ends[parents[n]], ends[n], lows[n], highs[n])
        for n in order
    ]
    return nodes, [place[n] for n in leaf], [place[n] for n in turn]


def _partings(example_of: np.ndarray, common: np.ndarray, turn: list[int]) -> set[int]:
    """Nodes at whose end two answers of one example part.

    These stay, however short: an example shares with itself at least its prompt.
    """
    needed = set()
    last: dict[int, int] = {}  # of an example, the rank of its answer before
    for rank, example in enumerate(example_of.tolist()):
        if example in last:
            first = last[example] + 1
            needed.add(turn[first + int(common[first : rank + 1].argmin())])
        last[example] = rank
    return needed - {ROOT}


def _without_small(
    nodes: list[_Branch], leaf: list[int], needed: Iterable[int], smallest: int
) -> tuple[list[_Branch], list[int]]:
    """The nodes without those that save too few rows: what they have, each that comes after has for itself.

    The one that saves least goes first, as each that goes leaves more to save to those before and after it.
    """
    children: list[list[int]] = [[] for _ in nodes]
    for n, node in enumerate(nodes):
        if node.parent != ROOT:
            children[node.parent].append(n)
    ending: dict[int, list[int]] = {}  # node -> the ranks that end with it
    for rank, n in enumerate(leaf):
        ending.setdefault(n, []).append(rank)
    branches = [len(found) + (n in ending) for n, found in enumerate(children)]
    parents = [node.parent for node in nodes]  # of each node, as others go, and so its first position
    starts = [node.start for node in nodes]
    may_go = {n for n, found in enumerate(children) if found} - {*needed}

    def saved(n: int) -> int:
        return (nodes[n].end - starts[n]) * (branches[n] - 1)

    waiting = [(saved(n), n) for n in may_go]
    heapify(waiting)
    gone = set()
    while waiting and waiting[0][0] < smallest:
        found, n = heappop(waiting)
        if n in gone or found != saved(n):
            continue  # it waits again with what it saves now
        gone.add(n)
        parent = parents[n]
        left = [child for child in children[n] if child not in gone or child in ending]
        for child in left:
            parents[child], starts[child] = parent, starts[n]
        if parent != ROOT:
            children[parent] += left
            branches[parent] += branches[n] - 1
        for other in (parent, *left):
            if other in may_go:
                heappush(waiting, (saved(other), other))
    kept: list[_Branch] = []
    leaf = list(leaf)
    place: dict[int, int] = {ROOT: ROOT}
    for n, node in enumerate(nodes):
        own = ending.get(n, [])
        if n not in gone:
            place[n] = len(kept)
        if n not in gone or own:
            high = node.low + len(own) if n in gone else node.high
            kept.append(_Branch(place[parents[n]], starts[n], node.end, node.low, high))
        for rank in own:
            leaf[rank] = len(kept) - 1
    return kept, leaf
