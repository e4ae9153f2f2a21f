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


class _Layer(Protocol):
    """A call of a layer that treats each row alike."""

    @property
    def flops(self) -> int:
        """Forward, of a row."""

    @property
    def backward(self) -> bool:
        """Whether it has a backward pass."""


def cost_by_rows(layers: Iterable[_Layer], spans: Iterable[Span]) -> Flops:
    """Of layers in which each row costs as much wherever it lies. The backward pass is twice the forward."""
    rows = sum(own for _, own in spans)
    flops = [(layer.flops, layer.backward) for layer in layers]
    return Flops(rows * sum(n for n, _ in flops), 2 * rows * sum(n for n, backward in flops if backward))


def within(limit: int, prompt: int, answers: tuple[int, ...]) -> Shape:
    """An example as far as no sequence of it is longer than `limit` tokens."""
    prompt = min(prompt, max(1, limit // 2))
    return prompt, tuple(min(answer, limit - prompt) for answer in answers)


def around(reach: int, limit: int) -> list[Shape]:
    """Prompts and answers longer than the `reach` rows that a row's result depends on, and shorter; see `within`."""
    shapes: list[Shape] = [(reach + 3, (1, reach + 1)), (1, (reach, 1)), (max(1, reach - 1), (2, 1))]
    return [within(limit, *shape) for shape in shapes]


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
