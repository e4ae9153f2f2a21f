"""Model flops: only necessary work, on unique tokens. Recomputation, padding and repeated prompts are not counted.

What an example costs where its prompt is repeated, `work` says: ranks share a step's work by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tuningfork.records import TokenExample


@dataclass(frozen=True, slots=True)
class FlopCounter:
    """What one token costs. Forward; the backward pass is twice the forward.

    block_weights: weights used in matrix products of all decoder blocks (2 flops each per row).
    head_weights: vocabulary x hidden size (2 flops each per logit row).
    attention: for each layer (heads x head_dim, window); 4 flops per (query, key) pair that mask and window allow.
    """

    block_weights: int
    head_weights: int
    attention: tuple[tuple[int, int | None], ...]

    def forward(self, example: TokenExample) -> int:
        """Flops to score one example."""
        logit_rows = sum(example.answer_tokens(i) for i in range(len(example.answers)))
        flops = 2 * self.block_weights * example.unique_tokens + 2 * self.head_weights * logit_rows
        for window in {window for _, window in self.attention}:
            width = sum(w for w, layer_window in self.attention if layer_window == window)
            flops += 4 * width * _visible_pairs(example, window)
        return flops

    def work(self, example: TokenExample, share_prompt: bool) -> int:
        """Flops that a pack's layout makes of one example: without sharing, its prompt again for every answer."""
        if share_prompt:
            return self.forward(example)
        return sum(map(self.forward, example.alone()))

    def training(self, examples: Iterable[TokenExample]) -> int:
        """Flops of one forward and backward pass."""
        return 3 * sum(self.forward(example) for example in examples)


def _visible_pairs(example: TokenExample, window: int | None) -> int:
    """(query, key) pairs of the prompt once and of each answer after it."""
    p = len(example.prompt_ids)
    prompt = _causal_pairs(p, window)
    return prompt + sum(_causal_pairs(p + len(a.ids), window) - prompt for a in example.answers)


def _causal_pairs(n: int, window: int | None) -> int:
    """Pairs of a sequence of n: sum over t = 1..n of min(t, window)."""
    w = n if window is None else min(window, n)
    return w * (w + 1) // 2 + (n - w) * w
