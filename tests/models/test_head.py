"""The one-pass head against plain autograd through all logits: value, both gradients, bits, flops and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny import one_pack, random_examples, random_pairs, tiny_policy, with_row_logps
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import plain
from tuningfork.models.head import Head
from tuningfork.objective.base import Answers
from tuningfork.objective.config import ObjectiveConfig
from tuningfork.objective.pairs import OBJECTIVES
from tuningfork.records import LogitTransform, PackedBatch

# k = 1, 2 and 3; a document, alone and forked, whose first token has no row; one-token answers; masks with holes.
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (0, (3, 5)), (9, (1, 1)), (4, (11,)), (17, (13, 20))]
D, V = 24, 61
TRANSFORMS = {
    "none": LogitTransform(),
    "scale": LogitTransform(scale=0.5),
    "softcap": LogitTransform(softcap=4.0),
    "both": LogitTransform(scale=2.0, softcap=6.0),
}


@dataclass
class Case:
    batch: PackedBatch
    hidden: torch.Tensor  # [R, D]
    weight: torch.Tensor  # [V, D]
    bias: torch.Tensor | None = None  # [V]

    @classmethod
    def of(
        cls, batch: PackedBatch, dtype=torch.float64, d: int = D, v: int = V, weight_dtype=None, biased: bool = False
    ) -> Case:
        generator = torch.Generator().manual_seed(7)
        hidden = torch.randn(len(batch.logit_rows), d, generator=generator, dtype=torch.float64)
        weight = torch.randn(v, d, generator=generator, dtype=torch.float64) * 0.5
        # A bias is no matrix, and so never held below float32.
        bias = torch.randn(v, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
        return cls(batch, hidden.to(dtype), weight.to(weight_dtype or dtype), bias if biased else None)


def case_of_all_kinds(**kwargs) -> Case:
    return Case.of(one_pack(random_examples(SHAPES, vocab=V, holes=True), "prompt"), **kwargs)


def coupled(first: int, last: int, logps: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient depends on the log-probs themselves, so that a stale or permuted one shows."""
    weights = torch.cos(torch.arange(first, last, dtype=torch.float64))
    return (weights * logps + 0.01 * logps.square()).sum()


def through_all_logits(case: Case, loss, transform: LogitTransform, dtype=torch.float64):
    """(loss, answer log-probs, d hidden, d weight, d bias if there is one) by autograd through the full [R, V] logits,
    matmul in `dtype`."""
    hidden = case.hidden.to(dtype).requires_grad_()
    weight, bias = (
        None if t is None else (t.double() if dtype == torch.float64 else t.clone()).requires_grad_()
        for t in (case.weight, case.bias)
    )
    logits = hidden @ weight.to(dtype).t()
    logits = logits if bias is None else logits + bias.to(dtype)
    z = (logits if dtype == torch.float64 else logits.float()) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    rows = z.log_softmax(-1)[torch.arange(len(z)), case.batch.targets].double()
    answers = sum(case.batch.answers_per_example)
    rows = rows[case.batch.logit_row_of_counted]
    logps = torch.stack([rows[case.batch.answer_of_counted == a].sum() for a in range(answers)])
    value = loss(0, answers, logps)
    gradients = torch.autograd.grad(value, [leaf for leaf in (hidden, weight, bias) if leaf is not None])
    return value.detach(), logps.detach(), *gradients


