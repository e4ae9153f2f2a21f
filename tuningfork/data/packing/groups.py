"""Examples that belong together, so that a step can hold several of them: pairs of one prompt, turns of a conversation.

What they begin with alike can then be shared in a pack. The price is that a step's examples are less independent of
each other, so no more than some of a group are kept together, and where these lie is as random as a shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tuningfork.wording import counted


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Which of n examples belong together, and how many of a group an epoch keeps together at most."""

    by: str  # what their keys are, in words
    most: int
    first: np.ndarray = field(repr=False)  # int64 [n]: a group is named by the first example in it

    @classmethod
    def of_keys(cls, by: str, keys: np.ndarray, most: int) -> Groups:
        """Examples of one key are a group; one of the key 0 has none, and is a group of its own. `keys` uint64 [n]."""
        _, first, key = np.unique(keys, return_index=True, return_inverse=True)
        return cls(by, most, np.where(keys == 0, np.arange(len(keys)), first[key]))

    @property
    def alone(self) -> bool:
        """Whether no two examples belong together, so that the order is a shuffle."""
        return np.array_equal(self.first, np.arange(len(self.first)))

    def __str__(self) -> str:
        if self.alone:
            return f"grouped by {self.by}, but no two examples belong together: it is a shuffle"
        groups = int((self.first == np.arange(len(self.first))).sum())
        return f"grouped by {self.by}: {counted(groups, 'group')}, at most {self.most:,} of one together"

    def permutation(self, random: np.random.Generator) -> np.ndarray:
        """int64 [n]: all examples, once each. Groups are shuffled inside and cut into pieces of `most` and a rest, and
        the pieces are shuffled."""
        shuffled = random.permutation(len(self.first))
        members = shuffled[np.argsort(self.first[shuffled], kind="stable")]  # group by group
        group = self.first[members]
        starts, of_group = _runs(np.concatenate([[True], group[1:] != group[:-1]]))
        place = np.arange(len(members)) - np.repeat(starts, of_group)  # within the group
        starts, sizes = _runs(place % self.most == 0)
        order = random.permutation(len(starts))
        starts, sizes = starts[order], sizes[order]
        return members[np.arange(len(members)) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)]


def _runs(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [r] twice: where runs start, and how long they are. `begins` bool [n]: is it the first of one?"""
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=len(begins))
