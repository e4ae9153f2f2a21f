"""On a GPU in bfloat16, compiled: what lies beside an example decides no bit of it, and its numbers are right."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench import shapes
from tests.gpu.policies import CUDA, alone, packed, policy_of
from tests.tiny import (
    CCGQA,
    FAMILIES,
    HYBRIDS,
    SHORT_CONVS,
    SPARSE,
    one_pack,
    random_examples,
    random_pairs,
    scorer_of,
)
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.models.compilations import Compilations
from tuningfork.models.policy import Policy
from tuningfork.records import TokenAnswer, TokenExample

pytestmark = pytest.mark.gpu
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (0, (3, 5)), (9, (1, 1)), (17, (13, 20))]


@pytest.mark.parametrize(
    "family,share", [*((f, True) for f in (*FAMILIES, *HYBRIDS, *SHORT_CONVS)), ("olmo3", False), ("gemma2", False)]
)
def test_packed_equals_alone(family, share):
    """G1, G2 on a GPU: no further from the float32 truth than twice plain transformers in bfloat16, per quantity."""
    policy = policy_of(family, torch.bfloat16)
    examples = random_examples(SHAPES, holes=True)
    count = sum(len(e.answers) for e in examples)
    weights = torch.linspace(-1, 2, count, dtype=torch.float64, device=CUDA)
    truth, truth_grads = alone(policy, examples, weights, autocast=False)
    plain, plain_grads = alone(policy, examples, weights, autocast=True)
    ours, our_grads = packed(policy, examples, weights, share)
    assert (ours - truth).norm() <= 2 * (plain - truth).norm()
    truth_of, plain_of, ours_of = map(_by_kind, (truth_grads, plain_grads, our_grads))
    for kind, expected in truth_of.items():
        assert (ours_of[kind] - expected).norm() <= 2 * (plain_of[kind] - expected).norm(), kind


def _by_kind(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All layers' of a kind of weight together: of one layer's four numbers rounding may be little by chance."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(gradient.flatten())
    return {kind: torch.cat(of_layers) for kind, of_layers in kinds.items()}


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_float32_packed_equals_alone(family):
    policy = policy_of(family, torch.float32)
    examples = random_examples(SHAPES)
    weights = torch.linspace(-1, 2, sum(len(e.answers) for e in examples), dtype=torch.float64, device=CUDA)
    truth, truth_grads = alone(policy, examples, weights, autocast=False)
    ours, our_grads = packed(policy, examples, weights, share="prompt")
    torch.testing.assert_close(ours, truth.double(), rtol=1e-5, atol=1e-4)
    for name, expected in truth_grads.items():
        assert (our_grads[name] - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        *((family, {}) for family in ("llama", "olmo2", "olmo3", "gemma2", *HYBRIDS, "lfm2", *SPARSE, *CCGQA)),
        ("llama", {"weights": torch.bfloat16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_same_bits_in_any_pack(family, kept):
    _check_the_same_bits_in_any_pack(policy_of(family, torch.bfloat16, **kept))


@pytest.mark.parametrize("shape", ["olmo_hybrid_7b", "olmo2_1b", "m7c-125m", "hydra-100m"])
def test_the_same_bits_in_any_pack_at_a_released_width(shape):
    """Of products with thousands of inputs and few outputs a library cuts the sums, unless it is kept from it."""
    torch._dynamo.reset()
    policy = Policy.fast(shapes.build(shape, CUDA, layers=4), torch.bfloat16)
    policy.compile()
    _check_the_same_bits_in_any_pack(policy)


def _check_the_same_bits_in_any_pack(policy):
    """An example's log-probs keep their bits in another order, batch, pack size and chunk, and with prompts repeated:
    what makes a margin of exactly 0 possible."""
    pairs = random_pairs(100, longest=60)
    # Half of them go on from others' prompts and answers, so that trees are deep and cut anywhere.
    for n in range(50, 100):
        before, own = pairs[n - 50 if n % 3 else n - 1], pairs[n]
        history = np.concatenate([before.prompt_ids, before.answers[n % 2].ids[: n % 40 or None]])
        pairs[n] = replace(own, prompt_ids=np.concatenate([history, own.prompt_ids])[:500])

    def scores(examples, tokens, chunk_rows=8192, share="prompt"):
        limits = PackLimits.plan(tokens, share, compiled=True)
        found = {}
        for pack in build_packs(examples, limits):
            logps = scorer_of(policy, chunk_rows).score(pack)
            for example, row in zip(pack.examples, logps.view(-1, 2).tolist(), strict=True):
                found[example.id] = row
        return found

    first = scores(pairs, 2048)
    assert scores(pairs[::-1], 2048) == first
    assert scores(pairs, 1024, chunk_rows=100) == first
    assert scores(pairs[:7], 2048) == {e.id: first[e.id] for e in pairs[:7]}
    assert scores(pairs, 2048, share="none") == first
    assert scores(pairs, 2048, share="tree") == scores(pairs[::-1], 8192, share="tree") == first


def test_what_a_pack_follows_decides_no_bit_of_its_gradient():
    """A run that scores held-out pairs between its steps trains as one that scores none."""
    lengths = [(9, (30, 40)), (5, (8, 60)), (17, (23, 20))]
    packs = [random_examples(lengths * n) for n in (3, 2, 5, 8)]  # tables of 32 to 96 entries; a seam is 32 wide
    weights = torch.linspace(-1, 2, 500, dtype=torch.float64, device=CUDA)

    def gradients(places):
        policy = policy_of("llama", torch.bfloat16, weights=torch.bfloat16)
        return {place: packed(policy, packs[place], weights, share="prompt") for place in places}

    one = gradients([0, 1, 2, 3])
    compilations = Compilations()
    other = gradients([0, 3, 2, 1])
    graphs = [str(what) for what in compilations.taken() if what.what.startswith("graph ")]
    assert len(graphs) == 1, graphs  # one kind of block
    for place, (logps, grads) in other.items():
        assert torch.equal(logps, one[place][0])
        assert [name for name, grad in grads.items() if not torch.equal(grad, one[place][1][name])] == []


@pytest.mark.parametrize("family", ["llama", "olmo3", "gemma2", *HYBRIDS, "lfm2", *SPARSE, *CCGQA])
def test_no_token_reaches_another_example(family):
    """G3 on a GPU: change one example; not a bit of any other changes. Two are so long that sparse rows choose."""
    policy = policy_of(family, torch.bfloat16)
    examples = random_examples([*SHAPES, (70, (40, 20)), (5, (90, 75))])

    def scores(changed):
        batch = one_pack(changed, share="prompt", tokens=512).to(CUDA)
        return scorer_of(policy).score(batch)

    other = lambda ids: np.where(ids == 50, 51, 50).astype(np.int32)  # noqa: E731
    before, first = scores(examples), 0
    for place, example in enumerate(examples):
        answers = tuple(TokenAnswer(other(a.ids), a.mask) for a in example.answers)
        after = scores([*examples[:place], TokenExample(example.source, other(example.prompt_ids), answers),
                        *examples[place + 1 :]])  # fmt: skip
        keep = torch.ones(len(before), dtype=torch.bool)
        keep[first : first + len(answers)] = False
        assert torch.equal(before[keep], after[keep])
        assert not torch.equal(before[~keep], after[~keep])
        first += len(answers)
