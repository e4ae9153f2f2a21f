"""Compressed convolutional grouped-query attention (CCGQA; Figliolia et al. 2025, arXiv:2510.04476), but for attention.

Before attention, queries and keys go through two convolutions along a row's path, and half of the values are those of
the row before. Attention itself is a mixer of its own, which takes what comes of this (mixers/attention.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tuningfork.kernels.ccgqa.plain import QueryHeads
from tuningfork.kernels.select import Kernels, Sizes
from tuningfork.models.mixers.mixer import Flops, Shape, around, cost_by_rows
from tuningfork.records import ForkLayout, Span

KEYWORD = "ccgqa"


class CcgqaLayer(NamedTuple):
    """One call in a forward pass.

    heads: of queries and keys.
    depthwise, grouped: rows that each convolution reads, a row itself among them.
    backward: whether gradients flow through it.
    """

    heads: QueryHeads
    depthwise: int
    grouped: int
    backward: bool = True

    @property
    def reach(self) -> int:
        """Rows of its path that decide a row's queries and keys, itself among them."""
        return self.depthwise + self.grouped - 1

    @property
    def flops(self) -> int:
        """Forward, for each row: both convolutions, 2 C (W0 + d W1) of C channels in heads of width d."""
        queries, keys, width = self.heads
        return 2 * (queries + keys) * width * (self.depthwise + width * self.grouped)


@dataclass(frozen=True, slots=True)
class Ccgqa:
    """All calls in a model's forward pass, in their order."""

    layers: tuple[CcgqaLayer, ...]
    keyword: ClassVar[str] = KEYWORD

    @property
    def ops(self) -> Mapping[str, Sizes]:
        return {
            "ccgqa": {
                "head_width": max(layer.heads.width for layer in self.layers),
                "depthwise": max(layer.depthwise for layer in self.layers),
                "grouped": max(layer.grouped for layer in self.layers),
            }
        }

    def prepare(self, layout: ForkLayout, kernels: Kernels) -> Any:
        return kernels["ccgqa"].prepare(layout)

    def cost(self, spans: Iterable[Span]) -> Flops:
        """Each row costs as much wherever it lies. The backward pass is twice the forward."""
        return cost_by_rows(self.layers, spans)

    def probes(self, limit: int) -> list[Shape]:
        """Prompts and answers longer than what a row's queries depend on, and shorter, as far as `limit` lets them."""
        return around(max(layer.reach for layer in self.layers), limit)

    def untried(self, longest: int) -> str | None:
        reach = max(layer.reach for layer in self.layers)
        return None if longest >= reach else f"not all of the {reach} tokens that two convolutions read"
