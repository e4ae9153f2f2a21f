"""Weights spread over processes: the scores of one process to the bit, and its gradients and steps up to rounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.worlds import together
from tests.repeated import slow
from tests.tiny import HYBRIDS, limits_of, one_pack, random_examples, scorer_of, tiny_model
from tuningfork.data.packing.layout import lay
from tuningfork.data.packing.pack import pack_of, portions_of
from tuningfork.data.tokens.truncate import pieces_of
from tuningfork.distributed.config import ParallelConfig
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.plan import plan_step
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.world import ALONE, world
from tuningfork.models.policy import Policy
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.records import ForkLayout, TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer
from tuningfork.train.step import train_step

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {"shard": None},
    "HSDP": {"replicate": 2},
    "DDP": {"shard": 1},
    "kept": {"reshard_after_forward": False},
}


def steps_of(
    ranks: Ranks,
    family: str,
    parallel: dict[str, Any],
    examples: list,
    settings: dict[str, Any],
    activations: str = "none",
    slots: int = 64,
) -> Any:
    """Some steps of a tiny model, in packs of so many slots: what each found, and the weights in the end."""
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    config = ParallelConfig(**parallel)
    layout = Layout.plan(config, ranks)
    ranks = replace(ranks, tensor=layout.tensor)
    again = config.reshard_after_forward
    parallelize(policy, activations, compiled=False, layout=layout, reshard_after_forward=again)
    scorer, limits = scorer_of(policy, 64), limits_of(slots, "tree")
    objective = ObjectiveConfig(**settings).build()
    reference = -torch.arange(sum(len(e.answers) for e in examples), dtype=torch.float64).numpy() / 7 - 20
    if not objective.needs_reference:
        reference = None
    found = []
    empty = pack_of([], limits)
    scorer.score(lay(empty.examples, empty.forest, empty.slots))  # as before a run, without a backward pass
    if policy.spread is not None:
        policy.spread.release()
    # Where a gradient is next to nothing, AdamW makes a whole step of its rounding; a larger eps makes none of it.
    optimizer = build_optimizer(policy.model, TrainConfig(learning_rate=1e-3, adam_eps=1e-4))
    for _ in range(STEPS):
        plan = plan_step(portions_of(examples, limits), limits, ranks.workers, lambda p: p.rows)
        packs = [lay(b.examples, b.forest, b.slots) for b in plan.bins_of(ranks.worker)]
        batch = StepBatch.shared_out(examples, plan.examples, packs, objective, reference, ranks)
        found.append(train_step(scorer, objective, optimizer, batch, 1.0, ranks=ranks))
    weights = {
        name: weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach()
        for name, weight in policy.model.named_parameters()
    }
    return [(step.loss, step.grad_norm, step.logps) for step in found], weights


@pytest.mark.parametrize(
    ("family", "layout", "size"),  # untied, tied
    [
        ("llama", "FSDP", 2),
        ("llama", "FSDP", 4),
        ("llama", "DDP", 4),
        ("llama", "kept", 2),
        slow("llama", "HSDP", 4),
        ("granite", "FSDP", 4),
        ("granite", "HSDP", 4),
        slow("granite", "FSDP", 2),
        slow("granite", "DDP", 4),
        slow("granite", "kept", 2),
    ],
)
def test_steps_are_those_of_one_process(family: str, layout: str, size: int) -> None:
    check_steps(size, family, LAYOUTS[layout], "none")


@pytest.mark.parametrize(("family", "activations"), [*zip((*HYBRIDS, "lfm2"), cycle(["block", "none"]), strict=False)])
def test_steps_of_a_hybrid_model_are_those_of_one_process(family: str, activations: str) -> None:
    check_steps(2, family, LAYOUTS["FSDP"], activations)


@pytest.mark.parametrize(("layout", "activations"), [("HSDP", "none"), ("FSDP", "block")])
def test_steps_of_a_hybrid_model_over_four_are_those_of_one_process(layout: str, activations: str) -> None:
    check_steps(4, "olmo_hybrid", LAYOUTS[layout], activations)


@pytest.mark.parametrize("layout", ["FSDP", "DDP"])
@pytest.mark.parametrize("documents", [11, 1])
def test_steps_over_documents_are_those_of_one_process(layout: str, documents: int) -> None:
    """Of one document, too, where the other process has an empty pack."""
    check_steps(2, "llama", LAYOUTS[layout], "none", documents_in_pieces(documents, 16), {"name": "lm"})


@pytest.mark.parametrize(
    ("layout", "family", "activations"),
    [
        ("FSDP", "nsa", "block"),  # untied, each of its branches with weights of its own
        ("FSDP", "nsa_linear", "none"),  # tied
        ("DDP", "nsa_mean", "none"),
        ("FSDP", "ccgqa", "none"),
        ("FSDP", "ccgqa_recursive", "block"),  # tied
        ("DDP", "ccgqa", "block"),
    ],
)
def test_steps_of_sparse_and_of_convolutional_attention_are_those_of_one_process(
    layout: str, family: str, activations: str
) -> None:
    """Documents are so long that rows of native sparse attention choose among blocks."""
    documents = [*documents_in_pieces(5, 16), *random_examples([(0, (n,)) for n in (90, 64, 75)], seed=1)]
    check_steps(2, family, LAYOUTS[layout], activations, documents, {"name": "lm"}, slots=128)


def documents_in_pieces(count: int, longest: int) -> list[TokenExample]:
    whole = random_examples([(0, (5 + 9 * n % 40,)) for n in range(count)])
    return [piece for one in whole for piece in (pieces_of(one, longest) if one.longest > longest else [one])]


def check_steps(
    size: int,
    family: str,
    parallel: dict[str, Any],
    activations: str,
    examples: list[TokenExample] | None = None,
    settings: dict[str, Any] | None = None,
    slots: int = 64,
) -> None:
    examples = examples or random_examples([(n % 7 + 1, (2 * n % 11 + 1, 3 + n % 5)) for n in range(11)])
    settings = settings or {}
    expected, weights = steps_of(ONE_PROCESS, family, {}, examples, settings, slots=slots)
    for found, theirs in together(size, steps_of, family, parallel, examples, settings, activations, slots):
        assert found[0][0] == expected[0][0]
        assert torch.equal(found[0][2], expected[0][2])  # before the first step: the same bits
        for (loss, norm, logps), (loss_alone, norm_alone, logps_alone) in zip(found, expected, strict=True):
            assert loss == pytest.approx(loss_alone, rel=1e-6)
            assert norm == pytest.approx(norm_alone, rel=1e-5)
            torch.testing.assert_close(logps, logps_alone, rtol=1e-6, atol=0)
        for name, weight in weights.items():
            assert (theirs[name] - weight).norm() <= 1e-6 * weight.norm(), name


class _Whole:
    """Attention that a compiler has in one graph with what is around it, as it has that of a GPU."""

    @classmethod
    def prepare(cls, layout: ForkLayout) -> _Whole:
        return cls()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, **how: Any) -> Tensor:
        return query * (key * value).sum(1, keepdim=True) * scale


def _graphs(monkeypatch: pytest.MonkeyPatch, always: bool) -> list[str]:
    """The code of all graphs that the compiler makes of a model's blocks."""
    compiler, graphs = torch.compile, []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def watched(forward: Any, dynamic: bool, **options: Any) -> Any:
        return compiler(forward, dynamic=dynamic, backend=note)

    torch._dynamo.reset()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", watched)
        policy = Policy.plain(tiny_model("olmo2", torch.float32), torch.float32)
        policy.kernels = replace(policy.kernels, forms={**policy.kernels.forms, "attention": _Whole})
        parallelize(policy, "none", compiled=True, layout=Layout(), always=always)
    scorer, limits = scorer_of(policy, 64), limits_of(64, "tree")
    for tokens in (2, 5):
        pack = pack_of(portions_of(random_examples([(3, (tokens, 4))]), limits), limits)
        scorer.score(lay(pack.examples, pack.forest, pack.slots))
    return graphs


