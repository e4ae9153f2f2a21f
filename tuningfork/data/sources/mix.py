"""How many examples of each source a mix takes, and which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuningfork.errors import DataError
from tuningfork.wording import counted


def mixed_indices(
    sizes: Sequence[int],
    names: Sequence[str],
    shares: Sequence[float] | None,
    counts: Sequence[int] | None,
    seed: int,
) -> list[np.ndarray]:
    """Which examples of each source a mix takes: sorted int64 indices into each source's examples.

    `shares` are the parts of the whole that the sources should make up, in any unit; as many examples are taken as can
    be without taking one twice. `counts` are numbers of examples. Which ones is decided by `seed` and each source's
    place alone. Raises DataError where a source has fewer examples than `counts` asks for, or where its share is so
    small that it comes to none.
    """
    wanted = list(sizes)
    if counts is not None:
        wanted = list(counts)
        for name, size, count in zip(names, sizes, counts, strict=True):
            if count > size:
                raise DataError(
                    f"{name}: data.counts asks for {counted(count, 'example')}, but only {size:,} can be used."
                )
    elif shares is not None:
        whole = min(size / share for size, share in zip(sizes, shares, strict=True))
        wanted = [min(size, round(whole * share)) for size, share in zip(sizes, shares, strict=True)]
        for name, share, count in zip(names, shares, wanted, strict=True):
            if count == 0:
                least = min(range(len(sizes)), key=lambda i: sizes[i] / shares[i])
                raise DataError(
                    f"{name}: data.shares gives it {share:g} beside {shares[least]:g} for {names[least]}, which has "
                    f"{counted(sizes[least], 'example')}. That comes to {whole * share:.2g} of an example, so none. "
                    "Raise its share or leave it out."
                )
    return [
        np.sort(np.random.default_rng([seed, place]).permutation(size)[:count])
        for place, (size, count) in enumerate(zip(sizes, wanted, strict=True))
    ]
