"""The gated delta rule in plain PyTorch: exact, any dtype, any device, all chunks of all paths together.

Only the state goes from chunk to chunk: all first chunks make a batch, then all second ones, and paths that have ended
drop out. A chunk's shapes are always the same, of widths that fill vector registers, and its operands lie side by side
in memory: of anything else a product would take another way through its library for one chunk than for many. So a row
has the same bits in every pack that has its path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tuningfork.kernels.gated_delta._chunks import CHUNK, Chunks, check_gates
from tuningfork.kernels.sums import LINE, take
from tuningfork.records import ForkLayout


class PlainGatedDelta(NamedTuple):
    """The N chunks of a pack, the first ones of all paths first, then the second ones, and so on."""

    rows: Tensor  # int64 [N * CHUNK], T where there is no row
    parents: list[Tensor]  # of all second chunks, all third ones ...: int64, a place among the chunks one before
    counts: list[int]  # of all first chunks, all second ones ...
    places: Tensor  # int64 [T], where in `rows` a row's result is made

    @classmethod
    def prepare(cls, layout: ForkLayout) -> PlainGatedDelta:
        """The chunks of a layout's paths, read by the host: it waits for the layout's device."""
        chunks = Chunks.of(layout)
        there = int((chunks.number >= 0).sum())
        number, order = chunks.number[:there].sort(stable=True)
        counts = number.bincount().tolist()
        place = torch.empty_like(order)
        place[order] = torch.arange(there, device=order.device)
        begin = number.bincount().cumsum(0) - number.bincount()
        parents = (place[chunks.parent[order]] - begin[number - 1]).split(counts)  # not of the first ones
        return cls(
            rows=chunks.rows[order].flatten(),
            parents=list(parents[1:]),
            counts=counts,
            places=place[chunks.of_row] * CHUNK + layout.position_of_row % CHUNK,
        )

    def scan(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Run the recurrence along every path of the layout. States and sums are at least float32.

        A number that is not finite spoils all rows of its chunk, and those that come after them.

        Args:
            query, key: [T, Hk, dk], both with a norm of 1 at most, as the layer makes them; the query is scaled.
            value: [T, Hv, dv]; Hv is a multiple of Hk, and a key head serves that many value heads side by side.
            decay: [T, Hv], the log of what the state is multiplied with before a row, at most 0.
            beta: [T, Hv], how much of what the state says of a row's key is replaced by its value.

        Returns:
            [T, Hv, dv], in the value's dtype.

        Raises:
            TypeError: decay or beta is narrower than float32.
        """
        check_gates(value, decay, beta)
        out: Tensor = _Scan.apply(self, query, key, value, decay, beta)
        return out


class _Scan(torch.autograd.Function):
    """The scan of a pack. The backward pass computes it again: autograd would keep thousands of numbers a row."""

    @staticmethod
    def forward(ctx: Any, pack: PlainGatedDelta, *given: Tensor) -> Tensor:
        ctx.pack = pack
        ctx.save_for_backward(*given)
        return _scan(pack, *given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = _scan(ctx.pack, *leaves)
        return None, *torch.autograd.grad(out, leaves, grad)


def _scan(pack: PlainGatedDelta, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    wide = torch.promote_types(value.dtype, torch.float32)
    groups, width = value.shape[1] // key.shape[1], value.shape[2]
    with torch.autocast(value.device.type, enabled=False):
        q, k, v, g, b = (_chunks(t.to(wide), pack.rows) for t in (query, key, value, decay, beta))
        if groups > 1:
            q, k = (t.repeat_interleave(groups, dim=1) for t in (q, k))
        gamma, b = g.cumsum(-1)[..., None], b[..., None]
        above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        # What a row forgets of another: masked first, for e^(γ_i - γ_j) has no bound above the diagonal.
        fading = (gamma - gamma.mT).masked_fill(above, float("-inf")).exp()
        keys = k.mT.contiguous()
        mixing = b * (k @ keys) * fading  # its diagonal is not read
        solved = torch.linalg.solve_triangular(
            mixing, torch.cat([b * v, b * gamma.exp() * k], dim=-1), upper=False, unitriangular=True
        )
        u, w = (part.contiguous() for part in solved.split([v.shape[-1], k.shape[-1]], dim=-1))
        into = ((gamma[:, :, -1:] - gamma).exp() * k).mT.contiguous()
        kept = gamma[:, :, -1:].exp()
        states, fresh = _states(pack, u, w, into, kept)
        out = (gamma.exp() * q) @ states + (q @ keys * fading) @ fresh
        return take(out[..., :width].transpose(1, 2).flatten(0, 1), pack.places).to(value.dtype)


def _chunks(rows: Tensor, places: Tensor) -> Tensor:
    """Rows [T, H] or [T, H, d] by chunks and heads, [N, H, CHUNK] or [N, H, CHUNK, d], d filled up; zero at place T."""
    fill = (0, -rows.shape[2] % LINE) if rows.ndim == 3 else ()
    padded = pad(rows, (*fill, 0, 0, 0, 1))
    return take(padded, places).unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()


def _states(pack: PlainGatedDelta, u: Tensor, w: Tensor, into: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Each chunk's incoming state [N, H, dk, dv], and what its rows add to it, v' [N, H, CHUNK, dv]; dk and dv filled
    up."""
    before, added = [], []
    state = u.new_zeros(pack.counts[0], u.shape[1], w.shape[3], u.shape[3])
    by_number = (t.split(pack.counts) for t in (u, w, into, kept))
    for number, (u_, w_, into_, kept_) in enumerate(zip(*by_number, strict=True)):
        if number:
            state = take(state, pack.parents[number - 1])
        fresh = u_ - w_ @ state
        before.append(state)
        added.append(fresh)
        state = kept_ * state + into_ @ fresh
    return torch.cat(before), torch.cat(added)
