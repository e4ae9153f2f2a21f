"""Fork attention in plain PyTorch: exact, any dtype, any device, one call per segment.

The arithmetic of a segment depends on nothing but the segment and its ancestors, so an example gets the same bits in
every pack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tuningfork.records import ForkLayout, Segment


class PlainAttention(NamedTuple):
    """How many rows each segment has, and which segments its rows see: its ancestors from the root on, and itself.

    Cutting once and joining pieces again costs the backward pass one join; slicing per segment would cost it a full
    tensor of zeros per segment.
    """

    lengths: list[int]
    paths: list[list[int]]

    @classmethod
    def prepare(cls, layout: ForkLayout) -> PlainAttention:
        """The segments [S, 6] of a layout that have rows, read by the host: it waits for the layout's device."""
        lengths: list[int] = []
        paths: dict[int, list[int]] = {}  # by entry of the table; ROOT has none
        for entry, segment in enumerate(Segment(*numbers) for numbers in layout.segments.tolist()):
            if segment.end > segment.start:
                paths[entry] = [*paths.get(segment.parent, []), len(lengths)]
                lengths.append(segment.end - segment.start)
        return cls(lengths, list(paths.values()))

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
            scale: of the products of queries and keys.
            window: keys that a row sees at most, itself included; None sees the whole sequence.
            softcap: of the scores: s -> softcap tanh(s / softcap); None has none.
            sinks: [H], a score for each head that takes part in the softmax as if a key with a value of zero had it
                (gpt-oss, arXiv:2508.10925).
        """
        groups = query.shape[1] // key.shape[1]
        q, k, v = (t.transpose(0, 1).split(self.lengths, dim=1) for t in (query, key, value))  # [H, ., d] each
        outs = []
        for i, path in enumerate(self.paths):
            seen_key, seen_value = (torch.cat([t[j] for j in path], dim=1) if len(path) > 1 else t[i] for t in (k, v))
            if groups > 1:
                seen_key, seen_value = (t.repeat_interleave(groups, dim=0) for t in (seen_key, seen_value))
            outs.append(_attend_one(q[i], seen_key, seen_value, scale, window, softcap, sinks))
        return torch.cat(outs, dim=1).transpose(0, 1).contiguous()


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One segment: query [H, q, d] are the last q positions of key and value [H, n, d]."""
    q, n = query.shape[1], key.shape[1]
    if window is not None and window >= n:
        window = None
    simple = softcap is None and sinks is None
    if simple and q == n and window is None:
        return F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=scale)[0]
    i = torch.arange(n - q, n, device=query.device)[:, None]
    j = torch.arange(n, device=query.device)[None, :]
    visible = j <= i
    if window is not None:
        visible &= j > i - window
    if simple:
        return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=visible, scale=scale)[0]
    products = query @ key.transpose(1, 2)
    scores = products * scale if softcap is None else softcap * torch.tanh(products * (scale / softcap))
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(-1, q, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=_softmax_dtype(scores))
    return weights[..., :n].to(value.dtype) @ value


def _softmax_dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32
