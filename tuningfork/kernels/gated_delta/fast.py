# mypy: disable-error-code=no-untyped-def
"""The gated delta rule in Triton: chunks are read where their rows lie, and what paths share is scanned once.

Forward, each of these a kernel (`_kernels.py`), by chunk and head unless said:

- the sums of a chunk's decays, all heads together; (I + A)^-1; u and w;
- the states, by tree of chunks, head and some of their columns: one program goes through a tree depth first. Most
  chunks go on from the one before; a state that several go on from is written down, in float32;
- the results, which need nothing but the chunk and its incoming state.

Backward (`_gradient_kernels.py`): u, w and states again, then the states' gradients back through each tree, those of
chunks that go on from one added up in one order; then, by chunk, those of all inputs. A row in several chunks has the
sum of its places in their order. Nothing is added up atomically.

A program's instructions do not depend on what else is in the pack, so a row's result has the same bits in every pack
that has its path, and so have its gradients if the path is the only one that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula  # private: torch.utils.flop_counter

from tuningfork.kernels.gated_delta import _gradient_kernels as backward
from tuningfork.kernels.gated_delta import _kernels as forward
from tuningfork.kernels.gated_delta._chunks import CHUNK, Chunks, chains_of, check_gates
from tuningfork.kernels.gated_delta._cuts import Cut, cut_of, lanes, tile
from tuningfork.records import ForkLayout

WIDEST_KEY = 128


class TritonGatedDelta(NamedTuple):
    """The chunks of a pack, all on the GPU: room for N of them, in at most S trees of 2 S chains."""

    rows: Tensor  # int32 [N, CHUNK], T where there is no row
    kept_from: Tensor  # int32 [N], the first row whose result is the chunk's to write
    chains: Tensor  # int32 [2 S, 5], see _chunks.chains_of
    trees: Tensor  # int32 [S, 2], first chain and end; the largest come first
    starts: Tensor  # int32 [T + 1], where the places of each row begin
    places: Tensor  # int32 [N * CHUNK], in `rows`, row by row

    @classmethod
    def prepare(cls, layout: ForkLayout) -> TritonGatedDelta:
        """The chunks of a layout's paths, on its device, a GPU, made without waiting for it."""
        chunks = Chunks.of(layout)
        total, device = len(layout.position_of_row), chunks.rows.device
        last = torch.where(chunks.rows < total, chunks.rows, -1).amax(1)
        chains, trees = chains_of(chunks, len(layout.segments))
        by_row, places = chunks.rows.flatten().sort(stable=True)
        return cls(
            rows=chunks.rows.int(),
            kept_from=torch.cat([last.new_zeros(1), last[:-1] + 1]).int(),
            chains=chains.int(),
            trees=trees.int(),
            starts=torch.searchsorted(by_row, torch.arange(total + 1, device=device)).int(),
            places=places.int(),
        )

    def scan(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Run the recurrence along every path of the layout, as PlainGatedDelta.scan has it.

        All on the GPU of the layout; query, key and value of one dtype, float32 or bfloat16, which the result has too;
        states and sums are float32. dk is at most WIDEST_KEY, which `kernels.select` refuses to exceed.

        Args:
            query, key: [T, Hk, dk].
            value: [T, Hv, dv].
            decay, beta: float32 [T, Hv].

        Raises:
            TypeError: decay or beta is narrower than float32.
        """
        check_gates(value, decay, beta)
        out, _, _ = _scan(*self, query, key, value, decay, beta)
        return out


class _Launch:
    """The sizes of one call, as its kernels take them."""

    def __init__(self, rows: Tensor, trees: Tensor, key: Tensor, value: Tensor) -> None:
        self.total, self.heads, self.width = value.shape
        self.key, self.value = key, value
        self.chunks, self.trees = len(rows), len(trees)
        self.sizes = {
            "GROUP": self.heads // key.shape[1],
            "HEADS": self.heads,
            "KEY": key.shape[2],
            "KEY_LANES": tile(key),
            "VALUE": self.width,
            "CHUNK": CHUNK,
            # In float32 three products: exact but for the last bit.
            "PRECISION": "tf32x3" if value.dtype == torch.float32 else "tf32",
        }

    def of_chunks(self, like: Tensor, *shape: int) -> Tensor:
        """Room for something of every chunk and head."""
        return like.new_empty(self.chunks, self.heads, *shape)

    def by_chunk(self, kernel: Any, *args: Any) -> None:
        """Run a kernel of which each program has a chunk and a head."""
        self._run(kernel, lambda _: (self.heads, self.chunks), args)

    def by_tree(self, kernel: Any, *args: Any) -> None:
        """Run a kernel of which each program has some columns of a head's states, and goes through a tree."""
        self._run(kernel, lambda cut: (triton.cdiv(self.width, cut.columns), self.heads, self.trees), args)

    def _run(self, kernel: Any, grid: Callable[[Cut], tuple[int, ...]], args: tuple[Any, ...]) -> None:
        cut = cut_of(kernel.fn.__name__, self.key, self.value)
        sizes = {**self.sizes, "COLUMNS": cut.columns}
        taken = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        kernel[grid(cut)](*args, **taken, num_warps=cut.warps, num_stages=cut.stages)

    def incoming_states(self, tables, k, v, beta, gamma, inverse) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, w, each chunk's incoming state, and v'."""
        rows, _, chains, trees, *_ = tables
        dk, dv = k.shape[2], v.shape[2]
        u, w, fresh = (self.of_chunks(v, CHUNK, width) for width in (dv, dk, dv))
        states = self.of_chunks(v, dk, dv)
        handed = v.new_empty(len(trees), self.heads, dk, dv, dtype=torch.float32)
        self.by_chunk(
            forward.delta_apply_inverse, k, v, beta, gamma, inverse, u, w, rows, self.total, *_strides(k, v)
        )  # fmt: skip
        self.by_tree(
            forward.delta_states,
            k, u, w, gamma, states, fresh, handed, rows, chains, trees, self.total, *_strides(k),
        )  # fmt: skip
        return u, w, states, fresh


def _strides(*tensors: Tensor) -> list[int]:
    """Of rows and heads."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _readable(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


@torch.library.custom_op("tuningfork::gated_delta", mutates_args=())
def _scan(
    rows: Tensor, kept_from: Tensor, chains: Tensor, trees: Tensor, starts: Tensor, places: Tensor,
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k [T, Hk, dk]; v [T, Hv, dv]; decay, beta [T, Hv] -> out [T, Hv, dv]; what the backward pass need not make
    again: the sums of decays, float32 [N, Hv, CHUNK], and (I + A)^-1 [N, Hv, CHUNK, CHUNK] in out's dtype."""
    tables = rows, kept_from, chains, trees, starts, places
    q, k, v = _readable(q, k, v)
    decay, beta = decay.contiguous(), beta.contiguous()
    launch = _Launch(rows, trees, k, v)
    gamma = launch.of_chunks(decay, CHUNK)
    work, inverse = (launch.of_chunks(like, CHUNK, CHUNK) for like in (decay, v))
    forward.delta_decays[(launch.chunks,)](
        decay, gamma, rows, launch.total, HEADS=launch.heads, LANES=lanes(launch.heads), CHUNK=CHUNK
    )
    launch.by_chunk(forward.delta_solve, k, beta, gamma, work, inverse, rows, launch.total, *_strides(k))
    _, _, states, fresh = launch.incoming_states(tables, k, v, beta, gamma, inverse)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    launch.by_chunk(forward.delta_read, q, k, gamma, states, fresh, out, rows, kept_from, launch.total, *_strides(q, k))
    return out, gamma, inverse


@torch.library.custom_op("tuningfork::gated_delta_backward", mutates_args=())
def _scan_backward(
    rows: Tensor, kept_from: Tensor, chains: Tensor, trees: Tensor, starts: Tensor, places: Tensor,
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gamma: Tensor, inverse: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, decay and beta."""
    tables = rows, kept_from, chains, trees, starts, places
    q, k, v = _readable(q, k, v)
    beta, grad = beta.contiguous(), grad.contiguous()
    launch = _Launch(rows, trees, k, v)
    total, (_, _, dk), dv = launch.total, k.shape, v.shape[2]
    u, w, states, fresh = launch.incoming_states(tables, k, v, beta, gamma, inverse)

    d_fresh, x_u = (launch.of_chunks(v, CHUNK, dv) for _ in range(2))
    x_w, d_k_parts = (launch.of_chunks(v, CHUNK, dk) for _ in range(2))
    d_states, d_mixing = launch.of_chunks(v, dk, dv), launch.of_chunks(gamma, CHUNK, CHUNK)
    handed = v.new_empty(len(trees), launch.heads, dk, dv, dtype=torch.float32)
    d_beta_parts, d_gamma = (launch.of_chunks(gamma, CHUNK) for _ in range(2))
    d_q = v.new_empty(total, launch.heads, dk)
    launch.by_chunk(backward.delta_fresh_gradient, q, k, gamma, grad, d_fresh, rows, kept_from, total, *_strides(q, k))
    launch.by_tree(
        backward.delta_state_gradients,
        q, k, w, gamma, grad, d_states, d_fresh, handed, rows, kept_from, chains, trees, total, *_strides(q, k),
    )  # fmt: skip
    launch.by_chunk(
        backward.delta_solve_gradient,
        k, v, beta, gamma, inverse, u, w, states, d_fresh, x_u, x_w, d_mixing, d_beta_parts, d_gamma, rows, total,
        *_strides(k, v),
    )  # fmt: skip
    launch.by_chunk(
        backward.delta_query_gradient,
        q, k, gamma, states, fresh, grad, d_q, d_gamma, rows, kept_from, total, *_strides(q, k),
    )  # fmt: skip
    launch.by_chunk(
        backward.delta_key_gradient,
        q, k, beta, gamma, x_w, d_mixing, states, d_states, fresh, grad, d_k_parts, d_beta_parts, d_gamma,
        rows, kept_from, total, *_strides(q, k),
    )  # fmt: skip

    def summed(parts: Tensor, like: Tensor, scale: Tensor | None = None) -> Tensor:
        """What rows have of their places, and of their heads' group."""
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        heads, width = like.shape[1], parts.shape[3]
        backward.delta_sum_places[(heads, triton.cdiv(total, 32))](
            parts, beta if scale is None else scale, out, starts, places, total, HEADS=heads,
            GROUP=launch.heads // heads, HAS_SCALE=scale is not None, WIDTH=width, LANES=lanes(width), ROWS=32,
            CHUNK=CHUNK,
        )  # fmt: skip
        return out

    if launch.heads > k.shape[1]:  # a group's heads one after the other: a sum over them may add in any order
        of_heads = d_q.float().unflatten(1, (k.shape[1], -1)).unbind(2)
        d_q = reduce(torch.add, of_heads).to(v.dtype)
    d_k, d_v = summed(d_k_parts, k), summed(x_u, v, beta)
    return d_q, d_k, d_v, summed(d_gamma[..., None], beta), summed(d_beta_parts[..., None], beta)


@_scan.register_fake
def _(rows, kept_from, chains, trees, starts, places, q, k, v, decay, beta):
    chunks, heads = rows.shape[0], v.shape[1]
    return v.new_empty(v.shape), decay.new_empty(chunks, heads, CHUNK), v.new_empty(chunks, heads, CHUNK, CHUNK)


@_scan_backward.register_fake
def _(rows, kept_from, chains, trees, starts, places, q, k, v, beta, gamma, inverse, grad):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, beta, beta))


def _save(ctx, inputs, output):
    *tables, q, k, v, _, beta = inputs
    _, gamma, inverse = output
    ctx.save_for_backward(*tables, q, k, v, beta, gamma, inverse)


def _backward(ctx, grad, *_):
    return (*(None for _ in TritonGatedDelta._fields), *_scan_backward(*ctx.saved_tensors, grad))


_scan.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.tuningfork.gated_delta)
def _(rows, kept_from, chains, trees, starts, places, q, k, v, *_, **__) -> int:
    """From shapes alone, as if every row had one place: whole products of a chunk, the inverse as what it costs at
    most. By this the compiler decides under an activation budget what is cheap to recompute."""
    (total, _, dk), (_, heads, dv) = k, v
    return total * heads * (6 * dk * dv + CHUNK * (6 * dk + 4 * dv) + 2 * CHUNK**2 // 3)
