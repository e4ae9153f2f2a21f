"""A model of a class of our own, with a second kind of mixer: what train/ and the records offer is enough for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.tiny import one_pack, random_examples, tiny_policy
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.select import plain
from tuningfork.models.backbone import Backbone
from tuningfork.models.flops import FlopCounter, by_itself
from tuningfork.models.mixers.attention import Attention, AttentionLayer
from tuningfork.models.mixers.mixer import Flops, Mixer
from tuningfork.records import (
    ROOT,
    ForkLayout,
    LogitTransform,
    PackedBatch,
    Segment,
    Source,
    Span,
    TokenAnswer,
    TokenExample,
)
from tuningfork.train.checks.self_check import probe_pack, probes, untried

VOCAB, WIDTH = 50, 16


class Shift:
    """Each token also sees the one before it in its sequence, zeros at its start."""

    keyword = "previous"
    ops: ClassVar[dict[str, Any]] = {}

    def prepare(self, layout: ForkLayout, kernels: Any) -> Tensor:
        """The row of each row's previous position, int64 [T]; T where there is none."""
        rows = len(layout.position_of_row)
        previous = torch.arange(rows) - 1
        segments = [Segment(*entry) for entry in layout.segments.tolist()]
        for segment in segments:
            if segment.start < segment.end:
                previous[segment.start] = rows if segment.parent == ROOT else segments[segment.parent].end - 1
        return previous

    def cost(self, spans: Iterable[Span]) -> Flops:
        tokens = sum(own for _, own in spans)
        return Flops(tokens, 2 * tokens)

    def probes(self, limit: int) -> list[tuple[int, tuple[int, ...]]]:
        return [(1, (1, 2))]

    def untried(self, longest: int) -> str | None:
        return "not two tokens long" if longest < 2 else None


class OwnModel(nn.Module):
    """One block of windowed attention and shift, whose head is its embedding."""

    transform = LogitTransform()
    vocab_size, positions, head_bias = VOCAB, 300, None
    device = torch.device("cpu")

    def __init__(self, window: int | None = 5) -> None:
        super().__init__()
        self.mixers = (Attention((AttentionLayer(WIDTH, window, head_width=8),)), Shift())
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.blocks = [self.mix]
        self.kernels = plain()

    @property
    def head_weight(self) -> nn.Parameter:
        return self.embedding.weight

    def hidden_rows(self, batch: PackedBatch) -> Tensor:
        attention, previous = (mixer.prepare(batch.layout, self.kernels) for mixer in self.mixers)
        x = self.embedding(batch.input_ids)
        q, k, v = (t.unflatten(1, (2, 8)) for t in self.mix(x).chunk(3, dim=1))
        x = x + attention.attend(q, k, v, scale=0.5, window=self.mixers[0].windows[0], softcap=None).flatten(1)
        return (x + torch.cat([x, x.new_zeros(1, WIDTH)])[previous])[batch.logit_rows]

    def config_digest(self) -> str:
        return "own"


def own_model(window: int | None = 5) -> OwnModel:
    torch.manual_seed(0)
    return OwnModel(window).double()


def members(protocol: type) -> set[str]:
    return {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}


@pytest.mark.parametrize("model", [own_model(), tiny_policy()], ids=["our own", "transformers'"])
def test_models_have_what_is_asked_of_one(model: Any) -> None:
    assert members(Backbone) >= {"mixers", "hidden_rows", "head_weight", "transform", "config_digest"}
    assert {name for name in members(Backbone) if not hasattr(model, name)} == set()
    for mixer in model.mixers:
        assert {name for name in members(Mixer) if not hasattr(mixer, name)} == set()


@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
def test_all_mixers_find_their_sequence_in_a_pack(share: str) -> None:
    """Against each sequence as one segment, in a pack of its own."""
    model, examples = own_model(), random_examples([(7, (5, 9)), (0, (4, 3)), (1, (1, 3, 2))], vocab=VOCAB)
    batch = one_pack(examples, share)
    packed = model.hidden_rows(batch)[batch.logit_row_of_counted]
    alone = []
    for example in examples:
        p = len(example.prompt_ids)
        for answer in example.answers:
            ids = np.concatenate([example.prompt_ids, answer.ids])
            counted = np.arange(len(ids)) >= p
            document = TokenExample(Source("alone", 1), ids[:0], (TokenAnswer(ids, counted),))
            alone.append(model.hidden_rows(build_pack([document], len(ids), "prompt")))
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_checks_and_counts_ask_every_mixer() -> None:
    model = own_model(window=400)
    shapes = [(len(e.prompt_ids), tuple(len(a.ids) for a in e.answers)) for e in probes(model)]
    assert shapes == [*model.mixers[0].probes(300), (1, (1, 2))]
    assert model.hidden_rows(probe_pack(probes(model), "tree", compiled=False)).isfinite().all()
    assert untried(model) == ["not beyond the layers' window of 400, which is too long for that"]
    [pair] = random_examples([(3, (2, 4))])  # 9 unique tokens, 6 logit rows; pairs: 6 + 9 + 22
    counter = FlopCounter(block_weights=3, head_weights=5, mixers=model.mixers)
    assert counter.forward(*by_itself(pair)) == 2 * 3 * 9 + 2 * 5 * 6 + 4 * WIDTH * 37 + 9
    assert counter.training(*by_itself(pair)) == 3 * counter.forward(*by_itself(pair))
