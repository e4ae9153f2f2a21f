"""The whole path on a GPU in bfloat16, compiled: exact bits at step 0, no leak, right gradients, steps that learn."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers

from tests.tiny import (
    CCGQA,
    FAMILIES,
    HYBRIDS,
    SHORT_CONVS,
    SPARSE,
    one_pack,
    random_examples,
    random_pairs,
    score_alone,
    scorer_of,
    tiny_gpt_oss,
    tiny_model,
)
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.packing.tree import Share
from tuningfork.errors import ConfigError, ModelError
from tuningfork.models import compiler
from tuningfork.models.compilations import Compilations
from tuningfork.models.hf import attention
from tuningfork.models.hf.load import hold_weights
from tuningfork.models.policy import Policy, picked
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import TokenAnswer, TokenExample
from tuningfork.report.run.console import Console
from tuningfork.train import step as step_module
from tuningfork.train.batch import StepBatch
from tuningfork.train.checks.head_check import check_head
from tuningfork.train.checks.kernel_check import KernelCheck
from tuningfork.train.checks.rounding import rounded_products
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer, hold_gradients, move_weights, optimizer_bytes
from tuningfork.train.setup import activation_memory
from tuningfork.train.step import train_step

pytestmark = pytest.mark.gpu
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (0, (3, 5)), (9, (1, 1)), (17, (13, 20))]
CUDA = torch.device("cuda")


def _policy(family: str, dtype: torch.dtype, compiled: bool = True, weights: torch.dtype = torch.float32) -> Policy:
    torch._dynamo.reset()
    # The tiny models' matrices are below what is ever held in bfloat16.
    model = tiny_model(family, torch.float32).to(CUDA) if weights == torch.float32 else _memory_model()
    hold_weights(model, weights)
    policy = Policy.fast(model, dtype)
    if compiled:
        policy.compile()
    return policy


def _packed(policy, examples, weights, share):
    batch = one_pack(examples, share).to(CUDA)
    policy.model.zero_grad()
    _, logps = scorer_of(policy, 64).backward(batch, lambda a, b, logps: (weights[a:b] * logps).sum())
    return logps, {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def _alone(policy, examples, weights, autocast):
    """By plain transformers, in bfloat16 with autocast; a class's own scan would compute in float32 even so. Its loop
    over the rows of a chunk would be minutes of work for the compiler, who has the model's blocks."""
    policy.model.zero_grad()
    with (
        torch.compiler.set_stance("force_eager"),
        rounded_products(torch.bfloat16) if autocast else nullcontext(),
    ):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            sums = torch.stack([s for example in examples for s in score_alone(policy.model, example)])
        (weights * sums).sum().backward()
    return sums.detach(), {name: p.grad.clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize(
    "family,share", [*((f, True) for f in (*FAMILIES, *HYBRIDS, *SHORT_CONVS)), ("olmo3", False), ("gemma2", False)]
)
def test_packed_equals_alone(family, share):
    """G1, G2 on a GPU: no further from the float32 truth than twice plain transformers in bfloat16, per quantity."""
    policy = _policy(family, torch.bfloat16)
    examples = random_examples(SHAPES, holes=True)
    count = sum(len(e.answers) for e in examples)
    weights = torch.linspace(-1, 2, count, dtype=torch.float64, device=CUDA)
    truth, truth_grads = _alone(policy, examples, weights, autocast=False)
    plain, plain_grads = _alone(policy, examples, weights, autocast=True)
    ours, our_grads = _packed(policy, examples, weights, share)
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
    policy = _policy(family, torch.float32)
    examples = random_examples(SHAPES)
    weights = torch.linspace(-1, 2, sum(len(e.answers) for e in examples), dtype=torch.float64, device=CUDA)
    truth, truth_grads = _alone(policy, examples, weights, autocast=False)
    ours, our_grads = _packed(policy, examples, weights, share="prompt")
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
    """An example's log-probs keep their bits in another order, batch, pack size and chunk, and with
    prompts repeated: what makes a margin of exactly 0 possible."""
    policy = _policy(family, torch.bfloat16, **kept)
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
    shapes = [(9, (30, 40)), (5, (8, 60)), (17, (23, 20))]
    packs = [random_examples(shapes * n) for n in (3, 2, 5, 8)]  # tables of 32 to 96 entries; a seam is 32 wide
    weights = torch.linspace(-1, 2, 500, dtype=torch.float64, device=CUDA)

    def gradients(places):
        policy = _policy("llama", torch.bfloat16, weights=torch.bfloat16)
        return {place: _packed(policy, packs[place], weights, share="prompt") for place in places}

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
    policy = _policy(family, torch.bfloat16)
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


def _checked(family: str, dtype: torch.dtype, share: Share = "prompt", factor: float = 1.0) -> None:
    """The check of kernels at a start, with attention whose scale is wrong by a factor."""
    policy = _policy(family, dtype, compiled=False)
    kind = policy.kernels["attention"]

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def attend(self, *args, scale, **how):
            return super().attend(*args, scale=scale * factor, **how)

    if factor != 1.0:
        policy.kernels = replace(policy.kernels, forms={**policy.kernels.forms, "attention": Scaled})
    check_head(scorer_of(policy, 64), "here")
    check = KernelCheck.begin(policy, "here", share, compiling=True)
    policy.compile()
    check.compare(policy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *SHORT_CONVS, *SPARSE, *CCGQA])