def through_the_head(case: Case, loss, head: Head):
    hidden, weight, bias = (
        None if tensor is None else tensor.detach().clone().requires_grad_()
        for tensor in (case.hidden, case.weight, case.bias)
    )
    value, logps = head.backward(hidden, weight, case.batch, loss, bias)
    return value, logps, hidden.grad, weight.grad, *([] if bias is None else [bias.grad])


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 16, 8192])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_value_and_gradients_are_autograds(transform, chunk_rows, biased):
    case = case_of_all_kinds(biased=biased)
    expected = through_all_logits(case, coupled, transform)
    head = Head(plain(), transform, chunk_rows)
    ours = through_the_head(case, coupled, head)
    assert torch.equal(ours[1], head.score(case.hidden, case.weight, case.batch, case.bias))
    for mine, true in zip(ours, expected, strict=True):
        # 3e-11 is the step of the fixed-point sums; nothing else is rounded coarser than float64.
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-9)
    assert ours[0].dtype == ours[1].dtype == torch.float64
    assert not ours[0].requires_grad and not ours[1].requires_grad


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_several_packs_add_up(weight_dtype):
    """As those of any module do; a bfloat16 weight's are added up in float32 within a pack, and rounded once."""
    case = case_of_all_kinds(weight_dtype=weight_dtype, dtype=torch.float32)
    head = Head(plain(), LogitTransform(), 16)
    once = through_the_head(case, coupled, head)[3]
    assert once.dtype == weight_dtype
    before = torch.randn(case.weight.shape, generator=torch.Generator().manual_seed(1)).to(weight_dtype)
    weight = case.weight.clone().requires_grad_()
    weight.grad = before.clone()
    head.backward(case.hidden.clone().requires_grad_(), weight, case.batch, coupled)
    spacing = torch.finfo(weight_dtype).eps
    torch.testing.assert_close(weight.grad, before + once, rtol=4 * spacing, atol=4 * spacing * float(once.abs().max()))


def test_a_bfloat16_weights_gradient_is_rounded_once():
    """Not once a chunk: then small chunks would lose digits."""
    case = case_of_all_kinds(dtype=torch.bfloat16, d=64, v=300)
    head = Head(plain(), LogitTransform(), 4)
    rounded = through_the_head(case, coupled, head)[3]
    exact = through_the_head(replace(case, weight=case.weight.float()), coupled, head)[3]
    assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(rounded, exact.bfloat16())


def test_the_gradient_of_a_bias_adds_up_over_packs_and_a_frozen_one_has_none():
    case = case_of_all_kinds(biased=True)
    assert case.bias is not None
    head = Head(plain(), LogitTransform(), 16)
    once = through_the_head(case, coupled, head)[4]
    for frozen in (False, True):
        weight, bias = case.weight.clone().requires_grad_(), case.bias.clone().requires_grad_(not frozen)
        for _ in range(2):
            head.backward(case.hidden.clone().requires_grad_(), weight, case.batch, coupled, bias)
        if frozen:
            assert bias.grad is None
        else:
            torch.testing.assert_close(bias.grad, 2 * once, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient():
    case = case_of_all_kinds()
    hidden = case.hidden.clone().requires_grad_()
    Head(plain(), LogitTransform(), 16).backward(hidden, case.weight, case.batch, coupled)
    assert case.weight.grad is None
    torch.testing.assert_close(hidden.grad, through_the_head(case, coupled, Head(plain(), LogitTransform(), 16))[2])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_the_gradient_of_the_plain_path(name):
    """Liger#676: the fused path's own idea of the loss."""
    pairs = random_pairs(6, vocab=V)
    case = Case.of(one_pack(pairs, "prompt"))
    objective = ObjectiveConfig(name, beta=0.3, sft_weight=0.4).build()
    reference = -np.linspace(5, 60, 12) if objective.needs_reference else None
    answers = Answers.of(pairs, case.batch.answer_lengths, reference)
    loss = objective.of_chunks(answers, objective.totals(pairs))

    expected = through_all_logits(case, loss, LogitTransform())
    for chunk_rows in (3, 30, 8192):
        for mine, true in zip(
            through_the_head(case, loss, Head(plain(), LogitTransform(), chunk_rows)), expected, strict=True
        ):
            torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-10)


def long_answers(vocab: int = V) -> PackedBatch:
    """At least four logit rows wherever these examples are cut in pieces of 4, 8 or 16 rows; one longer than 16."""
    shapes = [(3, (4, 8)), (2, (12, 4)), (0, (9,)), (5, (16, 24)), (1, (8, 4, 4)), (7, (20,))]
    return one_pack(random_examples(shapes, vocab=vocab), "prompt")


