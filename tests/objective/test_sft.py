"""SFT: numbers by hand, and the step of a plain trainer with PyTorch's cross-entropy, however the batch is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tests.tiny import limits_of, random_examples, random_pairs, scorer_of, tiny_gpt2
from tuningfork.data.packing.loader import build_packs
from tuningfork.errors import DataError
from tuningfork.models.hf import attention
from tuningfork.models.hf.load import Loaded
from tuningfork.objective.base import Answers, BatchTotals
from tuningfork.objective.sft import SFT, MeanOver
from tuningfork.records import PerToken, TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.evaluate import evaluate
from tuningfork.train.session import Session
from tuningfork.train.step import train_step

BOTH: tuple[MeanOver, ...] = ("tokens", "examples")

# Answers of very different lengths, so that the two means are far apart; documents; turns between the answer's own that
# do not count; weights.
BATCH = [
    replace(example, weight=weight)
    for example, weight in zip(
        random_examples([(7, (5,)), (1, (31,)), (12, (8,)), (0, (17,)), (9, (1,)), (0, (4,)), (3, (26,))], holes=True),
        (1.0, 1.0, 2.5, 1.0, 1.0, 0.25, 1.0),
        strict=True,
    )
]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def known(lengths: list[int], weights: tuple[float, ...] = ()) -> Answers:
    examples = random_examples([(3, (length,)) for length in lengths])
    weights = weights or (1.0,) * len(lengths)
    return Answers.of([replace(e, weight=w) for e, w in zip(examples, weights, strict=True)], lengths, None)


def test_both_means_by_hand() -> None:
    """Three answers of 2, 4 and 10 tokens: 6 + 8 + 10 nats over 16 tokens; and 3, 2 and 1 nats a token over three."""
    logps, answers, totals = numbers(-6, -8, -10), known([2, 4, 10]), BatchTotals(3, 16)
    assert float(SFT().loss(logps, answers, totals)) == pytest.approx(24 / 16, rel=1e-15)
    assert float(SFT("examples").loss(logps, answers, totals)) == pytest.approx(6 / 3, rel=1e-15)
    assert SFT().loss_size(totals) == 16 and SFT("examples").loss_size(totals) == 3


def test_a_weight_multiplies_and_does_not_change_what_is_divided_by() -> None:
    logps, totals = numbers(-6, -8, -10), BatchTotals(3, 16)
    answers = known([2, 4, 10], (2.0, 0.5, 1.0))
    assert float(SFT().loss(logps, answers, totals)) == pytest.approx((12 + 4 + 10) / 16, rel=1e-15)
    assert float(SFT("examples").loss(logps, answers, totals)) == pytest.approx((6 + 1 + 1) / 3, rel=1e-15)


def test_totals_count_what_counts() -> None:
    """Less the holes, and less the first token of a document, which nothing predicts."""
    examples = random_examples([(3, (5,)), (0, (4,)), (2, (8,))], holes=True)
    assert SFT().totals(examples) == BatchTotals(examples=3, tokens=4 + 2 + 5)
    weighted = [replace(example, weight=3.0) for example in examples]
    assert SFT().totals(weighted) == SFT().totals(examples)


def test_statistics_by_hand() -> None:
    found = SFT().statistics(numbers(-6, -8), known([2, 4], (5.0, 1.0)))
    nll = found["nll/token"]
    assert isinstance(nll, PerToken) and nll.sums.tolist() == [6.0, 8.0] and nll.tokens.tolist() == [2.0, 4.0]
    assert found["logps/answer"].tolist() == [-6.0, -8.0] and found["tokens/answer"].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("example", "why"),
    [
        (random_pairs(1)[0], "2 answers, objective sft imitates one. Set data.answers: best"),
        (random_examples([(3, (4, 5, 6))])[0], "3 answers, objective sft imitates one. Set data.answers: best"),
        (replace(BATCH[0], label=False), "a label, and objective sft would imitate unwanted answers"),
        (replace(BATCH[0], label=True), "a label, and objective sft would imitate unwanted answers"),
        (replace(BATCH[0], margin=0.5), "a margin, which objective sft has no place for"),
    ],
    ids=["pair", "ranking", "unwanted", "wanted", "margin"],
)
def test_what_is_no_single_answer_to_imitate_is_refused_with_the_remedy(example: TokenExample, why: str) -> None:
    SFT().check(BATCH)
    with pytest.raises(DataError, match=why):
        SFT().check([*BATCH, example])


def plain_losses(model: PreTrainedModel, example: TokenExample) -> torch.Tensor:
    """The negative log-prob of each counted token, by PyTorch's cross-entropy on the sequence alone."""
    model.set_attn_implementation("sdpa")
    try:
        ids = torch.from_numpy(np.concatenate([example.prompt_ids, example.answers[0].ids])).long()
        labels = torch.cat([torch.full((len(example.prompt_ids),), -100), ids[len(example.prompt_ids) :].clone()])
        labels[len(example.prompt_ids) :][~torch.from_numpy(example.answers[0].mask)] = -100
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        losses = cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="none")
        return losses[labels[1:] != -100]
    finally:
        model.set_attn_implementation(attention.NAME)


