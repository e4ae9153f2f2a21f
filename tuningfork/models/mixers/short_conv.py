"""A gated short convolution (LFM2, Liquid AI 2025): each channel reads a few rows of its path, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tuningfork.kernels.select import Kernels, Sizes
from tuningfork.models.mixers.mixer import Flops, Shape
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
        rows = sum(own for _, own in spans)
        forward = sum(layer.flops for layer in self.layers)
        backward = 2 * sum(layer.flops for layer in self.layers if layer.backward)
        return Flops(forward * rows, backward * rows)

    def probes(self, limit: int) -> list[Shape]:
        """Prompts and answers longer than what a row reads, and shorter, as far as `limit` lets them."""
        taps = self.taps
        shapes: list[Shape] = [(taps + 3, (1, taps + 1)), (1, (taps, 1)), (max(1, taps - 1), (2, 1))]
        return [_within(limit, *shape) for shape in shapes]

    def untried(self, longest: int) -> str | None:
        return None if longest >= self.taps else f"not all of the {self.taps} tokens that a convolution reads"


def _within(limit: int, prompt: int, answers: tuple[int, ...]) -> Shape:
    prompt = min(prompt, max(1, limit // 2))
    return prompt, tuple(min(answer, limit - prompt) for answer in answers)
