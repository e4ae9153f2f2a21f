"""The fast kernels of the gated delta rule on a GPU: near the truth, and the same bits wherever a row lies."""

from __future__ import annotations

import pytest
import torch

from tests.delta_rule import Heads, check_error_and_repeat, check_paths_decide_bits, random_inputs
from tests.forests import Known, laid, random_forest, stem_of_many, ways_to_lie
from tests.tiny import random_examples

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
HEADS = [
    Heads(2, 96, 2, 192),  # OLMo-Hybrid
    Heads(1, 128, 2, 128),  # Qwen's
    Heads(2, 64, 2, 128),
    Heads(1, 128, 1, 256),
    Heads(1, 24, 4, 40),  # tiny models of tests
    Heads(2, 8, 2, 8),
    Heads(1, 8, 1, 40),
    Heads(1, 24, 1, 8),
    Heads(2, 32, 2, 32),
    Heads(1, 128, 2, 24),
]
heads = pytest.mark.parametrize("heads", HEADS, ids=["-".join(map(str, one)) for one in HEADS])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture
def fast() -> type:
    from tuningfork.kernels.gated_delta.fast import TritonGatedDelta

    return TritonGatedDelta


@pytest.mark.parametrize("share", ["tree", "none"])
@heads
@dtypes
def test_the_error_is_what_the_dtype_allows_and_bits_repeat(dtype, heads, share, fast):
    check_error_and_repeat(fast, laid(random_forest(3, depth=6), share).to(DEVICE), heads, dtype)


@pytest.mark.parametrize("decay", [1e-3, 20.0])
@dtypes
def test_states_that_hardly_fade_and_that_fade_at_once(dtype, decay, fast):
    check_error_and_repeat(fast, laid(random_forest(4), "tree").to(DEVICE), HEADS[0], dtype, decay=decay)


@pytest.mark.parametrize("seed", range(2))
@heads
@dtypes
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(dtype, heads, seed, fast):
    check_paths_decide_bits(fast, [batch.to(DEVICE) for batch in ways_to_lie(seed)], heads, dtype)


@dtypes
def test_long_paths_cut_often_have_the_bits_of_uncut_ones(dtype, fast):
    examples = random_forest(7, roots=1, depth=60, longest=3000)[:24]
    packs = [laid(examples, "tree").to(DEVICE), *(laid([example], "none").to(DEVICE) for example in examples[::6])]
    check_paths_decide_bits(fast, packs, Heads(1, 96, 1, 192), dtype)


@dtypes
def test_a_state_that_many_answers_go_on_from(dtype, fast):
    batch = laid(stem_of_many(9000, 90), "prompt")
    check_error_and_repeat(fast, batch.to(DEVICE), Heads(1, 96, 1, 192), dtype)


@dtypes
def test_rows_may_lie_with_any_stride(dtype, fast):
    """As they do in one tensor of queries, keys and values."""
    batch = laid(random_forest(2), "tree")
    given = [t.to(DEVICE) for t in random_inputs(Known().rows(batch), HEADS[0], dtype)]
    rows = torch.cat([t.flatten(1) for t in given[:3]], dim=1)
    parts = rows.split([t[0].numel() for t in given[:3]], dim=1)
    strided = [part.unflatten(1, like.shape[1:]) for part, like in zip(parts, given, strict=False)]
    form = fast.prepare(batch.to(DEVICE).layout)
    assert torch.equal(form.scan(*given), form.scan(*strided, *given[3:]))


def test_neither_preparing_nor_scanning_waits_for_the_device(fast):
    batch = laid(random_forest(1), "tree")
    given = [t.to(DEVICE).requires_grad_() for t in random_inputs(Known().rows(batch), HEADS[0], torch.bfloat16)]
    layout = batch.to(DEVICE).layout
    fast.prepare(layout).scan(*given).sum().backward()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast.prepare(layout).scan(*given).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_it_has_the_same_bits_and_one_graph_for_all_packs(fast):
    def layer(form, query, key, value, decay, beta):
        return form.scan(query * 0.5, key, value, decay, beta) + 1

    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    packs = [
        laid(random_forest(1), "tree"),
        laid(random_forest(2, depth=2), "none"),
        laid(random_examples([(200, (300, 100))]), "prompt"),
    ]
    for number, batch in enumerate(packs):
        form = fast.prepare(batch.to(DEVICE).layout)
        leaves = [t.to(DEVICE).requires_grad_() for t in random_inputs(Known().rows(batch), HEADS[1], torch.float32)]
        expected = layer(form, *leaves)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(form, *leaves)
        assert torch.equal(expected, found)
        gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (expected, found))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
