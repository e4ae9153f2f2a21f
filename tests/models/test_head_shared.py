"""Logit rows that several answers share: a step's loss, gradient and log-probs do not depend on whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.models.shared_answers import GROUPS, hidden_states, paths, paths_alone, shared_pairs, state
from tests.models.test_head import D, V, coupled, recording
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.select import plain
from tuningfork.models import head as head_module
from tuningfork.models.head import Head
from tuningfork.objective.base import Answers, Objective
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.kinds import OBJECTIVES
from tuningfork.records import LogitTransform, PackedBatch, TokenExample

SHARES = ("none", "prompt", "tree")
TRANSFORM = LogitTransform(scale=0.7, softcap=6.0)
WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.5


def pack(share: str, examples: Sequence[TokenExample] | None = None) -> PackedBatch:
    examples = shared_pairs(V) if examples is None else examples
    return build_pack(examples, sum(example.plain_tokens for example in examples), share)


class Step(NamedTuple):
    """What a step computes; the gradient of hidden states by the path of tokens that each is the state of."""

    loss: torch.Tensor
    logps: torch.Tensor
    d_states: dict[bytes, torch.Tensor]
    d_weight: torch.Tensor


def step(batch: PackedBatch, loss, chunk_rows: int, dtype: torch.dtype = torch.float64, linear: bool = False) -> Step:
    hidden = hidden_states(batch, D).to(dtype).requires_grad_()
    weight = WEIGHT.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
    value, logps = Head(plain(), TRANSFORM, chunk_rows).backward(hidden, weight, batch, loss, linear=linear)
    assert hidden.grad is not None and weight.grad is not None
    d_states: dict[bytes, torch.Tensor] = {}
    for path, gradient in zip(paths(batch), hidden.grad, strict=True):
        d_states[path] = d_states.get(path, 0) + gradient
    return Step(value, logps, d_states, weight.grad)


def alone(examples: Sequence[TokenExample], loss) -> Step:
    """By autograd, each answer by itself: no pack, no head."""
    states: dict[bytes, torch.Tensor] = {}
    weight = WEIGHT.clone().requires_grad_()
    logps = []
    for example in examples:
        for answer in range(len(example.answers)):
            seen, targets = paths_alone(example, answer)
            for path in seen:
                states.setdefault(path, torch.from_numpy(state(path, D)).requires_grad_())
            logits = TRANSFORM.scale * torch.stack([states[path] for path in seen]) @ weight.t()
            logits = TRANSFORM.softcap * torch.tanh(logits / TRANSFORM.softcap)
            logps.append(logits.log_softmax(1)[range(len(targets)), targets].sum())
    value = loss(0, len(logps), torch.stack(logps))
    *d_states, d_weight = torch.autograd.grad(value, [*states.values(), weight])
    return Step(value.detach(), torch.stack(logps).detach(), dict(zip(states, d_states, strict=True)), d_weight)


def distance(one: Step, other: Step) -> float:
    """The largest difference of two steps' numbers, as a share of the quantity's norm."""
    assert one.d_states.keys() == other.d_states.keys()
    states = [torch.stack([each.d_states[path] for path in one.d_states]) for each in (one, other)]
    pairs = [(one.loss, other.loss), (one.logps, other.logps), tuple(states), (one.d_weight, other.d_weight)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def objective_of(name: str, options: str) -> Objective:
    asked = {"sft_weight": 0.4, "label_smoothing": 0.1, "gamma": 0.7} if options == "all" else {}
    return ObjectiveConfig(
        name, beta=0.3, **{k: v for k, v in asked.items() if k in OBJECTIVES[name].settings()}
    ).build()


@pytest.mark.parametrize("options", ["bare", "all"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_steps_loss_and_gradient_do_not_depend_on_sharing(name, options):
    """With answers in several pairs, weights and margins. A chunk holds all, a few groups, or a piece of one."""
    objective = objective_of(name, options)
    examples = shared_pairs(V, margins=getattr(objective, "takes_margins", False) and options == "all")
    if objective.answers == 1:  # the same answers, each an example of its own
        examples = [one for example in examples for one in example.alone()]
    lengths = pack("none", examples).answer_lengths
    # Near the policy's own, so that no pair's gradient vanishes.
    reference = -4.0 * np.array(lengths) - np.linspace(0, 3, len(lengths)) if objective.needs_reference else None
    answers = Answers.of(examples, lengths, reference)
    loss = objective.of_chunks(answers, objective.totals(examples))
    unshared = step(pack("none", examples), loss, 8192)
    for share, chunk_rows in (("prompt", 150), ("tree", 8192), ("tree", 90), ("tree", 7)):
        shared = step(pack(share, examples), loss, chunk_rows, linear=objective.linear)
        assert distance(shared, unshared) <= 1e-12, (share, chunk_rows)
    # A log-prob is off by half a fixed-point step a token, 2e-9 of tens of nats; the losses' slopes follow it smoothly.
    assert distance(unshared, alone(examples, loss)) <= 1e-9


def test_the_shared_answers_are_laid_as_the_tests_need_them():
    tree = pack("tree")
    counted = sum(tree.answer_lengths)
    assert [answers for answers, _ in tree.groups] == list(GROUPS)
    assert len(tree.logit_rows) < counted / 2
    assert len(pack("none").logit_rows) == counted
    assert (
        len(pack("prompt").logit_rows) == counted - 2
    )  # two pairs have a chosen and a rejected answer that begin alike
    uses = torch.bincount(tree.logit_row_of_counted)
    assert {1, 3} < set(uses.tolist()) and uses.max() >= 9
    # Rows of the third group: three of the first pair's own, one that is its last and the other's first, and the rest.
    first, last = (sum(rows for _, rows in tree.groups[:n]) for n in (2, 3))
    assert uses[first:last].tolist() == [1, 1, 1, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_have_the_same_bits_however_answers_are_shared(dtype):
    weight = WEIGHT.float()
    found = []
    for share in SHARES:
        batch = pack(share)
        hidden = hidden_states(batch, D).to(dtype)
        for chunk_rows in (1, 3, 7, 64, 8192):
            found.append(Head(plain(), TRANSFORM, chunk_rows).score(hidden, weight, batch))
        found.append(step(batch, coupled, 50, dtype).logps)
    for logps in found:
        assert torch.equal(logps, found[0])
    assert len(found[0].unique()) > len(found[0]) / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_repeat_to_the_bit(dtype):
    batch = pack("tree")
    for chunk_rows in (7, 8192):
        one, again = (step(batch, coupled, chunk_rows, dtype) for _ in range(2))
        assert torch.equal(one.loss, again.loss) and torch.equal(one.d_weight, again.d_weight)
        assert all(torch.equal(one.d_states[path], again.d_states[path]) for path in one.d_states)


def test_chunks_are_whole_groups_and_only_a_larger_one_is_cut():
    batch = pack("tree")
    sizes = [rows for _, rows in batch.groups]
    before = [0, *accumulate(answers for answers, _ in batch.groups)]

    def cuts_of(limit: int) -> tuple[list[tuple[int, int]], list[int]]:
        cuts: list[tuple[int, int]] = []
        shapes: list[tuple[int, ...]] = []

        def loss(first: int, last: int, logps: torch.Tensor) -> torch.Tensor:
            cuts.append((first, last))
            return coupled(first, last, logps)

        hidden, weight = hidden_states(batch, D).requires_grad_(), WEIGHT.clone().requires_grad_()
        Head(recording(shapes), TRANSFORM, limit).backward(hidden, weight, batch, loss)
        return cuts, [rows for rows, _ in shapes]

    a, b, c, d = sizes
    assert b < a < b + c + d
    answers = list(pairwise(before))
    assert cuts_of(sum(sizes)) == ([(0, before[-1])], [sum(sizes)])
    assert cuts_of(b + c + d) == ([answers[0], (before[1], before[4])], [a, b + c + d])
    assert cuts_of(b + c + d - 1) == ([answers[0], (before[1], before[3]), answers[3]], [a, b + c, d])
    assert cuts_of(a - 1)[1][:2] == [a - 1, 1]
    assert cuts_of(1) == (answers, [1] * sum(sizes))


def test_a_shared_row_is_projected_once_and_twice_where_its_group_is_larger_than_a_chunk(monkeypatch):
    batch = pack("tree")
    (_, first), (_, second), *rest = batch.groups
    assert first > second > sum(rows for _, rows in rest)
    project, projected = head_module._Projection.logits, []
    monkeypatch.setattr(
        head_module._Projection, "logits", lambda self, rows: projected.append(len(rows)) or project(self, rows)
    )
    for limit, again in ((8192, 0), (first, 0), (first - 1, first), (second - 1, first + second)):
        projected.clear()
        step(batch, coupled, limit)
        assert sum(projected) == len(batch.logit_rows) + again
        assert max(projected) <= limit


def test_a_chunk_without_shared_rows_adds_up_no_coefficients(monkeypatch):
    """There the map from counted tokens to logit rows is the identity."""
    sizes: list[int] = []
    add = head_module.sum_by_place
    monkeypatch.setattr(head_module, "sum_by_place", lambda d, rows, size: sizes.append(size) or add(d, rows, size))
    step(pack("none"), coupled, 60)
    assert sizes == []
    batch = pack("tree")
    step(batch, coupled, 1)  # each group is a chunk
    assert sizes == [rows for _, rows in batch.groups[:3]]  # the last one is of one pair that shares nothing


def test_not_a_number_in_a_shared_row_breaks_all_its_answers_and_no_other():
    batch = pack("tree")
    hidden = hidden_states(batch, D).float()
    head = Head(plain(), TRANSFORM, 8192)
    clean = head.score(hidden, WEIGHT.float(), batch)
    uses = torch.bincount(batch.logit_row_of_counted)
    for row in (int(uses.argmax()), int(uses.argmin())):
        spoilt = hidden.clone()
        spoilt[row, 3] = float("nan")
        logps = head.score(spoilt, WEIGHT.float(), batch)
        hit = torch.zeros(len(clean), dtype=torch.bool)
        hit[batch.answer_of_counted[batch.logit_row_of_counted == row]] = True
        assert int(hit.sum()) == uses[row]
        assert logps[hit].isnan().all() and torch.equal(logps[~hit], clean[~hit])
