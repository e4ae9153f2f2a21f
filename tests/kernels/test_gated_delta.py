"""The fast kernels of the gated delta rule without a GPU, by Triton's interpreter: slowly.

Its products do not know bfloat16, so float16 stands for a dtype whose operands are rounded.

TRITON_INTERPRET=1 pytest tests/kernels/test_gated_delta.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.delta_rule import Heads, check_error_and_repeat, check_paths_decide_bits, random_inputs
from tests.forests import Known, laid, random_forest
from tests.tiny import random_examples

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.fixture
def fast() -> Iterator[type]:
    from tuningfork.kernels.gated_delta.fast import TritonGatedDelta

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN
    yield TritonGatedDelta
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [Heads(1, 16, 1, 32), Heads(1, 24, 2, 40), Heads(1, 8, 1, 72)])
def test_a_small_tree_has_its_error_and_repeats(heads, dtype, fast):
    check_error_and_repeat(fast, laid(random_forest(1, depth=3, longest=200), "tree"), heads, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_wherever_its_path_is_cut(dtype, fast):
    examples = random_forest(1, depth=3, longest=200)
    check_paths_decide_bits(fast, [laid(examples, share) for share in ("tree", "none")], Heads(1, 16, 1, 16), dtype)


def test_states_are_handed_to_several_answers(fast):
    """Of a prompt of more than two chunks, and of an answer that itself goes on in two ways."""
    [ranking] = random_examples([(140, (1, 64, 70, 130))])
    packs = [laid([ranking], share) for share in ("prompt", "none")]
    check_error_and_repeat(fast, packs[0], Heads(1, 16, 1, 16), torch.float32)
    check_paths_decide_bits(fast, packs, Heads(1, 16, 1, 16), torch.float32)


def test_a_compiler_takes_it_whole(fast):
    """Whatever the pack, in one graph; here without code of its own."""

    def layer(form, query, key, value, decay, beta):
        return form.scan(query * 0.5, key, value, decay, beta) + 1

    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    for number, batch in enumerate(
        (laid(random_examples([(70, (10, 70))]), "prompt"), laid(random_forest(1)[:3], "none"))
    ):
        form = fast.prepare(batch.layout)
        given = random_inputs(Known().rows(batch), Heads(1, 16, 1, 16), torch.float32)
        leaves = [t.requires_grad_() for t in given]
        expected = layer(form, *leaves)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(form, *leaves)
        assert torch.equal(expected, found)
        gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (expected, found))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_its_flops_are_those_of_whole_chunks(fast):
    batch = laid(random_examples([(0, (64,))]), "none")
    given = random_inputs(Known().rows(batch), Heads(1, 16, 2, 32), torch.float32)
    with FlopCounterMode(display=False) as counter:
        fast.prepare(batch.layout).scan(*given)
    rows, c, dk, dv = len(batch.input_ids), 64, 16, 32
    # Twice K K^T, Q K^T and their like: K K^T, Q K^T, w; u, P v'; three products with a state; the inverse.
    products = 2 * c * c * (3 * dk + 2 * dv) + 3 * 2 * c * dk * dv + 2 * c**3 // 3
    assert abs(counter.get_total_flops() / (rows / c * 2 * products) - 1) < 1e-3
