"""Products that several processes compute together: scores, gradients and steps of one process up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

from tests.distributed.test_sharding import steps_of
from tests.distributed.worlds import together
from tests.graphs import graphs_of
from tests.repeated import slow
from tests.tiny import CCGQA, FAMILIES, HYBRIDS, SHORT_CONVS, SPARSE, one_pack, random_examples, scorer_of, tiny_model
from tuningfork.distributed.layout import Layout
from tuningfork.distributed.parallelize import parallelize
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.tensor import check_has_plan, split_blocks
from tuningfork.errors import ConfigError
from tuningfork.models.policy import Policy
from tuningfork.records import TokenExample
from tuningfork.train.config import TrainConfig
from tuningfork.train.optimizer import build_optimizer


def of(answers: int, count: int = 7) -> list[TokenExample]:
    """Examples with as many answers each."""
    return random_examples([(n % 7 + 1, [2 * n % 11 + 1 + 2 * k for k in range(answers)]) for n in range(count)])


class Case(NamedTuple):
    family: str
    objective: dict[str, Any]
    examples: list[TokenExample]

    def __str__(self) -> str:
        return f"{self.family} {self.objective} {len(self.examples)}"


CASES = [
    Case("llama", {"name": "ipo_sum"}, of(2)),
    Case("qwen3", {"name": "sft"}, of(1)),  # norms of single heads
    Case("gemma2", {"name": "sft", "mean_over": "examples"}, of(1)),  # soft-capped, with norms around both halves; tied
    Case("granite", {"name": "simpo"}, of(2)),  # tied
    Case("olmo2", {"name": "ipo", "beta": 0.5}, of(2)),  # norms of all heads together
    Case("qwen2", {"name": "dpo_norm", "sft_weight": 0.1}, of(2)),  # biases
    Case("llama", {"name": "dpo"}, of(2, count=1)),  # with more than one worker: some have nothing to do
]
# Weights whole and tied, biases, and a worker with nothing to do: what sharing out beside the products meets.
SOME = [CASES[place] for place in (0, 3, 5, 6)]
LAYOUTS = [
    pytest.param({"tensor": 2}, CASES, id="tensor"),
    pytest.param({"tensor": 2, "shard": 2}, SOME, id="tensor, shard"),
    pytest.param({"tensor": 2, "replicate": 2}, SOME[2:], id="tensor, replicate"),
    slow({"tensor": 2, "shard": 2}, CASES, id="tensor, shard, all"),
    slow({"tensor": 2, "replicate": 2}, CASES, id="tensor, replicate, all"),
]


def run_all(ranks: Ranks, parallel: dict[str, Any], cases: Sequence[Case]) -> list[Any]:
    return [steps_of(ranks, case.family, parallel, case.examples, case.objective) for case in cases]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return run_all(ONE_PROCESS, {}, CASES)


@pytest.mark.parametrize(("layout", "cases"), LAYOUTS)
def test_steps_are_those_of_one_process(layout: dict[str, int], cases: list[Case], expected: list[Any]) -> None:
    size = 2 if layout == {"tensor": 2} else 4
    by_rank = together(size, run_all, layout, cases)
    for number, case in enumerate(cases):
        steps, weights = expected[CASES.index(case)]
        of_first = by_rank[0][number]
        for of_rank in by_rank:
            found, theirs = of_rank[number]
            for ours, alone, first in zip(found, steps, of_first[0], strict=True):
                assert ours[0] == pytest.approx(alone[0], rel=1e-6), case
                assert ours[1] == pytest.approx(alone[1], rel=1e-5), case
                torch.testing.assert_close(ours[2], alone[2], rtol=1e-6, atol=0)
                assert ours[:2] == first[:2] and torch.equal(ours[2], first[2])
            for name, weight in weights.items():
                assert (theirs[name] - weight).norm() <= 1e-6 * weight.norm(), (str(case), name)
                assert torch.equal(theirs[name], of_first[1][name]), (str(case), name)


def scores_of(ranks: Ranks, family: str, examples: Sequence[TokenExample]) -> list[torch.Tensor]:
    """Scores of all examples in one pack, again, and one by one, between scores of others."""
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    parallelize(policy, "none", compiled=False, layout=Layout(tensor=ranks.size))
    scorer = scorer_of(policy, 8)
    packs = [one_pack(examples, "tree"), one_pack(examples, "tree"), *(one_pack([one], "tree") for one in examples)]
    first, again, *alone = map(scorer.score, packs)
    return [first, again, torch.cat(alone)]


def test_scores_have_the_same_bits_in_any_pack() -> None:
    """Also of four parts, which an all-reduce adds up in an order that depends on where a number lies."""
    examples = [*of(1, 3), *of(2, 3), *of(4, 3)]
    expected = scores_of(ONE_PROCESS, "olmo2", examples)[0]
    for first, again, alone in together(4, scores_of, "olmo2", examples):
        assert torch.equal(first, again) and torch.equal(first, alone)
        torch.testing.assert_close(first, expected, rtol=1e-6, atol=0)


def graphs_of_split(ranks: Ranks, family: str) -> tuple[int, int]:
    """Blocks, and graphs that they are compiled to."""
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    parallelize(policy, "none", compiled=False, layout=Layout(tensor=ranks.size))
    return len(policy.blocks), len(graphs_of(policy))


def test_blocks_share_a_graph() -> None:
    for blocks, graphs in together(2, graphs_of_split, "olmo2"):
        assert blocks > graphs == 1


def state_of(ranks: Ranks, family: str, layout: Layout) -> dict[str, torch.Tensor]:
    """Weights and first moments as a checkpoint has them, whole, after a step on one example for each worker."""
    ranks = replace(ranks, tensor=layout.tensor)
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    if ranks.size > 1:
        parallelize(policy, "none", compiled=False, layout=layout)
    optimizer = build_optimizer(policy.model, TrainConfig(adam_eps=1e-4))
    scorer, examples = scorer_of(policy, 8), of(2, 2)
    scorer.backward(one_pack(examples[ranks.worker :: ranks.workers], "tree"), lambda first, last, logps: logps.sum())
    optimizer.step()
    weights, moments = get_state_dict(policy.model, optimizer, options=StateDictOptions(full_state_dict=True))
    return {**weights, **{f"moment of {name}": of_one["exp_avg"] for name, of_one in moments["state"].items()}}


@pytest.mark.parametrize("family", ["qwen2", "granite"])  # untied, with biases; tied
def test_checkpoints_have_whole_weights_and_moments(family: str) -> None:
    expected = state_of(ONE_PROCESS, family, Layout())
    for found in together(4, state_of, family, Layout(shard=2, tensor=2)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def head_gradient(ranks: Ranks, dtype: torch.dtype, layout: Layout) -> torch.Tensor:
    """The gradient of an output weight of this dtype over several packs, with the same weights in any."""
    model = tiny_model("llama", torch.float32)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # which are spread together
        module.weight = torch.nn.Parameter(module.weight.detach().bfloat16().to(dtype))
    model.get_input_embeddings().register_forward_hook(lambda module, ids, found: found.float())
    policy = Policy.plain(model, torch.float32)
    if ranks.size > 1:
        parallelize(policy, "none", compiled=False, layout=layout)
    packs = [one_pack([example], "tree") for example in of(2, 6)]
    mine = packs[ranks.rank // layout.tensor :: layout.spread]
    for number, pack in enumerate(mine, start=1):
        scorer_of(policy, 8).backward(pack, lambda first, last, logps: logps.sum(), last=number == len(mine))
    gradient = policy.head_weight.grad
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(tensor=2)], ids=str)
def test_a_bfloat16_heads_gradient_is_rounded_once_a_step(layout: Layout) -> None:
    exact = head_gradient(ONE_PROCESS, torch.float32, Layout())
    half = torch.finfo(torch.bfloat16).eps / 2
    for found in together(2, head_gradient, torch.bfloat16, layout):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), exact, rtol=half * 1.001, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("family", "size", "words"),
    [
        (
            "llama",
            4,
            "LlamaForCausalLM has 4 query heads and 2 key heads, which do not divide by it. Set it to 1, or to",
        ),
        ("olmo2", 3, "layers.0.self_attn.q_proj has 32 outputs, which do not divide by it"),
    ],
)
def test_what_does_not_divide_is_refused(family: str, size: int, words: str) -> None:
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    with pytest.raises(ConfigError, match=f"parallel.tensor is {size}, but .*{words}"):
        split_blocks(policy, SimpleNamespace(size=lambda: size))  # type: ignore[arg-type]  # asks for nothing else


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "has no plan of how to split its blocks"),
        ({"layers.*.mlp.up_proj": ""}, "says nothing of layers.0.mlp.up_proj, layers.1.mlp.up_proj"),
        ({"layers.*.self_attn.q_norm": ""}, "says nothing of layers.0.self_attn.q_norm"),
        (
            {"layers.*.mlp.up_proj": "packed_colwise"},
            r"not supported of layers.0.mlp.up_proj \(packed_colwise, Linear\)",
        ),
    ],
)
def test_plans_that_are_not_enough_are_refused(plan: dict[str, str] | None, words: str) -> None:
    model = tiny_model("qwen3", torch.float32)
    whole = model.base_model.tp_plan
    model.base_model._tp_plan = plan if plan is None else {**whole, **plan}
    with pytest.raises(ConfigError, match=words):
        split_blocks(Policy.plain(model, torch.float32), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *SHORT_CONVS, *SPARSE, *CCGQA])
def test_a_config_tells_whether_its_model_has_a_plan(family: str) -> None:
    model = tiny_model(family, torch.float32)
    check_has_plan(model.config, 1)
    if model.base_model.tp_plan:
        check_has_plan(model.config, 2)
        return
    with pytest.raises(ConfigError, match=f"parallel.tensor is 2, but {type(model).__name__} has no plan of how to"):
        check_has_plan(model.config, 2)


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_with_a_recurrence_are_not_split(family: str) -> None:
    policy = Policy.plain(tiny_model(family, torch.float32), torch.float32)
    with pytest.raises(ConfigError, match=r"parallel.tensor is 2, but .* says nothing of layers\.0\.linear_attn"):
        split_blocks(policy, SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
