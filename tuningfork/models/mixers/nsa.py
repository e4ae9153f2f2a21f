"""Native sparse attention (Yuan et al. 2025, arXiv:2502.11089): blocks that are compressed, and blocks that are chosen.
Its third branch, a window, is attention as everybody's (mixers/attention.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tuningfork.kernels.nsa.plain import Choice, Grid
from tuningfork.kernels.select import Kernels, Sizes
from tuningfork.models.mixers.attention import visible_pairs
from tuningfork.models.mixers.mixer import Flops, Shape
from tuningfork.records import ForkLayout, Span

KEYWORD = "nsa"
NOTES = ("nsa/gate_cmp", "nsa/gate_slc", "nsa/gate_win", "nsa/gate_entropy", "nsa/keys_read")
"""What layers say of a pass, by the names that report/run/metrics.py defines."""


class NsaLayer(NamedTuple):
    """One layer of a forward pass.

    heads: of its queries.
    key_width, value_width: of one head.
    grid, choice: where blocks lie, and how many are chosen; the same in all layers of a model.
    window: keys of its third branch, which is counted with attention's.
    compression: weights that a compressed block is multiplied with, of all groups, for its key and its value.
    """

    heads: int
    key_width: int
    value_width: int
    grid: Grid
    choice: Choice
    window: int
    compression: int = 0

    def forward(self, above: int, own: int) -> int:
        """Flops of so many rows behind `above` others: 2 (dk + dv) for each head and pair, of a row with a compressed
        block or with a row of a chosen one, and 2 for each weight and block. Scores that a kernel computes again to
        choose by are not counted."""
        end = above + own
        pairs = sum(count(end) - count(above) for count in (self._compressed_pairs, self._selected_pairs))
        blocks = self._blocks(end) - self._blocks(above)
        return 2 * (self.heads * (self.key_width + self.value_width) * pairs + self.compression * blocks)

    def keys_read(self, above: int, own: int) -> int:
        """Keys that a query head reads in its three branches, over all of these rows."""
        end = above + own
        pairs = sum(count(end) - count(above) for count in (self._compressed_pairs, self._selected_pairs))
        return pairs + visible_pairs([Span(above, own)], self.window)

    def _blocks(self, n: int) -> int:
        """Compressed blocks of a sequence of n."""
        return (n - self.grid.length) // self.grid.stride + 1 if n >= self.grid.length else 0

    def _compressed_pairs(self, n: int) -> int:
        """The sum of `_blocks` over the lengths 1 .. n."""
        d, longer = self.grid.stride, n - self.grid.length + 1  # lengths with a block at least
        if longer <= 0:
            return 0
        whole, rest = divmod(longer, d)
        return d * whole * (whole + 1) // 2 + rest * (whole + 1)

    def _selected_pairs(self, n: int) -> int:
        """Rows in chosen blocks: all up to a row while it has no choice, then whole blocks and a part of its own."""
        size, room = self.grid.select, self.grid.select * self.choice.count
        early, late = min(n, room), max(0, n - room)
        whole, rest = divmod(late, size)
        own = whole * size * (size + 1) // 2 + rest * (rest + 1) // 2
        return early * (early + 1) // 2 + late * (room - size) + own


class PreparedNsa(NamedTuple):
    """What all layers need of a pack of T rows, or one of them."""

    ops: Any
    gates: Tensor | None = None  # float32 [L, T, 4], in which each layer leaves what its rows' gates are; or [T, 4]

    def of_layer(self, number: int) -> PreparedNsa:
        """What one layer is handed. Not its gates by themselves: who recomputes a block saves what it is called with,
        and a tensor that is written to meanwhile cannot be saved."""
        return self if self.gates is None else self._replace(gates=self.gates[number])


@dataclass(frozen=True, slots=True)
class Nsa:
    """All layers of native sparse attention in a model's forward pass, in their order."""

    layers: tuple[NsaLayer, ...]
    keyword: ClassVar[str] = KEYWORD

    @property
    def ops(self) -> Mapping[str, Sizes]:
        first = self.layers[0]
        return {"nsa": {"key_width": first.key_width, "value_width": first.value_width}}

    def prepare(self, layout: ForkLayout, kernels: Kernels) -> PreparedNsa:
        position = layout.position_of_row
        gates = torch.zeros(len(self.layers), len(position), len(NOTES) - 1, device=position.device)
        return PreparedNsa(kernels["nsa"].prepare(layout, self.layers[0].grid), gates)

    def noted(self, prepared: PreparedNsa, spans: Sequence[Span]) -> dict[str, Tensor]:
        assert prepared.gates is not None
        gates = prepared.gates[:, : sum(own for _, own in spans)].double().sum(1).mean(0)
        kinds = Counter(self.layers)
        keys = sum(many * kind.keys_read(*span) for kind, many in kinds.items() for span in spans) / len(self.layers)
        return dict(zip(NOTES, [*gates.unbind(), torch.full_like(gates[0], keys)], strict=True))

    def cost(self, spans: Iterable[Span]) -> Flops:
        """The backward pass is twice the forward."""
        spans, kinds = list(spans), Counter(self.layers)
        forward = sum(many * kind.forward(*span) for kind, many in kinds.items() for span in spans)
        return Flops(forward, 2 * forward)

    def probes(self, limit: int) -> list[Shape]:
        """Answers on both sides of a block's border, and of where a row begins to choose, as far as `limit` lets them;
        and a short example, without a complete block."""
        grid, choice = self.layers[0].grid, self.layers[0].choice
        answer = min(2 * grid.select + 3, limit // 2)
        prompt = min(grid.select * choice.count + grid.stride + 1, limit - answer)
        short = min(5, limit // 2)
        return [
            (prompt, (answer, max(1, answer // 3))),
            (short, (min(4, limit - short), min(grid.length, limit - short))),
        ]

    def untried(self, longest: int) -> str | None:
        room = self.layers[0].grid.select * self.layers[0].choice.count
        return None if longest > room else f"not a choice of blocks, which begins behind {room:,} tokens"
