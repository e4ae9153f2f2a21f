"""One optimizer step: that of a plain trainer, however the batch is cut (G5), or none at all."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.tiny import (
    head_of,
    limits_of,
    random_examples,
    random_pairs,
    score_alone,
    scorer_of,
    tiny_gpt2,
    tiny_policy,
    with_row_logps,
)
from tuningfork.data.packing.layout import build_pack
from tuningfork.data.packing.loader import build_packs
from tuningfork.errors import DataError, NonFiniteError, ReferenceMismatch
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import plain
from tuningfork.models.hf.load import Loaded
from tuningfork.models.policy import Policy
from tuningfork.models.scorer import Scorer
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.pairs import OBJECTIVES
from tuningfork.records import TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.config import TrainConfig
from tuningfork.train.evaluate import evaluate
from tuningfork.train.optimizer import build_optimizer, hold_gradients
from tuningfork.train.session import Session
from tuningfork.train.step import StepOutcome, train_step

NAMES = list(OBJECTIVES)
PLAIN = ["dpo", "dpo_norm", "ipo", "ipo_sum", "simpo"]  # whose formulas the plain trainer below has
LEARNING_RATE = 1.0  # large, so that float32 weights lose little of the step that is read off them


@dataclass
class Done:
    outcome: StepOutcome
    moved: dict[str, torch.Tensor]  # the step that each weight made
    logps: dict[str, list[float]]  # by example


@cache
def _starting_policy(family: str, dtype: torch.dtype):
    return tiny_policy(family, dtype) if family != "gpt2" else tiny_gpt2(dtype)


def fresh_policy(family: str = "gpt2", dtype: torch.dtype = torch.float64):
    return copy.deepcopy(_starting_policy(family, dtype))


def sgd(policy) -> torch.optim.Optimizer:
    """Its step is the gradient itself, so that two steps can be compared without Adam's division in between."""
    return torch.optim.SGD(policy.model.parameters(), lr=LEARNING_RATE)


def reference_of(examples: list[TokenExample]) -> dict[str, np.ndarray]:
    """Reference log-probs by example id, unlike the policy's own, so that margins are not 0."""
    return {
        e.id: -np.random.default_rng(e.source.row).uniform(2, 5, len(e.answers)) * [len(a.ids) for a in e.answers]
        for e in examples
    }


def step(
    examples,
    name="dpo",
    *,
    tokens=512,
    chunk_rows=8192,
    share="prompt",
    dtype=torch.float64,
    max_grad_norm=None,
    sft_weight=0.25,
    family="gpt2",
    optimizer_of=sgd,
    policy=None,
) -> Done:
    policy = policy or fresh_policy(family, dtype)
    objective = ObjectiveConfig(name, sft_weight=sft_weight).build()
    known = reference_of(examples)
    packs = build_packs(examples, limits_of(tokens, share))
    reference = None
    if objective.needs_reference:
        reference = np.concatenate([known[e.id] for pack in packs for e in pack.examples])
    before = {key: p.detach().clone() for key, p in policy.model.named_parameters()}
    batch = StepBatch.of(packs, objective, reference)
    outcome = train_step(scorer_of(policy, chunk_rows), objective, optimizer_of(policy), batch, max_grad_norm)
    assert all(p.grad is None for p in policy.model.parameters())
    moved = {key: p.detach() - before[key] for key, p in policy.model.named_parameters()}
    order = [e.id for pack in packs for e in pack.examples]
    return Done(outcome, moved, dict(zip(order, outcome.logps.view(-1, 2).tolist(), strict=True)))


def rewards(outcome: StepOutcome) -> torch.Tensor:
    """[N, 2], chosen first."""
    return torch.stack([outcome.statistics[f"rewards/{side}"] for side in ("chosen", "rejected")], 1)


def norm(moved: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in moved.values()))


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """How far two steps are apart, against the length of one."""
    return norm({key: a[key].double() - b[key].double() for key in a}) / norm(b)


def test_padding_stays_within_a_learned_table_of_positions():
    """The tail of a pack may be longer than the model knows positions; its rows are computed like all others."""
    policy = fresh_policy()
    examples = random_examples([(10, (54, 3)), (1, (2, 1))])  # as long as the table, and a little more
    for some in (examples, examples[1:]):
        alone = np.concatenate([[float(x.detach()) for x in score_alone(policy.model, example)] for example in some])
        pack = build_pack(some, 512, share="prompt")
        assert 512 - pack.used_slots > policy.config.n_positions
        hidden = policy.hidden_rows(pack)
        packed = scorer_of(policy).score(pack)
        np.testing.assert_allclose(packed.numpy(), alone, rtol=1e-9, atol=1e-9)
        hidden.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in policy.model.parameters())


