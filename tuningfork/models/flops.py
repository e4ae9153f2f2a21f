"""Model flops: only necessary work, on each row that is laid once. Recomputation and padding are not counted.

What a step costs follows from the segments of its packs: what several sequences begin with is computed once where it is
laid once. By what the parts of a step cost, ranks share it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuningfork.models.mixers.mixer import Mixer
from tuningfork.records import Span, TokenExample


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

    def forward(self, spans: Sequence[Span], logit_rows: int) -> int:
        """Flops to score the tokens of some segments, and so many logit rows of theirs."""
        return self._products(spans, logit_rows) + sum(mixer.cost(spans).forward for mixer in self.mixers)

    def training(self, spans: Sequence[Span], logit_rows: int) -> int:
        """Flops of one forward and backward pass of these."""
        return (
            3 * self._products(spans, logit_rows)
            - 2 * (2 * self.forward_only_weights * _tokens(spans))
            + sum(sum(mixer.cost(spans)) for mixer in self.mixers)
        )

    def _products(self, spans: Sequence[Span], logit_rows: int) -> int:
        """Forward flops of products with weights, the head's on the logit rows alone."""
        return 2 * (self.block_weights * _tokens(spans) + self.head_weights * logit_rows)


def by_itself(example: TokenExample) -> tuple[list[Span], int]:
    """The segments and logit rows of an example that shares nothing with others: what FlopCounter takes."""
    return example.spans, sum(example.answer_tokens(answer) for answer in range(len(example.answers)))


def _tokens(spans: Sequence[Span]) -> int:
    return sum(own for _, own in spans)
