"""CCGQA's plain op against a loop over rows and taps in float64, and what it may never do (C1, C3-C7)."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from tests.ccgqa import (
    SHAPES,
    Case,
    applied,
    check_neighbours_change_nothing,
    check_paths_decide_bits,
    given,
    looped,
    with_gradients,
)
from tests.forests import Known, laid, random_forest, ways_to_lie
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.ccgqa.plain import Filters, PlainCcgqa, _Mix
from tuningfork.kernels.tables import rows_read

NEAR = {"rtol": 1e-12, "atol": 1e-12}  # float64 throughout, and sums of a few hundred terms
CASES = [
    Case(),
    Case(1, 1, 4, 1, 1, biased=False),
    Case(1, 4, 6, 3, 3, biased=False),  # as in a public model, with an odd number of key heads
    Case(4, 1, 2, 4, 1),
    Case(2, 3, 2, 1, 4),
    Case(2, 4, 4, 4, 4),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def packs():
    short = random_examples([*SHAPES, *((0, (n,)) for n in range(1, 9)), (0, (65,))])
    return [one_pack(short, "prompt", 320), laid(random_forest(5, depth=4, most=5, longest=90), "tree")]


@cases
def test_values_and_gradients_are_those_of_a_loop(case):
    for batch in packs():
        leaves, upstream = given(Known().rows(batch), case, torch.float64)
        ours = with_gradients(applied(PlainCcgqa, batch, case, *leaves), leaves, upstream)
        theirs = with_gradients(looped(batch, case, *leaves), leaves, upstream)
        for name, one, other in zip(case.names, ours, theirs, strict=True):
            # Gradients of weights are sums over hundreds of rows.
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12 * other.abs().max().item(), msg=name)


@cases
def test_gradients_are_those_of_finite_differences(case):
    """Of the temperature too, which a fused form once took as a number without a gradient (C5)."""
    batch = one_pack(random_examples(SHAPES[:4]), "prompt", 30)
    leaves, _ = given(Known().rows(batch), case, torch.float64)
    assert gradcheck(lambda *tensors: tuple(applied(PlainCcgqa, batch, case, *tensors)), leaves, fast_mode=True)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(dtype, case):
    check_paths_decide_bits(PlainCcgqa, ways_to_lie(1), case, dtype)


@cases
def test_neighbours_change_nothing(case):
    check_neighbours_change_nothing(PlainCcgqa, one_pack(random_examples(SHAPES), "prompt", 80), case, torch.float32)


def test_gradients_repeat_to_the_bit():
    batch, case = laid(random_forest(2), "tree"), CASES[-1]
    leaves, upstream = given(Known().rows(batch), case, torch.float32)
    runs = [with_gradients(applied(PlainCcgqa, batch, case, *leaves), leaves, upstream) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_what_lies_before_a_path_is_the_first_convolutions_bias_to_the_second():
    """By hand: with zeros there in place of it, the first row would be 1 + 0, and with biases of 1 it is 1 + 1."""
    batch = one_pack(random_examples([(0, (3,))]), "prompt", 4)
    ones = torch.ones(2, 1, 2, dtype=torch.float64)
    filters = Filters(torch.zeros(2, 1, dtype=torch.float64), ones, torch.ones(2, dtype=torch.float64))
    x = torch.zeros(4, 2, dtype=torch.float64)
    prepared = PlainCcgqa.prepare(batch.layout)
    sources = rows_read(prepared.convolution.previous, 2)
    by_channel = prepared.convolution.conv(x, filters.depthwise, filters.depthwise_bias, silu=False)
    mixed = _Mix.apply(sources, by_channel, filters.grouped, None, filters.depthwise_bias)
    assert mixed[:3].tolist() == [[2.0, 2.0]] * 3


def test_the_scale_of_latent_rows_leaves_queries_and_keys():
    """C3, without biases."""
    case = CASES[2]
    batch = one_pack(random_examples(SHAPES), "prompt", 80)
    x, *others = given(Known().rows(batch), case, torch.float64)[0]
    one, ten = (applied(PlainCcgqa, batch, case, scale * x, *others)[:2] for scale in (1, 10))
    for a, b in zip(one, ten, strict=True):
        torch.testing.assert_close(a, b, **NEAR)


def test_a_query_has_the_length_of_its_width_and_a_key_that_by_its_temperature():
    case = CASES[0]
    batch = one_pack(random_examples(SHAPES), "prompt", 80)
    leaves, _ = given(Known().rows(batch), case, torch.float64)
    query, key, _ = applied(PlainCcgqa, batch, case, *leaves)
    torch.testing.assert_close(query.norm(dim=-1), torch.full(query.shape[:2], 6**0.5, dtype=torch.float64), **NEAR)
    torch.testing.assert_close(key.norm(dim=-1), 6**0.5 * leaves[4].exp().expand(key.shape[:2]), **NEAR)


def test_the_first_row_of_a_path_has_no_value_of_the_row_before():
    """C4; the rows of answers behind an empty prompt are first rows, too."""
    batch = one_pack(random_examples([(0, (2, 2)), (1, (1,))]), "prompt", 8)
    values = torch.arange(1.0, 33).view(8, 4)
    out = PlainCcgqa.prepare(batch.layout).values(values, 2)
    assert torch.equal(out[:, :2], values[:, :2])
    assert out[:6, 2:].tolist() == [[0, 0], [3, 4], [0, 0], [11, 12], [0, 0], [19, 20]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_gradients_grow_and_shrink_with_what_comes_in_and_nothing_is_clamped(scale, dtype):
    """C7: doubled by powers of two they would be equal to the bit; by others, but for rounding."""
    batch, case = one_pack(random_examples(SHAPES), "prompt", 80), CASES[0]
    leaves, upstream = given(Known().rows(batch), case, dtype)
    out = applied(PlainCcgqa, batch, case, *leaves)
    of_one = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    scaled = torch.autograd.grad(out, leaves, [scale * t for t in upstream])
    for one, other in zip(of_one, scaled, strict=True):
        error = (other.double() / scale - one.double()).norm() / one.double().norm()
        assert error < 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_zeros_stay_zeros_with_finite_gradients(dtype):
    """The norm is bounded from below in the backward pass as in the forward: both are of one function."""
    batch, case = one_pack(random_examples(SHAPES[:3]), "prompt", 40), Case(biased=False)
    leaves, upstream = given(Known().rows(batch), case, dtype)
    leaves[0] = torch.zeros_like(leaves[0]).requires_grad_()
    query, key, value = applied(PlainCcgqa, batch, case, *leaves)
    assert not query.any()
    assert not key.any()
    gradients = torch.autograd.grad([query, key, value], leaves, [1e-3 * t for t in upstream])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0].any()


def test_results_and_gradients_have_the_dtypes_of_what_they_belong_to():
    batch = one_pack(random_examples(SHAPES[:3]), "prompt", 40)
    case = CASES[0]
    leaves, upstream = given(Known().rows(batch), case, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = applied(PlainCcgqa, batch, case, *leaves)
    plain = applied(PlainCcgqa, batch, case, *leaves)
    assert all(torch.equal(one, other) for one, other in zip(out, plain, strict=True))  # autocast reaches no sum
    assert {t.dtype for t in out} == {torch.bfloat16}
    assert [t.dtype for t in torch.autograd.grad(out, leaves, upstream)] == [t.dtype for t in leaves]
    assert leaves[4].dtype == torch.float32