def test_blocks_are_compiled_as_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    alone = _graphs(monkeypatch, always=False)
    with world(ParallelConfig(), cuda=False, always=True):
        assert _graphs(monkeypatch, always=True) == alone
    assert len(alone) == 1


class Gathers(TorchDispatchMode):
    """How often processes gather something from each other."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


def gathers(ranks: Ranks, again: bool) -> tuple[int, int]:
    """All-gathers in a step of two packs, and how many blocks there are."""
    policy = Policy.plain(tiny_model("llama", torch.float32), torch.float32)
    layout = Layout.plan(ParallelConfig(), ranks)
    parallelize(policy, "none", compiled=False, layout=layout, reshard_after_forward=again)
    pack = one_pack(random_examples([(3, (5, 4))]), "prompt")
    assert policy.spread is not None
    for _ in range(2):  # the second step begins with what the first one leaves
        with Gathers() as seen:
            for last in (False, True):
                policy.hidden_rows(pack, last=last).square().sum().backward()
            policy.spread.exchange()
    return seen.count, len(policy.blocks)


@pytest.mark.parametrize("again", [True, False])
def test_blocks_are_gathered_twice_a_pack_or_once_a_step(again: bool) -> None:
    for found, blocks in together(2, gathers, again):
        assert found == (2 * (2 * blocks + 1) if again else blocks + 1)  # the rest of the model once, or once a pack
