"""Softmax attention: each layer with a window of its own, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tuningfork.kernels.select import Kernels, Sizes
from tuningfork.models.mixers.mixer import Flops, Shape
from tuningfork.records import ForkLayout, Span

KEYWORD = "fork"
_TILE = 64  # rows that a kernel works on at once


class AttentionLayer(NamedTuple):
    """One call of attention in a forward pass.

    width: heads times the mean width of a head's keys and values, so that a pair of tokens costs 4 flops for each.
    window: keys that a token sees at most, itself included; None sees the whole sequence.
    head_width: the widest of a head's queries, keys and values.
    backward: whether gradients flow through it.
    """

    width: int
    window: int | None
    head_width: int
    backward: bool = True


@dataclass(frozen=True, slots=True)
class Attention:
    """All calls of attention in a model's forward pass, in their order; a layer that runs twice has two."""

    layers: tuple[AttentionLayer, ...]
    keyword: ClassVar[str] = KEYWORD

    @property
    def windows(self) -> list[int | None]:
        return [layer.window for layer in self.layers]

    @property
    def ops(self) -> Mapping[str, Sizes]:
        return {"attention": {"head_width": max(layer.head_width for layer in self.layers)}}

    def prepare(self, layout: ForkLayout, kernels: Kernels) -> Any:
        return kernels["attention"].prepare(layout)

    def cost(self, spans: Iterable[Span]) -> Flops:
        """4 flops per (query, key) pair that mask and window allow, and width; the backward pass is twice that."""
        forward, backward = Counter[int | None](), Counter[int | None]()
        for layer in self.layers:
            forward[layer.window] += 4 * layer.width
            backward[layer.window] += 8 * layer.width if layer.backward else 0
        spans = list(spans)
        pairs = {window: visible_pairs(spans, window) for window in forward}
        return Flops(*(sum(flops * pairs[window] for window, flops in of.items()) for of in (forward, backward)))

    def probes(self, limit: int) -> list[Shape]:
        """A prompt longer than a tile and than all windows, and an answer longer than a tile, as far as `limit` lets
        them; and a short example, so that the pack has a neighbour."""
        answer = min(_TILE + 3, limit // 2)
        prompt = min(max(_TILE, *(window or 0 for window in self.windows)) + 8, limit - answer)
        short = min(5, limit // 2)
        return [
            (prompt, (answer, max(1, 9 * answer // _TILE))),
            (short, (min(4, limit - short), min(7, limit - short))),
        ]

    def untried(self, longest: int) -> str | None:
        window = min((window for window in self.windows if window and window >= longest), default=None)
        return None if window is None else f"not beyond the layers' window of {window:,}, which is too long for that"


def visible_pairs(spans: Iterable[Span], window: int | None) -> int:
    """(query, key) pairs of segments: each one's tokens with those of its ancestors and, causally, its own."""
    return sum(_causal_pairs(above + own, window) - _causal_pairs(above, window) for above, own in spans)


def _causal_pairs(n: int, window: int | None) -> int:
    """Pairs of a sequence of n: sum over t = 1..n of min(t, window)."""
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w
