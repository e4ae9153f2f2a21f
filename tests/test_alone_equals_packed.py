"""Gates G1, G2, G3: a packed, shared example is that example alone, in value and gradient, and leaks nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.forests import laid, random_forest
from tests.repeated import slow
from tests.tiny import FAMILIES, VOCAB, one_pack, random_examples, score_alone, scorer_of, tiny_model, tiny_policy
from tuningfork.data.packing.tree import Share
from tuningfork.kernels.select import plain
from tuningfork.models.policy import Policy
from tuningfork.records import TokenAnswer, TokenExample

# Ragged lengths; one, two and three answers; an empty prompt; answers of one token; a prompt of one token.
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (0, (3, 5)), (9, (1, 1)), (4, (11,)), (17, (13, 20))]


def _weighted_alone(policy, examples, weights):
    """The truth of a weighted sum of answer log-probs, with gradients in the model."""
    sums = [s for example in examples for s in score_alone(policy.model, example)]
    total = sum(w * s for w, s in zip(weights, sums, strict=True))
    return torch.stack([s.detach() for s in sums]), total


def _gradients(policy, total):
    policy.model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def _packed(policy, batch, weights, chunk_rows):
    policy.model.zero_grad()
    loss, logps = scorer_of(policy, chunk_rows).backward(batch, lambda a, b, logps: (weights[a:b] * logps).sum())
    return logps, loss, {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def _scores(policy, batch, chunk_rows=8192):
    return scorer_of(policy, chunk_rows).score(batch)


def _assert_same_gradients(policy, truth, ours, relative):
    for name, expected in truth.items():
        # Error against the size of the whole tensor: single entries may cancel to nothing.
        error = (ours[name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < relative, f"{name}: {error:.2e}"


@pytest.mark.parametrize("share", ["prompt", "none", "tree"], ids=["shared", "unshared", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_packed_equals_alone(family, share):
    policy = tiny_policy(family)
    examples = random_examples(SHAPES, holes=True)
    batch = one_pack(examples, share)
    weights = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64)

    expected, truth = _weighted_alone(policy, examples, weights)
    truth_gradients = _gradients(policy, truth)
    logps, loss, gradients = _packed(
        policy, batch, weights, chunk_rows=16
    )  # several chunks, some examples larger than one

    torch.testing.assert_close(logps, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, truth.detach(), rtol=1e-6, atol=1e-6)
    # transformers computes norms, rotary embeddings and softmax in float32 whatever the dtype: 1e-6 is its rounding.
    _assert_same_gradients(policy, truth_gradients, gradients, relative=1e-6)
    assert (policy.head_bias is not None) == (family == "phi")  # whose gradient is among them
    torch.testing.assert_close(_scores(policy, batch, 16), logps)


@pytest.mark.parametrize("share", ["prompt", "none", "tree"], ids=["shared", "unshared", "tree"])
@pytest.mark.parametrize("family", ["llama", "olmo3", "gemma2"])
def test_a_pack_filled_to_the_last_row_equals_alone(family, share):
    policy = tiny_policy(family)
    examples = random_examples(SHAPES, holes=True)
    batch = one_pack(examples, share, tokens=one_pack(examples, share).used_slots)
    assert batch.used_slots == len(batch.input_ids)
    weights = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64)

    expected, truth = _weighted_alone(policy, examples, weights)
    truth_gradients = _gradients(policy, truth)
    logps, _, gradients = _packed(policy, batch, weights, chunk_rows=8192)

    torch.testing.assert_close(logps, expected, rtol=1e-6, atol=1e-6)
    _assert_same_gradients(policy, truth_gradients, gradients, relative=1e-6)


@pytest.mark.parametrize("share", ["prompt", "none", "tree"], ids=["shared", "unshared", "tree"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "olmo3", "mistral", "gemma2", "phi"])
def test_float32_packed_equals_alone(family, share):
    policy = tiny_policy(family, torch.float32)
    examples = random_examples(SHAPES, holes=True)
    batch = one_pack(examples, share)
    weights = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64)

    expected, truth = _weighted_alone(policy, examples, weights)
    truth_gradients = _gradients(policy, truth)
    logps, _, gradients = _packed(policy, batch, weights, chunk_rows=8192)

    torch.testing.assert_close(logps.float(), expected, rtol=1e-5, atol=1e-5)
    _assert_same_gradients(policy, truth_gradients, gradients, relative=2e-5)


@pytest.mark.parametrize("share", ["prompt", "none", "tree"], ids=["shared", "unshared", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_reaches_another_example(family, share):
    """G3: change every token of one example; not a bit of any other example changes."""
    policy = tiny_policy(family, torch.float32)
    examples = random_examples(SHAPES)

    def scores(changed: list[TokenExample]) -> torch.Tensor:
        batch = one_pack(changed, share)
        return _scores(policy, batch)

    before = scores(examples)
    first = 0
    for place, example in enumerate(examples):
        other = lambda ids: np.where(ids == 50, 51, 50).astype(np.int32)  # noqa: E731
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


def test_one_answer_does_not_see_the_other():
    """G3 within an example: changing the rejected answer changes no bit of the chosen one's log-prob."""
    policy = tiny_policy("olmo3", torch.float32)
    [example] = random_examples([(7, (5, 9))])
    rejected = TokenAnswer((example.answers[1].ids % 50 + 3).astype(np.int32), example.answers[1].mask)
    changed = TokenExample(example.source, example.prompt_ids, (example.answers[0], rejected))
    scores = []
    for one in (example, changed):
        batch = one_pack([one], share="prompt")
        scores.append(_scores(policy, batch))
    assert scores[0][0] == scores[1][0]
    assert scores[0][1] != scores[1][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "olmo3", "gemma2"])
