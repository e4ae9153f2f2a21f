"""What every objective has in common: answers in any cut, and a loss that couples the examples of a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.tiny import random_examples, random_pairs, score_alone, scorer_of, tiny_policy
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.packing.pack import PackLimits
from tuningfork.errors import DataError
from tuningfork.models.hf.load import Loaded
from tuningfork.objective.base import Answers, BatchTotals, Objective
from tuningfork.objective.kinds import OBJECTIVES
from tuningfork.records import TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.evaluate import evaluate
from tuningfork.train.session import Session
from tuningfork.train.step import train_step

EXAMPLES = [
    replace(example, **said)
    for example, said in zip(
        random_examples([(3, (4, 5)), (2, (6,)), (5, (1, 2, 3)), (4, (7, 8))]),
        ({"weight": 2.0, "margin": 0.5}, {"label": True}, {"margin": -1.0}, {"weight": 0.25}),
        strict=True,
    )
]
LENGTHS = [4, 5, 6, 1, 2, 3, 7, 8]


def answers(reference: bool = True) -> Answers:
    return Answers.of(EXAMPLES, LENGTHS, -np.arange(8.0) if reference else None)


def test_answers_say_what_their_rows_say() -> None:
    found = answers()
    assert found.answers_per_example == (2, 1, 3, 2)
    assert found.lengths.tolist() == LENGTHS and found.lengths.dtype == torch.float64
    assert found.reference is not None and found.reference.tolist() == [-float(n) for n in range(8)]
    assert found.weights.tolist() == [2.0, 1.0, 1.0, 0.25]
    assert found.margins.tolist() == [0.5, 0.0, -1.0, 0.0]
    assert found.labels.tolist() == [-1, 1, -1, -1]
    assert answers(reference=False).reference is None


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 3), (2, 6), (3, 8), (0, 8), (6, 8)])
def test_a_chunk_has_its_own_answers_and_examples(first: int, last: int) -> None:
    boundaries = [0, 2, 3, 6, 8]
    its_own = slice(boundaries.index(first), boundaries.index(last))
    chunk = answers().chunk(first, last)
    alone = Answers.of(EXAMPLES[its_own], LENGTHS[first:last], -np.arange(8.0)[first:last])
    for item in fields(Answers):
        ours, theirs = getattr(chunk, item.name), getattr(alone, item.name)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, item.name


def test_answers_of_parts_are_those_of_all_of_them_together() -> None:
    for parts in ([(0, 8)], [(0, 2), (2, 3), (3, 8)]):
        joined = Answers.joined([answers().chunk(first, last) for first, last in parts])
        for item in fields(Answers):
            ours, whole = getattr(joined, item.name), getattr(answers(), item.name)
            assert torch.equal(ours, whole) if isinstance(ours, torch.Tensor) else ours == whole, item.name
    assert Answers.joined([answers(reference=False)]).reference is None


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_declares_what_it_gives(name: str) -> None:
    objective = OBJECTIVES[name]()
    assert objective.name == name and objective.unit
    reference = -np.arange(4.0) if objective.needs_reference else None
    pairs = random_pairs(2)
    if objective.refusal(pairs[0]):
        known = Answers.of([document(one) for pair in pairs for one in pair.alone()], [1, 2, 3, 4], reference)
    else:
        known = Answers.of(pairs, [1, 2, 3, 4], reference)
    found = objective.statistics(-torch.ones(4, dtype=torch.float64), known)
    assert list(found) == list(objective.statistics_defined)
    assert set(objective.headline.values()) <= set(found)
    derived = objective.derived(dict.fromkeys(found, 0.5))
    assert list(derived) == list(objective.derived_defined)
    definitions = [*objective.statistics_defined.values(), *objective.derived_defined.values()]
    assert all(definition.endswith(".") for definition in definitions)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_that_is_called_linear_has_one_slope(name: str) -> None:
    """The head takes its gradient before it knows the log-probs."""
    objective = OBJECTIVES[name]()
    examples = random_pairs(3)
    if objective.answers == 1:
        examples = [document(one) for pair in examples for one in pair.alone()]
    reference = -np.arange(6.0) if objective.needs_reference else None
    known, totals = Answers.of(examples, [3, 1, 4, 1, 5, 9], reference), objective.totals(examples)
    slopes = []
    for at in (torch.zeros(6), -(torch.arange(1.0, 7.0) ** 2)):
        logps = at.double().requires_grad_()
        slopes.append(torch.autograd.grad(objective.loss(logps, known, totals), logps)[0])
    assert torch.equal(*slopes) == objective.linear


def document(example: TokenExample) -> TokenExample:
    """An example's answer as a document of its own."""
    return replace(example, prompt_ids=example.prompt_ids[:0])


