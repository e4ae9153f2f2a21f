"""Examples that must share a pack or had better: whole trees, and parts of trees that are larger than a pack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tuningfork.data.packing.tree import Forest, Share, Trie, grow
from tuningfork.records import ROOT, Span, TokenExample

_MOST = 1024
"""Examples of a large tree that are cut at once, in the order of their tokens. The time grows with its square."""

_FEW = 8
"""Of so few examples all ways to part them are tried; the time grows as three to the power of it."""

_NEAR = 64  # a tree in parts alike: to find the least possible size of the largest more closely is worth no time


class Portion(NamedTuple):
    """Whole examples of a trie, in the order of their tokens, and the rows that they take up together."""

    trie: Trie
    members: list[int]
    rows: int

    @property
    def examples(self) -> list[TokenExample]:
        return [self.trie.examples[member] for member in self.members]

    @property
    def logit_rows(self) -> int:
        """Counted tokens of its answers, which need a logit row each; fewer, where answers share some."""
        return sum(example.answer_tokens(i) for example in self.examples for i in range(len(example.answers)))

    @property
    def spans(self) -> list[Span]:
        """Those of its segments."""
        return self.trie.spans(self.members)


def portion_out(examples: Sequence[TokenExample], share: Share, capacity: int) -> list[Portion]:
    """All examples in portions of at most `capacity` rows, each example in exactly one.

    A portion is a tree, with all trees that an example of it has a part in. One that is larger is parted so that its
    parts together have as few rows as can be: of all ways to part it if it has few examples, else of all ways to cut it
    between examples in the order of their tokens.

    Args:
        share: what makes a tree: see `tree.grow`.
    """
    trie = grow(examples, share)
    if share != "tree":  # an example has trees of its own
        rows = np.bincount(trie.example_of[trie.low], trie.lengths, len(examples)).astype(np.int64).tolist()
        return [Portion(trie, [example], own) for example, own in enumerate(rows)]
    nodes, users = trie.users()
    tree_of = _trees(trie)  # of each example
    first = np.flatnonzero(np.diff(nodes, prepend=-1))  # of the users of each node
    rows_of = np.bincount(tree_of[users[first]], weights=trie.lengths, minlength=len(examples)).astype(np.int64)
    by_tree = np.argsort(tree_of[users], kind="stable")
    nodes, users = nodes[by_tree], users[by_tree]
    tree_of_pair = tree_of[users]
    members_of: dict[int, list[int]] = {}
    for example in trie.in_order(range(len(examples))):
        members_of.setdefault(int(tree_of[example]), []).append(example)
    found = []
    for tree, members in members_of.items():
        if rows_of[tree] <= capacity:
            found.append(Portion(trie, members, int(rows_of[tree])))
        else:
            own = slice(*np.searchsorted(tree_of_pair, (tree, tree + 1)).tolist())
            found += _parted(trie, nodes[own], users[own], members, capacity)
    return found


def part(portion: Portion, parts: int) -> list[Portion]:
    """A portion in so many at most, cut in the order of its tokens.

    Their largest is as small as can be, or larger by no more than one part in _NEAR. What examples of several parts
    begin with in common, each of these parts has for itself.
    """
    trie, members = portion.trie, portion.members
    parts = min(parts, len(members))
    if parts < 2:
        return [portion]
    cuts = _Cuts(trie, members)
    low, high = max(cuts.largest, -(-portion.rows // parts)), portion.rows
    best = [(0, len(members), portion.rows)]
    while low + low // _NEAR < high:
        middle = (low + high) // 2
        tried = cuts.within(middle, parts)
        if tried is None:
            low = middle + 1
        else:
            best, high = tried, middle
    return [Portion(trie, members[first:last], rows) for first, last, rows in best]


class _Cuts:
    """Ways to cut some examples of a trie, in the order of their tokens."""

    def __init__(self, trie: Trie, members: list[int]) -> None:
        nodes, users = _nodes_of(trie, members)
        self._count = len(members)
        before = _user_before(nodes, users)
        order = np.argsort(users, kind="stable")
        # Of each need of a node, by examples: the example, the node's rows, the last example before that needs it, too.
        self._users, self._rows, self._before = users[order], trie.lengths[nodes[order]], before[order]
        self._first = np.searchsorted(self._users, np.arange(len(members) + 1))  # need of each example
        self.largest = int(np.bincount(self._users, self._rows, len(members)).max())  # example by itself, in rows

    def within(self, capacity: int, parts: int) -> list[tuple[int, int, int]] | None:
        """(first, last + 1, rows) of each part, as few as can be; None: more than `parts`. `largest` must fit."""
        found: list[tuple[int, int, int]] = []
        begin = 0
        while begin < self._count:
            if len(found) == parts:
                return None
            needs = slice(self._first[begin], None)
            own = np.where(self._before[needs] < begin, self._rows[needs], 0)  # the first in the part to need the node
            rows = np.bincount(self._users[needs] - begin, own, self._count - begin).astype(np.int64).cumsum()
            size = int(np.searchsorted(rows, capacity, side="right"))
            found.append((begin, begin + size, int(rows[size - 1])))
            begin += size
        return found


def joined(portions: Sequence[Portion]) -> tuple[list[TokenExample], Forest]:
    """The examples of some portions, which are to share a pack, and their trees."""
    of_trie: dict[int, tuple[Trie, list[int]]] = {}
    for portion in portions:
        of_trie.setdefault(id(portion.trie), (portion.trie, []))[1].extend(portion.members)
    examples: list[TokenExample] = []
    forests = []
    for trie, unordered in of_trie.values():
        members = trie.in_order(unordered)
        forests.append(trie.of(members))
        examples += (trie.examples[member] for member in members)
    return examples, Forest.joined(forests)


def _trees(trie: Trie) -> np.ndarray:
    """Of each example the first one that shares a tree with it, itself or by way of others."""
    top: list[int] = []  # of each node: the root above it
    for n, parent in enumerate(trie.parent.tolist()):
        top.append(n if parent == ROOT else top[parent])
    first = list(range(len(trie.examples)))

    def find(example: int) -> int:
        while first[example] != example:
            first[example] = first[first[example]]
            example = first[example]
        return example

    owner: dict[int, int] = {}  # of a root: an example that has a part in its tree
    for example, leaf in zip(trie.example_of.tolist(), trie.leaf.tolist(), strict=True):
        if leaf != ROOT:
            one, other = sorted((find(example), find(owner.setdefault(top[leaf], example))))
            first[other] = one
    return np.array([find(example) for example in first], dtype=np.int64)


def _parted(trie: Trie, nodes: np.ndarray, users: np.ndarray, members: list[int], capacity: int) -> list[Portion]:
    """The examples of one tree in portions that together have as few rows as can be.

    Args:
        nodes, users: which of them need which nodes, see `Trie.users`.
        members: the examples, in the order of their tokens.
    """
    order = np.argsort(members)
    places = order[np.searchsorted(members, users, sorter=order)]
    found = []
    for start in range(0, len(members), _MOST):
        some = members[start : start + _MOST]
        here = (places >= start) & (places < start + len(some))
        kinds, nodes_here = np.unique(nodes[here], return_inverse=True)
        lengths, users_here = trie.lengths[kinds], places[here] - start
        if len(some) <= _FEW:
            found += [
                Portion(trie, [some[i] for i in chosen], rows)
                for chosen, rows in _best_parts(lengths, nodes_here, users_here, len(some), capacity)
            ]
        else:
            added = _added_rows(lengths, nodes_here, users_here, len(some))
            found += [Portion(trie, some[first:last], rows) for first, last, rows in _fewest_rows(added, capacity)]
    return found


def _best_parts(
    lengths: np.ndarray, nodes: np.ndarray, users: np.ndarray, count: int, capacity: int
) -> list[tuple[list[int], int]]:
    """The examples and rows of each part, of all ways to part `count` examples; sets of them are bits of a number."""
    sets = np.arange(1 << count)
    needed_by = np.bincount(nodes, weights=1 << users, minlength=len(lengths)).astype(np.int64)
    rows = ((sets[:, None] & needed_by[None, :] > 0) * lengths).sum(1).tolist()
    # Of each set, parted as best can be: rows, parts, and the part that has its first example.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for of in range(1, 1 << count):
        first, part, found = of & -of, of, (2**62, 0, 0)
        while part:
            if part & first and rows[part] <= capacity:
                others = best[of ^ part]
                found = min(found, (others[0] + rows[part], others[1] + 1, part))
            part = (part - 1) & of
        best.append(found)
    parts, left = [], (1 << count) - 1
    while left:
        part = best[left][2]
        parts.append(([i for i in range(count) if part >> i & 1], rows[part]))
        left ^= part
    return parts


def _nodes_of(trie: Trie, members: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which of some examples needs which node: pairs (nodes, places in `members`), sorted, each once."""
    ranks = [trie.ranks_of_member(member) for member in members]
    users = np.repeat(np.arange(len(members)), [len(some) for some in ranks])
    level = trie.leaf[np.concatenate(ranks)]
    pairs = []
    while len(users := users[level != ROOT]):
        level = level[level != ROOT]
        level, users = np.divmod(np.unique(level * len(members) + users), len(members))
        pairs.append((level, users))
        level = trie.parent[level]
    nodes, users = (np.concatenate(column) for column in zip(*pairs, strict=True))
    nodes, users = np.divmod(np.unique(nodes * len(members) + users), len(members))
    return nodes, users


