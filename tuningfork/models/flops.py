"""Model flops: only necessary work, on unique tokens. Recomputation, padding and repeated prompts are not counted.

What an example costs where its prompt is repeated, `work` says: ranks share a step's work by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tuningfork.models.mixers.mixer import Mixer
from tuningfork.records import TokenExample


@dataclass(frozen=True, slots=True)
class FlopCounter:
    """What one token costs. Forward; the backward pass is twice the forward, but for what takes no part in it.

    block_weights: weights used in matrix products below the head (2 flops each per token). What runs several times in
        a forward pass counts as often.
    head_weights: vocabulary x hidden size (2 flops each per logit row).
    mixers: each knows what it costs beside its products with weights.
    forward_only_weights: of the block weights, those of what a model computes without gradients, as models do that run
        their layers in cycles and train the last ones only.
    """

    block_weights: int
    head_weights: int
    mixers: tuple[Mixer, ...] = ()
    forward_only_weights: int = 0

    def forward(self, example: TokenExample) -> int:
        """Flops to score one example."""
        return self._products(example) + sum(mixer.cost(example).forward for mixer in self.mixers)

    def work(self, example: TokenExample, share_prompt: bool) -> int:
        """Flops that a pack's layout makes of one example: without sharing, its prompt again for every answer."""
        if share_prompt:
            return self.forward(example)
        return sum(map(self.forward, example.alone()))

    def training(self, examples: Iterable[TokenExample]) -> int:
        """Flops of one forward and backward pass."""
        return sum(
            3 * self._products(example)
            - 2 * (2 * self.forward_only_weights * example.unique_tokens)
            + sum(sum(mixer.cost(example)) for mixer in self.mixers)
            for example in examples
        )

    def _products(self, example: TokenExample) -> int:
        """Forward flops of products with weights, the head's on the tokens that predict a counted one."""
        logit_rows = sum(example.answer_tokens(i) for i in range(len(example.answers)))
        return 2 * (self.block_weights * example.unique_tokens + self.head_weights * logit_rows)
