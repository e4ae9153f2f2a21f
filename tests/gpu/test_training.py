"""Steps on a GPU in bfloat16, compiled: they learn, repeat to the bit, and keep what memory allows."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
import torch

from tests.gpu.policies import CUDA, memory_model, policy_of
from tests.tiny import (
    one_pack,
    random_examples,
    random_pairs,
    scorer_of,
)
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.errors import ConfigError
from tuningfork.models.policy import Policy, picked
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.report.run.console import Console
from tuningfork.train import step as step_module
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer, move_weights, optimizer_bytes
from tuningfork.train.setup import activation_memory
from tuningfork.train.step import train_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["none", "block"])
def test_steps_learn_and_agree_however_the_batch_is_cut(mode):
    """G5 on a GPU: packs of 512 and of 2048 rows give the same gradient within bfloat16's rounding; training learns."""
    pairs = random_pairs(32, longest=40)
    config = TrainConfig(learning_rate=1e-3)
    objective = ObjectiveConfig(sft_weight=0.1).build()
    norms = []
    for tokens in (512, 2048):
        policy = policy_of("llama", torch.bfloat16)
        policy.keep_activations(mode)
        limits = PackLimits.plan(tokens, "prompt", compiled=True)
        packs = build_packs(pairs, limits)
        scorer = scorer_of(policy)
        optimizer = build_optimizer(policy.model, config)
        reference = [scorer.score(pack).cpu().numpy() for pack in packs]
        batch = StepBatch.of(packs, objective, np.concatenate(reference))
        outcomes = [train_step(scorer, objective, optimizer, batch, None) for _ in range(15)]
        margins = [outcome.statistics["rewards/margin"] for outcome in outcomes]
        assert (margins[0] == 0).all()
        assert (margins[-1] > 0).float().mean() > 0.9
        norms.append(outcomes[0].grad_norm)
    assert abs(norms[0] / norms[1] - 1) < 2e-2


def test_bfloat16_weights_learn_and_repeat_to_the_bit():
    """8-bit AdamW with stochastic rounding: margins rise, and the same seeds give the same weights."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    pairs = random_pairs(32, longest=40)
    config = TrainConfig(learning_rate=1e-3, optimizer="adamw_8bit")
    objective = ObjectiveConfig(sft_weight=0.1).build()

    def trained():
        policy = policy_of("llama", torch.bfloat16, weights=torch.bfloat16)
        scorer = scorer_of(policy)
        packs = build_packs(pairs, PackLimits.plan(2048, "prompt", compiled=True))
        reference = [scorer.score(pack).cpu().numpy() for pack in packs]
        batch = StepBatch.of(packs, objective, np.concatenate(reference))
        optimizer = build_optimizer(policy.model, config)
        outcomes = []
        for number in range(15):
            torch.manual_seed(number)
            outcomes.append(train_step(scorer, objective, optimizer, batch, 1.0))
        return policy, outcomes

    policy, outcomes = trained()
    assert (outcomes[0].statistics["rewards/margin"] == 0).all()
    assert (outcomes[-1].statistics["rewards/margin"] > 0).float().mean() > 0.9
    again, _ = trained()
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16, torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_of_a_row_that_many_answers_pick_are_added_in_order(dtype):
    """Rankings of five: as on a CPU, one addition after the other, and the same bits each time."""
    batch = one_pack(random_examples([(3, (4, 2, 6, 1, 3))] * 200), "prompt", tokens=4096)
    rows, generator = batch.logit_rows, torch.Generator().manual_seed(0)
    gradient = torch.randn(len(rows), 1024, generator=generator) * 10 ** torch.linspace(-2, 2, len(rows))[:, None]
    gradient = gradient.to(dtype)

    def of(device):
        leaf = torch.zeros(len(batch.input_ids), 1024, dtype=dtype, device=device, requires_grad=True)
        picked(leaf, rows.to(device)).backward(gradient.to(device))
        return leaf.grad.cpu()

    expected = of("cpu")
    assert all(torch.equal(of(CUDA), expected) for _ in range(10))


def test_a_step_of_rankings_has_the_same_gradient_bits_each_time():
    policy = policy_of("llama", torch.bfloat16)
    examples = random_examples([(5, (7, 9, 4, 12, 6))] * 40)
    weights = torch.linspace(-1, 2, 200, dtype=torch.float64, device=CUDA)
    batch = one_pack(examples, "prompt", tokens=2048).to(CUDA)

    def gradients():
        policy.model.zero_grad()
        scorer_of(policy, 512).backward(batch, lambda a, b, logps: (weights[a:b] * logps).sum())
        return {name: p.grad.clone() for name, p in policy.model.named_parameters()}

    first = gradients()
    for _ in range(10):
        for name, again in gradients().items():
            assert torch.equal(again, first[name]), name


def test_ways_to_keep_activations_differ_in_memory_alone():
    """Log-probs to the bit, gradients to bfloat16's rounding; and less memory."""
    torch._dynamo.reset()
    policy = Policy.fast(memory_model(), torch.bfloat16)
    policy.compile()
    batch = one_pack(random_pairs(60, longest=60, vocab=512), "prompt", tokens=8192).to(CUDA)
    weights = torch.linspace(-1, 2, len(batch.answer_lengths), dtype=torch.float64, device=CUDA)

    def run(mode):
        """Log-probs, gradients, and bytes at the peak beyond what is held anyway."""
        policy.keep_activations(mode)
        for _ in range(2):  # the first compiles
            policy.model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            _, logps = scorer_of(policy, 1024).backward(batch, lambda a, b, s: (weights[a:b] * s).sum())
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        return logps, {name: p.grad.clone() for name, p in policy.model.named_parameters()}, peak

    logps, gradients, peak = run("none")
    peaks = {"none": peak}
    for mode in ("budget:0.6", "budget:0.2", "block", "offload"):
        again, found, peaks[mode] = run(mode)
        assert torch.equal(again, logps), mode
        for name, expected in gradients.items():
            assert (found[name] - expected).norm() <= 2e-2 * expected.norm(), (mode, name)
    assert peaks["offload"] < peaks["block"] < peaks["none"] > peaks["budget:0.2"], peaks


