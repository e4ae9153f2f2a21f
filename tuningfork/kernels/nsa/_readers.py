"""Who reads the pieces of chosen blocks: the lists of rows turned about, on their device without waiting for it.

Rows are taken in *chunks* of so many side by side, and a *launch* of kernels has one chunk and one group: what its rows
hold in between is of one size in a pack of any length. A piece's readers in a launch are cut into *parts*, so that a
piece that all rows read is no longer a program's than others.

What a part gives the keys of its piece goes to a *slot*. Slots of a piece lie side by side: its first parts of all
launches share one, since launches come one after the other, and each part beyond has its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tuningfork.kernels.nsa._tables import starts_of
from tuningfork.kernels.tables import spread


class Readers(NamedTuple):
    """Of lists of pieces int32 [T, G, n] with B pieces; C chunks of rows."""

    order: Tensor  # int32 [T G n], the places of the lists, those of one piece and group together and in order
    parts: Tensor  # int32 [P, 4]: piece and group as lists have them; begin and end in `order`; slot. By launch
    launches: Tensor  # int32 [C G + 1], where each launch's parts begin, by chunk, then group; and the last one's end
    slot_starts: Tensor  # int32 [B G + 1], where the slots of each piece and group begin

    @classmethod
    def of(cls, lists: Tensor, pieces: int, chunk: int, most: int) -> Readers:
        """
        Args:
            lists: what is not there is pieces * G or more.
            pieces: how many there are.
            chunk: rows of one.
            most: readers that a part has at most.
        """
        rows, groups, count = lists.shape
        none, chunks = pieces * groups, chunks_of(rows, chunk)
        listed, order = lists.flatten().sort(stable=True)
        wanted = listed.long() * chunks + order // (groups * count * chunk)
        starts = torch.searchsorted(wanted, torch.arange(none * chunks + 1, device=lists.device))
        counts = (starts.diff() + most - 1) // most  # parts, by piece and group, then chunk
        more = (counts - 1).clamp(min=0).view(none, chunks)
        slot_starts = starts_of((starts[::chunks].diff() > 0) + more.sum(1))
        own_slots = (slot_starts[:-1, None] + more.cumsum(1) - more).flatten()  # of parts beyond the first, less one

        def by_launch(of: Tensor) -> Tensor:
            return of.view(pieces, groups, chunks).permute(2, 1, 0).flatten()

        launched = by_launch(counts)
        which, number, there = spread(launched, most_parts(none, chunks, lists.numel(), most))
        begin = by_launch(starts[:-1])[which] + number * most
        end = torch.where(there, torch.minimum(begin + most, by_launch(starts[1:])[which]), 0)
        shared = by_launch(slot_starts[:-1, None].expand(none, chunks).contiguous())[which]
        slot = torch.where(number > 0, by_launch(own_slots)[which] + number, shared)
        parts = torch.stack([which % pieces * groups + which // pieces % groups, begin, end, slot], 1)
        launches = starts_of(launched.view(chunks * groups, pieces).sum(1))
        return cls(order.int(), parts.int(), launches.int(), slot_starts.int())


def chunks_of(rows: int, chunk: int) -> int:
    return (rows + chunk - 1) // chunk


def most_parts(lists: int, chunks: int, pairs: int, most: int) -> int:
    """How many parts there can be: one for each of so many lists of readers and chunk, and one for each `most` pairs of
    a row and a piece. With one chunk it is how many slots there can be of any number of chunks, too."""
    return lists * chunks + pairs // most
