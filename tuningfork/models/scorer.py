"""The scorer: log-probs of packs under a policy, and the gradients of a loss of them.

It alone brings the backbone's hidden states, the output weight and the kernels together, so it is the one place that
must know how the output weight is kept and where its gradient is added up.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tuningfork.errors import SCORING, enough_memory
from tuningfork.models.embedding import switched_back
from tuningfork.models.even import evenly
from tuningfork.models.head import Head
from tuningfork.models.policy import Policy
from tuningfork.ranges import phase
from tuningfork.records import ChunkLoss, PackedBatch


@dataclass(frozen=True)
class Scorer:
    """A policy and its head."""

    policy: Policy
    head: Head

    @classmethod
    def of(cls, policy: Policy, chunk_rows: int) -> Scorer:
        """A policy with a head that has its kernels and projects `chunk_rows` logit rows at once."""
        return cls(policy, Head(policy.kernels, policy.transform, chunk_rows))

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def _evenly(self) -> AbstractContextManager[Any]:
        return evenly(self.device, self.policy.compiled)

    def score(self, pack: PackedBatch) -> Tensor:
        """Summed log-probs of a pack's answers under the policy as it is now, float64 [A] on its device. No gradient.

        Runs with gradients on although none is taken: a compiler fuses, and so rounds, the forward pass of a graph
        without gradients differently. Scoring and training share one graph, and therefore every bit.

        Raises:
            OutOfMemory: the device has too little for the pack.
        """
        with enough_memory(f"scoring a pack of {len(pack.input_ids):,} tokens", SCORING), self._evenly():
            pack = pack.to(self.device)
            with torch.enable_grad():
                hidden = self.policy.hidden_rows(pack)
            output = self.policy.output
            return self.head.score(hidden.detach(), output.weight, pack, output.bias, output.vocabulary)

    def backward(
        self, pack: PackedBatch, loss: ChunkLoss, last: bool = True, linear: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Backpropagate a pack's share of a loss into the `.grad` of the policy's weights, the output weight included.

        The output weight is made ready once, used by all chunks of the pack, and gets their gradient at the end.

        Args:
            last: of the packs of a step, after which all processes have the sum of all gradients.
            linear: the loss is a weighted sum of log-probs.

        Returns:
            `(loss, logps)`: float64 scalar; float64 [A], the same bits as `score` gives. Neither has a gradient.
        """
        pack = pack.to(self.device)
        with self._evenly(), switched_back():
            with phase("forward"):
                hidden = self.policy.hidden_rows(pack, last)
            output = self.policy.output
            weight, bias = output.weight, output.bias
            with phase("head"):  # with the model's backward pass as a range at its end
                found = self.head.backward(
                    hidden, weight, pack, loss, bias, output.vocabulary, output.gradients, linear
                )
        if last and self.policy.spread is not None:
            with phase("gradient exchange"):
                self.policy.spread.exchange()
        return found
