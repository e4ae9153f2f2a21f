"""Log-probs of a pack under a policy as it is: how the reference is scored, and how every later check of it is."""

from __future__ import annotations

import torch
from torch import Tensor

from tuningfork.errors import SCORING, enough_memory
from tuningfork.models.policy import Policy
from tuningfork.objective.head import Head
from tuningfork.records import PackedBatch


def score(policy: Policy, head: Head, batch: PackedBatch) -> Tensor:
    """Summed log-probs of a pack's answers, float64 [A] on the policy's device.

    Runs with gradients on although none is taken: a compiler fuses, and so rounds, the forward pass of a graph without
    gradients differently. Scoring and training share one graph, and therefore every bit.
    """
    with enough_memory(f"scoring a pack of {len(batch.input_ids):,} tokens", SCORING):
        batch = batch.to(policy.device)
        with torch.enable_grad():
            hidden = policy.hidden_rows(batch)
        return head.score(hidden.detach(), policy.head_weight, batch, policy.head_bias)
