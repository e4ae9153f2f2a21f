# mypy: disable-error-code=no-untyped-def
"""Row log-probs in Triton: one program a row, one read of the logits forward, one read and one write backward.

A row's arithmetic depends on nothing but the row, so its bits do not depend on the chunk that it lies in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from tuningfork.records import LogitTransform

_BLOCK = 4096
_RUN_BYTES = 16  # what a thread loads at once
_WARPS = 8


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _transformed(raw, scale, softcap, HAS_CAP: tl.constexpr):
    z = raw.to(tl.float32) * scale
    if HAS_CAP:
        z = softcap * libdevice.tanh(z / softcap)
    return z


@triton.jit(do_not_specialize_on_alignment=["targets"])  # a piece of a pack may begin at any row
def _forward(
    logits, targets, logps, lses, stride, V, scale, softcap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    lanes: tl.constexpr = BLOCK // RUN
    # A lane reads RUN neighbours at a time. Its running maximum and sum are merged with the others' once, at the end.
    place = tl.arange(0, lanes)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    top = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], tl.float32)
    for start in range(0, V, BLOCK):
        column = start + place
        inside = column < V
        z = _transformed(tl.load(base + column, mask=inside, other=0.0), scale, softcap, HAS_CAP)
        z = tl.where(inside, z, float("-inf"))
        new_top = _larger(top, tl.reduce(z, 1, _larger))
        # A lane that has seen nothing yet has top -inf; exp(-inf - -inf) would be nan.
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(z - safe[:, None]), 1)
        top = new_top
    row_top = tl.max(top, 0)
    row_total = tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - row_top)), 0)
    rest = tl.log(row_total)
    target = tl.load(targets + row)
    picked = _transformed(tl.load(base + target), scale, softcap, HAS_CAP)
    tl.store(lses + 2 * row, row_top)
    tl.store(lses + 2 * row + 1, rest)
    tl.store(logps + row, (picked - row_top) - rest)


@triton.jit(do_not_specialize_on_alignment=["targets", "grads"])
def _backward(
    logits, out, targets, lses, grads, stride, out_stride, V, scale, softcap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    out_base = out + row * out_stride
    row_top = tl.load(lses + 2 * row)
    rest = tl.load(lses + 2 * row + 1)
    grad = tl.load(grads + row) * scale
    target = tl.load(targets + row)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        z = _transformed(tl.load(base + column, mask=inside, other=0.0), scale, softcap, HAS_CAP)
        d = tl.where(column == target, 1.0, 0.0) - tl.exp((z - row_top) - rest)
        d = d * grad
        if HAS_CAP:
            d = d * (1.0 - (z / softcap) * (z / softcap))
        tl.store(out_base + column, d.to(out.dtype.element_ty), mask=inside)


def row_logps(logits: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor]:
    """See plain.row_logps. `logits` must have unit column stride."""
    rows, vocabulary = logits.shape
    logps = torch.empty(rows, device=logits.device, dtype=torch.float32)
    lse = torch.empty(rows, 2, device=logits.device, dtype=torch.float32)
    if rows:
        _forward[(rows,)](
            logits,
            targets,
            logps,
            lse,
            logits.stride(0),
            vocabulary,
            transform.scale,
            transform.softcap or 1.0,
            HAS_CAP=transform.softcap is not None,
            BLOCK=_BLOCK,
            RUN=_RUN_BYTES // logits.element_size(),
            num_warps=_WARPS,
        )
    return logps, lse


def logits_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, grad_logps: Tensor, transform: LogitTransform, out: Tensor
) -> Tensor:
    """See plain.logits_gradient. `logits` and `out` must have unit column stride."""
    rows, vocabulary = logits.shape
    if rows:
        _backward[(rows,)](
            logits,
            out,
            targets,
            lse,
            grad_logps.contiguous(),
            logits.stride(0),
            out.stride(0),
            vocabulary,
            transform.scale,
            transform.softcap or 1.0,
            HAS_CAP=transform.softcap is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out
