"""Fork attention in plain PyTorch: exact, any dtype, any device, one call per segment.

The arithmetic of a segment depends on nothing but the segment, so an example gets the same bits in every pack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tuningfork.records import ForkLayout


class PlainAttention(NamedTuple):
    """Segment borders on the host, and the key gather."""

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    kv_index: Tensor | None

    @classmethod
    def prepare(cls, layout: ForkLayout, windows: frozenset[int | None]) -> PlainAttention:
        q, k = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
        used = [i for i in range(len(q) - 1) if q[i + 1] > q[i]]
        return cls([(q[i], q[i + 1]) for i in used], [(k[i], k[i + 1]) for i in used], layout.kv_index)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if self.kv_index is not None:
            key, value = key.index_select(0, self.kv_index), value.index_select(0, self.kv_index)
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1).transpose(0, 1) for t in (key, value))  # [H, K, d]
        query = query.transpose(0, 1)  # [H, T, d]
        outs = [
            _attend_one(query[:, q0:q1], key[:, k0:k1], value[:, k0:k1], scale, window, softcap)
            for (q0, q1), (k0, k1) in zip(self.queries, self.keys, strict=True)
        ]
        return torch.cat(outs, dim=1).transpose(0, 1)


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
