"""Language modelling: numbers by hand, and the step of a plain trainer on whole documents, however they are cut."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tiny import limits_of, random_examples, random_pairs, scorer_of, tiny_gpt2
from tuningfork.data.packing.loader import build_packs
from tuningfork.data.tokens.truncate import pieces_of
from tuningfork.errors import DataError
from tuningfork.models.hf.load import Loaded
from tuningfork.objective.base import Answers, BatchTotals
from tuningfork.objective.lm import LM
from tuningfork.records import PerToken, TokenExample
from tuningfork.train.batch import StepBatch
from tuningfork.train.evaluate import evaluate
from tuningfork.train.session import Session
from tuningfork.train.step import train_step


def sized(example: TokenExample) -> TokenExample:
    """A document each of whose targets stands for three bytes."""
    answer = replace(example.answers[0], text_bytes=3 * example.answer_tokens(0))
    return replace(example, answers=(answer,))


DOCUMENTS = random_examples([(0, (n,)) for n in (41, 3, 17, 30, 2)])
PIECES = [sized(piece) for whole in DOCUMENTS for piece in (pieces_of(whole, 9) if whole.longest > 9 else [whole])]


def known(lengths: list[int], text_bytes: list[int], weights: list[float]) -> Answers:
    rows = zip(random_examples([(0, (n + 1,)) for n in lengths]), text_bytes, weights, strict=True)
    examples = [replace(e, weight=w, answers=(replace(e.answers[0], text_bytes=size),)) for e, size, w in rows]
    return Answers.of(examples, lengths, None)


def test_loss_and_numbers_by_hand() -> None:
    """24 nats over 16 tokens that stand for 40 bytes."""
    logps, totals = torch.tensor([-6.0, -8.0, -10.0], dtype=torch.float64), BatchTotals(3, 16)
    assert float(LM().loss(logps, known([2, 4, 10], [8, 12, 20], [1.0] * 3), totals)) == pytest.approx(24 / 16)
    weighted = known([2, 4, 10], [8, 12, 20], [2.0, 0.5, 1.0])
    assert float(LM().loss(logps, weighted, totals)) == pytest.approx((12 + 4 + 10) / 16)
    found = LM().statistics(logps, weighted)
    nll, bits = found["nll/token"], found["bits/byte"]
    assert isinstance(nll, PerToken) and isinstance(bits, PerToken)
    assert float(nll.sums.sum() / nll.tokens.sum()) == pytest.approx(24 / 16)
    assert float(bits.sums.sum() / bits.tokens.sum()) == pytest.approx(24 / math.log(2) / 40)
    assert LM().derived({"nll/token": 1.5, "bits/byte": 2.0}) == {"perplexity": pytest.approx(math.exp(1.5))}
    assert LM().derived({"nll/token": 1e4}) == LM().derived({"nll/token": None}) == {"perplexity": None}
    assert LM().loss_size(totals) == 16


@pytest.mark.parametrize(
    ("example", "why"),
    [
        (random_pairs(1)[0], "2 answers, objective lm reads documents"),
        (random_examples([(2, (4,))])[0], "a prompt, whose tokens objective lm would not learn.*objective.name: sft"),
        (replace(DOCUMENTS[0], label=True), "a label, which objective lm has no place for"),
        (replace(DOCUMENTS[0], margin=0.5), "a margin, which objective lm has no place for"),
    ],
    ids=["pair", "prompt", "label", "margin"],
)
def test_what_is_no_document_is_refused_with_the_remedy(example: TokenExample, why: str) -> None:
    LM().check([*PIECES, *random_examples([(1, (4,))])])  # a BOS is no prompt
    with pytest.raises(DataError, match=why):
        LM().check([*PIECES, example])


def plain_losses(piece: TokenExample) -> torch.Tensor:
    """The negative log-prob of each token of a piece but its first, by plain transformers."""
    model = tiny_gpt2().model
    model.set_attn_implementation("sdpa")
    ids = torch.from_numpy(piece.answers[0].ids).long()
    logps = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    return -logps[torch.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize(("tokens", "chunk_rows"), [(512, 8192), (64, 8192), (16, 3)])
def test_a_step_and_an_evaluation_are_means_over_all_tokens_whatever_the_packs(tokens: int, chunk_rows: int) -> None:
    """Loss, gradient and perplexity are those of a plain trainer that has each piece by itself."""
    losses = torch.cat([plain_losses(piece) for piece in PIECES])
    assert len(losses) == sum(len(whole.answers[0].ids) - 1 for whole in DOCUMENTS)
    mean = float(losses.detach().mean())
    reference = tiny_gpt2().model
    reference.set_attn_implementation("sdpa")
    total = 0
    for piece in PIECES:
        ids = torch.from_numpy(piece.answers[0].ids).long()
        logps = reference(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        total = total - logps[torch.arange(len(ids) - 1), ids[1:]].sum() / len(losses)
    total.backward()

    policy, found = tiny_gpt2(), {}

    class Reading(torch.optim.SGD):
        def step(self, *args):
            found.update({name: p.grad.clone() for name, p in policy.model.named_parameters()})

    packs, scorer = build_packs(PIECES, limits_of(tokens, "tree")), scorer_of(policy, chunk_rows)
    assert (len(packs) == 1) == (tokens == 512)
    session = Session(scorer, LM(), Loaded(policy.model, torch.float64))
    scores = evaluate(session, PIECES, limits_of(tokens, "tree"), None).as_dict()
    batch = StepBatch.of(packs, LM(), None)
    outcome = train_step(scorer, LM(), Reading(policy.model.parameters(), lr=0.0), batch, None)
    assert outcome.loss == pytest.approx(mean, rel=1e-10) == pytest.approx(scores["loss"], rel=1e-10)
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-10, atol=1e-13, msg=name)
    assert scores["nll/token"] == pytest.approx(mean, rel=1e-10)
    assert scores["perplexity"] == pytest.approx(math.exp(mean), rel=1e-9)
    assert scores["bits/byte"] == pytest.approx(mean / math.log(2) / 3, rel=1e-10)
    assert batch.answer_tokens == len(losses) and np.isfinite(outcome.grad_norm)