def _user_before(nodes: np.ndarray, users: np.ndarray) -> np.ndarray:
    """Of each pair the last user before its own that needs the node, too; -1 if there is none. Pairs are sorted."""
    before = np.full(len(nodes), -1)
    again = np.flatnonzero(nodes[1:] == nodes[:-1]) + 1
    before[again] = users[again - 1]
    return before


def _added_rows(lengths: np.ndarray, nodes: np.ndarray, users: np.ndarray, count: int) -> np.ndarray:
    """int64 [count, count]: at [m, i] the rows that example m adds to a portion that begins with example i.

    These are its nodes that no example from i on had before it.
    """
    order = np.lexsort((users, nodes))
    nodes, users = nodes[order], users[order]
    places = users * (count + 1) + _user_before(nodes, users) + 1
    added = np.bincount(places, weights=lengths[nodes], minlength=count * (count + 1)).astype(np.int64)
    return added.reshape(count, count + 1).cumsum(axis=1)[:, :count]


def _fewest_rows(added: np.ndarray, capacity: int) -> list[tuple[int, int, int]]:
    """Where to cut: (first, last + 1, rows) of each portion. As few rows as can be, and then as few portions."""
    count = len(added)
    rows = np.zeros(count, np.int64)  # of the portion from each example to the present one
    best = np.zeros(count + 1, np.int64)  # rows · (count + 1) + portions, of all up to each example
    begun = np.zeros((count + 1, 2), np.int64)  # of the last portion up to there: where it begins, and its rows
    for last in range(count):
        rows[: last + 1] += added[last, : last + 1]
        found = np.where(rows[: last + 1] <= capacity, best[: last + 1] + rows[: last + 1] * (count + 1) + 1, 2**62)
        first = int(found.argmin())
        best[last + 1], begun[last + 1] = found[first], (first, rows[first])
    portions, end = [], count
    while end:
        first, size = begun[end].tolist()
        portions.append((first, end, size))
        end = first
    return portions[::-1]