def one_token_answers() -> PackedBatch:
    return one_pack(
        random_examples([(5, (1, 1)), (3, (1,)), (4, (6, 7)), (2, (1, 1, 1)), (6, (3, 5))], vocab=V), "prompt"
    )


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        pytest.param(long_answers(), (4, 8, 16, 20, 64, 8192), id="long answers"),
        pytest.param(
            one_token_answers(),
            (1, 3, 8, 8192),
            id="one-token answers",
        ),
        pytest.param(
            long_answers(),
            (1, 2, 3, 7, 8192),
            id="pieces of a few rows",
        ),
    ],
)
def test_float32_log_probs_have_the_same_bits_in_any_chunk(batch, sizes):
    case = Case.of(batch, torch.float32)
    truth = through_all_logits(case, coupled, LogitTransform())
    whole = through_the_head(case, coupled, Head(plain(), LogitTransform(), 10**6))
    for size in sizes:
        head = Head(plain(), LogitTransform(), size)
        value, logps, d_hidden, d_weight = through_the_head(case, coupled, head)
        assert torch.equal(logps, whole[1]), size
        assert torch.equal(head.score(case.hidden, case.weight, batch), logps), size
        assert value == pytest.approx(float(whole[0]), rel=1e-14)
        for mine, one_chunk, true in ((d_hidden, whole[2], truth[2]), (d_weight, whole[3], truth[3])):
            # Sums in another order: as far from the truth as one chunk is, give or take the same again.
            assert (mine.double() - true).norm() <= 2 * (one_chunk.double() - true).norm()


def test_bfloat16_log_probs_have_the_same_bits_in_any_chunk():
    case = Case.of(long_answers(), torch.bfloat16, weight_dtype=torch.float32)
    scores = [
        Head(plain(), LogitTransform(), size).score(case.hidden, case.weight, case.batch) for size in (4, 16, 999)
    ]
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[1], scores[2])


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_logits_of_bfloat16_factors_are_rounded_to_float32_only(transform):
    """In bfloat16, logits of 20 are 1/8 apart: tenths of a nat on an answer, hundreds of times what is allowed here."""
    case = case_of_all_kinds(dtype=torch.bfloat16, d=64, v=300)
    case = replace(case, hidden=4 * case.hidden)
    _, true, *_ = through_all_logits(case, coupled, transform)
    ours = Head(plain(), transform, 16).score(case.hidden, case.weight, case.batch)
    # Two logits below 256, each a sum of 64 products and one more rounding; the transform at most doubles them.
    allowed = 2 * 2 * 65 * 256 * torch.finfo(torch.float32).eps / 2
    assert ((ours - true).abs() <= allowed * torch.tensor(case.batch.answer_lengths)).all()
    assert (ours - true).norm() <= 1e-3


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_error_is_at_most_twice_that_of_full_logits_in_the_same_dtype(dtype, transform, biased):
    """G8: float32 weights, products in `dtype`; error to the float64 truth of the very same inputs."""
    case = case_of_all_kinds(dtype=dtype, d=64, v=300, weight_dtype=torch.float32, biased=biased)
    true = through_all_logits(replace(case, hidden=case.hidden.double()), coupled, transform)
    baseline = through_all_logits(case, coupled, transform, dtype)
    for chunk_rows in (16, 8192):
        ours = through_the_head(case, coupled, Head(plain(), transform, chunk_rows))
        assert ours[2].dtype == dtype and all(gradient.dtype == torch.float32 for gradient in ours[3:])
        # The loss itself is left out: one number may be right by luck. It is a function of the log-probs.
        names = ("logps", "d_hidden", "d_weight", "d_bias")[: len(ours) - 1]
        for name, mine, theirs, truth in zip(names, ours[1:], baseline[1:], true[1:], strict=True):
            error, allowed = (mine.double() - truth).norm(), (theirs.double() - truth).norm()
            assert error <= 2 * allowed + 1e-9, f"{name}: {error:.2e} against {allowed:.2e}"


