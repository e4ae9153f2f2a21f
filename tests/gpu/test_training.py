"""The whole path on a GPU in bfloat16, compiled: exact bits at step 0, no leak, right gradients, a run end to end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny import FAMILIES, head_of, one_pack, random_examples, random_pairs, score_alone, tiny_model
from tuningfork.data.loader import build_packs
from tuningfork.data.pack import PackLimits
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.head import Head
from tuningfork.objective.objectives import PreferenceObjective
from tuningfork.records import TokenAnswer, TokenExample
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.step import train_step

pytestmark = pytest.mark.gpu
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (0, (3, 5)), (9, (1, 1)), (17, (13, 20))]
CUDA = torch.device("cuda")


def _policy(family: str, dtype: torch.dtype, compiled: bool = True) -> Policy:
    torch._dynamo.reset()
    model = tiny_model(family, torch.float32).to(CUDA)
    policy = Policy.fast(model, dtype)
    if compiled:
        policy.compile()
    return policy


def _packed(policy, examples, weights, share_prompt):
    batch = one_pack(examples, share_prompt).to(CUDA)
    policy.model.zero_grad()
    _, logps = head_of(policy, 64).backward(
        policy.hidden_rows(batch), policy.head_weight, batch, lambda a, b, logps: (weights[a:b] * logps).sum()
    )
    return logps, {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def _alone(policy, examples, weights, autocast):
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        sums = torch.stack([s for example in examples for s in score_alone(policy.model, example)])
    policy.model.zero_grad()
    (weights * sums).sum().backward()
    return sums.detach(), {name: p.grad.clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("family,share_prompt", [*((f, True) for f in FAMILIES), ("olmo3", False), ("gemma2", False)])
def test_packed_equals_alone(family, share_prompt):
    """G1, G2 on a GPU: no further from the float32 truth than twice plain transformers in bfloat16, per quantity."""
    policy = _policy(family, torch.bfloat16)
    examples = random_examples(SHAPES, holes=True)
    count = sum(len(e.answers) for e in examples)
    weights = torch.linspace(-1, 2, count, dtype=torch.float64, device=CUDA)
    truth, truth_grads = _alone(policy, examples, weights, autocast=False)
    plain, plain_grads = _alone(policy, examples, weights, autocast=True)
    ours, our_grads = _packed(policy, examples, weights, share_prompt)
    assert (ours - truth).norm() <= 2 * (plain - truth).norm()
    for name, expected in truth_grads.items():
        allowed = 2 * (plain_grads[name] - expected).norm()
        assert (our_grads[name] - expected).norm() <= allowed, name


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_float32_packed_equals_alone(family):
    policy = _policy(family, torch.float32)
    examples = random_examples(SHAPES)
    weights = torch.linspace(-1, 2, sum(len(e.answers) for e in examples), dtype=torch.float64, device=CUDA)
    truth, truth_grads = _alone(policy, examples, weights, autocast=False)
    ours, our_grads = _packed(policy, examples, weights, share_prompt=True)
    torch.testing.assert_close(ours, truth.double(), rtol=1e-5, atol=1e-4)
    for name, expected in truth_grads.items():
        assert (our_grads[name] - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.parametrize("family", ["llama", "olmo2", "olmo3", "gemma2"])
def test_the_same_bits_in_any_pack(family):
    """An example's log-probs keep their bits in another order, batch, pack size and chunk, and with
    prompts repeated: what makes a margin of exactly 0 possible."""
    policy = _policy(family, torch.bfloat16)
    pairs = random_pairs(100, longest=60)

    def scores(examples, tokens, chunk_rows=8192, share_prompt=True):
        limits = PackLimits.plan(tokens, share_prompt, compiled=True)
        found = {}
        for pack in build_packs(examples, limits):
            batch = pack.to(CUDA)
            hidden = policy.hidden_rows(batch).detach()
            logps = Head(policy.kernels, policy.transform, chunk_rows).score(hidden, policy.head_weight, batch)
            for example, row in zip(pack.examples, logps.view(-1, 2).tolist(), strict=True):
                found[example.id] = row
        return found

    first = scores(pairs, 2048)
    assert scores(pairs[::-1], 2048) == first
    assert scores(pairs, 1024, chunk_rows=100) == first
    assert scores(pairs[:7], 2048) == {e.id: first[e.id] for e in pairs[:7]}
    assert scores(pairs, 2048, share_prompt=False) == first


@pytest.mark.parametrize("family", ["llama", "olmo3", "gemma2"])
def test_no_token_reaches_another_example(family):
    """G3 on a GPU: change one example; not a bit of any other changes."""
    policy = _policy(family, torch.bfloat16)
    examples = random_examples(SHAPES)

    def scores(changed):
        batch = one_pack(changed, share_prompt=True).to(CUDA)
        with torch.no_grad():
            return head_of(policy).score(policy.hidden_rows(batch), policy.head_weight, batch)

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


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_steps_learn_and_agree_however_the_batch_is_cut(checkpointing):
    """G5 on a GPU: packs of 512 and of 2048 rows give the same gradient within bfloat16's rounding; training learns."""
    pairs = random_pairs(32, longest=40)
    config = TrainConfig(learning_rate=1e-3)
    objective = PreferenceObjective(ObjectiveConfig(sft_weight=0.1))
    norms = []
    for tokens in (512, 2048):
        policy = _policy("llama", torch.bfloat16, compiled=False)
        if checkpointing:
            policy.checkpoint_activations()
        policy.compile()
        limits = PackLimits.plan(tokens, True, compiled=True)
        packs = build_packs(pairs, limits)
        head = Head(policy.kernels, policy.transform, 8192)
        optimizer = build_optimizer(policy.model, config)
        reference = [head.score(policy.hidden_rows(b).detach(), policy.head_weight, b).cpu().numpy()
                     for b in (p.to(CUDA) for p in packs)]  # fmt: skip
        outcomes = [train_step(policy, head, objective, optimizer, packs, reference, None) for _ in range(15)]
        margin = outcomes[-1].rewards[:, 0] - outcomes[-1].rewards[:, 1]
        assert (outcomes[0].rewards == 0).all()
        assert (margin > 0).float().mean() > 0.9
        norms.append(outcomes[0].grad_norm)
    assert abs(norms[0] / norms[1] - 1) < 2e-2
