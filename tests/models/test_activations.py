"""What is kept for the backward pass: the same numbers in every mode, and really not kept what is said not to be."""

from __future__ import annotations

import gc
import weakref
from itertools import product, starmap
from typing import NamedTuple

import pytest
import torch
import torch._functorch.config
from torch.nn.functional import scaled_dot_product_attention

from tests.repeated import slow
from tests.tiny import one_pack, random_examples, scorer_of, tiny_policy, with_form
from tuningfork.errors import ConfigError
from tuningfork.models.activations import budget_of, keeping
from tuningfork.models.policy import Policy

SHAPES = [(7, (5, 9)), (0, (6,)), (3, (4, 2, 8))]


def outcome(policy: Policy, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and gradients of a pack."""
    policy.model.zero_grad()
    batch = one_pack(random_examples(SHAPES, seed), "prompt")
    _, logps = scorer_of(policy).backward(batch, lambda a, b, s: (s * s).sum())
    return logps, {name: p.grad for name, p in policy.model.named_parameters()}


def assert_equal(ours: tuple, theirs: tuple) -> None:
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(ours[1][name], gradient) for name, gradient in theirs[1].items())


@pytest.mark.parametrize("mode", ["block", "offload"])
@pytest.mark.parametrize(
    "family, dtype",
    [
        *product(["llama", "olmo2", "olmo3", "qwen3", "gemma2", "gemma3", "cohere"], [torch.float32]),
        *product(["llama", "gemma2", "gemma3"], [torch.bfloat16]),
        *starmap(slow, product(["olmo2", "olmo3", "qwen3", "cohere"], [torch.bfloat16])),
    ],
)
def test_a_mode_changes_no_bit(family, mode, dtype):
    """The reference may be scored by one mode and the policy trained by another: step 0 must stay exact."""
    policy = Policy(tiny_policy(family, torch.float32).model, tiny_policy(family).kernels, dtype)
    plain = outcome(policy)
    policy.keep_activations(mode)
    assert_equal(outcome(policy), plain)
    assert_equal(outcome(policy, seed=1), outcome(policy, seed=1))
    policy.keep_activations("none")
    assert_equal(outcome(policy), plain)


@pytest.mark.parametrize(("mode", "passes"), [("none", 1), ("block", 2), ("offload", 2)])
def test_blocks_are_recomputed_in_the_backward_pass_only(mode, passes):
    policy = tiny_policy("llama", torch.float32)
    ran = []
    for place, block in enumerate(policy.blocks):
        block.mlp.register_forward_pre_hook(lambda *_, place=place: ran.append(place))
    policy.keep_activations(mode)
    hidden = policy.hidden_rows(one_pack(random_examples(SHAPES), "prompt"))
    assert ran == [0, 1, 2, 3]
    hidden.sum().backward()
    assert ran == [0, 1, 2, 3] + [3, 2, 1, 0] * (passes - 1)


@pytest.mark.parametrize(("mode", "held"), [("none", 4), ("block", 4), ("offload", 0)])
def test_offload_holds_no_input_of_a_block_after_the_forward_pass(mode, held):
    policy = tiny_policy("llama", torch.float32)
    policy.keep_activations(mode)
    inputs = []
    for block in policy.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    hidden = policy.hidden_rows(one_pack(random_examples(SHAPES), "prompt"))
    gc.collect()
    assert len(inputs) == 4 and sum(known() is not None for known in inputs) == held
    hidden.sum().backward()


def test_offload_leaves_nothing_behind(monkeypatch):
    """After the backward pass, or when a forward pass is thrown away, no copy in host memory is left."""
    from tuningfork.models import offload

    kept = weakref.WeakSet()

    class Watched(offload._Kept):
        def __init__(self, *args):
            super().__init__(*args)
            kept.add(self)

    monkeypatch.setattr(offload, "_Kept", Watched)
    policy = tiny_policy("llama", torch.float32)
    policy.keep_activations("offload")
    batch = one_pack(random_examples(SHAPES), "prompt")
    for backward in (True, False):
        hidden = policy.hidden_rows(batch)
        assert len(kept) == 4
        if backward:
            hidden.sum().backward()
        del hidden
        gc.collect()
        assert len(kept) == 0


def test_offload_keeps_forward_passes_apart():
    """Two graphs at a time, and one that is asked for its gradient twice."""
    policy = tiny_policy("llama", torch.float32)
    batches = [one_pack(random_examples(SHAPES, seed), "prompt") for seed in (0, 1)]

    def gradient(hidden: torch.Tensor, again: bool = False) -> torch.Tensor:
        first = next(iter(policy.blocks)).mlp.up_proj.weight
        return torch.autograd.grad(hidden.square().sum(), first, retain_graph=again)[0]

    plain = [gradient(policy.hidden_rows(batch)) for batch in batches]
    policy.keep_activations("offload")
    one, two = (policy.hidden_rows(batch) for batch in batches)
    assert torch.equal(gradient(one, again=True), plain[0])
    assert torch.equal(gradient(two), plain[1])
    assert torch.equal(gradient(one), plain[0])
    with torch.no_grad():
        assert torch.equal(policy.hidden_rows(batches[0]), one)


class Simple(NamedTuple):
    """Attention that is quickly traced, where only the blocks around it matter: every row sees all before it."""

    position_of_row: torch.Tensor

    @classmethod
    def prepare(cls, layout):
        return cls(layout.position_of_row)

    def attend(self, query, key, value, *, scale, window, softcap):
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1)


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_budget_holds_while_its_blocks_are_compiled_and_only_then(monkeypatch):
    """With the code generator left out, which takes minutes on a CPU; the partition into passes is the real one."""
    import torch._inductor.compile_fx
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    budgets = []
    partition = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=min_cut_rematerialization_partition)

    def compile_fx(graph, inputs, config_patches=None):
        assert torch._functorch.config.is_non_builtin_to_include
        budgets.append(torch._functorch.config.activation_memory_budget)
        return partition(graph, inputs)

    def run() -> tuple[int, tuple]:
        """Bytes kept for the backward pass, and the outcome."""
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            numbers = outcome(policy)
        return sum(kept), numbers

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    policy = tiny_policy("llama", torch.float32, with_form("attention", Simple))
    numbers = outcome(policy)
    policy.compile()
    taken = {}
    for budget in (0.9, 0.1, 0.9):
        policy.keep_activations(f"budget:{budget}")
        assert torch._functorch.config.activation_memory_budget == 1.0
        taken[budget], again = run()
        assert torch._functorch.config.activation_memory_budget == 1.0
        torch.testing.assert_close(again[0], numbers[0], rtol=1e-6, atol=1e-5)
        for name, gradient in numbers[1].items():
            assert (again[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    assert list(dict.fromkeys(budgets)) == [0.9, 0.1] and budgets[-1] == 0.1  # 0.9 was still there
    assert taken[0.9] > 1.3 * taken[0.1]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("mode", "budget"),
    [("none", None), ("block", None), ("offload", None), ("auto", None), ("budget:0", 0.0), ("budget:.25", 0.25),
     ("budget:0.5", 0.5), ("budget:1", 1.0), ("budget:1.0", 1.0)],
)  # fmt: skip
def test_modes(mode, budget):
    assert budget_of(mode) == budget


@pytest.mark.parametrize("mode", ["", "None", "blocks", "budget", "budget:", "budget:1.5", "budget:-1", "budget:0.5\n"])
def test_there_are_no_other_modes(mode):
    with pytest.raises(ConfigError, match=r"train\.activation_memory is .*allowed: none, block, budget:<0\.\.1>"):
        tiny_policy("llama").keep_activations(mode)


def test_a_budget_needs_the_compiler():
    policy = tiny_policy("llama")
    with pytest.raises(ConfigError, match=r"budget:0.5, .*Set model\.compile to on"):
        policy.keep_activations("budget:0.5")
    assert policy.activation_memory == "none"


def test_auto_is_no_way_to_keep_anything():
    with pytest.raises(ValueError, match="stands for another"):
        keeping("auto", [])