def recording(shapes: list[tuple[int, ...]]):
    """The plain kernels, noting the shape of every block of logits that they are given."""

    def row_logps(logits, targets, transform):
        shapes.append(tuple(logits.shape))
        return plain_rows.row_logps(logits, targets, transform)

    return with_row_logps(row_logps=row_logps)


class Watch(TorchDispatchMode):
    """Counts the flops of matrix products and the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("limit", [16, 40])
def test_all_logits_are_never_there_at_once(limit):
    case = Case.of(long_answers(vocab=997), torch.float32, v=997)
    rows = len(case.hidden)
    shapes: list[tuple[int, ...]] = []
    head = Head(recording(shapes), LogitTransform(), limit)
    with Watch() as watch:
        through_the_head(case, coupled, head)
    assert rows > 2 * limit
    assert sum(r for r, _ in shapes) == rows  # each row once
    assert max(r for r, _ in shapes) <= limit
    # Beside logits, only the weight and its gradient are this large; the plain kernel adds nothing beyond [r, V].
    assert watch.largest <= max(limit * 997, case.weight.numel())
    shapes.clear()
    with Watch() as watch:
        head.score(case.hidden, case.weight, case.batch)
    assert max(r for r, _ in shapes) <= limit
    assert watch.largest <= max(limit * 997, case.weight.numel())


def test_chunks_are_whole_examples_and_only_a_longer_example_is_cut():
    examples = random_examples([(2, (3, 4)), (2, (5, 5)), (2, (30, 2)), (2, (1, 1)), (2, (9,))], vocab=V)
    shapes: list[tuple[int, ...]] = []
    case = Case.of(one_pack(examples, "prompt"))
    cuts: list[tuple[int, int]] = []

    def loss(first: int, last: int, logps: torch.Tensor) -> torch.Tensor:
        cuts.append((first, last))
        return coupled(first, last, logps)

    through_the_head(case, loss, Head(recording(shapes), LogitTransform(), 17))
    assert cuts == [(0, 4), (4, 6), (6, 9)]
    assert [r for r, _ in shapes] == [17, 17, 15, 11]


@pytest.mark.parametrize(("limit", "recomputed"), [(8192, 0), (40, 0), (36, 40), (16, 40 + 20)])
def test_flops_are_six_per_row_and_eight_only_for_an_example_larger_than_a_chunk(limit, recomputed):
    case = Case.of(long_answers(), torch.float32)
    rows = len(case.hidden)
    with Watch() as watch:
        through_the_head(case, coupled, Head(plain(), LogitTransform(), limit))
    assert watch.flops == 6 * rows * V * D + 2 * recomputed * V * D


@pytest.mark.parametrize("limit", [8192, 36, 16, 4])
def test_a_weighted_sum_of_log_probs_takes_no_second_product_and_holds_a_chunk_of_logits_at_most(limit):
    """However long an answer is, and with the numbers of a loss that is not told to be one."""

    def weighted(first: int, last: int, logps: torch.Tensor) -> torch.Tensor:
        return (torch.cos(torch.arange(first, last, dtype=torch.float64)) * logps).sum()

    found = []
    for linear in (False, True):
        case = Case.of(long_answers(vocab=997), torch.float32, v=997)
        hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
        with Watch() as watch:
            head = Head(plain(), LogitTransform(), limit)
            loss, logps = head.backward(hidden, weight, case.batch, weighted, linear=linear)
        found.append((loss, logps, hidden.grad, weight.grad))
    assert watch.flops == 6 * len(hidden) * 997 * D
    assert watch.largest <= max(limit * 997, weight.numel())
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_flop_counter_sees_all_of_the_head():
    case = Case.of(long_answers(), torch.float32)
    with FlopCounterMode(display=False) as counter:
        through_the_head(case, coupled, Head(plain(), LogitTransform(), 8192))
    assert counter.get_total_flops() == 6 * len(case.hidden) * V * D


def test_scoring_costs_two_flops_per_row_and_weight_and_keeps_no_graph():
    case = Case.of(long_answers(), torch.float32)
    case.weight.requires_grad_()
    with Watch() as watch:
        logps = Head(plain(), LogitTransform(), 8192).score(case.hidden, case.weight, case.batch)
    assert watch.flops == 2 * len(case.hidden) * V * D
    assert not logps.requires_grad


@pytest.mark.parametrize("family", ["granite", "llama"])
def test_a_tied_weight_gets_both_gradients(family):
    """trl#6372: embeddings that are the head too. Their gradient is the sum of both uses."""
    policy = tiny_policy(family)
    tied = family == "granite"
    assert (policy.head_weight is policy.model.get_input_embeddings().weight) == tied
    examples = random_pairs(3)
    batch = one_pack(examples, "prompt")
    head = Head(policy.kernels, policy.transform, 8192)

    def gradient(detach: str | None) -> torch.Tensor:
        hidden = policy.hidden_rows(batch)
        weight = policy.head_weight
        hidden = hidden.detach().requires_grad_() if detach == "hidden" else hidden
        weight = weight.detach().requires_grad_() if detach == "weight" else weight
        policy.model.zero_grad()
        head.backward(hidden, weight, batch, coupled)
        grad = policy.head_weight.grad
        return torch.zeros_like(policy.head_weight) if grad is None else grad.clone()

    as_embedding, as_head = gradient("weight"), gradient("hidden")
    torch.testing.assert_close(gradient(None), as_embedding + as_head, rtol=1e-12, atol=1e-12)
    assert as_head.abs().sum() > 0
    assert (as_embedding.abs().sum() > 0) == tied