def gradients_of_bfloat16_weights(gradient_dtype: str, tokens: int) -> tuple[dict[str, torch.Tensor], int]:
    """The gradients of a step by name, in float64, and its packs. `truth`: of the same numbers, computed in float32."""
    policy, found = fresh_policy("llama", torch.float32), {}
    for weight in policy.model.parameters():
        weight.data = weight.data.bfloat16() if weight.ndim >= 2 else weight.data
        weight.data = weight.data.float() if gradient_dtype == "truth" else weight.data
    if gradient_dtype != "truth":
        hold_gradients(policy.model, TrainConfig(gradient_dtype=gradient_dtype))
        policy = Policy(policy.model, plain(), torch.bfloat16)

    class Reading(torch.optim.SGD):
        def step(self, *args):
            found.update({name: p.grad.double() for name, p in policy.model.named_parameters()})

    packs = build_packs(random_pairs(120), limits_of(tokens))
    objective = ObjectiveConfig("simpo").build()
    batch = StepBatch.of(packs, objective, None)
    train_step(scorer_of(policy), objective, Reading(policy.model.parameters(), lr=0.0), batch, None)
    return found, len(packs)


def test_with_float32_gradients_bfloat16_weights_make_the_same_step_however_the_batch_is_cut():
    """Each pack's own gradient is rounded to bfloat16, with or without them; what is added up no more."""
    truth, _ = gradients_of_bfloat16_weights("truth", 8192)

    def error(gradient_dtype: str, tokens: int) -> float:
        found, packs = gradients_of_bfloat16_weights(gradient_dtype, tokens)
        assert (packs == 1) == (tokens == 8192)
        names = [name for name, gradient in truth.items() if gradient.ndim == 2 and "norm" not in name]
        return distance({n: found[n] for n in names}, {n: truth[n] for n in names})

    one = error("weights", 8192)
    assert error("float32", 8192) == pytest.approx(one, rel=0.05)
    assert error("float32", 64) == pytest.approx(one, rel=0.05)
    # Some 50 roundings of the sum show beside the packs' own; this is what the setting is there for.
    assert error("weights", 64) > error("float32", 64)


# Chosen answers of very different lengths: a mean of means would show.
BATCH = random_examples(
    [(7, (5, 19)), (1, (21, 3)), (12, (8, 2)), (9, (1, 1)), (4, (11, 6)), (0, (9, 5)), (17, (13, 20))], holes=True
)
CUTS = {
    "many packs": {"tokens": 64},
    "another order": {"order": [3, 6, 0, 5, 2, 4, 1]},
    "another order, many packs, small chunks": {"order": [6, 5, 4, 3, 2, 1, 0], "tokens": 72, "chunk_rows": 5},
    "prompts not shared": {"share": "none", "tokens": 128},
}


def cut(how: str, examples=BATCH, **settings) -> Done:
    settings = {**CUTS[how], **settings}
    order = settings.pop("order", range(len(examples)))
    return step([examples[i] for i in order], **settings)


@cache
def one_pack_step(name: str, dtype: torch.dtype = torch.float64) -> Done:
    return step(BATCH, name, dtype=dtype)


