"""Kernels and compiled blocks beside the plain ones: what is wrong is named, what only rounds otherwise passes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.repeated import slow
from tests.tiny import FAMILIES, VOCAB, limits_of, scorer_of, tiny_gpt_oss, tiny_model, with_form
from tuningfork.errors import ModelError
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.select import Kernels, plain
from tuningfork.models import activations
from tuningfork.models.hf.load import Loaded
from tuningfork.models.mixers.attention import Attention, AttentionLayer
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.report.run.console import Console
from tuningfork.train import checkpoint
from tuningfork.train.checks import kernel_check
from tuningfork.train.checks.kernel_check import KernelCheck
from tuningfork.train.checks.self_check import probes, untried
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import hold_gradients
from tuningfork.train.session import Session
from tuningfork.train.setup.model import choose_activations

DTYPES = [torch.float32, torch.bfloat16]


def attention_of(attend: Callable[..., Any]) -> Kernels:
    """Kernels whose attention is another function of the plain one's arguments."""

    class Other(PlainAttention):
        def attend(self, *args: Any, **how: Any) -> torch.Tensor:
            return attend(super().attend, *args, **how)

    return replace(with_form("attention", Other), names={"attention": "other", "row_logps": "other"})


def begun(kernels: Kernels, family: str = "llama", dtype: torch.dtype = torch.float32, share: str = "tree"):
    policy = Policy(tiny_model(family, torch.float32), kernels, dtype)
    return policy, KernelCheck.begin(policy, "here", share, compiling=False)


def finely(plain_attend, q, k, v, **how):
    """Attention as it should be, rounded at another place: once, at the end."""
    return plain_attend(q.double(), k.double(), v.double(), **how).to(q.dtype)


def coarsely(plain_attend, q, k, v, **how):
    """Keys and values read in another order of heads, and scaled in front of the product: rounded at other places."""
    scale = how.pop("scale")
    return plain_attend(q * scale**0.5, k * scale**0.5, v, scale=1.0, **how)


def test_a_model_that_scales_its_embedded_tokens_in_place_is_checked(monkeypatch):
    """As CTRL does."""
    forward = LlamaRotaryEmbedding.forward

    def scaling(self, embedded, *args, **how):
        embedded *= 2.0
        return forward(self, embedded, *args, **how)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", scaling)
    policy, check = begun(attention_of(finely))
    check.compare(policy)


@pytest.mark.parametrize("right", [finely, coarsely])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_that_only_round_otherwise_pass(family, dtype, right):
    policy, check = begun(attention_of(right), family, dtype)
    state = torch.get_rng_state()
    check.compare(policy)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None and weight.requires_grad for weight in policy.model.parameters())


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


