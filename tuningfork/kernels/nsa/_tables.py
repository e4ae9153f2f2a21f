"""What the Triton kernels of native sparse attention know of a pack: tables, made on its device without waiting for it.

*Entries*, the compressed blocks (`_blocks.py`), lie as rows do: those of a segment side by side, behind its ancestors'.
So the path of a segment has steps of GRID entries, as it has of rows (records.ForkLayout), and a line of `seams` for a
step in which a cut lies.

*Pieces* are the blocks that are chosen, once for each segment that ends them: piece (s, j) has the positions of block j
on the path of segment s, up to the segment's end, and is there if one of these is a row of s. So a block that a cut
crosses is a piece of each segment that goes on from there. A row that chooses block j reads the piece of the segment
that has the block's last position, or, where that is not yet there, of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tuningfork.kernels.nsa._blocks import Blocks, Grid
from tuningfork.kernels.tables import rows_at, spread
from tuningfork.records import GRID, ForkLayout

TABLE_TILE = 64  # rows, or entries, of a tile in the tables; programs that hold fewer take a part of one
MORE_PARTS = 512  # there are at most so many parts more than tiles of entries: none has more than a 512th of the work
SMALLEST_PART = 512  # rows that a part of a tile's readers has at least


class Places(NamedTuple):
    """Where rows [T] are in a table of rows [B, L], one after the other: a sum over them has one order."""

    starts: Tensor  # int32 [T + 1]
    places: Tensor  # int32 [B L], in the table, by row

    @classmethod
    def of(cls, table: Tensor, rows: int) -> Places:
        """Of a table in which `rows` stands where there is none."""
        by_row, places = table.flatten().sort(stable=True)
        return cls(torch.searchsorted(by_row, torch.arange(rows + 1, device=table.device)).int(), places.int())


class Entries(NamedTuple):
    """The compressed blocks, E of them, by last row, and who reads them; for S segments."""

    rows: Tensor  # int32 [E, l], T where there is no block
    first_positions: Tensor  # int64 [E]
    row_starts: Tensor  # Places of rows in `rows`
    row_places: Tensor
    segments: Tensor  # int32 [S, 2]: a segment's first entry, and how many its ancestors have
    steps: Tensor  # int32, of the ancestors' entries, each segment's where its steps of rows begin
    seams: Tensor  # int32 [S, GRID]
    query_tiles: Tensor  # int32 [T // TABLE_TILE + S, 2]: segment, first row; the longest paths first
    parts: Tensor  # int32 [P, 4]: a tile's first entry and end, and its readers' first row and end
    part_starts: Tensor  # int32 [tiles + 1], of each tile of entries
    starts: Tensor  # Places of entries in the tiles
    places: Tensor

    @classmethod
    def of(cls, layout: ForkLayout, grid: Grid) -> Entries:
        blocks = Blocks.of(layout, grid)
        total, room, device = len(layout.position_of_row), len(blocks.rows), blocks.rows.device
        row_starts, row_places = Places.of(blocks.rows, total)
        start, end, _, first_position, subtree_end, _ = layout.segments.long().unbind(1)
        ended = torch.cat([blocks.ended.new_zeros(1), blocks.ended])  # before a row
        first, stop = ended[start], ended[end]
        above = torch.where(first_position >= grid.length, (first_position - grid.length) // grid.stride + 1, 0)
        steps, seams = _steps_of_entries(layout, grid, ended, first, stop, above)

        places = total // TABLE_TILE + len(start)
        segment, number, there = spread((end - start + TABLE_TILE - 1) // TABLE_TILE, places)
        row = start[segment] + number * TABLE_TILE  # beyond its segment's end where there is no tile
        reach = torch.where(there, first_position[segment] + row - start[segment], -1)
        query_tiles = torch.stack([segment, row], 1)[reach.argsort(descending=True)]

        last_row = torch.cat([blocks.rows[:, -1], blocks.rows.new_full((1,), total)])
        segment, number, there = spread((stop - first + TABLE_TILE - 1) // TABLE_TILE, room // TABLE_TILE + len(start))
        entry = torch.where(there, first[segment] + number * TABLE_TILE, room)
        tile_end = torch.where(there, torch.minimum(entry + TABLE_TILE, stop[segment]), room)
        begin, readers_end = last_row[entry], torch.where(there, subtree_end[segment], 0)
        readers = (readers_end - begin).clamp(min=0)
        share = (readers.sum() + MORE_PARTS - 1) // MORE_PARTS
        size = ((share + TABLE_TILE - 1) // TABLE_TILE * TABLE_TILE).clamp(min=SMALLEST_PART)
        counts = (readers + size - 1) // size
        tile, number, there = spread(counts, len(entry) + MORE_PARTS)
        part_begin = begin[tile] + number * size
        part_end = torch.where(there, torch.minimum(part_begin + size, readers_end[tile]), 0)
        parts = torch.stack([entry[tile], tile_end[tile], part_begin, part_end], 1)
        listed = entry[:, None] + torch.arange(TABLE_TILE, device=device)
        starts, tile_places = Places.of(torch.where(listed < tile_end[:, None], listed, room), room)
        return cls(
            rows=blocks.rows.int(),
            first_positions=blocks.first_positions,
            row_starts=row_starts,
            row_places=row_places,
            segments=torch.stack([first, above], 1).int(),
            steps=steps,
            seams=seams,
            query_tiles=query_tiles.int(),
            parts=parts.int(),
            part_starts=starts_of(counts).int(),
            starts=starts,
            places=tile_places,
        )


class Pieces(NamedTuple):
    """The pieces of chosen blocks, B of them, and what of them each row has."""

    segment_of_row: Tensor  # int32 [T]
    piece_of_row: Tensor  # int32 [T], the one of its segment that has its position
    table: Tensor  # int32 [B, 2]: first position, and the row that has it if all others follow it; else -1
    rows: Tensor  # int32 [B, l'], T where there is none
    starts: Tensor  # Places of rows in `rows`
    places: Tensor

    @classmethod
    def of(cls, layout: ForkLayout, grid: Grid) -> Pieces:
        total, device = len(layout.position_of_row), layout.position_of_row.device
        start, end, _, first_position, _, _ = layout.segments.long().unbind(1)
        path_end = first_position + end - start
        first_block = first_position // grid.select
        counts = torch.where(end > start, (path_end - 1) // grid.select - first_block + 1, 0)
        first_piece = starts_of(counts)[:-1]
        segment, number, there = spread(counts, total // grid.select + 2 * len(start))
        first = (first_block[segment] + number) * grid.select
        positions = first[:, None] + torch.arange(grid.select, device=device)
        inside = there[:, None] & (positions < path_end[segment][:, None])
        last = (path_end[segment] - 1).clamp(min=0)
        rows = rows_at(layout, segment, torch.minimum(positions, last[:, None]))
        uncut = there & (first >= first_position[segment])  # blocks that begin in an ancestor's rows go by the table
        rows = torch.where(inside, rows, total)
        segment_of_row = torch.searchsorted(end.contiguous(), torch.arange(total, device=device), right=True)
        segment_of_row = segment_of_row.clamp(max=len(end) - 1)
        block_of_row = layout.position_of_row // grid.select
        piece_of_row = first_piece[segment_of_row] + block_of_row - first_block[segment_of_row]
        starts, places = Places.of(rows, total)
        return cls(
            segment_of_row=segment_of_row.int(),
            piece_of_row=piece_of_row.int(),
            table=torch.stack([first, torch.where(uncut, rows[:, 0], -1)], 1).int(),
            rows=rows.int(),
            starts=starts,
            places=places,
        )


def _steps_of_entries(
    layout: ForkLayout, grid: Grid, ended: Tensor, first: Tensor, stop: Tensor, above: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the entries of each segment's path lie, in steps of GRID.

    Args:
        ended: int64 [T + 1], entries that end before a row.
        first, stop, above: int64 [S], a segment's entries, and how many its ancestors have.
    """
    total, device = len(layout.position_of_row), ended.device
    end, steps_start = layout.segments[:, 1].long().contiguous(), layout.segments[:, 5].long()
    slots = len(layout.steps)
    steps_start = torch.where(end > layout.segments[:, 0], steps_start, slots).contiguous()
    slot = torch.arange(slots, device=device)
    segment = torch.searchsorted(steps_start, slot, right=True).sub(1).clamp(min=0)
    begin = (slot - steps_start[segment]) * GRID

    def entries_at(segment: Tensor, places: Tensor) -> Tensor:
        rows = rows_at(layout, segment, places * grid.stride + grid.length - 1)
        return ended[rows.clamp(0, total - 1) + 1] - 1

    listed = begin < above[segment]
    begin = torch.where(listed, begin, 0)
    last = begin + GRID - 1
    row = rows_at(layout, segment, (last * grid.stride + grid.length - 1)[:, None])[:, 0]
    its_segment = torch.searchsorted(end, row.clamp(0, total - 1), right=True).clamp(max=len(end) - 1)
    ending = torch.where(last < above[segment], its_segment, segment)  # that has the step's last entry
    steps = torch.where(above[ending] > begin, -1 - ending, entries_at(segment, begin[:, None])[:, 0])

    everyone = torch.arange(len(end), device=device)
    places = (above // GRID * GRID)[:, None] + torch.arange(GRID, device=device)
    seams = entries_at(everyone, torch.minimum(places, (above + stop - first - 1).clamp(min=0)[:, None]))
    return torch.where(listed, steps, 0).int(), seams.clamp(min=0).int()


def starts_of(counts: Tensor) -> Tensor:
    """Where each entry's begin if all lie one after the other, and where the last one's end."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