Gradients = dict[str, torch.Tensor]


@cache
def truth(mean_over: MeanOver) -> tuple[float, Gradients]:
    """Loss and gradient of the batch, one sequence at a time, in float64."""
    model = tiny_gpt2().model
    losses = [plain_losses(model, example) for example in BATCH]
    assert [len(loss) for loss in losses] == [example.answer_tokens(0) for example in BATCH]
    weighted = [example.weight * loss for example, loss in zip(BATCH, losses, strict=True)]
    if mean_over == "tokens":
        total = torch.cat(weighted).sum() / sum(map(len, losses))
    else:
        total = torch.stack([loss.mean() for loss in weighted]).mean()
    total.backward()
    return total.item(), {name: weight.grad for name, weight in model.named_parameters()}


def trained(mean_over: MeanOver, order: list[int], tokens: int, chunk_rows: int) -> tuple[float, Gradients, int]:
    """Loss and gradient of a step, and the number of its packs."""
    policy, found = tiny_gpt2(), {}

    class Reading(torch.optim.SGD):
        def step(self, *args):
            found.update({name: p.grad.clone() for name, p in policy.model.named_parameters()})

    packs = build_packs([BATCH[place] for place in order], limits_of(tokens))
    batch = StepBatch.of(packs, SFT(mean_over), None)
    optimizer = Reading(policy.model.parameters(), lr=0.0)
    outcome = train_step(scorer_of(policy, chunk_rows), SFT(mean_over), optimizer, batch, None)
    return outcome.loss, found, len(packs)


IN_ORDER, TURNED = [0, 1, 2, 3, 4, 5, 6], [4, 6, 0, 3, 5, 1, 2]


@pytest.mark.parametrize("mean_over", BOTH)
@pytest.mark.parametrize(
    ("order", "tokens", "chunk_rows"),
    [(IN_ORDER, 512, 8192), (TURNED, 64, 8192), (IN_ORDER, 32, 5)],
    ids=["one pack", "packs, another order", "small packs and chunks"],
)
def test_a_step_is_that_of_a_plain_trainer_however_the_batch_is_cut(
    mean_over: MeanOver, order: list[int], tokens: int, chunk_rows: int
) -> None:
    loss, gradients = truth(mean_over)
    found, ours, packs = trained(mean_over, order, tokens, chunk_rows)
    assert (packs == 1) == (tokens == 512)
    assert found == pytest.approx(loss, rel=1e-10)  # log-probs are fixed-point sums, in steps of 6e-11
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-13, msg=name)


def test_the_two_means_are_two_objectives() -> None:
    """Guards the test above: on this batch they differ by far more than its tolerance."""
    (tokens, over_tokens), (examples, over_examples) = truth("tokens"), truth("examples")
    assert abs(tokens - examples) > 1e-3 * tokens
    name = "transformer.wte.weight"
    assert (over_tokens[name] - over_examples[name]).norm() > 0.1 * over_tokens[name].norm()


@pytest.mark.parametrize("mean_over", BOTH)
@pytest.mark.parametrize("tokens", [512, 32])
def test_an_evaluation_is_a_mean_over_all_held_out_examples_and_not_over_packs(
    mean_over: MeanOver, tokens: int
) -> None:
    policy = tiny_gpt2()
    session = Session(scorer_of(policy), SFT(mean_over), Loaded(policy.model, torch.float64))
    found = evaluate(session, BATCH, limits_of(tokens), None).as_dict()
    assert found["loss"] == pytest.approx(truth(mean_over)[0], rel=1e-10)
    plain = [plain_losses(policy.model, example).detach() for example in BATCH]
    assert found["examples"] == len(BATCH)
    assert found["nll/token"] == pytest.approx(float(torch.cat(plain).mean()), rel=1e-10)  # without weights
    assert found["logps/answer"] == pytest.approx(-float(torch.cat(plain).sum()) / len(BATCH), rel=1e-10)
    assert found["tokens/answer"] == pytest.approx(sum(map(len, plain)) / len(BATCH), rel=1e-15)
