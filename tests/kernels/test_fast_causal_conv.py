"""The fast kernels of the causal convolution without a GPU, by Triton's interpreter: slowly, and in float32 alone.

TRITON_INTERPRET=1 pytest tests/kernels/test_fast_causal_conv.py

It needs a NumPy before 2.4, which made an error of what the interpreter does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.convolutions import (
    HEADS,
    Conv,
    check_error_and_repeat,
    check_neighbours_change_nothing,
    check_paths_decide_bits,
    given,
)
from tests.forests import Known, laid, random_forest, stem_of_many
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.causal_conv.plain import Heads

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),  # infinity is meant
]

CASES = [
    Conv(width=1),
    Conv(width=3, silu=False, has_bias=True),
    Conv(width=4, has_bias=True),
    Conv(width=2, heads=HEADS),
    Conv(width=4, heads=Heads(1, 24, 1, 140)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture
def form() -> Iterator[type]:
    from tuningfork.kernels.causal_conv.fast import TritonCausalConv

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN
    yield TritonCausalConv
    torch.use_deterministic_algorithms(False)


@cases
def test_a_tree_has_its_error_and_its_bits(case, form):
    examples = random_forest(1, depth=5, longest=110, most=12)
    check_error_and_repeat(form, laid(examples, "tree"), case, torch.float32)
    check_paths_decide_bits(form, [laid(examples, share) for share in ("tree", "prompt", "none")], case, torch.float32)


@cases
def test_short_prompts_and_answers_have_their_error(case, form):
    examples = random_examples([(7, (5, 9)), (1, (1, 3)), (2, (1, 1, 4)), (0, (6,)), (0, (3, 1)), (1, (2,))])
    batch = one_pack(examples, "prompt", 61)
    check_error_and_repeat(form, batch, case, torch.float32)
    check_neighbours_change_nothing(form, batch, case, torch.float32)


@pytest.mark.parametrize("case", CASES[-1:], ids=str)
def test_a_prompt_of_many_answers_is_read_by_all(case, form):
    check_error_and_repeat(form, laid(stem_of_many(90, 41), "prompt"), case, torch.float32)


def test_it_is_traced_without_a_break_in_any_size_of_pack(form):
    def layer(prepared, x, weight):
        return [t + 1 for t in prepared.query_key_value(x * 2, weight, HEADS)]

    case = Conv(heads=HEADS)
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