WRONG = {
    "scale": lambda attend, q, k, v, *, scale, **how: attend(q, k, v, scale=1.5 * scale, **how),
    "window off by one": lambda attend, q, k, v, *, window, **how: attend(q, k, v, window=window and window + 1, **how),
    "no window": lambda attend, q, k, v, *, window, **how: attend(q, k, v, window=None, **how),
    "gradient of queries": lambda attend, q, k, v, **how: attend(_HalfGradient.apply(q), k, v, **how),
    "gradient of keys": lambda attend, q, k, v, **how: attend(q, _HalfGradient.apply(k), v, **how),
    "gradient of values": lambda attend, q, k, v, **how: attend(q, k, _HalfGradient.apply(v), **how),
    "a row beyond a tile": lambda attend, q, k, v, **how: attend(q, k, v, **how).index_fill(0, torch.tensor([64]), 0),
    "no number": lambda attend, q, k, v, **how: attend(q, k, v, **how) * float("nan"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_attention_kernel_is_named(wrong, dtype):
    with pytest.raises(ModelError, match="here: attention kernel other, call 1: ") as caught:
        begun(attention_of(WRONG[wrong]), "mistral", dtype)
    assert "of their size away from those of plain kernels in float32" in str(caught.value)
    assert ("gradients of" in str(caught.value)) == wrong.startswith("gradient")


def test_a_softcap_that_is_left_out_is_named():
    kernels = attention_of(lambda attend, q, k, v, *, softcap, **how: attend(q, k, v, softcap=1.0, **how))
    with pytest.raises(ModelError, match="attention kernel other, call 1"):
        begun(kernels, "gemma2")


def with_another_window(by: int, backward: bool):
    """Attention with a window that is off, or only its gradients."""

    def attend(plain_attend, *args, window, **how):
        wrong = plain_attend(*args, window=window + by, **how)
        return wrong + (plain_attend(*args, window=window, **how) - wrong).detach() if backward else wrong

    return attend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window, by", [(50, -1), (50, 1), (512, 1), slow(512, -1)])
def test_a_window_that_is_off_by_one_is_named(window, by, backward, dtype):
    """Few rows reach beyond a long one, and of each the one key that is wrong is one of many."""
    model = tiny_model("mistral", torch.float32)
    model.config.sliding_window, model.config.max_position_embeddings = window, 1000
    policy = Policy(model, attention_of(with_another_window(by, backward)), dtype)
    with pytest.raises(ModelError, match=r"attention kernel other, call \d"):
        KernelCheck.begin(policy, "here", True, compiling=False)
    policy = Policy(model, attention_of(finely), dtype)
    KernelCheck.begin(policy, "here", True, compiling=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_block_that_was_compiled_wrongly_is_found(where, share, dtype):
    """A compiler puts other code in the place of a block; here it computes something a little else."""
    policy, check = begun(plain(), "llama", dtype, share)
    forward = policy.blocks[2].forward
    change = (lambda x: 1.2 * x) if where == "forward" else _HalfGradient.apply  # 1.1 is 3 roundings of bfloat16
    policy.blocks[2].forward = lambda x, *args, **how: forward(change(x), *args, **how)
    said = "hidden states" if where == "forward" else "gradients of embedded tokens"
    with pytest.raises(ModelError, match=f"the blocks: {said} are"):
        check.compare(policy)


def without_its_weight(linear: torch.nn.Linear) -> None:
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight.detach(), linear.bias)


def with_half_of_it(linear: torch.nn.Linear) -> None:
    linear.forward = lambda x: torch.nn.functional.linear(x, _HalfGradient.apply(linear.weight), linear.bias)


@pytest.mark.parametrize("mode", ["none", "block", "offload"])
@pytest.mark.parametrize("wrong", [without_its_weight, with_half_of_it])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_weights_that_are_wrong_are_named(dtype, wrong, mode):
    """Those of one block alone, while what it hands on, forward and backward, is right."""
    policy, check = begun(plain(), "qwen3", dtype)
    wrong(policy.blocks[2].mlp.down_proj)
    policy.keep_activations(mode)
    with pytest.raises(ModelError, match=r"the blocks: gradients of model\.layers\.\*\.mlp\.down_proj\.weight are"):
        check.compare(policy)
    assert all(weight.grad is None for weight in policy.model.parameters())


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.5, False)])
def test_a_kind_of_weights_may_be_off_by_what_all_blocks_together_are(share, passes, monkeypatch):
    """Where few numbers decide its error, the plain kernels' own may be little by chance, here 0."""
    policy, check = begun(plain(), "llama", torch.bfloat16)
    name = "model.layers.0.mlp.down_proj.weight"
    kind = {n: t for n, t in check.exact.d_weights.items() if n.endswith("mlp.down_proj.weight")}
    check = replace(check, usual=replace(check.usual, d_weights=check.usual.d_weights | kind))
    came = float((check.usual.d_embedded - check.exact.d_embedded).norm() / check.exact.d_embedded.norm())
    size = float(torch.cat([t.flatten() for t in kind.values()]).norm())
    off = torch.zeros_like(kind[name])
    off[0, 0] = share * came * size
    found = replace(check.usual, d_weights=check.usual.d_weights | {name: kind[name] + off})
    monkeypatch.setattr(kernel_check, "_through", lambda *_: found)
    if passes:
        check.compare(policy)
    else:
        with pytest.raises(ModelError, match=r"gradients of model\.layers\.\*\.mlp\.down_proj\.weight are"):
            check.compare(policy)


