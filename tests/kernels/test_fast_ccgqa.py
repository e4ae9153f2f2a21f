"""The fast kernels of CCGQA without a GPU, by Triton's interpreter: slowly, and in float32 alone.

TRITON_INTERPRET=1 pytest tests/kernels/test_fast_ccgqa.py

It needs a NumPy before 2.4, which made an error of what the interpreter does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

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
from tests.forests import Known, laid, random_forest, stem_of_many
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.ccgqa.plain import Filters

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

CASES = [
    Case(),
    Case(1, 1, 4, 1, 1, biased=False),
    Case(1, 4, 6, 3, 3, biased=False),
    Case(2, 1, 20, 4, 1),
    Case(1, 2, 10, 1, 4),
    Case(1, 2, 8, 4, 4),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture
def form() -> Iterator[type]:
    from tuningfork.kernels.ccgqa.fast import TritonCcgqa

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN
    yield TritonCcgqa
    torch.use_deterministic_algorithms(False)


@cases
def test_short_prompts_and_answers_have_their_error_and_their_bits(case, form):
    batch = one_pack(random_examples(SHAPES), "prompt", 80)
    check_error_and_repeat(form, batch, case, torch.float32)
    check_neighbours_change_nothing(form, one_pack(random_examples(SHAPES[:5]), "prompt", 61), case, torch.float32)


@pytest.mark.parametrize("case", CASES[-1:], ids=str)
def test_a_tree_has_its_error_and_its_bits(case, form):
    examples = random_forest(1, depth=5, longest=110, most=12)
    check_error_and_repeat(form, laid(examples, "tree"), case, torch.float32)
    check_paths_decide_bits(form, [laid(examples, share) for share in ("tree", "prompt", "none")], case, torch.float32)


@pytest.mark.parametrize("case", CASES[-1:], ids=str)
def test_a_prompt_of_many_answers_is_read_by_all(case, form):
    check_error_and_repeat(form, laid(stem_of_many(90, 41), "prompt"), case, torch.float32)


@pytest.mark.parametrize("scale", [1e4, 1e-6])
def test_gradients_grow_and_shrink_with_what_comes_in(scale, form):
    batch, case = one_pack(random_examples(SHAPES[:5]), "prompt", 40), CASES[0]
    leaves, upstream = given(Known().rows(batch), case, torch.float32)
    out = applied(form, batch, case, *leaves)
    of_one = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    scaled = torch.autograd.grad(out, leaves, [scale * t for t in upstream])
    for one, other in zip(of_one, scaled, strict=True):
        assert (other.double() / scale - one.double()).norm() < 1e-5 * one.double().norm()


def test_rows_of_zeros_stay_zeros_with_finite_gradients(form):
    batch, case = one_pack(random_examples(SHAPES[:3]), "prompt", 40), Case(biased=False)
    leaves, upstream = given(Known().rows(batch), case, torch.float32)
    leaves[0] = torch.zeros_like(leaves[0]).requires_grad_()
    query, key, value = applied(form, batch, case, *leaves)
    assert not query.any() and not key.any()
    gradients = torch.autograd.grad([query, key, value], leaves, [1e-3 * t for t in upstream])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_it_is_traced_without_a_break_in_any_size_of_pack(form):
    case = CASES[0]

    def layer(prepared, x, values, depthwise, grouped, temperature, *biases):

        query, key = prepared.query_key(x * 2, Filters(depthwise, grouped, *biases), temperature, case.heads)
        return [query + 1, key + 1, prepared.values(values * 2, values.shape[1] // 2)]

    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    for number, shapes in enumerate(([(7, (5, 9)), (1, (1, 3))], [(2, (1, 1, 4))])):
        batch = one_pack(random_examples(shapes), "prompt", 30 - 3 * number)
        prepared = form.prepare(batch.layout)
        leaves, upstream = given(Known().rows(batch), case, torch.float32)
        expected = layer(prepared, *leaves)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(prepared, *leaves)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        gradients = (torch.autograd.grad(out, leaves, upstream) for out in (expected, found))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
