"""Fork attention in plain PyTorch: exact, any dtype, any device, a call for each block of 64 positions of a segment.

Blocks lie on the grid of positions, and are filled up with zeros where the segment has no row: so the shapes of a call,
and with them the order in which it adds, follow a row's position, and a row has the same bits in every pack that has
its path. One call a segment would be less work for PyTorch, but its shapes follow where the path is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tuningfork.records import ForkLayout, Segment

BLOCK = 64  # positions; a multiple of what CPUs and GPUs read at once, so that no row lies at an odd address


class PlainAttention(NamedTuple):
    """The segments of a pack that have rows, and the length of its longest path."""

    segments: list[Segment]
    longest: int

    @classmethod
    def prepare(cls, layout: ForkLayout) -> PlainAttention:
        """The segments [S, 6] of a layout, read by the host: it waits for the layout's device."""
        segments = [Segment(*numbers) for numbers in layout.segments.tolist()]
        segments = [segment for segment in segments if segment.end > segment.start]
        return cls(segments, max((_path_end(segment) for segment in segments), default=0))

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
        how = _How(scale, window, softcap)
        out: Tensor = _Attend.apply(self, how, query, key, value, sinks)
        return out


class _How(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None


class _Block(NamedTuple):
    """Query rows start .. end of a segment, at `offset` .. of a block; the block's keys are positions first .. last."""

    start: int
    end: int
    offset: int
    first: int
    last: int


class _Attend(torch.autograd.Function):
    """All blocks of a pack. The backward pass computes each again: what autograd would keep of every block, and the
    zeros that it would add up for each slice of its keys, grow with the square of a sequence."""

    @staticmethod
    def forward(
        ctx: Any, pack: PlainAttention, how: _How, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        ctx.pack, ctx.how = pack, how
        ctx.save_for_backward(query, key, value, sinks)
        out = query.new_zeros(len(query), query.shape[1], value.shape[2])
        path = _Path(pack, query, key, value)
        with torch.autocast(query.device.type, enabled=False):
            for segment in pack.segments:
                path.go_to(segment)
                for block in _blocks(segment, how.window):
                    found = _attend_block([*path.of(block), *_some(sinks)], how)
                    out[block.start : block.end] = found[:, _queries(block)].transpose(0, 1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        pack, how = ctx.pack, ctx.how
        query, key, value, sinks = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)  # sums of many blocks
        d_query, d_sinks = torch.zeros_like(query), None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        d_rows = [torch.zeros_like(t, dtype=wide) for t in (key, value)]
        path = _Path(pack, query, key, value)
        above = _Ancestors()
        for segment in pack.segments:
            path.go_to(segment)
            runs = above.runs(segment)
            blocks = list(_blocks(segment, how.window))
            low, high = blocks[0].first, blocks[-1].last
            d_path = [torch.zeros_like(t[:, low:high], dtype=wide) for t in (path.keys, path.values)]
            for block in blocks:
                leaves = [t.detach().requires_grad_() for t in (*path.of(block), *_some(sinks))]
                with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
                    found = _attend_block(leaves, how)
                upstream = torch.zeros_like(found)
                upstream[:, _queries(block)] = grad[block.start : block.end].transpose(0, 1)
                of_query, *of_path = torch.autograd.grad(found, leaves, upstream)
                d_query[block.start : block.end] = of_query[:, _queries(block)].transpose(0, 1)
                for total, part in zip(d_path, of_path, strict=False):
                    total[:, block.first - low : block.last - low] += part
                if d_sinks is not None:
                    d_sinks += of_path[2]
            for of_rows, of_heads in zip(d_rows, d_path, strict=True):
                total = of_heads.unflatten(0, (of_rows.shape[1], -1)).sum(1).transpose(0, 1)  # [positions, H_kv, d]
                for run in runs:
                    begin, end = max(run.first_position, low), _path_end(run)
                    if begin < end:
                        of_rows[run.end - (end - begin) : run.end] += total[begin - low : end - low]
        d_key, d_value = (t.to(like.dtype) for t, like in zip(d_rows, (key, value), strict=True))
        return None, None, d_query, d_key, d_value, None if d_sinks is None else d_sinks.to(sinks.dtype)


class _Path:
    """The keys and values of one path after the other, [H, longest, d], by position.

    Segments lie depth first, so what one has in common with the one before it is still there, and nothing is copied
    twice. Behind a segment's last row its last block is filled up with zeros.
    """

    def __init__(self, pack: PlainAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
        heads, length = query.shape[1], -(-pack.longest // BLOCK) * BLOCK
        self._query, self._key, self._value = query, key, value
        self.keys, self.values = (t.new_zeros(heads, length, t.shape[2]) for t in (key, value))

    def go_to(self, segment: Segment) -> None:
        """Take up a segment whose ancestors' rows are there."""
        begin, end = segment.first_position, _path_end(segment)
        for path, rows in ((self.keys, self._key), (self.values, self._value)):
            own = rows[segment.start : segment.end].transpose(0, 1)
            path[:, begin:end] = own.repeat_interleave(len(path) // len(own), dim=0)
            path[:, end : _filled(segment)] = 0

    def of(self, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
        """Query [H, BLOCK, d], key [H, n, d] and value [H, n, d'] of a block."""
        query = self._query.new_zeros(self._query.shape[1], BLOCK, self._query.shape[2])
        query[:, _queries(block)] = self._query[block.start : block.end].transpose(0, 1)
        return query, self.keys[:, block.first : block.last], self.values[:, block.first : block.last]


class _Ancestors:
    """The segments of one path after the other."""

    def __init__(self) -> None:
        self._open: list[Segment] = []

    def runs(self, segment: Segment) -> list[Segment]:
        """A segment's ancestors and itself; segments come in the order of their rows."""
        while self._open and self._open[-1].subtree_end <= segment.start:
            self._open.pop()
        self._open.append(segment)
        return self._open


def _path_end(segment: Segment) -> int:
    return segment.first_position + segment.end - segment.start


def _filled(segment: Segment) -> int:
    """The end of the block in which its path ends."""
    return -(-_path_end(segment) // BLOCK) * BLOCK


def _blocks(segment: Segment, window: int | None) -> Iterator[_Block]:
    shift = segment.first_position - segment.start  # from a row to its position
    for begin in range(segment.first_position // BLOCK * BLOCK, _path_end(segment), BLOCK):
        start, end = max(segment.start, begin - shift), min(segment.end, begin + BLOCK - shift)
        first = 0 if window is None else max(0, begin - window + 1) // BLOCK * BLOCK
        yield _Block(start, end, start + shift - begin, first, begin + BLOCK)


def _some(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _queries(block: _Block) -> slice:
    return slice(block.offset, block.offset + block.end - block.start)


def _attend_block(given: list[Tensor], how: _How) -> Tensor:
    """Query [H, BLOCK, d], the last positions of key [H, n, d] and value [H, n, d'], and sinks [H] if there are any ->
    [H, BLOCK, d']."""
    query, key, value, *sinks = given
    n = key.shape[1]
    i = torch.arange(n - BLOCK, n, device=query.device)[:, None]
    j = torch.arange(n, device=query.device)[None, :]
    visible = j <= i
    if how.window is not None:
        visible &= j > i - how.window
    if how.softcap is None and not sinks:
        query, key, value = query[None], key[None], value[None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=how.scale)[0]
    products = query @ key.transpose(1, 2)
    if how.softcap is None:
        scores = products * how.scale
    else:
        scores = how.softcap * torch.tanh(products * (how.scale / how.softcap))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks:
        sink = sinks[0].to(scores.dtype)[:, None, None].expand(-1, BLOCK, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., :n].to(value.dtype) @ value
