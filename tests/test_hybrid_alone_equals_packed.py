"""Gates G1, G2, G3 for models that do not only attend: a packed, shared example is that alone, and leaks nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.forests import laid
from tests.test_alone_equals_packed import (
    SHAPES,
    _assert_same_gradients,
    _forest,
    _gradients,
    _packed,
    _scores,
    _weighted_alone,
)
from tests.tiny import CCGQA, HYBRIDS, SHORT_CONVS, SPARSE, one_pack, random_examples, tiny_model, tiny_policy
from tuningfork.kernels.select import plain
from tuningfork.models.policy import Policy
from tuningfork.records import TokenAnswer, TokenExample

# Over the borders of chunks and of what a convolution reads, besides: answers behind a border, and right before one.
LONG = [*SHAPES, (70, (3, 61)), (1, (2, 130)), (64, (64, 1)), (63, (1, 2, 1)), (2, (66,))]


@pytest.fixture
def widened(monkeypatch):
    """The classes of a model without casts to float32: scan, norms, gates and rotary embeddings stay in float64."""

    def widen(model) -> None:
        module = sys.modules[type(model).__module__]
        monkeypatch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), "float32": torch.float64}))
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    return widen


@pytest.mark.parametrize("share", ["prompt", "none", "tree"], ids=["shared", "unshared", "tree"])
@pytest.mark.parametrize("family", [*HYBRIDS, *SHORT_CONVS, *CCGQA, *SPARSE])
def test_hybrid_models_in_float64_packed_equal_alone(family, share, widened):
    policy = tiny_policy(family)
    widened(policy.model)
    examples = random_examples(LONG, holes=True)
    batch = one_pack(examples, share, tokens=2048)
    weights = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64)
    expected, truth = _weighted_alone(policy, examples, weights)
    truth_gradients = _gradients(policy, truth)
    logps, loss, gradients = _packed(policy, batch, weights, chunk_rows=16)
    torch.testing.assert_close(logps, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, truth.detach(), rtol=1e-9, atol=1e-9)
    _assert_same_gradients(policy, truth_gradients, gradients, relative=1e-9)


@pytest.mark.parametrize("share", ["prompt", "tree"])
@pytest.mark.parametrize("family", [*HYBRIDS, *SHORT_CONVS, *CCGQA, *SPARSE])
def test_hybrid_models_in_float32_packed_equal_alone(family, share):
    policy = tiny_policy(family, torch.float32)
    examples = random_examples(LONG, holes=True)
    batch = one_pack(examples, share, tokens=2048)
    weights = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64)
    expected, truth = _weighted_alone(policy, examples, weights)
    truth_gradients = _gradients(policy, truth)
    logps, _, gradients = _packed(policy, batch, weights, chunk_rows=8192)
    torch.testing.assert_close(logps.float(), expected, rtol=1e-5, atol=1e-5)
    _assert_same_gradients(policy, truth_gradients, gradients, relative=1e-4)


@pytest.mark.parametrize("share", ["prompt", "tree"])
@pytest.mark.parametrize("family", [*HYBRIDS, *SHORT_CONVS, *CCGQA, *SPARSE])
def test_no_token_of_a_hybrid_model_reaches_another_example(family, share):
    policy = tiny_policy(family, torch.float32)
    examples = random_examples(SHAPES)

    def scores(changed: list[TokenExample]) -> torch.Tensor:
        return _scores(policy, one_pack(changed, share))

    def other(ids: np.ndarray) -> np.ndarray:
        return np.where(ids == 50, 51, 50).astype(np.int32)

    before, first = scores(examples), 0
    for place, example in enumerate(examples):
        answers = tuple(TokenAnswer(other(a.ids), a.mask) for a in example.answers)
        changed = list(examples)
        changed[place] = TokenExample(example.source, other(example.prompt_ids), answers)
        after = scores(changed)
        own = slice(first, first + len(answers))
        assert (before[own] != after[own]).all()
        keep = torch.ones(len(before), dtype=torch.bool)
        keep[own] = False
        assert torch.equal(before[keep], after[keep])
        first += len(answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*HYBRIDS, *SHORT_CONVS, *CCGQA, *SPARSE])
def test_an_answer_scores_the_same_bits_in_every_pack_and_tree(family, dtype):
    policy = Policy(tiny_model(family, torch.float32), plain(), dtype)
    examples = _forest(5)

    def scores(members: list[TokenExample], share: str) -> dict[str, list[float]]:
        batch = laid(members, share)
        logps = _scores(policy, batch)
        return {e.id: part.tolist() for e, part in zip(members, logps.split(batch.answers_per_example), strict=True)}

    first = scores(examples, "tree")
    for share in ("prompt", "none"):
        assert scores(examples, share) == first
    assert scores(examples[::-1], "tree") == first
    some = examples[:: max(2, len(examples) // 8)]  # most cuts are gone
    assert scores(some, "tree") == {example.id: first[example.id] for example in some}
