"""Fork attention in plain PyTorch: exact, any dtype, any device, in blocks of 64 query positions.

Blocks lie on the grid of positions, and are filled up with zeros where the segment has no row: so the shapes of a call,
and with them the order in which it adds, follow a row's position, and a row has the same bits in every pack that has
its path. One call a segment would be less work, but its shapes follow where the path is cut. Blocks that read as many
keys as each other are computed together, each by itself along a batch dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tuningfork.kernels.sums import add_by_place
from tuningfork.records import ROOT, ForkLayout, Segment

BLOCK = 64  # positions; a multiple of what CPUs and GPUs read at once, so that no row lies at an odd address
_MOST = 1 << 15  # key rows gathered at once: what that takes is bounded, and a block of a very long path goes alone


class _Blocks(NamedTuple):
    """Blocks that read as many keys, B of them. A row that is not there is the one behind the pack's last."""

    queries: Tensor  # int64 [B, BLOCK]
    keys: Tensor  # int64 [B, n], of the positions up to the blocks' last


class PlainAttention(NamedTuple):
    """The blocks of a pack."""

    blocks: list[_Blocks]

    @classmethod
    def prepare(cls, layout: ForkLayout) -> PlainAttention:
        """The blocks of a layout's segments, read by the host: it waits for the layout's device."""
        missing = len(layout.position_of_row)
        paths: dict[int, np.ndarray] = {ROOT: np.zeros(0, np.int64)}  # the rows of a path, by the segment that ends it
        found: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}  # by the number of keys
        for entry, segment in enumerate(Segment(*numbers) for numbers in layout.segments.tolist()):
            if segment.end == segment.start:
                continue
            path = paths[entry] = np.concatenate([paths[segment.parent], np.arange(segment.start, segment.end)])
            filled = np.append(path, np.full(-len(path) % BLOCK, missing))
            for begin in range(segment.first_position // BLOCK * BLOCK, len(path), BLOCK):
                queries = filled[begin : begin + BLOCK].copy()
                queries[: max(0, segment.first_position - begin)] = missing  # an ancestor's
                of_queries, of_keys = found.setdefault(begin + BLOCK, ([], []))
                of_queries.append(queries)
                of_keys.append(filled[: begin + BLOCK])
        device = layout.segments.device
        blocks: list[_Blocks] = []
        for n, rows in sorted(found.items()):
            at_once = max(1, _MOST // n)
            queries, keys = (torch.from_numpy(np.stack(part)).to(device).split(at_once) for part in rows)
            blocks += map(_Blocks, queries, keys)
        return cls(blocks)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Query [T, H, d], key [T, H_kv, d] and value [T, H_kv, d'] -> [T, H, d'], all of one dtype.

        Args:
            scale: of the products of queries and keys, positive.
            window: keys that a row sees at most, itself included; None sees the whole sequence.
            softcap: of the scores: s -> softcap tanh(s / softcap); None has none.
            sinks: [H], a score for each head that takes part in the softmax as if a key with a value of zero had it
                (gpt-oss, arXiv:2508.10925).
        """
        out: Tensor = _Attend.apply(self, _How(scale, window, softcap), query, key, value, sinks)
        return out


class _How(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None


class _Attend(torch.autograd.Function):
    """All blocks of a pack. The backward pass computes each again: what autograd would keep of every block grows with
    the square of a sequence."""

    @staticmethod
    def forward(
        ctx: Any, pack: PlainAttention, how: _How, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        ctx.pack, ctx.how = pack, how
        ctx.save_for_backward(query, key, value, sinks)
        out = query.new_zeros(len(query) + 1, query.shape[1], value.shape[2])
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = map(_with_missing, (query, key, value))
            for blocks in pack.blocks:
                given = [_gathered(q, blocks.queries), *(_gathered(t, blocks.keys) for t in (k, v)), *_some(sinks)]
                out[blocks.queries.flatten()] = _attend(given, how).transpose(1, 2).flatten(0, 1)
        return out[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, sinks = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)  # sums of many blocks
        q, k, v, upstream = map(_with_missing, (query, key, value, grad))
        d_q = torch.zeros_like(q)
        d_k, d_v = (torch.zeros_like(t, dtype=wide) for t in (k, v))
        d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        for blocks in ctx.pack.blocks:
            given = [_gathered(q, blocks.queries), *(_gathered(t, blocks.keys) for t in (k, v)), *_some(sinks)]
            leaves = [t.detach().requires_grad_() for t in given]
            with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
                found = _attend(leaves, ctx.how)
            of_q, of_k, of_v, *of_sinks = torch.autograd.grad(found, leaves, _gathered(upstream, blocks.queries))
            d_q[blocks.queries.flatten()] = of_q.transpose(1, 2).flatten(0, 1)
            for total, part in ((d_k, of_k), (d_v, of_v)):
                add_by_place(total, blocks.keys.flatten(), part.transpose(1, 2).flatten(0, 1).to(wide))
            if d_sinks is not None:
                d_sinks += of_sinks[0]
        gradients = (d[:-1].to(like.dtype) for d, like in ((d_q, query), (d_k, key), (d_v, value)))
        return None, None, *gradients, None if d_sinks is None else d_sinks.to(sinks.dtype)


def _with_missing(rows: Tensor) -> Tensor:
    """Rows [T, ...] with one of zeros behind them."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def _gathered(rows: Tensor, places: Tensor) -> Tensor:
    """Rows [T + 1, H, d] at places [B, n], as [B, H, n, d]."""
    return rows[places.flatten()].unflatten(0, places.shape).transpose(1, 2)


def _some(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _attend(given: list[Tensor], how: _How) -> Tensor:
    """Query [B, H, BLOCK, d], the last positions of key [B, H_kv, n, d] and value [B, H_kv, n, d'], and sinks [H] if
    there are any -> [B, H, BLOCK, d']."""
    query, key, value, *sinks = given
    n, groups = key.shape[2], query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    i = torch.arange(n - BLOCK, n, device=query.device)[:, None]
    j = torch.arange(n, device=query.device)[None, :]
    visible = j <= i
    if how.window is not None:
        visible &= j > i - how.window
    if how.softcap is None and not sinks:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=how.scale)
    products = query @ key.transpose(2, 3)
    if how.softcap is None:
        scores = products * how.scale
    else:
        scores = how.softcap * torch.tanh(products * (how.scale / how.softcap))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks:
        sink = sinks[0].to(scores.dtype)[:, None, None].expand(len(query), -1, BLOCK, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., :n].to(value.dtype) @ value