def test_log_probs_are_never_above_zero():
    case = case_of_all_kinds(dtype=torch.float32)
    certain = replace(case, hidden=100 * case.weight[case.batch.targets])  # every target towers over the rest
    for size in (4, 16, 8192):
        logps = Head(plain(), LogitTransform(), size).score(certain.hidden, certain.weight, case.batch)
        assert (logps <= 0).all()
    assert (logps == 0).any()


def test_not_a_number_in_a_row_breaks_its_answer_and_no_other():
    case = case_of_all_kinds(dtype=torch.float32)
    head = Head(plain(), LogitTransform(), 8192)
    clean = head.score(case.hidden, case.weight, case.batch)
    for row, bad in ((0, float("nan")), (20, float("inf"))):
        hidden = case.hidden.clone()
        hidden[row, 3] = bad
        broken = head.score(hidden, case.weight, case.batch)
        (answer,) = case.batch.answer_of_counted[case.batch.logit_row_of_counted == row].tolist()
        assert broken[answer].isnan()
        others = torch.arange(len(broken)) != answer
        assert torch.equal(broken[others], clean[others])


def test_a_target_that_cannot_be_is_not_a_number_and_not_a_huge_one():
    """A vocabulary entry at minus infinity: impossible as a target, harmless elsewhere."""
    case = case_of_all_kinds(dtype=torch.float32)
    token = int(case.batch.targets[5])

    def masked(logits, targets, transform):
        logits[:, token] = float("-inf")
        return plain_rows.row_logps(logits, targets, transform)

    logps = Head(with_row_logps(row_logps=masked), LogitTransform(), 8192).score(case.hidden, case.weight, case.batch)
    hit = set(case.batch.answer_of_counted[case.batch.targets[case.batch.logit_row_of_counted] == token].tolist())
    for answer, logp in enumerate(logps):
        assert logp.isnan() if answer in hit else logp.isfinite()
    assert len(hit) < len(logps)


def test_a_pack_without_any_logit_row_has_log_probs_of_zero():
    """One-token documents: nothing is predicted."""
    batch = one_pack(random_examples([(0, (1,)), (0, (1, 1))]), "prompt")
    hidden = torch.zeros(0, D, requires_grad=True)
    weight = torch.ones(V, D, requires_grad=True)
    _, logps = Head(plain(), LogitTransform(), 8192).backward(hidden, weight, batch, lambda a, b, s: s.sum())
    assert logps.tolist() == [0, 0, 0]
    assert weight.grad is not None and weight.grad.abs().sum() == 0
