"""What a kind of layer says of itself. A *mixer* lets tokens see each other, so it alone must know a pack's layout.

All else in a model treats each token by itself. Attention is a mixer, of all layers that have it; the gated delta rule,
a convolution and a scan along the sequence, is another. A class of our own runs its mixers itself; under a class of
transformers a module of models/hf puts them (`patch`), and models/hf/watch.py finds their layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from tuningfork.kernels.select import Kernels, Sizes
from tuningfork.records import ForkLayout, Span

Shape = tuple[int, tuple[int, ...]]
"""Lengths of an example in tokens: of its prompt, and of each of its answers."""


class Flops(NamedTuple):
    """Necessary work of one forward and one backward pass."""

    forward: int
    backward: int


class Mixer(Protocol):
    """One kind of mixer in one model, with what is to be known of each of its layers."""

    @property
    def keyword(self) -> str:
        """Under this name the model call hands on to its layers what `prepare` has made."""

    @property
    def ops(self) -> Mapping[str, Sizes]:
        """The ops of kernels/ that run it, each with the sizes that decide which of its forms can."""

    def prepare(self, layout: ForkLayout, kernels: Kernels) -> Any:
        """What all of its layers need of a pack, made once a pack on the layout's device."""

    def cost(self, spans: Iterable[Span]) -> Flops:
        """Its flops on the tokens of some segments; products with weights are counted elsewhere."""

    def probes(self, limit: int) -> list[Shape]:
        """Examples that the checks at a start must try, no sequence longer than `limit` tokens.

        They cross every length at which its arithmetic takes another way: a kernel's tile, a window, a chunk.
        """

    def untried(self, longest: int) -> str | None:
        """In words, what a sequence of `longest` tokens leaves untried of that; None if nothing."""


@runtime_checkable
class Noting(Protocol):
    """A mixer whose layers note something of each pass, for the run's numbers."""

    def noted(self, prepared: Any, spans: Sequence[Span]) -> dict[str, Tensor]:
        """Of a pass that is done, by the names of numbers: sums over the tokens of a pack's segments, float64 scalars
        on its device, which is not waited for."""
