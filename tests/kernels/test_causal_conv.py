"""Plain causal convolution against a loop over rows and taps in float64, and what it may never do (H3)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from tests.convolutions import (
    HEADS,
    Conv,
    check_neighbours_change_nothing,
    check_paths_decide_bits,
    convolved,
    given,
)
from tests.forests import Known, laid, paths, random_forest, ways_to_lie
from tests.repeated import slow
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.causal_conv.plain import Heads, PlainCausalConv
from tuningfork.records import PackedBatch

# Prompts of 0, 1, 2 and more rows, and answers of one row, beside and behind each other.
SHAPES = [(7, (5, 9)), (1, (1, 3)), (2, (1, 1, 4)), (0, (6,)), (0, (3, 1)), (9, (1, 1)), (1, (2,))]
NEAR = {"rtol": 1e-12, "atol": 1e-12}  # float64 throughout, and sums of a few hundred terms

CASES = [
    Conv(width=1),
    Conv(width=3, silu=False),
    Conv(width=3, silu=False, has_bias=True),
    Conv(width=4),
    Conv(width=4, has_bias=True),
    Conv(width=6, heads=HEADS),
    Conv(width=4, heads=HEADS),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def packs() -> list[PackedBatch]:
    short = random_examples(SHAPES)
    return [one_pack(short, "prompt", 80), one_pack(short, "none", 100), laid(random_forest(5, depth=9), "tree")]


def looped(batch: PackedBatch, case: Conv, x, weight, bias=None) -> list[torch.Tensor]:
    """Each number by itself, from the definition: a row's path is all that there is."""
    out = []
    for path in paths(batch):
        taps = path[-case.width :]
        total = sum(x[row] * weight[:, case.width - len(taps) + n] for n, row in enumerate(taps))
        total = total if bias is None else total + bias
        out.append(total / (1 + torch.exp(-total)) if case.silu else total)
    rows = torch.stack(out)
    if case.heads is None:
        return [rows]
    keys, width, values, value_width = case.heads
    query, key, value = rows.split([keys * width, keys * width, values * value_width], 1)
    query, key = (t.view(-1, keys, width) for t in (query, key))
    query, key = (t / ((t * t).sum(-1, keepdim=True) + 1e-6) ** 0.5 for t in (query, key))
    return [query / math.sqrt(width), key, value.view(-1, values, value_width)]


@cases
def test_values_and_gradients_are_those_of_a_loop(case):
    for batch in packs():
        leaves, upstream = given(Known().rows(batch), case, torch.float64)
        ours, theirs = (
            [*out, *torch.autograd.grad(out, leaves, upstream)]
            for out in (convolved(PlainCausalConv, batch, case, *leaves), looped(batch, case, *leaves))
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, **NEAR)


@cases
def test_gradients_are_those_of_finite_differences(case):
    batch = one_pack(random_examples(SHAPES[:3]), "prompt", 36)
    leaves, _ = given(Known().rows(batch), case, torch.float64)
    assert gradcheck(lambda *tensors: tuple(convolved(PlainCausalConv, batch, case, *tensors)), leaves, fast_mode=True)


@cases
@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(dtype, seed, case):
    check_paths_decide_bits(PlainCausalConv, ways_to_lie(seed), case, dtype)


@cases
def test_large_rows_before_a_segment_change_nothing(case):
    for batch in packs():
        check_neighbours_change_nothing(PlainCausalConv, batch, case, torch.float32)


@cases
def test_gradients_repeat_to_the_bit(case):
    batch = laid(random_forest(2), "tree")
    leaves, upstream = given(Known().rows(batch), case, torch.float32)
    runs = [torch.autograd.grad(convolved(PlainCausalConv, batch, case, *leaves), leaves, upstream) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_the_last_rows_of_a_prompt_add_up_over_its_answers_in_their_order():
    """In float32, where another order has other bits: 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    batch = one_pack(random_examples([(2, (1, 1, 1))]), "prompt", 8)
    x = torch.zeros(8, 1, requires_grad=True)
    upstream = torch.tensor([0, 0, 1e8, -1e8, 1, 0, 0, 0])[:, None]
    out = PlainCausalConv.prepare(batch.layout).conv(x, torch.ones(1, 2), silu=False)
    [gradient] = torch.autograd.grad(out, x, upstream)
    assert gradient[:, 0].tolist() == [0, 1, 1e8, -1e8, 1, 0, 0, 0]


def test_results_and_gradients_have_the_dtypes_of_what_they_belong_to():
    batch = one_pack(random_examples(SHAPES[:2]), "prompt", 40)
    form = PlainCausalConv.prepare(batch.layout)
    x = torch.randn(40, 24, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(24, 4, requires_grad=True)
    out = form.query_key_value(x, weight, Heads(1, 8, 2, 4))
    assert [(t.dtype, *t.shape) for t in out] == [
        (torch.bfloat16, 40, 1, 8),
        (torch.bfloat16, 40, 1, 8),
        (torch.bfloat16, 40, 2, 4),
    ]
    exact = form.query_key_value(x.double(), weight.double(), Heads(1, 8, 2, 4))
    for ours, true in zip(out, exact, strict=True):  # float32 within, rounded once
        assert ((ours.double() - true).abs() <= 2**-8 * true.abs() + 1e-6).all()
    d_x, d_weight = torch.autograd.grad(sum(t.float().sum() for t in out), (x, weight))
    assert (d_x.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)


def test_the_row_before_each_is_that_of_its_path():
    """By hand, in a pack of 10; 10 is none, and so is what comes before it."""
    batch = one_pack(random_examples([(3, (2, 2)), (0, (1,))]), "prompt", 10)
    assert PlainCausalConv.prepare(batch.layout).previous.tolist() == [10, 0, 1, 2, 3, 2, 5, 10, 10, 8, 10]
