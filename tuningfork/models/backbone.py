"""What is asked of a model, whoever wrote its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tuningfork.models.mixers.mixer import Mixer
from tuningfork.records import LogitTransform, PackedBatch


class Backbone(Protocol):
    """A language model that runs packs: all of it but the loss. models/policy.py is that of transformers' classes.

    transform: what the model does to its raw logits.
    """

    transform: LogitTransform

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def vocab_size(self) -> int:
        """Ids of tokens that the model knows."""

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence that it can be trained on; None where there is no such limit."""

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder blocks, in the order in which they first run: units of compilation and of activation memory."""

    @property
    def mixers(self) -> Sequence[Mixer]:
        """Each kind of layer in which tokens see each other."""

    @property
    def head_weight(self) -> nn.Parameter:
        """The output embedding [V, D]; the input embedding itself where a model ties them."""

    @property
    def head_bias(self) -> nn.Parameter | None:
        """What the model adds to its raw logits, [V]; most add nothing."""

    def hidden_rows(self, batch: PackedBatch) -> Tensor:
        """Final hidden states of a pack's logit rows, [R, D] in the compute dtype."""

    def config_digest(self) -> str:
        """A content hash of all of its settings that decide its numbers."""
