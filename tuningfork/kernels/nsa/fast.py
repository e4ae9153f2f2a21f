"""Native sparse attention in Triton: rows, and compressed blocks, are read where they lie.

What the kernels know of a pack are tables (`_tables.py`). Of compressed attention (`_compressed_kernels.py`,
`_choice_kernels.py`):

- forward, and the gradient of the queries: a tile of a segment's rows and one head reads the entries of its path in
  steps from the first on; which of them a row sees, its position says;
- the choice: from the log-sum-exp, the weights of all heads of a group again, added up by blocks, for so many rows at
  once that these scores have one size in a pack of any length; then the best of each row;
- the gradient of keys and values: a tile of entries reads the rows that see them, which lie side by side.

Of selected attention row by row (`_selected_kernels.py`):

- forward, and the gradient of the queries: a row's heads of one group read the pieces of its list together;
- the gradient of keys and values: a piece, for one group, reads the rows that list it, in their order.

Of selected attention by blocks (`_block_kernels.py`), where few heads share keys (`LEAST_HEADS_BY_ROW`):

- forward: a piece, for one group, reads the rows that list it, and writes what each gets of it; then the parts of a row
  are joined in the order of its list;
- gradients: a piece reads these rows again and sums up its keys' and values', and writes what each row's query gets of
  it, which is added up in the order of the list.

Where a tile of entries or a piece has many readers they are cut into parts. What the parts give a row, and what all
tiles or pieces do that have the row, is added up in one order (`_sum_kernels.py`): nothing is added up atomically, and
gradients repeat. What a row reads, it reads in the order of its path, by the same instructions whatever lies beside it:
outputs, choices and gradients of queries have the same bits in every pack that has the row's path.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tuningfork.kernels.nsa._blocks import Choice, Grid
from tuningfork.kernels.nsa._by_block import attend_by_block
from tuningfork.kernels.nsa._compressed import attend_compressed
from tuningfork.kernels.nsa._selected import attend_selected
from tuningfork.kernels.nsa._tables import Entries, Pieces
from tuningfork.kernels.nsa._take import mean, take
from tuningfork.records import ForkLayout

WIDEST_HEAD = 256

# Query heads of a group from which on selected attention goes row by row. So each row reads 128 n (dk + dv) bytes for a
# group, with l' = 64, from the L2 cache, whatever the number of heads, and matrix units take 16 lines of which fewer
# heads leave most empty. By blocks each head's parts, float32, go to memory and back, 8 n dv bytes in the forward pass:
# by these numbers less up to some 16 heads, but matrix units and caches do their own work meanwhile. In between nothing
# has been measured.
LEAST_HEADS_BY_ROW = 8
WIDEST_BY_BLOCK = 128  # a piece of wider heads goes in slices, each of which would write a part for every head


class TritonNsa(NamedTuple):
    """The tables of a pack of T rows with E compressed blocks, all on the GPU."""

    grid: Grid
    segments: Tensor  # as the next two and `position_of_row` of records.ForkLayout
    steps: Tensor
    seams: Tensor
    position_of_row: Tensor
    entries: Entries
    pieces: Pieces

    @classmethod
    def prepare(cls, layout: ForkLayout, grid: Grid) -> TritonNsa:
        """The tables of a layout, on its device, a GPU, made without waiting for it."""
        tables = layout.segments, layout.steps, layout.seams, layout.position_of_row
        return cls(grid, *tables, Entries.of(layout, grid), Pieces.of(layout, grid))

    @property
    def first_positions(self) -> Tensor:
        """int64 [E], where in its path each compressed block begins."""
        return self.entries.first_positions

    def blocks(self, rows: Tensor) -> Tensor:
        """As PlainNsa.blocks has it."""
        entries = self.entries
        return take(entries.rows, entries.row_starts, entries.row_places, rows)

    def mean(self, rows: Tensor) -> Tensor:
        """As PlainNsa.mean has it."""
        entries = self.entries
        return mean(entries.rows, entries.row_starts, entries.row_places, rows)

    def compressed(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, choice: Choice
    ) -> tuple[Tensor, Tensor]:
        """As PlainNsa.compressed has it, for query, keys and values of one dtype, float32, bfloat16 or float16, which
        the result has too; scores and sums are float32. dk and dv are at most WIDEST_HEAD, which `kernels.select`
        refuses to exceed: here nothing is checked."""
        tables = [self.segments, *self.entries]
        out, _, chosen = attend_compressed(tables, query, keys, values, scale, *self.grid, *choice)
        return out, chosen

    def selected(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, *, scale: float) -> Tensor:
        """As PlainNsa.selected has it, for the dtypes and widths of `compressed`."""
        tables = [self.segments, self.steps, self.seams, self.position_of_row, *self.pieces]
        attend = attend_by_block if _reads_by_block(query, key, value) else attend_selected
        out, *_ = attend(tables, query, key, value, chosen, scale)
        return out


def _reads_by_block(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether selected attention goes by blocks, not row by row: a model's sizes alone decide."""
    fits = max(query.shape[2], value.shape[2]) <= WIDEST_BY_BLOCK
    return fits and query.shape[1] // key.shape[1] < LEAST_HEADS_BY_ROW