@pytest.mark.parametrize("name", PLAIN)
def test_a_step_is_that_of_a_plain_trainer(name):
    """Loss and gradient from plain transformers, one sequence at a time, and the formulas of the papers."""
    policy = fresh_policy()
    known = reference_of(BATCH)
    sft_weight, beta = 0.25, 0.1
    total, chosen_tokens, chosen_sum = torch.zeros((), dtype=torch.float64), 0, torch.zeros((), dtype=torch.float64)
    for example in BATCH:
        chosen, rejected = score_alone(policy.model, example)
        n_chosen, n_rejected = example.answer_tokens(0), example.answer_tokens(1)
        if name == "simpo":
            ratio = chosen / n_chosen - rejected / n_rejected
        else:
            ref = known[example.id]
            ratios = (chosen - ref[0], rejected - ref[1])
            per_token = name in ("dpo_norm", "ipo")
            ratio = ratios[0] / n_chosen - ratios[1] / n_rejected if per_token else ratios[0] - ratios[1]
        if name in ("ipo", "ipo_sum"):
            total = total + (ratio - 1 / (2 * beta)) ** 2
        else:
            total = total + torch.log1p(torch.exp(-(beta * ratio - (0.5 if name == "simpo" else 0.0))))
        chosen_tokens += n_chosen
        chosen_sum = chosen_sum + chosen
    loss = total / len(BATCH) - sft_weight * chosen_sum / chosen_tokens
    loss.backward()
    gradient = {key: p.grad for key, p in policy.model.named_parameters()}

    done = one_pack_step(name)
    assert done.outcome.loss == pytest.approx(loss.item(), rel=1e-10)
    assert done.outcome.grad_norm == pytest.approx(norm(gradient), rel=1e-10)
    assert distance(done.moved, {key: -LEARNING_RATE * g for key, g in gradient.items()}) < 1e-10


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_cut_in_any_way_gives_the_same_step(name, how):
    """G5 (trl PR#2615), in float64."""
    whole, parts = one_pack_step(name), cut(how, name=name)
    assert parts.outcome.loss == pytest.approx(whole.outcome.loss, rel=1e-12)
    assert parts.outcome.grad_norm == pytest.approx(whole.outcome.grad_norm, rel=1e-12)
    assert distance(parts.moved, whole.moved) < 1e-12
    for example, logps in whole.logps.items():
        assert parts.logps[example] == pytest.approx(logps, rel=1e-12)


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("name", ["dpo", "ipo_sum"])
def test_in_float32_a_cut_batch_is_as_near_to_the_truth_as_a_whole_one(name, how):
    truth, whole = one_pack_step(name), one_pack_step(name, torch.float32)
    parts = cut(how, name=name, dtype=torch.float32)
    # Both are rounded, each in its own order of addition.
    assert 0 < distance(whole.moved, truth.moved) < 1e-4
    assert distance(parts.moved, truth.moved) < 3 * distance(whole.moved, truth.moved)
    assert parts.outcome.loss == pytest.approx(whole.outcome.loss, rel=1e-5)


def test_adamw_moves_alike_too():
    def adamw(policy):
        return build_optimizer(policy.model, TrainConfig(learning_rate=1e-3, adam_eps=1e-3, weight_decay=0.1))

    whole = step(BATCH, optimizer_of=adamw)
    for how in CUTS:
        assert distance(cut(how, optimizer_of=adamw).moved, whole.moved) < 1e-11
    assert norm(whole.moved) > 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "olmo3"])
def test_cut_batches_of_other_families(family):
    """Soft-capping and windows; a tied head that collects the gradient of both uses over all packs.

    Their norms round to float32, so that a difference of 1e-16 may grow to 1e-7 of one entry.
    """
    whole = step(BATCH, family=family)
    for how in ("another order, many packs, small chunks", "prompts not shared"):
        assert distance(cut(how, family=family).moved, whole.moved) < 1e-7


# The same answers behind prompts so long that rows of sparse attention choose among their blocks.
LONG = random_examples([(60 + len(e.prompt_ids), [len(a.ids) for a in e.answers]) for e in BATCH], holes=True)


@pytest.mark.parametrize(("family", "examples", "scale"), [("nsa", LONG, 3), ("ccgqa", BATCH, 1)], ids=["nsa", "ccgqa"])
def test_cut_batches_of_families_of_our_own(family, examples, scale):
    """Blocks that are compressed and chosen, and convolutions, across forks and beside other examples; all of it in
    float64."""
    whole = step(examples, family=family, tokens=768)
    for how, tokens in (("another order, many packs, small chunks", 72), ("prompts not shared", 128)):
        assert distance(cut(how, examples, family=family, tokens=scale * tokens).moved, whole.moved) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_eight_is_the_mean_of_eight_steps_of_one(name):
    pairs = random_pairs(8)
    whole = step(pairs, name, sft_weight=0.0)
    parts = [step([pair], name, sft_weight=0.0) for pair in pairs]
    assert whole.outcome.loss == pytest.approx(sum(part.outcome.loss for part in parts) / 8, rel=1e-10)
    mean = {key: sum(part.moved[key] for part in parts) / 8 for key in whole.moved}
    assert distance(whole.moved, mean) < 1e-11


