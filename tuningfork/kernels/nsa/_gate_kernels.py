# mypy: disable-error-code=no-untyped-def
"""The Triton kernel of gates' linear layers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows_total"])
def nsa_gates(
    x, weight, bias, out, rows_total, stride_x, stride_weight,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = x weight' + bias, contiguous; x [rows, INPUTS], weight [OUTPUTS, INPUTS]. Inputs are added up in order."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, there = rows < rows_total, columns < OUTPUTS
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, INPUTS, STEP):
        inputs = first + tl.arange(0, STEP)
        inside = (inputs < INPUTS)[None, :]
        given = tl.load(x + rows[:, None] * stride_x + inputs[None, :], mask=live[:, None] & inside, other=0.0)
        weights = tl.load(
            weight + columns[:, None] * stride_weight + inputs[None, :], mask=there[:, None] & inside, other=0.0
        )
        acc = tl.dot(given, tl.trans(weights), acc, input_precision=PRECISION)
    acc += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)[None, :]
    places = rows[:, None] * OUTPUTS + columns[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=live[:, None] & there[None, :])
