"""Native sparse attention in plain PyTorch: exact, any dtype, any device, in blocks of 64 query positions.

Queries go as in plain attention (kernels/attention/plain.py): in blocks on the grid of positions, filled up where a
segment has no row. What such a block reads has a size that follows its position: all compressed blocks up to its end;
of the rows up to there all, behind a mask, or, where a row chooses few of them, for each row those that it chose. So a
row has the same bits in every pack that has its path.

How many blocks a pack has is known to the host alone, so a compiler would make a graph for each pack: it leaves these
calls as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tuningfork.kernels.attention.plain import BLOCK, PlainAttention
from tuningfork.kernels.nsa._blocks import Blocks, Choice, Grid
from tuningfork.kernels.sums import add_by_place, take
from tuningfork.records import ForkLayout

__all__ = ["Choice", "Grid", "PlainNsa"]

_SPARSE = 8  # where a row chooses no more than one row in so many, those are gathered: a copy of each costs as much
_MOST = 1 << 24  # numbers that scores, or gathered keys, take at once; a block of a very long path goes alone


class _Queries(NamedTuple):
    """Blocks of as many positions of their paths, B of them. Who is not there is the one behind the last."""

    rows: Tensor  # int64 [B, BLOCK]
    path: Tensor  # int64 [B, n], the rows of positions up to the blocks' last
    entries: Tensor  # int64 [B, m], the compressed blocks that end there

    @property
    def first(self) -> int:
        """Their first position."""
        return self.path.shape[1] - BLOCK

    @property
    def positions(self) -> Tensor:
        """int64 [BLOCK]"""
        return torch.arange(self.first, self.first + BLOCK, device=self.path.device)

    def split(self, cost: int) -> Iterator[_Queries]:
        """Parts of as many blocks as `_MOST` allows, if one costs that much."""
        at_once = max(1, _MOST // max(1, cost))
        parts = (tensor.split(at_once) for tensor in self)
        return map(_Queries, *parts)


class PlainNsa(NamedTuple):
    """The blocks of a pack: those that its rows are compressed in, E of them, and those of queries."""

    grid: Grid
    table: Blocks
    queries: list[_Queries]

    @classmethod
    def prepare(cls, layout: ForkLayout, grid: Grid) -> PlainNsa:
        """The blocks of a layout's paths. Which queries go together is read by the host: it waits for the device."""
        table = Blocks.of(layout, grid)
        missing = torch.tensor([len(table.rows) + 1], device=table.ended.device)
        entry = torch.cat([table.ended, missing]) - 1  # that ends at a row, if one does
        queries = []
        for rows, path in PlainAttention.prepare(layout).blocks:
            queries.append(_Queries(rows, path, entry[path[:, grid.length - 1 :: grid.stride]]))
        return cls(grid, table, queries)

    @property
    def first_positions(self) -> Tensor:
        """int64 [E], where in its path each compressed block begins."""
        return self.table.first_positions

    def blocks(self, rows: Tensor) -> Tensor:
        """The rows [T, G, w] of each compressed block, in order: [E, l, G, w]. Zero for blocks that are not there."""
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return take(padded, self.table.rows.flatten()).unflatten(0, self.table.rows.shape)

    def mean(self, rows: Tensor) -> Tensor:
        """The mean of rows [T, G, w] over each compressed block: [E, G, w]. Summed in order, in float32 at least."""
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        first, *others = self.blocks(wide).unbind(1)
        total = first
        for row in others:
            total = total + row
        return (total / self.grid.length).to(rows.dtype)

    @torch.compiler.disable
    def compressed(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, choice: Choice
    ) -> tuple[Tensor, Tensor]:
        """Attention over complete compressed blocks, and the blocks that each row chooses by it.

        Args:
            query: [T, H, dk].
            keys, values: [E, G, dk] and [E, G, dv], in the query's dtype, as the pack's compressed blocks lie.
            scale: of the products of queries and keys, positive.
            choice: how many blocks, and which of them are no choice.

        Returns:
            [T, H, dv], zero where no block is complete; and int32 [T, G, n], the chosen blocks from low to high, then
            -1. The second has no gradient.
        """
        heads, groups = query.shape[1], keys.shape[1]
        per_group = heads // groups
        chosen = torch.full((len(query) + 1, groups, choice.count), -1, dtype=torch.int32, device=query.device)

        def parts() -> Iterator[_Part]:
            for blocks in self.queries:
                entries = torch.arange(blocks.entries.shape[1], device=query.device)
                last = entries * self.grid.stride + self.grid.length - 1
                visible = (last <= blocks.positions[:, None]).repeat_interleave(per_group, dim=0)
                for some in blocks.split(heads * visible.numel() // per_group):
                    yield _Part(some.rows, some.first, some.entries, visible)

        def choose(part: _Part, weights: Tensor) -> None:
            scores = _added_up(weights.unflatten(2, (BLOCK, per_group)).unbind(3))  # of a group's heads, in order
            chosen[part.rows] = _chosen(scores, part.first, self.grid, choice).transpose(1, 2)

        out: Tensor = _Attend.apply(parts, scale, choose, query, keys, values)
        return out, chosen[:-1]

    @torch.compiler.disable
    def selected(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, *, scale: float) -> Tensor:
        """Attention over the rows of the chosen blocks, up to each row itself.

        Args:
            query: [T, H, dk].
            key, value: [T, G, dk] and [T, G, dv], in the query's dtype.
            chosen: int32 [T, G, n], blocks in any order, none twice; -1 for none. See `compressed`.
            scale: of the products of queries and keys, positive.

        Returns:
            [T, H, dv].
        """
        heads, groups, count = query.shape[1], key.shape[1], chosen.shape[2]
        chosen = pad(chosen.long(), (0, 0, 0, 0, 0, 1), value=-1)
        width = key.shape[2] + value.shape[2]

        def parts() -> Iterator[_Part]:
            for blocks in self.queries:
                n = blocks.path.shape[1]
                if n <= _SPARSE * count * self.grid.select:
                    for some in blocks.split(heads * BLOCK * n):
                        yield self._behind_a_mask(some, heads // groups, chosen[some.rows])
                else:
                    for some in blocks.split(groups * BLOCK * count * self.grid.select * width):
                        yield self._gathered(some, chosen[some.rows])

        out: Tensor = _Attend.apply(parts, scale, None, query, key, value)
        return out

    def _behind_a_mask(self, blocks: _Queries, per_group: int, chosen: Tensor) -> _Part:
        """Every row is offered all rows of its path up to its block's end."""
        n, select = blocks.path.shape[1], self.grid.select
        among = torch.zeros(*chosen.shape[:3], -(-n // select) + 1, dtype=torch.bool, device=chosen.device)
        among.scatter_(3, torch.where(chosen < 0, among.shape[3] - 1, chosen), True)
        position = torch.arange(n, device=chosen.device)
        visible = among.transpose(1, 2)[..., :-1].repeat_interleave(select, dim=3)[..., :n]
        visible &= position <= blocks.positions[:, None]
        return _Part(blocks.rows, blocks.first, blocks.path, visible.repeat_interleave(per_group, dim=2))

    def _gathered(self, blocks: _Queries, chosen: Tensor) -> _Part:
        """Every row is offered the rows of its own chosen blocks."""
        n, select = blocks.path.shape[1], self.grid.select
        chosen = chosen.transpose(1, 2)  # [B, G, BLOCK, count]
        position = (chosen[..., None] * select + torch.arange(select, device=chosen.device)).flatten(3)
        there = (chosen >= 0).repeat_interleave(select, dim=3)
        visible = there & (position <= blocks.positions[:, None])
        batch = torch.arange(len(position), device=chosen.device)[:, None, None, None]
        keys = blocks.path[batch, position.clamp(0, n - 1)]
        return _Part(blocks.rows, blocks.first, keys, visible.flatten(1, 2)[:, :, None])


class _Part(NamedTuple):
    """Some blocks of queries, B of them, with what they read: all of a block the same rows, or each rows of its own.

    Heads of a group that read the same rows are N groups of R queries with S keys: a block of a group, or a row of it.
    They are laid out alike for any B, since a product of matrices that lie otherwise may have other bits.
    """

    rows: Tensor  # int64 [B, BLOCK]
    first: int  # position of the blocks' first rows
    keys: Tensor  # int64 [B, S], rows or compressed blocks; or [B, G, BLOCK, S]
    visible: Tensor  # bool, broadcasts to [B, N, R, S]

    def asking(self, heads: Tensor, groups: int) -> Tensor:
        """Query heads [T + 1, H, d] of the blocks, [B, N, R, d]."""
        taken = heads.index_select(0, self.rows.flatten()).view(*self.rows.shape, groups, -1, heads.shape[2])
        return taken.transpose(1, 2).flatten(*self._together).contiguous()

    def answered(self, out: Tensor, found: Tensor) -> None:
        """Write what was found [B, N, R, d] where its heads lie in `out` [T + 1, H, d]."""
        sizes = (-1, BLOCK) if self._each else (BLOCK, -1)
        heads = found.unflatten(self._together[0], sizes).transpose(1, 2).reshape(-1, *out.shape[1:])
        out.index_copy_(0, self.rows.flatten(), heads)

    def read(self, heads: Tensor) -> Tensor:
        """Heads [T + 1, G, d] of what is read, [B, N, S, d]."""
        if self._each:
            taken = heads.flatten(0, 1).index_select(0, self._flat_keys(heads.shape[1]))
            return taken.view(len(self.keys), -1, self.keys.shape[3], heads.shape[2])
        return heads.index_select(0, self.keys.flatten()).unflatten(0, self.keys.shape).transpose(1, 2).contiguous()

    def add(self, total: Tensor, gradient: Tensor) -> None:
        """Add gradients [B, N, S, d] to the total [T + 1, G, d] of what was read."""
        if self._each:
            add_by_place(total.flatten(0, 1), self._flat_keys(total.shape[1]), gradient.flatten(0, 2))
        else:
            add_by_place(total, self.keys.flatten(), gradient.transpose(1, 2).flatten(0, 1))

    @property
    def _each(self) -> bool:
        return self.keys.ndim == 4

    @property
    def _together(self) -> tuple[int, int]:
        """Which of B, G, BLOCK, h become one dimension."""
        return (1, 2) if self._each else (2, 3)

    def _flat_keys(self, groups: int) -> Tensor:
        group = torch.arange(groups, device=self.keys.device)[:, None, None]
        return (self.keys * groups + group).flatten()


class _Attend(torch.autograd.Function):
    """Softmax attention of a pack's parts, in float32 at least. The backward pass computes each part again: what
    autograd would keep of every part grows with the square of a sequence.

    `look`, if there is one, is shown each part's weights [B, N, R, S].
    """

    @staticmethod
    def forward(
        ctx: Any,
        parts: Callable[[], Iterator[_Part]],
        scale: float,
        look: Callable[[_Part, Tensor], None] | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        ctx.parts, ctx.scale = parts, scale
        ctx.save_for_backward(query, key, value)
        q, k, v = map(_wide, (query, key, value))
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        with torch.autocast(query.device.type, enabled=False):
            for part in parts():
                weights = _weights(part.asking(q, k.shape[1]), part.read(k), part.visible, scale)
                part.answered(out, weights @ part.read(v))
                if look is not None:
                    look(part, weights)
        return out[:-1].to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With weights P of scores S: dV = P' dO, dP = dO V', and dS = P (dP - the sum of P dP over a row)."""
        query, key, value = ctx.saved_tensors
        q, k, v, upstream = map(_wide, (query, key, value, grad))
        groups = k.shape[1]
        d_q, d_k, d_v = map(torch.zeros_like, (q, k, v))
        with torch.autocast(query.device.type, enabled=False):
            for part in ctx.parts():
                own_q, own_k, own_v = part.asking(q, groups), part.read(k), part.read(v)
                own_upstream = part.asking(upstream, groups)
                weights = _weights(own_q, own_k, part.visible, ctx.scale)
                part.add(d_v, weights.mT @ own_upstream)
                of_weights = own_upstream @ own_v.mT
                of_scores = of_weights.sub_((weights * of_weights).sum(-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
                part.answered(d_q, of_scores @ own_k)
                part.add(d_k, of_scores.mT @ own_q)
        gradients = (d[:-1].to(t.dtype) for d, t in ((d_q, query), (d_k, key), (d_v, value)))
        return None, None, None, *gradients


def _wide(rows: Tensor) -> Tensor:
    """Rows [T, ...] in float32 at least, with one of zeros behind them."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return torch.cat([wide, wide.new_zeros(1, *wide.shape[1:])])


def _weights(query: Tensor, key: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax over what is visible of query [..., R, dk] times key [..., S, dk]; zeros where nothing is."""
    hidden = ~visible
    scores = (query @ key.mT).mul_(scale).masked_fill_(hidden, torch.finfo(query.dtype).min)
    return scores.softmax(dim=-1).masked_fill_(hidden.all(-1, keepdim=True), 0)


def _chosen(weights: Tensor, first: int, grid: Grid, choice: Choice) -> Tensor:
    """The blocks that BLOCK rows from position `first` on choose, by weights [..., BLOCK, m] of their groups: int32
    [..., BLOCK, n]."""
    t = torch.arange(first, first + BLOCK, device=weights.device)[:, None]
    block = torch.arange((first + BLOCK - 1) // grid.select + 1, device=weights.device)
    ahead = t // grid.select - block  # blocks between this one and the row's own
    scores = _by_block(weights, len(block), grid)
    scores = scores.masked_fill((block < choice.initial) | (ahead < choice.local), float("inf"))
    scores = scores.masked_fill(ahead < 0, -1)  # all others are sums of weights
    best = scores.sort(dim=-1, descending=True, stable=True)
    none = len(block)
    chosen = best.indices.masked_fill(best.values < 0, none)[..., : choice.count].sort(dim=-1).values
    return pad(chosen.masked_fill(chosen == none, -1), (0, max(0, choice.count - none)), value=-1).int()


def _by_block(weights: Tensor, blocks: int, grid: Grid) -> Tensor:
    """Weights of compressed blocks [..., m] added up by the blocks that are chosen, [..., J]: equation 9.

    Of compressed block i, stride u lies in block j if (l'/d) j <= i + u < (l'/d) (j + 1).
    """
    strides, per_block = grid.length // grid.stride, grid.select // grid.stride
    before, behind = strides - 1, max(0, per_block * blocks - weights.shape[-1])
    padded = pad(weights, (before, behind))
    taps = []
    for place in range(1 - strides, per_block):  # of a compressed block, from the block's first stride on
        times = min(strides, per_block, place + strides, per_block - place)
        taps.append(times * padded[..., before + place :: per_block][..., :blocks])
    return _added_up(taps)


def _added_up(parts: Any) -> Tensor:
    """The sum of tensors, one after the other."""
    first, *others = parts
    for other in others:
        first = first + other
    return first
