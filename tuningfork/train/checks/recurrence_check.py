"""At every start of a hybrid model: which op is it, where a packed example is not what it is alone?

What leaks through a state may be small by the time that it comes to a logit. So the first layer that has a state, a
recurrence's or a convolution's, is held against its class's own by itself, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tuningfork.data.packing.layout import build_pack
from tuningfork.errors import ModelError
from tuningfork.models.hf import ccgqa, gated_delta, short_conv
from tuningfork.models.policy import Policy
from tuningfork.records import ForkLayout, PackedBatch, TokenExample

_SCAN, _CONV = "gated_delta", "causal_conv"  # by the names of their ops
TOLERANCE = 1e-3
"""Of the largest number; float32 differs by 1e-6, a wrong model by its whole size."""

Score = Callable[[Policy, PackedBatch], Tensor]


@contextmanager
def first_state(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the first layer with a state gives in each forward pass, [T, D] float32 on the CPU; nothing where there is
    no such layer."""
    heard: list[Tensor] = []

    def hear(layer: Any, given: Any, out: Tensor) -> None:
        heard.append(out[0].float().cpu())

    hooks = [layer.register_forward_hook(hear) for layer in _layers(model)[:1]]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def check_first_state(
    policy: Policy, batch: PackedBatch, score: Score, packed: Tensor, alone: Sequence[Tensor], path: str
) -> None:
    """Compare what the first layer with a state gives for a pack, and for each of its sequences alone.

    Args:
        packed: [T, D]; alone: [n, D] of each answer with its prompt.

    Raises:
        ModelError: they differ.
    """
    rows = batch.logit_rows[batch.logit_row_of_counted].cpu()
    sequences = [(len(e.prompt_ids), len(a.ids)) for e in batch.examples for a in e.answers]
    expected = torch.cat([out[p - 1 : p + a - 1] for out, (p, a) in zip(alone, sequences, strict=True)])
    worst = apart(packed[rows], expected)
    if not worst <= TOLERANCE:
        kind = type(_layers(policy.model)[0]).__name__
        raise ModelError(
            f"{path}: the first {kind} gives packed examples other numbers than the same examples alone (relative "
            f"difference {worst:.1e}). Training it would be wrong, so it is not supported."
            f"{blamed(policy, batch, score)}"
        )


def blamed(policy: Policy, batch: PackedBatch, score: Score) -> str:
    """A sentence on the op by which examples of a pack see each other; none where it is none of a recurrence's.

    Each sequence goes alone through the same ops, at first with the scan left out. What then differs is the
    convolution's doing; what differs with it alone is the scan's.
    """
    if not _layers(policy.model):
        return ""
    without = replace(policy.kernels, forms={**policy.kernels.forms, _SCAN: _ValuesAsTheyAre})
    for kernels, words in (
        (without, f"its convolution ({_CONV}) reads tokens of other examples"),
        (policy.kernels, f"its scan ({_SCAN}) carries state from one example into another"),
    ):
        policy.kernels, kept = kernels, policy.kernels
        try:
            alone = [score(policy, _by_itself(one).to(policy.device)) for e in batch.examples for one in e.alone()]
            if not apart(score(policy, batch), torch.cat(alone)) <= TOLERANCE:
                return f" Of its layers with a state {words}."
        finally:
            policy.kernels = kept
    return ""


def _by_itself(example: TokenExample) -> PackedBatch:
    return build_pack([example], example.longest, "none")


def _layers(model: nn.Module) -> list[Any]:
    return gated_delta.layers(model) or short_conv.layers(model) or ccgqa.layers(model)


class _ValuesAsTheyAre:
    """Stands for the scan: no row's result depends on another row."""

    @classmethod
    def prepare(cls, layout: ForkLayout) -> _ValuesAsTheyAre:
        return cls()

    def scan(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return value


def apart(packed: Tensor, alone: Tensor) -> float:
    """How far numbers lie apart at most, relative to the largest."""
    return float((packed - alone).abs().max() / alone.abs().max())