def test_gradients_that_a_run_adds_up_in_float32_are_compared_as_they_are_added_up():
    policy = Policy(tiny_model("llama", torch.bfloat16), plain(), torch.bfloat16)
    hold_gradients(policy.model, TrainConfig(gradient_dtype="float32"))
    check = KernelCheck.begin(policy, "here", True, compiling=False)
    check.compare(policy)
    weights = list(policy.model.parameters())
    assert all(w.dtype == torch.bfloat16 and w.grad_dtype == torch.float32 and w.grad is None for w in weights)
    assert not any(w._post_accumulate_grad_hooks for w in weights)
    with_half_of_it(policy.blocks[0].self_attn.k_proj)
    with pytest.raises(ModelError, match=r"gradients of model\.layers\.\*\.self_attn\.k_proj\.weight are"):
        check.compare(policy)


def test_the_measure_of_bfloat16_weights_is_not_rounded_to_bfloat16():
    """Their gradients are of their dtype; while they are float32, so are these."""
    held = tiny_model("llama", torch.bfloat16)
    wide = copy.deepcopy(held).float()
    measures = []
    for model in (held, wide):
        policy = Policy(model, attention_of(finely), torch.bfloat16)
        measures.append(KernelCheck.begin(policy, "here", True, compiling=False).exact.d_weights)
    assert measures[0].keys() == measures[1].keys()
    assert all(torch.equal(measures[0][name], measures[1][name]) for name in measures[0])
    assert all(weight.dtype == torch.bfloat16 for weight in held.parameters())


def test_no_more_than_a_gradient_is_held_at_a_time(monkeypatch):
    policy, check = begun(attention_of(finely))
    most, sketch = [0], kernel_check._sketch

    def counting(gradient):
        most.append(sum(weight.grad is not None for weight in policy.model.parameters()))
        return sketch(gradient)

    monkeypatch.setattr(kernel_check, "_sketch", counting)
    check.compare(policy)
    assert max(most) == 1