@pytest.mark.parametrize("settings", [{}, {"tokens": 72, "chunk_rows": 5}], ids=["one pack", "packs and chunks"])
def test_weights_and_margins_find_their_pairs(settings):
    """The step of a weighted batch is the weighted mean of the pairs' own steps."""
    weights, margins = (2.0, 1.0, 0.25, 3.0, 1.0, 0.5, 1.5), (None, 4.0, None, -2.0, 0.5, None, 1.0)
    said = [replace(e, weight=w, margin=m) for e, w, m in zip(BATCH, weights, margins, strict=True)]
    whole = step(said, sft_weight=0.0, **settings)
    alone = [step([replace(e, weight=1.0)], sft_weight=0.0) for e in said]
    mean = {key: sum(w * one.moved[key] for w, one in zip(weights, alone, strict=True)) / 7 for key in whole.moved}
    assert distance(whole.moved, mean) < 1e-10
    losses = (w * one.outcome.loss for w, one in zip(weights, alone, strict=True))
    assert whole.outcome.loss == pytest.approx(sum(losses) / 7, rel=1e-10)
    assert distance(whole.moved, step(BATCH, sft_weight=0.0).moved) > 0.1


def test_clipping_scales_the_whole_step_and_reports_the_norm_before():
    free = step(BATCH)
    limit = free.outcome.grad_norm / 4
    clipped = step(BATCH, max_grad_norm=limit)
    assert clipped.outcome.grad_norm == pytest.approx(free.outcome.grad_norm, rel=1e-12)
    assert norm(clipped.moved) == pytest.approx(LEARNING_RATE * limit, rel=1e-5)
    scaled = {key: t / 4 for key, t in free.moved.items()}
    assert distance(clipped.moved, scaled) < 1e-5  # torch divides by the norm + 1e-6


def test_a_gradient_within_the_limit_is_not_touched():
    free = step(BATCH)
    loose = step(BATCH, max_grad_norm=free.outcome.grad_norm * 1.01)
    assert all(torch.equal(free.moved[key], loose.moved[key]) for key in free.moved)


def test_clipping_is_by_the_norm_of_the_whole_batch():
    """Clipping each pack would make the step depend on how the batch is cut."""
    limit = one_pack_step("dpo").outcome.grad_norm / 4
    whole = step(BATCH, max_grad_norm=limit)
    assert distance(cut("many packs", max_grad_norm=limit).moved, whole.moved) < 1e-12


def test_the_outcome_is_from_before_the_weights_moved():
    policy = fresh_policy()
    expected = {e.id: [s.item() for s in score_alone(policy.model, e)] for e in BATCH}
    done = step(BATCH, policy=policy)
    for example, logps in done.logps.items():
        assert logps == pytest.approx(expected[example], rel=1e-10)
    known = reference_of(BATCH)
    expected = {e: 0.1 * (np.array(logps) - known[e]) for e, logps in done.logps.items()}
    assert rewards(done.outcome).tolist() == [pytest.approx(expected[e].tolist(), rel=1e-12) for e in done.logps]


def test_at_the_start_dpo_is_ln_2_and_the_step_prefers_the_chosen():
    policy = fresh_policy()
    pairs = random_pairs(6)
    packs = build_packs(pairs, limits_of(64))
    scorer, objective = scorer_of(policy), ObjectiveConfig("dpo").build()

    def score() -> list[np.ndarray]:
        return [scorer.score(pack).numpy() for pack in packs]

    reference = score()
    batch = StepBatch.of(packs, objective, np.concatenate(reference))
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1e-3)
    outcome = train_step(scorer, objective, optimizer, batch, None)
    assert outcome.loss == pytest.approx(math.log(2), rel=1e-14)
    assert rewards(outcome).abs().max() < 1e-12
    margins = np.concatenate([(now - ref).reshape(-1, 2) for now, ref in zip(score(), reference, strict=True)])
    assert (margins[:, 0] - margins[:, 1]).mean() > 0
    again = train_step(scorer, objective, optimizer, batch, None)
    assert again.loss < math.log(2)


