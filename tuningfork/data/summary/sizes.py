"""How long examples are, as arrays: what lengths, limits and costs are counted from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tuningfork.accounts import Size


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of N examples and their M answers, int64 but for `first`."""

    prompt: np.ndarray  # [N]
    opening: np.ndarray  # [N], tokens of the prompt's beginning that no cut takes
    answer: np.ndarray  # [M]
    owner: np.ndarray  # [M], the example of each answer
    first: np.ndarray  # bool [M], whether it is the first of its example: of a pair, the chosen one

    @classmethod
    def of(cls, sizes: Iterable[Size]) -> Sizes:
        sizes = list(sizes)
        owner = np.repeat(np.arange(len(sizes)), [len(size.answers) for size in sizes])
        return cls(
            prompt=np.array([size.prompt for size in sizes], dtype=np.int64),
            opening=np.array([size.opening for size in sizes], dtype=np.int64),
            answer=np.array([n for size in sizes for n in size.answers], dtype=np.int64),
            owner=owner,
            first=np.diff(owner, prepend=-1) > 0,
        )

    @property
    def answers(self) -> np.ndarray:
        """[N], how many answers each example has."""
        return np.bincount(self.owner, minlength=len(self.prompt))

    @property
    def sequence(self) -> np.ndarray:
        """[M], prompt + answer."""
        return self.prompt[self.owner] + self.answer

    @property
    def longest(self) -> np.ndarray:
        """[N], the longest sequence of each example."""
        return np.maximum.reduceat(self.sequence, np.flatnonzero(self.first))
