"""Items of whole sizes into bins of one capacity: the arithmetic of packing, without examples or tensors.

`best_fit` takes a set that is there as a whole, `even_fit` makes its bins of like size, and `stream_fit` takes items as
they come. All are pure functions of the sizes. Sizes are at least 1 and at most the capacity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice

import numpy as np

SPARE = 256  # a bin of a stream is full enough when one part in so many is free
PATIENCE = 16  # items in a row that could not fill it better, after which it stays as it is


def best_fit(sizes: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: each item, largest first, goes into the fullest bin that still holds it.

    Of items of a size the first comes first, of bins as full as each other the oldest is taken.

    Returns:
        The bin of each item, int64 [n]; bins are numbered from 0 in the order in which they were opened.

    Raises:
        ValueError: a size is below 1 or above the capacity.
    """
    sizes = np.fromiter(_checked(sizes, capacity), np.int64)
    kinds, counts = np.unique(sizes, return_counts=True)
    rooms: list[int] = []  # the amounts of free room that bins have, sorted, each once
    bins_with: defaultdict[int, list[int]] = defaultdict(list)  # free room -> a heap of the bins that have it
    chosen: list[int] = []  # the bin of each item, largest first
    opened = 0
    for size, waiting in zip(kinds[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while waiting:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                current = heappop(bins_with[room])
                if not bins_with[room]:
                    del rooms[place]
            else:
                room, current = capacity, opened
                opened += 1
            # With one more item in it, it is still the fullest bin that holds another of this size, if it holds one.
            taken = min(waiting, room // size)
            chosen += [current] * taken
            waiting -= taken
            room -= taken * size
            if not bins_with[room]:
                insort(rooms, room)
            heappush(bins_with[room], current)
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[np.argsort(-sizes, kind="stable")] = chosen
    return bin_of


def even_fit(sizes: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    """As few bins as `best_fit` makes, and the largest of them as small as that allows.

    Returns:
        The bin of each item, as `best_fit` numbers them.

    Raises:
        ValueError: a size is below 1 or above the capacity.
    """
    bin_of = best_fit(sizes, capacity)
    bins = int(bin_of.max(initial=-1)) + 1
    if bins < 2:
        return bin_of
    low, high = max(int(np.max(sizes)), -(-int(np.sum(sizes)) // bins)), capacity
    while low < high:
        middle = (low + high) // 2
        tried = best_fit(sizes, middle)
        if tried.max() < bins:
            bin_of, high = tried, middle
        else:
            low = middle + 1
    return bin_of


def stream_fit(sizes: Iterable[int], capacity: int, window: int) -> Iterator[list[int]]:
    """Bins of a stream, nearly all of them full but for one part in SPARE.

    The item that has waited longest opens a bin, and those of the `window` items behind it join that fill it best. The
    last `window` items of the stream go into bins of like size. Yields the places in the stream of each bin's items, in
    order; every item is in exactly one bin, and no more than `window` + 1 items wait at a time.

    Raises:
        ValueError: a size is below 1 or above the capacity.
    """
    source = _checked(sizes, capacity)
    numbers = count()
    waiting = list(islice(source, window + 1))
    places = list(islice(numbers, len(waiting)))
    while len(waiting) > window:
        chosen = _fullest(waiting, capacity)
        yield [places[i] for i in chosen]
        for i in reversed(chosen):
            del waiting[i], places[i]
        waiting += islice(source, len(chosen))
        places += islice(numbers, len(waiting) - len(places))
    for members in members_of(even_fit(waiting, capacity)):
        yield [places[i] for i in members]


def members_of(bin_of: np.ndarray) -> list[list[int]]:
    """The items of each bin, in order, from the bin of each item."""
    if len(bin_of) == 0:
        return []
    ends = np.cumsum(np.bincount(bin_of))[:-1]
    return [members.tolist() for members in np.split(np.argsort(bin_of, kind="stable"), ends)]


def _fullest(sizes: Sequence[int], capacity: int) -> list[int]:
    """Places of the first item and of those behind it that fill a bin best with it, or nearly so.

    Sums of choices are the set bits of one long number, so that an item joins all of them at once by a shift.
    """
    room = capacity - sizes[0]
    enough = room - capacity // SPARE
    within = (2 << room) - 1
    reached = 1
    before: list[int] = []  # what choices of the items tried before each tried one add up to
    tried: list[int] = []
    best = vain = 0
    for place, size in enumerate(islice(sizes, 1, None), start=1):
        if best >= enough or vain == PATIENCE:
            break
        vain += 1
        if size <= room:
            tried.append(place)
            before.append(reached)
            reached |= reached << size & within
            if reached.bit_length() > best + 1:
                best = reached.bit_length() - 1
                vain = 0
    chosen = []
    for place, sums in zip(reversed(tried), reversed(before), strict=True):
        if not sums >> best & 1:
            chosen.append(place)
            best -= sizes[place]
    return [0, *reversed(chosen)]


def _checked(sizes: Iterable[int], capacity: int) -> Iterator[int]:
    for size in sizes:
        if not 1 <= size <= capacity:
            raise ValueError(f"an item of size {size} for bins of {capacity}")
        yield int(size)  # numpy's integers overflow
