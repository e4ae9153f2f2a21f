"""Model flops: only necessary work, on unique tokens. Recomputation, padding and repeated prompts are not counted.

What an example costs where its prompt is repeated, `work` says: ranks share a step's work by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tuningfork.records import TokenExample

Attention = tuple[int, int | None]  # heads x head_dim, window


@dataclass(frozen=True, slots=True)
class FlopCounter:
    """What one token costs. Forward; the backward pass is twice the forward, but for what takes no part in it.

    block_weights: weights used in matrix products below the head (2 flops each per row). What runs several times in a
        forward pass counts as often.
    head_weights: vocabulary x hidden size (2 flops each per logit row).
    attention: for each of its calls (heads x head_dim, window); 4 flops per (query, key) pair that mask and window
        allow.
    forward_only_weights, forward_only_attention: of these, what a model computes without gradients, as models do that
        run their layers in cycles and train the last ones only.
    """

    block_weights: int
    head_weights: int
    attention: tuple[Attention, ...]
    forward_only_weights: int = 0
    forward_only_attention: tuple[Attention, ...] = ()

    def forward(self, example: TokenExample) -> int:
        """Flops to score one example."""
        logit_rows = sum(example.answer_tokens(i) for i in range(len(example.answers)))
        below = _flops(self.block_weights, self.attention, example)
        return below + 2 * self.head_weights * logit_rows

    def work(self, example: TokenExample, share_prompt: bool) -> int:
        """Flops that a pack's layout makes of one example: without sharing, its prompt again for every answer."""
        if share_prompt:
            return self.forward(example)
        return sum(map(self.forward, example.alone()))

    def training(self, examples: Iterable[TokenExample]) -> int:
        """Flops of one forward and backward pass."""
        return sum(
            3 * self.forward(example) - 2 * _flops(self.forward_only_weights, self.forward_only_attention, example)
            for example in examples
        )


def _flops(weights: int, attention: tuple[Attention, ...], example: TokenExample) -> int:
    """Forward flops of products with so many weights and of so much attention, on the unique tokens of an example."""
    flops = 2 * weights * example.unique_tokens
    for window in {window for _, window in attention}:
        width = sum(w for w, layer_window in attention if layer_window == window)
        flops += 4 * width * _visible_pairs(example, window)
    return flops


def _visible_pairs(example: TokenExample, window: int | None) -> int:
    """(query, key) pairs of an example: each segment's tokens with those of its ancestors and, causally, its own."""
    return sum(_causal_pairs(above + own, window) - _causal_pairs(above, window) for above, own in example.segments)


def _causal_pairs(n: int, window: int | None) -> int:
    """Pairs of a sequence of n: sum over t = 1..n of min(t, window)."""
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w
