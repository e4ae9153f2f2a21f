"""The fast kernels of the causal convolution on a GPU: as exact as plain ones, and a row's path decides its bits."""

from __future__ import annotations

import pytest
import torch

from tests.convolutions import (
    HEADS,
    Conv,
    check_error_and_repeat,
    check_neighbours_change_nothing,
    check_paths_decide_bits,
    convolved,
    given,
)
from tests.forests import Known, laid, random_forest, stem_of_many, ways_to_lie
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.causal_conv.plain import Heads, PlainCausalConv

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
CASES = [
    Conv(width=1),
    Conv(width=2, has_bias=True),
    Conv(width=3, silu=False),  # LFM2
    Conv(width=3, silu=False, has_bias=True),
    Conv(width=4, has_bias=True),
    Conv(width=4, heads=HEADS),
    Conv(width=4, heads=Heads(3, 96, 3, 192)),  # Olmo Hybrid
    Conv(width=4, heads=Heads(2, 128, 4, 128)),  # Qwen3-Next
    Conv(width=4, heads=Heads(1, 256, 1, 512)),
    Conv(width=4, heads=Heads(1, 512, 1, 72)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture
def form() -> type:
    from tuningfork.kernels.causal_conv.fast import TritonCausalConv

    return TritonCausalConv


@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
@cases
@dtypes
def test_the_error_is_at_most_twice_the_plain_ones_and_bits_repeat(dtype, case, share, form):
    check_error_and_repeat(form, laid(random_forest(3, depth=9), share), case, dtype, "cuda")


@cases
@dtypes
def test_short_prompts_and_answers_have_their_error(dtype, case, form):
    examples = random_examples([(7, (5, 9)), (1, (1, 3)), (2, (1, 1, 4)), (0, (6,)), (0, (3, 1)), (1, (2,))])
    check_error_and_repeat(form, one_pack(examples, "prompt", 61), case, dtype, "cuda")


@cases
@dtypes
def test_large_rows_before_a_segment_change_nothing(dtype, case, form):
    check_neighbours_change_nothing(form, laid(random_forest(3, depth=9), "tree"), case, dtype, "cuda")


@cases
@dtypes
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(dtype, case, form):
    check_paths_decide_bits(form, ways_to_lie(1), case, dtype, "cuda")


@pytest.mark.parametrize("case", [CASES[2], CASES[6]], ids=str)
@dtypes
def test_a_prompt_of_many_answers_is_read_by_all(dtype, case, form):
    check_error_and_repeat(form, laid(stem_of_many(3000, 1000), "prompt"), case, dtype, "cuda")


def test_weights_in_float32_beside_rows_in_bfloat16_have_gradients_of_float32(form):
    """What is rounded is the rows, before; each product and sum has the digits of float32."""
    case = CASES[6]
    batch = laid(random_forest(3, depth=9), "tree")
    (x, weight), upstream = given(Known().rows(batch), case, torch.bfloat16, "cuda")
    weight = weight.detach().float().requires_grad_()
    gradients = []
    for kind, dtype, weights in ((form, torch.bfloat16, weight), (PlainCausalConv, torch.float64, weight.double())):
        out = convolved(kind, batch.to(DEVICE), case, x.to(dtype), weights)
        gradients += torch.autograd.grad(out, weight, [t.to(dtype) for t in upstream])
    assert gradients[0].dtype == torch.float32
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


@pytest.mark.parametrize("case", [CASES[4], CASES[6]], ids=str)
def test_neither_preparing_nor_convolving_waits_for_the_device(case, form):
    batch = laid(random_forest(1), "tree")
    leaves, upstream = given(Known().rows(batch), case, torch.bfloat16, "cuda")
    batch = batch.to(DEVICE)

    def passes():
        torch.autograd.grad(convolved(form, batch, case, *leaves), leaves, upstream)

    passes()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        passes()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", [CASES[3], CASES[6]], ids=str)
def test_compiled_it_has_the_same_bits_and_one_graph_for_all_packs(case, form):
    def layer(prepared, x, weight, bias=None):
        if case.heads is None:
            return [prepared.conv(x * 2, weight, bias, case.silu) + 1]
        return [t + 1 for t in prepared.query_key_value(x * 2, weight, case.heads)]

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


def test_a_pack_may_have_more_segments_than_a_grid_has_rows(form):
    """A grid of programs is 2^31 long, but 65,535 wide and deep."""
    check_error_and_repeat(
        form, one_pack(random_examples([(1, (1, 1))] * 11_000), "prompt"), CASES[3], torch.float32, "cuda"
    )