def test_a_pass_that_fails_leaves_no_gradient_behind(monkeypatch):
    policy, check = begun(attention_of(finely))
    monkeypatch.setattr(kernel_check, "_sketch", lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check.compare(policy)
    assert all(w.grad is None and not w._post_accumulate_grad_hooks for w in policy.model.parameters())


@pytest.mark.parametrize("shape", [(300, 70), (4, 30, 200), (1, 5000), (5000, 1), (64,), ()])
@pytest.mark.parametrize("rank", ["one", "full"])
def test_a_sketch_is_about_as_large_as_the_gradient(shape, rank):
    """Within five standard deviations of the size that 16 directions give a gradient of rank one."""
    torch.manual_seed(1)
    gradient = torch.randn(shape)
    if rank == "one" and len(shape) > 1:
        gradient = torch.randn(*shape[:-1], 1) * torch.randn(shape[-1])
    assert 1 / 2 < kernel_check._sketch(gradient).norm() / gradient.norm() < 2


@pytest.mark.parametrize("right", [finely, coarsely])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_and_experts_that_only_round_otherwise_pass(dtype, right):
    policy = Policy(tiny_gpt_oss(), attention_of(right), dtype)
    KernelCheck.begin(policy, "here", True, compiling=False).compare(policy)


@pytest.mark.parametrize("wrong", [torch.Tensor.detach, _HalfGradient.apply], ids=["none", "half"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_gradients_of_sinks_are_named(dtype, wrong):
    kernels = attention_of(lambda attend, q, k, v, *, sinks, **how: attend(q, k, v, sinks=wrong(sinks), **how))
    policy = Policy(tiny_gpt_oss(), kernels, dtype)
    with pytest.raises(ModelError, match="attention kernel other, call 1: gradients of sinks are"):
        KernelCheck.begin(policy, "here", True, compiling=False)


@pytest.mark.parametrize("resumed", [False, True])
def test_blocks_are_compared_in_the_mode_that_auto_has_found(monkeypatch, tmp_path, resumed):
    """A budget has the compiler make other graphs for the backward pass than those of the start."""
    policy, check = begun(attention_of(finely))
    objective = ObjectiveConfig().build()
    session = Session(scorer_of(policy), objective, Loaded(policy.model, torch.float32), check)
    monkeypatch.setattr(checkpoint, "progress", lambda last: SimpleNamespace(activation_memory="none"))

    def settled():
        policy.keep_activations("block")
        last = tmp_path if resumed else None
        choose_activations(session, TrainConfig(activation_memory="auto"), limits_of(), last, Console(io.StringIO()))

    settled()
    assert policy.activation_memory == "none"
    keeping = activations.keeping

    def wrong(mode, forwards):
        if mode == "none":
            without_its_weight(policy.blocks[1].mlp.gate_proj)
        return keeping(mode, forwards)

    monkeypatch.setattr(activations, "keeping", wrong)
    with pytest.raises(ModelError, match="gate_proj"):
        settled()


def spoiled(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A graph of a backward pass that gives twice the gradients of matrices, and right ones of what it was given."""

    def run(*args: Any) -> list[Any]:
        return [2 * g if isinstance(g, torch.Tensor) and g.ndim == 2 else g for g in graph(*args)]

    return make_boxed_func(run)


class Opaque(PlainAttention):
    """The plain attention, into which the compiler does not look, as it does not into a GPU's: to trace all of its
    blocks takes it most of a minute."""

    @torch.compiler.disable
    def attend(self, *args: Any, **how: Any) -> torch.Tensor:
        return super().attend(*args, **how)


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_graphs_that_spoil_gradients_of_weights_are_found(monkeypatch):
    policy = Policy(tiny_model("llama", torch.float32), with_form("attention", Opaque), torch.float32)
    check = KernelCheck.begin(policy, "here", True, compiling=True)
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=spoiled)
    monkeypatch.setattr(activations, "compiler", lambda mode, options: {"backend": backend})
    policy.compile()
    with pytest.raises(ModelError, match=r"the compiled blocks: gradients of model\.layers\.\*\.\S+_proj\.weight are"):
        check.compare(policy)


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("attention", [Opaque, slow(PlainAttention)])
def test_compiled_blocks_that_are_right_pass(attention):
    policy = Policy(tiny_model("llama", torch.float32), with_form("attention", attention), torch.float32)
    check = KernelCheck.begin(policy, "here", True, compiling=True)
    policy.compile()
    check.compare(policy)
    assert len(check.batch.input_ids) == 1024  # rows as compiled packs have them
    with torch._dynamo.config.patch(error_on_recompile=True):  # training has the graphs that were compared
        policy.hidden_rows(check.batch).sum().backward()


def test_probes_stay_within_a_models_positions() -> None:
    model = tiny_model("llama", torch.float32)
    for most in range(2, 80):
        model.config.max_position_embeddings = most
        found = probes(Policy.plain(model, torch.float32))
        assert all(len(example.prompt_ids) and example.longest <= most for example in found), most
        assert all(len(answer.ids) for example in found for answer in example.answers), most


@pytest.mark.parametrize(
    "window, positions, longest, reached",
    [
        (6, 1000, 139, True),
        (200, 1000, 275, True),
        (600, 1000, 640, True),
        (700, 1000, 640, False),
        (80, 50, 50, False),
    ],
)
def test_probes_reach_beyond_tile_and_window(window, positions, longest, reached):
    model = tiny_model("mistral", torch.float32)
    model.config.sliding_window, model.config.max_position_embeddings = window, positions
    policy = Policy.plain(model, torch.float32)
    assert [mixer.windows for mixer in policy.mixers] == [[window] * 4]
    assert max(example.longest for example in probes(policy)) == longest
    assert untried(policy) == ([] if reached else [too_long(window)])


def too_long(window: int) -> str:
    return f"not beyond the layers' window of {window}, which is too long for that"


@pytest.mark.parametrize(
    ("windows", "left"), [((6, 200), None), ((None, 200), None), ((200, 700), 700), ((700, 900), 700)]
)
def test_probes_reach_beyond_each_window_that_they_can(windows, left):
    """Layers of a model may have windows of their own; the shortest that is not reached is said."""
    mixer = Attention(tuple(AttentionLayer(32, window, head_width=8) for window in windows))
    policy = SimpleNamespace(mixers=(mixer,), positions=1000, vocab_size=VOCAB, device=torch.device("cpu"))
    longest = max(example.longest for example in probes(policy))
    assert min((window for window in windows if window and window >= longest), default=None) == left
    assert untried(policy) == ([too_long(left)] if left else [])