@pytest.mark.parametrize("family", ["olmo2", "qwen3", "gemma2"])
def test_offloaded_inputs_come_back_as_they_were(family):
    """Gradients equal those of `block` to the bit, pack after pack: nothing is read before it has arrived."""
    policy = policy_of(family, torch.bfloat16)
    batches = [one_pack(random_pairs(20, seed, longest=40), "prompt", tokens=2048).to(CUDA) for seed in range(3)]

    def gradients(mode):
        policy.keep_activations(mode)
        found = []
        for _ in range(2):
            for batch in batches:
                policy.model.zero_grad()
                policy.hidden_rows(batch).float().square().sum().backward()
                found += [p.grad.clone() for block in policy.blocks for p in block.parameters()]
        return found

    assert all(torch.equal(a, b) for a, b in zip(gradients("offload"), gradients("block"), strict=True))


def test_auto_takes_what_fits(monkeypatch):
    """A small model on a large card keeps everything; with less memory it keeps less; with none, it says so."""
    torch._dynamo.reset()
    policy = Policy.fast(memory_model(), torch.bfloat16)
    policy.compile()
    limits, out, config = PackLimits.plan(8192, "prompt", compiled=True), io.StringIO(), TrainConfig()
    scorer = scorer_of(policy, 1024)

    def settle():
        activation_memory.choose_activation_memory(
            scorer, limits, partial(optimizer_bytes, config=config), Console(out)
        )
        assert all(p.grad is None for p in policy.model.parameters())
        return policy.activation_memory

    assert settle() == "none"
    dry = activation_memory.DryRun(scorer, limits, activation_memory._cuda_peak)
    states = optimizer_bytes(policy.model, config)
    most, block = (dry.peak(mode, 8192) + states for mode in ("none", "block"))
    monkeypatch.setattr(activation_memory, "_usable", lambda device: (most + block) // 2)
    assert settle().startswith("budget:")
    monkeypatch.setattr(activation_memory, "_usable", lambda device: int(1.01 * block))
    assert settle() in ("block", "budget:0.2")
    monkeypatch.setattr(activation_memory, "_usable", lambda device: states)
    with pytest.raises(ConfigError, match=r"Lower pack\.tokens"):
        settle()
    assert "GiB needed: none" in out.getvalue()


def test_a_clipped_step_is_that_of_scaled_gradients():
    """AdamW divides by the scale while it reads a gradient; its epsilon counts here, or the scale would cancel."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(CUDA) for shape in ((300, 70), (33,))]

    def moved(scale, factor=1.0):
        weights = [torch.nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
        optimizer = torch.optim.AdamW(weights, lr=0.1, eps=0.1, fused=True)
        for _ in range(2):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = factor * gradient
            move_weights(optimizer, scale)
        return weights

    ours, expected = moved(torch.tensor(0.25, device=CUDA)), moved(None, 0.25)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(ours[0], moved(None)[0], rtol=1e-3)


@pytest.mark.parametrize("limit", [None, 1e-6], ids=["", "clipped"])
def test_the_host_waits_for_the_device_only_to_read_a_steps_numbers(monkeypatch, limit):
    """Two steps by train_step itself, with PyTorch's own detector of such waits, off where the numbers are read."""
    policy = policy_of("llama", torch.bfloat16)
    scorer = scorer_of(policy, 256)
    objective = ObjectiveConfig(sft_weight=0.1).build()
    optimizer = build_optimizer(policy.model, TrainConfig())
    packs = build_packs(random_pairs(32, longest=40), PackLimits.plan(1024, "prompt", compiled=True), pin_memory=True)
    assert len(packs) > 1
    batch = StepBatch.of(packs, objective, np.full(64, -3.0), pin_memory=True)

    def one() -> None:
        train_step(scorer, objective, optimizer, batch, limit)

    one()  # compiles, and allocates the optimizer's state
    read, reads = step_module._read, []

    def unwatched(*numbers):
        torch.cuda.set_sync_debug_mode("default")
        reads.append(read(*numbers))
        torch.cuda.set_sync_debug_mode("error")
        return reads[-1]

    monkeypatch.setattr(step_module, "_read", unwatched)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one()
        one()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(reads) == 2
