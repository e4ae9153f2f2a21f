"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): a short convolution, then a state that each token decays,
corrects and reads. Both go along a row's path; all else in such a layer treats each token by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tuningfork.kernels.causal_conv.plain import Heads
from tuningfork.kernels.select import Kernels, Sizes
from tuningfork.models.mixers.mixer import Flops, Shape, cost_by_rows, within
from tuningfork.records import ForkLayout, Span

KEYWORD = "gated_delta"
CHUNK = 64  # positions that the scan takes at once
# Over the borders of chunks, and of what a convolution reads; an answer right behind a border, and right before one.
_SHAPES: tuple[Shape, ...] = ((CHUNK + 6, (3, CHUNK - 3)), (1, (2, 2 * CHUNK + 2)), (CHUNK, (CHUNK, 1)))


class GatedDeltaLayer(NamedTuple):
    """One call of the gated delta rule in a forward pass.

    heads: of its keys and values.
    taps: rows that its convolution reads, a row itself among them.
    backward: whether gradients flow through it.
    """

    heads: Heads
    taps: int
    backward: bool = True

    @property
    def flops(self) -> int:
        """Forward, for each row: the convolution, and the scan in chunks of C = 64 rows.

        Of a value head: 6 dk dv for what the state gives and gets, C (6 dk + 4 dv) for products within a chunk and
        their inverse's, and 2/3 C^2 for the inverse. A part of a chunk counts by its rows.
        """
        keys, key_width, values, value_width = self.heads
        channels = 2 * keys * key_width + values * value_width
        within = CHUNK * (6 * key_width + 4 * value_width) + 2 * CHUNK**2 // 3
        return 2 * self.taps * channels + values * (6 * key_width * value_width + within)


class PreparedGatedDelta(NamedTuple):
    """What all layers need of a pack: both of their ops, each with its tables."""

    conv: Any
    scan: Any


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """All calls of the gated delta rule in a model's forward pass, in their order."""

    layers: tuple[GatedDeltaLayer, ...]
    keyword: ClassVar[str] = KEYWORD

    @property
    def ops(self) -> Mapping[str, Sizes]:
        heads = [layer.heads for layer in self.layers]
        return {
            "causal_conv": {"width": max(layer.taps for layer in self.layers)},
            "gated_delta": {
                "key_width": max(head.key_width for head in heads),
                "value_width": max(head.value_width for head in heads),
            },
        }

    def prepare(self, layout: ForkLayout, kernels: Kernels) -> PreparedGatedDelta:
        return PreparedGatedDelta(kernels["causal_conv"].prepare(layout), kernels["gated_delta"].prepare(layout))

    def cost(self, spans: Iterable[Span]) -> Flops:
        """Each row costs as much wherever it lies; rows that a scan goes through again are no necessary work. The
        backward pass is twice the forward."""
        return cost_by_rows(self.layers, spans)

    def probes(self, limit: int) -> list[Shape]:
        """Prompts and answers on both sides of a chunk's border, and shorter than the convolution is wide, as far as
        `limit` lets them."""
        return [within(limit, *shape) for shape in _SHAPES]

    def untried(self, longest: int) -> str | None:
        return None if longest > CHUNK else f"not the state from one chunk of {CHUNK} tokens to the next"
