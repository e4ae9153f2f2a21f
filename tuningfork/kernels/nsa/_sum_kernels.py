# mypy: disable-error-code=no-untyped-def
"""The Triton kernels that add up what lies in several places, in their order; fast.py launches them.

`starts` and `places` are `_tables.Places`: where each row is in a table of LENGTH columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["blocks", "rows_total"])
def nsa_mean(rows, out, table, blocks, rows_total, stride, LENGTH: tl.constexpr, BLOCKS: tl.constexpr,
             WIDTH: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """The mean of each block's rows, [blocks, WIDTH]; zero where there is no block. One column of programs has LANES of
    the width."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    total = tl.zeros([BLOCKS, LANES], tl.float32)
    for number in range(LENGTH):
        row = tl.load(table + block * LENGTH + number, mask=block < blocks, other=rows_total)
        pointers = rows + row.to(tl.int64)[:, None] * stride + lanes[None, :]
        found = tl.load(pointers, mask=(row < rows_total)[:, None] & (lanes < WIDTH)[None, :], other=0.0)
        total += found.to(tl.float32)
    places = block.to(tl.int64)[:, None] * WIDTH + lanes[None, :]
    mean = total * (1.0 / LENGTH)
    tl.store(out + places, mean.to(out.dtype.element_ty), mask=(block < blocks)[:, None] & (lanes < WIDTH)[None, :])


@triton.jit(do_not_specialize=["rows_total"])
def nsa_sum_places(
    values, out, starts, places, rows_total, scale,
    PER_VALUE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Each row's sum of the values [n, WIDTH] at its places, times scale. PER_VALUE places side by side have one value:
    a block's, in the gradient of its mean."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows_total
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    start = tl.load(starts + row, mask=live, other=0)
    count = tl.load(starts + row + 1, mask=live, other=0) - start
    total = tl.zeros([ROWS, LANES], tl.float32)
    for number in range(0, tl.max(count, 0)):
        there = number < count
        at = tl.load(places + start + number, mask=there, other=0) // PER_VALUE
        pointers = values + at.to(tl.int64)[:, None] * WIDTH + lanes[None, :]
        total += tl.load(pointers, mask=there[:, None] & (lanes < WIDTH)[None, :], other=0.0).to(tl.float32)
    pointers = out + row.to(tl.int64)[:, None] * WIDTH + lanes[None, :]
    tl.store(pointers, (total * scale).to(out.dtype.element_ty), mask=live[:, None] & (lanes < WIDTH)[None, :])


@triton.jit(do_not_specialize=["rows_total"])
def nsa_sum_parts(
    partial, out, starts, places, part_starts, rows_total,
    LENGTH: tl.constexpr, BY_GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Each row's sum over its places in blocks of LENGTH, and over the parts of each of these: [rows, groups, WIDTH].

    `partial` is [parts, LENGTH, WIDTH] where each block has parts of its own for each group (BY_GROUP), else [parts,
    groups, LENGTH, WIDTH]; those of a block lie side by side, from `part_starts` on.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    live = row < rows_total
    lanes = tl.arange(0, LANES)
    inside = (lanes < WIDTH)[None, :]
    start = tl.load(starts + row, mask=live, other=0)
    count = tl.load(starts + row + 1, mask=live, other=0) - start
    total = tl.zeros([ROWS, LANES], tl.float32)
    for number in range(0, tl.max(count, 0)):
        there = number < count
        place = tl.load(places + start + number, mask=there, other=0)
        block = place // LENGTH
        if BY_GROUP:
            block = block * groups + group
        first = tl.load(part_starts + block, mask=there, other=0)
        parts = tl.load(part_starts + block + 1, mask=there, other=0) - first
        for part in range(0, tl.max(parts, 0)):
            slot = (first + part).to(tl.int64)
            if not BY_GROUP:
                slot = slot * groups + group
            pointers = partial + (slot * LENGTH + place % LENGTH)[:, None] * WIDTH + lanes[None, :]
            total += tl.load(pointers, mask=(part < parts)[:, None] & inside, other=0.0)
    pointers = out + (row.to(tl.int64) * groups + group)[:, None] * WIDTH + lanes[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=live[:, None] & inside)
