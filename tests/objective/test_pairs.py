"""G4: each objective against numbers worked out by hand from its paper, in float64."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from tests.tiny import random_examples, random_pairs
from tuningfork.errors import ConfigError, DataError
from tuningfork.objective import kinds, losses
from tuningfork.objective.base import Answers, BatchTotals, Objective
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.pairs import DPO, OBJECTIVES, DPONorm, SimPO
from tuningfork.recipe.check import check_run_config
from tuningfork.recipe.run_config import RunConfig

# One pair: chosen and rejected log-probs under policy and reference, and their token counts.
#   log-ratios  chosen -10 - -12 = 2,  rejected -14 - -13 = -1;  h = 2 - -1 = 3;  per token h = 2/4 + 1/7 = 9/14
LOGPS, REFERENCE, LENGTHS = (-10.0, -14.0), (-12.0, -13.0), (4, 7)


def softplus(x: float) -> float:
    """-log sigmoid(-x) = log(1 + e^x)."""
    return math.log1p(math.exp(x))


def numbers(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def answers_of(objective: Objective, reference=REFERENCE, lengths=LENGTHS, said=()) -> Answers:
    """Of whole pairs, given flat; `said`: (weight, margin) of each pair's row, or nothing."""
    examples = random_pairs(len(lengths) // 2)
    if said:
        examples = [
            replace(e, weight=weight, margin=margin) for e, (weight, margin) in zip(examples, said, strict=True)
        ]
    return Answers.of(examples, list(lengths), np.array(reference) if objective.needs_reference else None)


def evaluate(config: ObjectiveConfig, logps=LOGPS, reference=REFERENCE, lengths=LENGTHS) -> float:
    """The loss of a batch of whole pairs, given flat."""
    objective = config.build()
    totals = BatchTotals(len(logps) // 2, int(sum(lengths[0::2])))
    return float(objective.loss(numbers(logps), answers_of(objective, reference, lengths), totals))


TABLE = [
    # Rafailov et al. 2023, eq. 7: -log sigmoid(0.1 * 3)
    (ObjectiveConfig("dpo"), softplus(-0.3), 0.554355244468527),
    # -log sigmoid(0.5 * 3)
    (ObjectiveConfig("dpo", beta=0.5), softplus(-1.5), 0.201413277982752),
    # Mitchell 2023: 0.9 * softplus(-0.3) + 0.1 * softplus(0.3) = softplus(-0.3) + 0.1 * 0.3
    (ObjectiveConfig("dpo", label_smoothing=0.1), 0.9 * softplus(-0.3) + 0.1 * softplus(0.3), 0.584355244468527),
    # per-token ratios: margin 5 * (2/4 + 1/7) = 45/14
    (ObjectiveConfig("dpo_norm", beta=5.0), softplus(-45 / 14), 0.0393976460103878),
    (
        ObjectiveConfig("dpo_norm", beta=5.0, label_smoothing=0.25),
        0.75 * softplus(-45 / 14) + 0.25 * softplus(45 / 14),
        0.8429690745818164,
    ),
    # Azar et al. 2023, eq. 17: (h - 1/(2 * 0.1))^2, h a sum: (3 - 5)^2
    (ObjectiveConfig("ipo_sum"), (3 - 5) ** 2, 4.0),
    (ObjectiveConfig("ipo_sum", beta=0.25), (3 - 2) ** 2, 1.0),
    # the same with h per token: (9/14 - 5)^2 = (61/14)^2
    (ObjectiveConfig("ipo"), (9 / 14 - 5) ** 2, 18.98469387755102),
    # Meng et al. 2024, eq. 6: r = 2 * (-10/4) = -5 and 2 * (-14/7) = -4: -log sigmoid(-5 - -4 - gamma)
    (ObjectiveConfig("simpo", beta=2.0), softplus(1.5), 1.701413277982752),
    (ObjectiveConfig("simpo", beta=2.0, gamma=0.0), softplus(1.0), 1.3132616875182228),
    (ObjectiveConfig("simpo", beta=2.0, gamma=1.6), softplus(2.6), 2.6716446919676698),
    # SFT term: 0.5 * 10 / 4 on top
    (ObjectiveConfig("dpo", sft_weight=0.5), softplus(-0.3) + 0.5 * 10 / 4, 1.804355244468527),
    (ObjectiveConfig("simpo", beta=2.0, sft_weight=2.0), softplus(1.5) + 2 * 10 / 4, 6.701413277982752),
]


@pytest.mark.parametrize(
    ("config", "formula", "number"), TABLE, ids=[f"{c.name}-{i}" for i, (c, *_) in enumerate(TABLE)]
)
def test_hand_computed_table(config, formula, number):
    assert formula == pytest.approx(number, rel=1e-9)  # the two ways of working it out by hand agree
    assert evaluate(config) == pytest.approx(formula, rel=1e-14)


def test_every_objective_is_in_the_tables():
    assert {config.name for config, *_ in TABLE} == GRADIENTS.keys() == REWARDS.keys() == set(OBJECTIVES)


def test_a_margin_of_six():
    """ms-swift#10167: log-ratio margin 6 at beta 0.1 must tell the losses apart."""
    logps, reference, lengths = (-4.0, -10.0), (-7.0, -7.0), (1, 1)
    given = {"logps": logps, "reference": reference, "lengths": lengths}
    assert evaluate(ObjectiveConfig("dpo"), **given) == pytest.approx(0.437487950485886, rel=1e-12)
    assert evaluate(ObjectiveConfig("ipo"), **given) == pytest.approx(1.0, rel=1e-12)
    assert evaluate(ObjectiveConfig("ipo_sum"), **given) == pytest.approx(1.0, rel=1e-12)
    assert evaluate(ObjectiveConfig("simpo"), **given) == pytest.approx(softplus(-0.6 + 0.5), rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.49])
@pytest.mark.parametrize("beta", [0.01, 0.1, 5.0])
@pytest.mark.parametrize("name", ["dpo", "dpo_norm"])
def test_dpo_at_step_zero_is_ln_2(name, beta, smoothing):
    config = ObjectiveConfig(name, beta=beta, label_smoothing=smoothing)
    assert evaluate(config, reference=LOGPS) == pytest.approx(math.log(2), rel=1e-15)


def test_ipo_at_step_zero_is_the_squared_target():
    for name in ("ipo", "ipo_sum"):
        assert evaluate(ObjectiveConfig(name, beta=0.1), reference=LOGPS) == pytest.approx(25.0, rel=1e-15)


def test_doubled_lengths_at_the_same_log_ratio_per_token():
    """trl#1677, torchtune#1291: ipo averages over tokens, ipo_sum is the paper's sum. Two losses, two names."""
    doubled = [tuple(2 * x for x in values) for values in (LOGPS, REFERENCE, LENGTHS)]
    for name in ("ipo", "dpo_norm"):
        assert evaluate(ObjectiveConfig(name), *doubled) == pytest.approx(evaluate(ObjectiveConfig(name)), rel=1e-14)
    simpo = ObjectiveConfig("simpo")
    assert evaluate(simpo, *doubled) == pytest.approx(evaluate(simpo), rel=1e-14)
    # The sums double: h = 6, (6 - 5)^2 = 1 instead of (3 - 5)^2 = 4.
    assert evaluate(ObjectiveConfig("ipo_sum"), *doubled) == pytest.approx(1.0, rel=1e-14)
    assert evaluate(ObjectiveConfig("dpo"), *doubled) == pytest.approx(softplus(-0.6), rel=1e-14)


GRADIENTS = {
    # d loss / d (log-prob of chosen, of rejected), by hand
    "dpo": (-0.1 / (1 + math.exp(0.3)), 0.1 / (1 + math.exp(0.3))),
    "dpo_norm": (-0.1 / 4 / (1 + math.exp(0.9 / 14)), 0.1 / 7 / (1 + math.exp(0.9 / 14))),
    "ipo": (2 * (9 / 14 - 5) / 4, -2 * (9 / 14 - 5) / 7),
    "ipo_sum": (2 * (3 - 5), -2 * (3 - 5)),
    # simpo at beta 0.1: r = -0.25 and -0.2, margin -0.05, less 0.5
    "simpo": (-0.1 / 4 / (1 + math.exp(-0.55)), 0.1 / 7 / (1 + math.exp(-0.55))),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_hand_push_chosen_up_and_rejected_down(name):
    objective = ObjectiveConfig(name).build()
    logps = torch.tensor(LOGPS, dtype=torch.float64, requires_grad=True)
    loss = objective.loss(logps, answers_of(objective), BatchTotals(1, 4))
    (gradient,) = torch.autograd.grad(loss, logps)
    assert gradient.tolist() == pytest.approx(GRADIENTS[name], rel=1e-12)
    assert gradient[0] < 0 < gradient[1]


def test_identity_loss_pushes_back_beyond_its_target():
    margins = torch.tensor([0.1 * 7.0], dtype=torch.float64, requires_grad=True)  # h = 7 > 5
    (gradient,) = torch.autograd.grad(losses.identity_loss(margins, 0.1).sum(), margins)
    assert gradient.item() == pytest.approx(2 * (7 - 5) / 0.1)


def test_label_smoothing_has_its_minimum_where_the_label_is_right_that_often():
    """Conservative DPO settles at sigmoid(margin) = 1 - e, not at infinity."""
    e = 0.2
    margins = torch.tensor([math.log((1 - e) / e)], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(losses.sigmoid_loss(margins, e).sum(), margins)
    assert abs(gradient.item()) < 1e-15


@pytest.mark.parametrize("margin", [-800.0, 800.0])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_extreme_margins_stay_finite_with_their_gradient(name, margin):
    objective = ObjectiveConfig(name, beta=1.0).build()
    logps = torch.tensor([margin - 1000.0, -1000.0], dtype=torch.float64, requires_grad=True)
    loss = objective.loss(logps, answers_of(objective, (-1000.0, -1000.0), (1, 1)), BatchTotals(1, 1))
    (gradient,) = torch.autograd.grad(loss, logps)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    if margin < 0:
        assert loss > 100 and gradient[0] < -0.5


BATCH = {
    "logps": (-10.0, -14.0, -3.0, -2.0, -30.0, -31.0),
    "reference": (-12.0, -13.0, -3.5, -1.0, -28.0, -33.0),
    "lengths": (4, 7, 1, 2, 20, 30),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_batch_loss_is_the_mean_of_its_pairs(name):
    config = ObjectiveConfig(name)
    pairs = [evaluate(config, *(BATCH[key][i : i + 2] for key in ("logps", "reference", "lengths"))) for i in (0, 2, 4)]
    assert evaluate(config, **BATCH) == pytest.approx(sum(pairs) / 3, rel=1e-14)


def test_the_sft_term_is_a_mean_over_the_tokens_of_the_batch():
    """Not a mean of means: 43 nats over 25 chosen tokens."""
    config = ObjectiveConfig("dpo", sft_weight=1.0)
    without = evaluate(replace(config, sft_weight=0.0), **BATCH)
    assert evaluate(config, **BATCH) - without == pytest.approx(43 / 25, rel=1e-12)


@pytest.mark.parametrize("name", GRADIENTS)
def test_shares_of_a_batch_add_up_however_it_is_cut(name):
    """trl PR#2615: a batch of eight in one go is eight batches of one."""
    objective = ObjectiveConfig(name, sft_weight=0.3).build()
    said = ((2.0, None), (1.0, 0.25), (0.5, None)) if objective.takes_margins else ()
    answers = answers_of(objective, BATCH["reference"], BATCH["lengths"], said)
    of_chunk, logps = objective.of_chunks(answers, BatchTotals(3, 25)), numbers(BATCH["logps"])

    def share(first: int, last: int) -> float:
        return float(of_chunk(first, last, logps[first:last]))

    assert share(0, 2) + share(2, 4) + share(4, 6) == pytest.approx(share(0, 6), rel=1e-14)
    assert share(0, 4) + share(4, 6) == pytest.approx(share(0, 6), rel=1e-14)


def test_totals_count_what_counts():
    examples = random_examples([(3, (5, 9)), (0, (4, 2)), (2, (8, 1))], holes=True)
    # chosen: 5 less 1 in its mask's hole; 4 less the hole of 1 and the first token of a document; 8 less 3
    assert DPO().totals(examples) == BatchTotals(examples=3, tokens=4 + 2 + 5)


# Each knob with another value than its default, and the objectives that may refuse it.
KNOBS = {
    "beta": 0.3,
    "label_smoothing": 0.2,
    "gamma": 1.25,
    "sft_weight": 0.7,
    "mean_over": "examples",
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_changes_the_loss_or_is_refused(name, knob):
    """trl#7063: a knob that one path silently dropped."""
    plain = ObjectiveConfig(name)
    turned = replace(plain, **{knob: KNOBS[knob]})
    run = RunConfig(objective=turned)
    run.model.path, run.data.train = "model", "pairs.jsonl"
    try:
        check_run_config(run)
    except ConfigError as error:
        assert f"objective.{knob}" in str(error)
        return
    assert abs(evaluate(turned) - evaluate(plain)) > 1e-3


def test_the_sweep_covers_every_knob():
    others = {"name", "head_chunk_rows"}  # the table's axis; a size that changes no number (test_head)
    assert {f.name for f in fields(ObjectiveConfig)} == {*KNOBS, *others}
    assert set().union(*(kind.settings() for kind in kinds.OBJECTIVES.values())) == set(KNOBS)


def test_settings_reach_their_objective_and_one_that_is_not_set_keeps_the_papers_value():
    assert ObjectiveConfig("dpo_norm", beta=0.3, label_smoothing=0.2, sft_weight=0.7).build() == DPONorm(0.3, 0.7, 0.2)
    assert ObjectiveConfig("simpo").build() == SimPO(gamma=0.5)
    assert ObjectiveConfig("simpo", gamma=0.0).build() == SimPO(gamma=0.0)


REWARDS = {
    # of (chosen, rejected), by hand
    "dpo": (0.2, -0.1),
    "ipo_sum": (0.2, -0.1),
    "dpo_norm": (0.2 / 4, -0.1 / 7),
    "ipo": (0.2 / 4, -0.1 / 7),
    "simpo": (-1.0 / 4, -1.4 / 7),
}


def test_rewards_are_the_margins_that_the_loss_sees():
    for name, values in REWARDS.items():
        objective = ObjectiveConfig(name).build()
        answers = answers_of(objective)
        assert objective.rewards(numbers(LOGPS), answers).tolist() == pytest.approx(values, rel=1e-14)
        loss = objective.loss(numbers(LOGPS), answers, BatchTotals(1, 4))
        assert objective.example_losses(numbers(LOGPS), answers).tolist() == pytest.approx([float(loss)], rel=1e-14)


def test_statistics_by_hand_ties_count_half():
    """Log-ratios at beta 1: one pair right, one wrong, two ties."""
    objective = ObjectiveConfig("dpo", beta=1.0).build()
    reference, ratios = [-1.0, -5.0, -2.0, -6.0, -3.0, -7.0, -4.0, -8.0], [2.0, 0.0, -1.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    logps = numbers(reference) + numbers(ratios)
    found = objective.statistics(logps, answers_of(objective, reference, [1] * 8))
    assert list(found) == list(objective.statistics_defined)
    assert found["rewards/chosen"].tolist() == [2.0, -1.0, 0.5, 0.0]
    assert found["rewards/rejected"].tolist() == [0.0, 0.0, 0.5, 0.0]
    assert found["rewards/margin"].tolist() == [2.0, -1.0, 0.0, 0.0]
    assert found["rewards/accuracy"].tolist() == [1.0, 0.0, 0.5, 0.5]
    assert found["logps/chosen"].tolist() == logps[0::2].tolist()
    assert found["logps/rejected"].tolist() == logps[1::2].tolist()
    assert set(objective.headline.values()) <= set(found)


def test_an_objective_says_whether_it_needs_a_reference():
    """Its formula has none; that of every other objective fails without."""
    assert not SimPO.needs_reference
    for name, kind in OBJECTIVES.items():
        answers = replace(answers_of(ObjectiveConfig(name).build()), reference=None)
        if kind.needs_reference:
            with pytest.raises(AssertionError):
                kind().example_losses(numbers(LOGPS), answers)
        else:
            kind().example_losses(numbers(LOGPS), answers)


@pytest.mark.parametrize(("answers", "found"), [((5,), "1 answer"), ((5, 6, 7), "3 answers")])
def test_only_pairs_are_compared(answers, found):
    objective = ObjectiveConfig("dpo").build()
    objective.check(random_pairs(3))
    with pytest.raises(DataError, match=rf"random:2: has {found}, objective dpo compares two"):
        objective.check(random_examples([(3, (4, 5)), (3, answers)]))


def test_a_rows_weight_multiplies_its_loss_and_its_margin_is_an_offset():
    """Two pairs of the table: margin 0.3 each. Amini et al. 2024, eq. 4: -log sigmoid(margin - offset)."""
    objective = ObjectiveConfig("dpo", sft_weight=0.5).build()
    answers = answers_of(objective, REFERENCE * 2, LENGTHS * 2, ((3.0, None), (0.5, 2.0)))
    loss = objective.loss(numbers(LOGPS * 2), answers, BatchTotals(2, 8))
    pairs = (3 * softplus(-0.3) + 0.5 * softplus(-(0.3 - 2.0))) / 2
    assert float(loss) == pytest.approx(pairs + 0.5 * (3 * 10 + 0.5 * 10) / 8, rel=1e-14)


@pytest.mark.parametrize("name", GRADIENTS)
def test_weights_count_in_every_objective_and_margins_where_there_is_a_place_for_them(name):
    objective = ObjectiveConfig(name).build()
    plain = objective.example_losses(numbers(LOGPS), answers_of(objective))
    weighted = objective.example_losses(numbers(LOGPS), answers_of(objective, said=((3.0, None),)))
    assert torch.equal(weighted, 3 * plain)
    objective.check([replace(pair, weight=3.0) for pair in random_pairs(2)])
    offset = [replace(pair, margin=0.25) for pair in random_pairs(2)]
    if objective.takes_margins:
        objective.check(offset)
        assert objective.example_losses(numbers(LOGPS), answers_of(objective, said=((1.0, 0.25),))) > plain
    else:
        with pytest.raises(DataError, match=rf"random:1: has a margin, which objective {name} has no place"):
            objective.check(offset)