def unchanged(policy, before: dict[str, torch.Tensor]) -> bool:
    now = policy.model.state_dict()
    return all(torch.equal(now[key].nan_to_num(), before[key].nan_to_num()) for key in before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_names_its_example_and_moves_nothing(bad):
    """trl#878: fail at the first one, loudly."""
    policy = fresh_policy("llama", torch.float32)  # input and output embedding apart
    pairs = random_pairs(5)
    token = 96
    for pair in pairs:  # the token occurs in one answer only
        for ids in (pair.prompt_ids, *(a.ids for a in pair.answers)):
            ids[ids == token] = 3
    pairs[3].answers[1].ids[0] = token
    pairs[3].answers[1].ids[1:2] = 5
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[token] = bad
    before = {key: t.clone() for key, t in policy.model.state_dict().items()}
    optimizer = build_optimizer(policy.model, TrainConfig(learning_rate=0.1))
    packs = build_packs(pairs, limits_of(64))
    objective = ObjectiveConfig().build()
    batch = StepBatch.of(packs, objective, np.full(10, -20.0))
    with pytest.raises(NonFiniteError, match=r"the log-prob of answer 1 of random:4 is nan"):
        train_step(scorer_of(policy), objective, optimizer, batch, 1.0)
    assert unchanged(policy, before)
    assert not optimizer.state


def test_a_reference_that_is_no_number_moves_nothing():
    policy = fresh_policy(dtype=torch.float32)
    pairs = random_pairs(3)
    before = {key: t.clone() for key, t in policy.model.state_dict().items()}
    packs = build_packs(pairs, limits_of())
    objective = ObjectiveConfig().build()
    batch = StepBatch.of(packs, objective, np.array([-20.0, -21.0, float("nan"), -20.0, -20.0, -20.0]))
    with pytest.raises(NonFiniteError, match=r"loss is nan"):
        train_step(scorer_of(policy), objective, sgd(policy), batch, None)
    assert unchanged(policy, before)


def test_a_first_step_whose_log_probs_are_not_the_cached_ones_moves_nothing():
    """To the bit: training may run another graph than scoring did. Later steps have moved away from the reference."""
    policy = fresh_policy(dtype=torch.float32)
    packs = build_packs(random_pairs(6), limits_of(64))
    assert len(packs) > 1
    scorer, objective = scorer_of(policy), ObjectiveConfig().build()
    reference = [scorer.score(pack).numpy() for pack in packs]
    before = {key: t.clone() for key, t in policy.model.state_dict().items()}
    spoilt = [part.copy() for part in reference]
    spoilt[-1][1] = np.nextafter(spoilt[-1][1], 0.0)
    batch = StepBatch.of(packs, objective, np.concatenate(spoilt))
    with pytest.raises(ReferenceMismatch, match="1 of 12 log-probs of the first training step") as caught:
        train_step(scorer, objective, sgd(policy), batch, None, starting=True)
    assert f"worst {packs[-1].examples[0].id}, answer 1: model" in str(caught.value)
    assert unchanged(policy, before)
    batch = StepBatch.of(packs, objective, np.concatenate(reference))
    assert (rewards(train_step(scorer, objective, sgd(policy), batch, None, starting=True)) == 0).all()
    train_step(scorer, objective, sgd(policy), batch, None)


@pytest.mark.parametrize("answers", [(3, 4, 5, 6), (3,)])
def test_rows_that_the_objective_refuses_have_no_loss(answers):
    """Four answers are no two pairs, and two single answers are not one: neither trains, nor is it evaluated."""
    policy = fresh_policy(dtype=torch.float32)
    objective = ObjectiveConfig().build()
    examples = random_examples([(5, answers), (7, answers)])
    packs = build_packs(examples, limits_of())
    with pytest.raises(DataError, match=r"random:1: has \d answers?, objective dpo compares two"):
        StepBatch.of(packs, objective, np.full(2 * len(answers), -20.0))
    session = Session(scorer_of(policy), objective, Loaded(policy.model, torch.float32))
    with pytest.raises(DataError, match="random:1: has"):
        evaluate(session, examples, limits_of(), None)


def test_a_log_prob_above_zero_is_refused():
    """verl#2656: probabilities above 1 come from a broken kernel, and train anyway."""
    policy = fresh_policy(dtype=torch.float32)

    def wrong(logits, targets, transform):
        logps, lse = plain_rows.row_logps(logits, targets, transform)
        return -logps, lse

    pairs = random_pairs(3)
    before = {key: t.clone() for key, t in policy.model.state_dict().items()}
    scorer = Scorer(policy, replace(head_of(policy), kernels=with_row_logps(row_logps=wrong)))
    objective = ObjectiveConfig().build()
    batch = StepBatch.of(build_packs(pairs, limits_of()), objective, np.full(6, -20.0))
    with pytest.raises(NonFiniteError, match=r"answer 0 of random:1 is .*, above 0"):
        train_step(scorer, objective, sgd(policy), batch, None)
    assert unchanged(policy, before)


def test_a_step_without_a_reference_reads_none():
    done = step(BATCH, "simpo", sft_weight=0.0)
    for example, reward in zip(done.logps, rewards(done.outcome).tolist(), strict=True):
        lengths = next([e.answer_tokens(0), e.answer_tokens(1)] for e in BATCH if e.id == example)
        assert reward == pytest.approx([0.1 * lp / n for lp, n in zip(done.logps[example], lengths, strict=True)])
