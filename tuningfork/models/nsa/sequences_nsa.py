"""Native sparse attention on sequences side by side, in its readable form: all scores of a sequence at once.

No packs, no cache, no gradient of its own: what transformers runs where nobody hands a layer anything faster.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class NsaChoice(NamedTuple):
    """Blocks that a row reads whole: how many, and how many first and last ones are no choice."""

    count: int  # type: ignore[assignment]  # not tuple's method
    initial: int
    local: int


class NsaSequences:
    """Sequences side by side, T rows in all: what a layer runs its branches on, with all scores of one at once.

    Compressed blocks lie sequence by sequence, E of them.
    """

    def __init__(self, lengths: list[int], config: Any) -> None:
        self.lengths = lengths
        self.length, self.stride, self.select = config.block_length, config.block_stride, config.select_length
        self.counts = [max(0, (n - self.length) // self.stride + 1) for n in lengths]
        self.ops, self.gates = self, None

    def of_layer(self, number: int) -> NsaSequences:
        """All layers run on the same."""
        return self

    @property
    def first_positions(self) -> Tensor:
        """int64 [E], where in its sequence each compressed block begins."""
        return torch.cat([torch.arange(n) for n in self.counts]) * self.stride

    def blocks(self, rows: Tensor) -> Tensor:
        """Rows [T, G, w] of each compressed block, [E, l, G, w]."""
        whole = [s.unfold(0, self.length, self.stride) for s in rows.split(self.lengths) if len(s) >= self.length]
        made = torch.cat(whole) if whole else rows.new_zeros(0, *rows.shape[1:], self.length)
        return made.permute(0, 3, 1, 2)

    def mean(self, rows: Tensor) -> Tensor:
        """Their mean, [E, G, w]."""
        return self.blocks(rows).mean(1)

    def compressed(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, choice: NsaChoice
    ) -> tuple[Tensor, Tensor]:
        """Query [T, H, dk] over complete blocks, keys [E, G, dk] and values [E, G, dv] -> [T, H, dv], zero where there
        is none; and which blocks each row chooses, bool [T, G, J]."""
        out, chosen = [], []
        parts = (query.split(self.lengths), keys.split(self.counts), values.split(self.counts))
        for q, k, v in zip(*parts, strict=True):
            t = torch.arange(len(q), device=q.device)[:, None]
            first = torch.arange(len(k), device=q.device) * self.stride
            weights, read = _read(q, k, v, first + self.length <= t + 1, scale)
            out.append(read)
            with torch.no_grad():
                chosen.append(self._chosen(weights, first, t, choice))
        most = max(c.shape[2] for c in chosen)
        return torch.cat(out), torch.cat([F.pad(c, (0, most - c.shape[2])) for c in chosen])

    def _chosen(self, weights: Tensor, first: Tensor, t: Tensor, choice: NsaChoice) -> Tensor:
        """By weights [G, h, T, m] of a sequence's blocks: bool [T, G, J]."""
        block = torch.arange(int(t[-1]) // self.select + 1, device=t.device)
        begin = block * self.select
        # Equation 9 with indices from 1: how many strides of a compressed block lie in block j.
        end = torch.minimum(first[:, None] + self.length, begin + self.select)
        shared = (end - torch.maximum(first[:, None], begin)).clamp(min=0) // self.stride
        scores = weights.sum(1) @ shared.to(weights.dtype)
        ahead = t // self.select - block
        scores = scores.masked_fill((block < choice.initial) | (ahead < choice.local), float("inf"))
        best = scores.masked_fill(ahead < 0, -1).sort(dim=-1, descending=True, stable=True)
        among = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best.indices[..., : choice.count], True)
        return among.transpose(0, 1) & (ahead >= 0)[:, None]

    def selected(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, *, scale: float) -> Tensor:
        """Query [T, H, dk] over the rows of chosen blocks up to each, key [T, G, dk] and value [T, G, dv]."""
        parts = (t.split(self.lengths) for t in (query, key, value, chosen))
        out = []
        for q, k, v, blocks in zip(*parts, strict=True):
            i = torch.arange(len(q), device=q.device)
            visible = blocks.transpose(0, 1)[..., i // self.select] & (i <= i[:, None])
            out.append(_read(q, k, v, visible[:, None], scale)[1])
        return torch.cat(out)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: None = None
    ) -> Tensor:
        """Query [T, H, dk] over the last `window` rows up to each, all of them for None."""
        out = []
        for q, k, v in zip(*(t.split(self.lengths) for t in (query, key, value)), strict=True):
            i = torch.arange(len(q), device=q.device)
            visible = (i <= i[:, None]) & (i > i[:, None] - (window or len(q)))
            out.append(_read(q, k, v, visible, scale)[1])
        return torch.cat(out)


def _read(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Weights [G, h, T, S] of query [T, H, dk] on key [S, G, dk] where visible, and what they read, [T, H, dv]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide).unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)
    k, v = (t.to(wide).transpose(0, 1)[:, None] for t in (key, value))
    scores = (q @ k.mT * scale).masked_fill(~visible, torch.finfo(wide).min)
    weights = scores.softmax(-1) * visible
    return weights, (weights @ v).permute(2, 0, 1, 3).flatten(1, 2).to(value.dtype)
