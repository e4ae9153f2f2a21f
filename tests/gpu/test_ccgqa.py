"""The fast kernels of CCGQA on a GPU: as exact as plain ones, and a row's path decides its bits."""

from __future__ import annotations

import pytest
import torch

from tests.ccgqa import (
    SHAPES,
    Case,
    applied,
    check_error_and_repeat,
    check_neighbours_change_nothing,
    check_paths_decide_bits,
    given,
)
from tests.forests import Known, laid, random_forest, stem_of_many, ways_to_lie
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.ccgqa.plain import Filters

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
CASES = [
    Case(1, 1, 16, 1, 1, biased=False),
    Case(3, 4, 16, 3, 3, biased=False),  # hydra-100m
    Case(2, 4, 64, 2, 2),
    Case(2, 4, 128, 2, 2),  # ZAYA
    Case(2, 1, 128, 4, 4),
    Case(1, 2, 24, 1, 4),
    Case(1, 2, 80, 4, 1),
    Case(1, 2, 256, 2, 2),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture
def form() -> type:
    from tuningfork.kernels.ccgqa.fast import TritonCcgqa

    return TritonCcgqa


@cases
@dtypes
def test_the_error_is_at_most_twice_the_plain_ones_and_bits_repeat(dtype, case, form):
    check_error_and_repeat(form, laid(random_forest(3, depth=9), "tree"), case, dtype, "cuda")


@cases
@dtypes
def test_short_prompts_and_answers_have_their_error(dtype, case, form):
    check_error_and_repeat(form, one_pack(random_examples(SHAPES), "prompt", 80), case, dtype, "cuda")


@cases
@dtypes
def test_large_rows_beside_a_path_change_nothing(dtype, case, form):
    check_neighbours_change_nothing(form, one_pack(random_examples(SHAPES), "prompt", 80), case, dtype, "cuda")


@cases
@dtypes
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(dtype, case, form):
    check_paths_decide_bits(form, ways_to_lie(1), case, dtype, "cuda")


@dtypes
def test_a_prompt_of_many_answers_is_read_by_all(dtype, form):
    check_error_and_repeat(form, laid(stem_of_many(3000, 1000), "prompt"), CASES[2], dtype, "cuda")


@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_gradients_grow_and_shrink_with_what_comes_in(scale, form):
    batch, case = laid(random_forest(3), "tree"), CASES[2]
    leaves, upstream = given(Known().rows(batch), case, torch.bfloat16, "cuda")
    out = applied(form, batch.to(DEVICE), case, *leaves)
    of_one = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    scaled = torch.autograd.grad(out, leaves, [scale * t for t in upstream])
    for one, other in zip(of_one, scaled, strict=True):
        assert (other.double() / scale - one.double()).norm() < 2e-2 * one.double().norm()


def test_a_pack_is_prepared_without_waiting_for_the_device(form):
    layout = laid(random_forest(1), "tree").to(DEVICE).layout
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        form.prepare(layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_it_has_the_same_bits_and_one_graph_for_all_packs(form):
    case = CASES[2]

    def layer(prepared, x, values, depthwise, grouped, temperature, *biases):
        query, key = prepared.query_key(x * 2, Filters(depthwise, grouped, *biases), temperature, case.heads)
        return [query + 1, key + 1, prepared.values(values * 2, values.shape[1] // 2) + 1]

    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    packs = laid(random_forest(1), "tree"), laid(random_forest(2, depth=2), "none"), laid(stem_of_many(5000, 2), "tree")
    for number, batch in enumerate(packs):
        prepared = form.prepare(batch.to(DEVICE).layout)
        leaves, upstream = given(Known().rows(batch), case, torch.bfloat16, "cuda")
        expected = layer(prepared, *leaves)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(prepared, *leaves)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        gradients = (torch.autograd.grad(out, leaves, upstream) for out in (expected, found))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