@dataclass(frozen=True)
class Coupled(Objective):
    """Raises the log-probs of single answers that are above the batch's mean, and lowers the others."""

    strength: float = 1.0

    name: ClassVar[str] = "coupled"
    needs_reference: ClassVar[bool] = False
    couples_examples: ClassVar[bool] = True
    unit: ClassVar[str] = "answers"

    def refusal(self, example) -> str:
        return "" if len(example.answers) == 1 else "more answers than one. Give one"

    def totals(self, examples) -> BatchTotals:
        return BatchTotals(len(examples), sum(example.answer_tokens(0) for example in examples))

    def coupling(self, logps, answers) -> torch.Tensor:
        return (logps / answers.lengths).mean()

    def loss(self, logps, answers, totals) -> torch.Tensor:
        above = (logps.detach() / answers.lengths > totals.coupling).double() * 2 - 1
        return -(self.strength * answers.weights * above * logps / answers.lengths).sum() / totals.examples

    def statistics(self, logps, answers) -> dict[str, torch.Tensor]:
        return {}


def gradients(examples, tokens: int, chunk_rows: int) -> dict[str, torch.Tensor]:
    policy, objective, found = tiny_policy(), Coupled(), {}

    class Reading(torch.optim.SGD):
        def step(self, *args):
            found.update({name: p.grad.clone() for name, p in policy.model.named_parameters()})

    packs = build_packs(examples, PackLimits.plan(tokens, "prompt", compiled=False))
    batch = StepBatch.of(packs, objective, None)
    outcome = train_step(
        scorer_of(policy, chunk_rows), objective, Reading(policy.model.parameters(), lr=0.0), batch, None
    )
    means = outcome.logps / batch.answers.lengths
    above = (means > means.mean()).double() * 2 - 1
    assert 0 < (above > 0).sum() < len(above)
    assert outcome.loss == pytest.approx(-float((batch.answers.weights * above * means).mean()), rel=1e-12)
    return found


def test_an_objective_that_couples_examples_sees_the_whole_batch_before_its_first_loss() -> None:
    """However the batch is cut, the loss and the gradient are those of the mean over all of it."""
    examples = [
        replace(e, weight=1 + 0.5 * n) for n, e in enumerate(random_examples([(n + 1, (9 - n,)) for n in range(7)]))
    ]
    whole = gradients(examples, tokens=512, chunk_rows=8192)
    for tokens, chunk_rows in ((64, 8192), (32, 5)):
        for name, gradient in gradients(examples, tokens, chunk_rows).items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("tokens", [512, 32])
def test_an_evaluation_couples_all_held_out_examples(tokens: int) -> None:
    """The batch's mean is that of all of them, not that of a pack."""
    examples = random_examples([(n + 1, (9 - n,)) for n in range(7)])
    policy = tiny_policy()
    session = Session(scorer_of(policy), Coupled(), Loaded(policy.model, torch.float64))
    limits = PackLimits.plan(tokens, "prompt", compiled=False)
    assert (len(build_packs(examples, limits)) == 1) == (tokens == 512)
    means = torch.stack([score_alone(policy.model, e)[0].detach() / e.answer_tokens(0) for e in examples])
    above = (means > means.mean()).double() * 2 - 1
    assert evaluate(session, examples, limits, None).loss == pytest.approx(-float((above * means).mean()), rel=1e-7)


def test_refusals_are_counted_by_what_they_say() -> None:
    pairs = random_pairs(4)
    rows = [pairs[0], replace(pairs[1], margin=1.0), replace(pairs[2], margin=2.0), pairs[3]]
    with pytest.raises(DataError, match=r"random:2: has a margin, .* \(1 other row is like it\.\)"):
        OBJECTIVES["ipo"]().check(rows)
    singles = random_examples([(3, (4,)), (3, (5,)), (3, (6,))])
    with pytest.raises(DataError, match=r"random:1: has 1 answer, .* \(2 other rows are like it\.\)"):
        OBJECTIVES["dpo"]().check([replace(e, label=e.source.row == 2) for e in singles])
