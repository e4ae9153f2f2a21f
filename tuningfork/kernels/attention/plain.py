"""Fork attention in plain PyTorch: exact, any dtype, any device, one call per segment.

The arithmetic of a segment depends on nothing but the segment, so an example gets the same bits in every pack.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tuningfork.records import ForkLayout


class PlainAttention(NamedTuple):
    """Where to cut the rows into pieces, and each segment's query and key pieces.

    Cutting once and joining pieces again costs the backward pass one join; slicing per segment would cost it a full
    tensor of zeros per segment.
    """

    piece_lengths: list[int]
    queries: list[range]
    keys: list[list[range]]

    @classmethod
    def prepare(cls, layout: ForkLayout, windows: frozenset[int | None]) -> PlainAttention:
        q, k = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
        rows = np.arange(q[-1]) if layout.kv_index is None else layout.kv_index.cpu().numpy()
        used = [i for i in range(len(q) - 1) if q[i + 1] > q[i]]
        queries = [(q[i], q[i + 1]) for i in used]
        keys = [_runs(rows[k[i] : k[i + 1]]) for i in used]
        cuts = sorted(
            {0, q[-1], *(cut for run in queries for cut in run), *(cut for r in keys for run in r for cut in run)}
        )
        place = {cut: piece for piece, cut in enumerate(cuts)}
        return cls(
            [b - a for a, b in pairwise(cuts)],
            [range(place[a], place[b]) for a, b in queries],
            [[range(place[a], place[b]) for a, b in runs] for runs in keys],
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        q, k, v = (t.transpose(0, 1).split(self.piece_lengths, dim=1) for t in (query, key, value))  # [H, ., d] each
        outs = []
        for own, seen in zip(self.queries, self.keys, strict=True):
            own_query = torch.cat([q[i] for i in own], dim=1)
            own_key, own_value = (torch.cat([t[i] for run in seen for i in run], dim=1) for t in (k, v))
            if groups > 1:
                own_key, own_value = (t.repeat_interleave(groups, dim=0) for t in (own_key, own_value))
            outs.append(_attend_one(own_query, own_key, own_value, scale, window, softcap))
        return torch.cat(outs, dim=1).transpose(0, 1).contiguous()


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of consecutive rows, as (first, last + 1)."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, breaks)]


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """One segment: query [H, q, d] are the last q positions of key and value [H, n, d]."""
    q, n = query.shape[1], key.shape[1]
    if window is not None and window >= n:
        window = None
    if softcap is None and q == n and window is None:
        return F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=scale)[0]
    i = torch.arange(n - q, n, device=query.device)[:, None]
    j = torch.arange(n, device=query.device)[None, :]
    visible = j <= i
    if window is not None:
        visible &= j > i - window
    if softcap is None:
        return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=visible, scale=scale)[0]
    scores = softcap * torch.tanh(query @ key.transpose(1, 2) * (scale / softcap))
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1, dtype=_softmax_dtype(scores))
    return weights.to(value.dtype) @ value


def _softmax_dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32
