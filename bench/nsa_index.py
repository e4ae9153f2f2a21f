"""From chosen blocks to what attention reads, the *index step*: the literal loop of a public report and what is here.

A loop in Python over sequences, rows and groups that sorts a row's blocks and joins them to ranges of positions
(`ranges`), on a CPU; and what stands for it here: lists of pieces, and these turned about: which rows read a piece.
Before anything is timed, both are held to let each row read the same rows, of blocks in the order of their scores and
of blocks in their own.

    equal_sets      whether they do; where they do not, nothing is timed
    loop_ms         of the loop, on blocks in the order of their scores
    lists_ms        from blocks to lists; at the report's shape we ask for 0.1 at most
    readers_ms      lists turned about
    times           loop_ms / lists_ms
    reported        what the report says of its own two forms, 3,664 and 21.7 ms, which is our target
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.output import device
from bench.shapes import random_pairs
from bench.timing import timed
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.tree import grow
from tuningfork.kernels.nsa.plain import Grid

INDEX_STEPS = {"report": (2, 256, 4, 32, 8), "m7c": (2, 2048, 2, 16, 64)}  # sequences, rows, groups, blocks a row, l'
REPORTED = 169
Ranges = list[list[list[tuple[int, int]]]]


def ranges(chosen: list[list[list[int]]], length: int, select: int) -> Ranges:
    """The positions [begin, end) that rows of sequences of so many read for each group, by their chosen blocks: in
    order, each once, neighbours joined, none behind the row. Literally, one row and group after the other."""
    found = []
    for row, groups in enumerate(chosen):
        position = row % length
        of_row = []
        for blocks in groups:
            joined: list[tuple[int, int]] = []
            for block in sorted({block for block in blocks if block >= 0}):
                begin, end = block * select, min((block + 1) * select, position + 1)
                if joined and joined[-1][1] == begin:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((begin, end))
            of_row.append(joined)
        found.append(of_row)
    return found


def rows_of_ranges(found: Ranges, length: int) -> Tensor:
    """Which rows [T, G, T] each row reads for each group, by `ranges` of sequences of so many."""
    reads = torch.zeros(len(found), len(found[0]), len(found), dtype=torch.bool)
    for row, groups in enumerate(found):
        start = row // length * length
        for group, joined in enumerate(groups):
            for begin, end in joined:
                reads[row, group, start + begin : start + end] = True
    return reads


def rows_of_lists(lists: Tensor, piece_rows: Tensor, position_of_row: Tensor) -> Tensor:
    """The same by lists of pieces [T, G, n], each `piece * G + group`, or more than there are for none.

    Args:
        piece_rows: int [B, l'], T where there is none. A row reads those that are not behind it.
    """
    total, groups, _ = lists.shape
    piece_rows = F.pad(piece_rows.long(), (0, 0, 0, 1), value=total)  # and a piece of none
    group = torch.arange(groups, device=lists.device)[:, None]
    listed = torch.where(lists < (len(piece_rows) - 1) * groups, lists, (len(piece_rows) - 1) * groups + group).long()
    if not torch.equal(listed % groups, group.expand_as(listed)):
        raise ValueError("a list has a piece of another group")
    rows = piece_rows[listed // groups].flatten(2)  # [T, G, n l']
    position = F.pad(position_of_row.long(), (0, 1), value=total)
    rows = rows.masked_fill(position[rows] > position_of_row[:, None, None], total)
    reads = torch.zeros(total, groups, total + 1, dtype=torch.bool, device=lists.device)
    return reads.scatter_(2, rows, True)[..., :total]


def chosen_blocks(name: str) -> Tensor:
    """Of an index step, int32 [rows, groups, blocks a row], by random scores and in their order; -1 where there is
    none."""
    sequences, length, groups, count, size = INDEX_STEPS[name]
    own = torch.arange(length) // size
    scores = torch.rand(sequences, length, groups, (length - 1) // size + 1, generator=torch.Generator().manual_seed(0))
    scores = scores.masked_fill(torch.arange(scores.shape[3]) > own[:, None, None], -1)
    best = scores.topk(min(count, scores.shape[3]), dim=-1)
    chosen = F.pad(best.indices.masked_fill(best.values < 0, -1), (0, max(0, count - scores.shape[3])), value=-1)
    return chosen.flatten(0, 1).int()


def index_line(name: str, repeats: int) -> dict[str, Any]:
    """Of the step from blocks to rows."""
    where = device()
    _, length, groups, count, size = INDEX_STEPS[name]
    chosen = chosen_blocks(name)
    line: dict[str, Any] = {"bench": "nsa", "kernel": f"index step: {name}", "rows": len(chosen)}
    line |= {"groups": groups, "count": count}
    if name == "report":
        line |= {"reported": REPORTED, "target": REPORTED, "lists_ms_most": 0.1}
    fast = None if where.type != "cuda" else Lists(name, where)
    if fast is not None:
        line["equal_sets"] = fast.equal(chosen)
        if not line["equal_sets"]:
            return {**line, "note": "the loop and the lists let rows read different ones"}
    listed, begun = chosen.tolist(), time.perf_counter()
    ranges(listed, length, size)
    line["loop_ms"] = round(1e3 * (time.perf_counter() - begun), 3)
    if fast is None:
        return {**line, "note": "the rest needs a GPU"}
    there = chosen.to(where)
    lists = fast.of(there)
    line["lists_ms"] = timed(lambda: fast.of(there), where, repeats, 1)
    line["readers_ms"] = timed(lambda: fast.readers(lists), where, repeats, 1)
    return {**line, "times": round(line["loop_ms"] / line["lists_ms"], 1)}


class Lists:
    """What makes lists of an index step's blocks; it needs Triton, and a GPU or Triton's interpreter."""

    def __init__(self, name: str, where: torch.device) -> None:
        from tuningfork.kernels.nsa.fast import TritonNsa

        sequences, self.length, _, _, self.size = INDEX_STEPS[name]
        examples = [e.alone()[0] for e in random_pairs([(0, self.length, 1)] * sequences, vocabulary=1000)]
        layout = lay(examples, grow(examples, "none").of(range(sequences)), sequences * self.length).to(where).layout
        self.op = TritonNsa.prepare(layout, Grid(self.size, self.size, self.size))

    def of(self, chosen: Tensor) -> Tensor:
        from tuningfork.kernels.nsa._selected import lists_of

        op = self.op
        return lists_of([op.segments, op.steps, op.seams, op.position_of_row, *op.pieces], chosen)

    def readers(self, lists: Tensor) -> Any:
        from tuningfork.kernels.nsa._readers import Readers

        return Readers.of(lists, len(self.op.pieces.rows), len(lists), 1024)

    def equal(self, chosen: Tensor) -> bool:
        """Whether rows read the same by the loop and by lists, of these blocks as they are and in their own order."""
        position, pieces = self.op.position_of_row, self.op.pieces.rows
        for blocks in (chosen, chosen.sort(dim=-1).values):
            expected = rows_of_ranges(ranges(blocks.tolist(), self.length, self.size), self.length)
            found = rows_of_lists(self.of(blocks.to(position.device)), pieces, position)
            if not torch.equal(found.cpu(), expected):
                return False
        return True