def test_an_answer_scores_the_same_bits_at_any_place_with_the_prompt_shared_or_repeated(family, dtype):
    policy = Policy(tiny_model(family, torch.float32), plain(), dtype)
    examples = random_examples([(7, (5, 9)), (12, (8, 2, 4)), (0, (3, 5)), (30, (17, 40)), (9, (6, 6))])
    turned = [TokenExample(e.source, e.prompt_ids, e.answers[::-1]) for e in examples]

    def scores(members: list[TokenExample], share: Share) -> dict[str, list[float]]:
        batch = one_pack(members, share, tokens=320)
        logps = _scores(policy, batch)
        return {e.id: part.tolist() for e, part in zip(members, logps.split(batch.answers_per_example), strict=True)}

    first = scores(examples, "prompt")
    for share in ("tree", "prompt", "none"):
        assert scores(examples[::-1], share) == first
        assert scores(turned, share) == {name: logps[::-1] for name, logps in first.items()}


def _forest(seed: int) -> list[TokenExample]:
    """Examples whose paths part at, before and behind multiples of 32 and 64, in a tiny model's vocabulary."""

    def small(ids: np.ndarray) -> np.ndarray:
        return (ids % (VOCAB - 3) + 3).astype(np.int32)

    return [
        replace(
            example,
            prompt_ids=small(example.prompt_ids),
            answers=tuple(replace(answer, ids=small(answer.ids)) for answer in example.answers),
        )
        for example in random_forest(seed, roots=1, depth=5, longest=150)
    ]


@pytest.mark.parametrize(
    "family", [slow(name) if name in {"mistral", "qwen2", "phi", "olmo2", "cohere"} else name for name in FAMILIES]
)
def test_a_deep_tree_equals_its_sequences_alone(family):
    examples = _forest(2)
    policy = tiny_policy(family)
    batch = laid(examples, "tree")
    assert batch.used_slots < sum(example.unique_tokens for example in examples) / 2
    weights = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64)
    expected, truth = _weighted_alone(policy, examples, weights)
    truth_gradients = _gradients(policy, truth)
    logps, loss, gradients = _packed(policy, batch, weights, chunk_rows=16)
    torch.testing.assert_close(logps, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, truth.detach(), rtol=1e-6, atol=1e-6)
    _assert_same_gradients(policy, truth_gradients, gradients, relative=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_scores_the_same_bits_in_every_tree(family, dtype):
    """Whatever is laid once, whatever cuts its path, and in whatever order its neighbours come."""
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
