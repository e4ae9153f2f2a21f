# mypy: disable-error-code=no-untyped-def
"""Gates' linear layers as an op of a GPU.

They have a few outputs, such as 12 or 36. For such products a library may take one kernel for a thousand rows and
another for two thousand, which add up in other orders: a row's bits would depend on the size of its pack.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.nsa import _gate_kernels as kernels
from tuningfork.kernels.nsa._launch import precision, readable


@torch.library.custom_op("tuningfork::nsa_gates", mutates_args=())
def gates(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, n] times weight [m, n], plus bias [m], all of one dtype: [T, m] in it, summed up in float32."""
    x, weight, bias = readable(x, weight, bias)
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    columns = min(64, max(16, triton.next_power_of_2(outputs)))
    kernels.nsa_gates[(triton.cdiv(rows, 64), triton.cdiv(outputs, columns))](
        x, weight, bias, out, rows, x.stride(0), weight.stride(0),
        INPUTS=inputs, OUTPUTS=outputs, ROWS=64, STEP=128 // x.dtype.itemsize, COLUMNS=columns,
        PRECISION=precision(x), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@gates.register_fake
def _(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


def _save(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    """Of a pack as a whole, and the same whenever it is computed again: a library's products serve."""
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.mT @ x, grad.sum(0)


gates.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.tuningfork.nsa_gates)
def _flops(x, weight, *_, **__) -> int:
    """From shapes alone."""
    return 2 * x[0] * x[1] * weight[0]
