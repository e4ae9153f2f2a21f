"""A gated short convolution (LFM2, Liquid AI 2025): each channel reads a few rows of its path, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tuningfork.kernels.select import Kernels, Sizes
from tuningfork.models.mixers.mixer import Flops, Shape, around, cost_by_rows
from tuningfork.records import ForkLayout, Span

KEYWORD = "short_conv"


class ShortConvLayer(NamedTuple):
    """One call of the convolution in a forward pass.

    taps: rows that it reads, a row itself among them.
    backward: whether gradients flow through it.
    """

    channels: int
    taps: int
    backward: bool = True

    @property
    def flops(self) -> int:
        """Forward, for each row."""
        return 2 * self.taps * self.channels


@dataclass(frozen=True, slots=True)
class ShortConv:
    """All short convolutions in a model's forward pass, in their order."""

    layers: tuple[ShortConvLayer, ...]
    keyword: ClassVar[str] = KEYWORD

    @property
    def taps(self) -> int:
        return max(layer.taps for layer in self.layers)

    @property
    def ops(self) -> Mapping[str, Sizes]:
        return {"causal_conv": {"width": self.taps}}

    def prepare(self, layout: ForkLayout, kernels: Kernels) -> Any:
        return kernels["causal_conv"].prepare(layout)

    def cost(self, spans: Iterable[Span]) -> Flops:
        """Each row costs as much wherever it lies. The backward pass is twice the forward."""
        return cost_by_rows(self.layers, spans)

    def probes(self, limit: int) -> list[Shape]:
        """Prompts and answers longer than what a row reads, and shorter, as far as `limit` lets them."""
        return around(self.taps, limit)

    def untried(self, longest: int) -> str | None:
        return None if longest >= self.taps else f"not all of the {self.taps} tokens that a convolution reads"