def test_the_check_at_a_start_takes_our_kernels_for_right(family, dtype):
    _checked(family, dtype)


def test_the_check_at_a_start_takes_them_for_right_with_repeated_prompts():
    _checked("gemma3", torch.bfloat16, share="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_a_start_finds_a_wrong_scale(dtype):
    with pytest.raises(ModelError, match="here: attention kernel fork, call 1"):
        _checked("llama", dtype, factor=1.1)


@pytest.mark.parametrize("mode", ["none", "budget:0.4", "block", "offload"])
@pytest.mark.parametrize(
    ("family", "weights"), [("llama", torch.float32), ("llama", torch.bfloat16), ("olmo_hybrid", torch.float32)]
)
def test_the_check_at_a_start_takes_gradients_of_weights_for_right_however_they_are_kept(family, weights, mode):
    policy = _policy(family, torch.bfloat16, compiled=False, weights=weights)
    if weights == torch.bfloat16:
        hold_gradients(policy.model, TrainConfig(gradient_dtype="float32"))
    check = KernelCheck.begin(policy, "here", True, compiling=True)
    policy.compile()
    policy.keep_activations(mode)
    check.compare(policy)
    assert all(weight.grad is None for weight in policy.model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_check_at_a_start_takes_sinks_and_experts_for_right(dtype):
    policy = Policy.fast(tiny_gpt_oss().to(CUDA), dtype)
    KernelCheck.begin(policy, "here", True, compiling=False).compare(policy)


class _Doubling(compiler.Float32WeightGradients):
    """Rewrites gradients of weights as it should, and then takes them for twice what they are."""

    def __call__(self, graph):
        super().__call__(graph)
        for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.dtype):
            with graph.inserting_after(product):
                twice = graph.call_function(torch.ops.aten.mul.Scalar, (product, 2.0))
            twice.meta = dict(product.meta)
            product.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)

    def uuid(self):
        return "doubling"


def test_the_check_at_a_start_finds_a_pass_over_graphs_that_spoils_gradients_of_weights(monkeypatch):
    policy = _policy("llama", torch.bfloat16, compiled=False)
    check = KernelCheck.begin(policy, "here", True, compiling=True)
    monkeypatch.setattr(compiler, "options", lambda *_: {"post_grad_custom_pre_pass": _Doubling()})
    policy.compile()
    with pytest.raises(ModelError, match=r"the compiled blocks: gradients of model\.layers\.\*\.\S+_proj\.weight are"):
        check.compare(policy)


@pytest.mark.parametrize("mode", ["none", "block"])
def test_steps_learn_and_agree_however_the_batch_is_cut(mode):
    """G5 on a GPU: packs of 512 and of 2048 rows give the same gradient within bfloat16's rounding; training learns."""
    pairs = random_pairs(32, longest=40)
    config = TrainConfig(learning_rate=1e-3)
    objective = ObjectiveConfig(sft_weight=0.1).build()
    norms = []
    for tokens in (512, 2048):
        policy = _policy("llama", torch.bfloat16)
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
        policy = _policy("llama", torch.bfloat16, weights=torch.bfloat16)
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
    policy = _policy("llama", torch.bfloat16)
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


def _memory_model():
    """Blocks that weigh more than the head and the embeddings: 8 of them."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, dtype=torch.float32
    ).to(CUDA)


def test_ways_to_keep_activations_differ_in_memory_alone():
    """Log-probs to the bit, gradients to bfloat16's rounding; and less memory."""
    torch._dynamo.reset()
    policy = Policy.fast(_memory_model(), torch.bfloat16)
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
    policy = _policy(family, torch.bfloat16)
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
    policy = Policy.fast(_memory_model(), torch.bfloat16)
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
    policy = _policy("llama", torch.bfloat16)
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
