"""The fast kernels of attention on a GPU: as exact as the plain ones, and the same bits wherever a row lies."""

from __future__ import annotations

import pytest
import torch

from tests.forests import (
    Case,
    check_error_and_repeat,
    check_paths_decide_bits,
    laid,
    random_forest,
    stem_of_many,
    ways_to_lie,
)

DEVICE = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
CASES = [
    Case(4, 4, 16),
    Case(4, 2, 80, window=6),
    Case(4, 1, 64, window=70),
    Case(2, 1, 128),
    Case(2, 2, 128, softcap=20.0),
    Case(2, 1, 256, softcap=50.0, window=100),
    Case(4, 2, 192, value_width=128),
    Case(16, 8, 64, has_sinks=True, window=40),  # gpt-oss
    Case(2, 2, 24, value_width=16),  # MiniCPM3's compressed attention, made small
    Case(2, 2, 16, value_width=24, softcap=20.0, has_sinks=True),
    Case(2, 1, 512),  # Gemma 4's global layers
    Case(2, 2, 320, softcap=20.0, has_sinks=True, window=40),
]
NAMES = [
    "-".join(f"{name}={value}" for name, value in case._asdict().items() if value != Case._field_defaults[name])
    for case in CASES
]
cases = pytest.mark.parametrize("case", CASES, ids=NAMES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


@pytest.fixture
def fork() -> type:
    from tuningfork.kernels.attention.fork import ForkAttention

    return ForkAttention


@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
@cases
@dtypes
def test_the_error_is_at_most_twice_the_plain_ones_and_bits_repeat(dtype, case, share, fork):
    check_error_and_repeat(fork, laid(random_forest(3, depth=6), share).to(DEVICE), case, dtype)


@pytest.mark.parametrize("seed", range(3))
@cases
@dtypes
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(dtype, case, seed, fork):
    check_paths_decide_bits(fork, [batch.to(DEVICE) for batch in ways_to_lie(seed)], case, dtype)


@dtypes
def test_long_paths_cut_often_have_the_bits_of_uncut_ones(dtype, fork):
    examples = random_forest(7, roots=1, depth=60, longest=3000)[:24]
    packs = [laid(examples, "tree").to(DEVICE), *(laid([example], "none").to(DEVICE) for example in examples[::6])]
    check_paths_decide_bits(fork, packs, Case(2, 1, 128), dtype)


@pytest.mark.parametrize("case", [Case(4, 2, 128), Case(4, 2, 64, window=3000), Case(2, 1, 512)])
@dtypes
def test_a_stem_that_very_many_rows_see_is_read_in_parts(dtype, case, fork):
    batch = laid(stem_of_many(9000, 3), "prompt")
    assert (fork.prepare(batch.layout).merges[:, 3] > 1).sum() == 2
    # Errors of a sum grow as the root of how many numbers are added one after the other: 2,048 of a part here, in the
    # plain form 64 of a block and 142 blocks.
    check_error_and_repeat(fork, batch.to(DEVICE), case, dtype, times=2 * (2048 / (64 + 142)) ** 0.5)


def test_a_pack_is_prepared_without_waiting_for_the_device(fork):
    layout = laid(random_forest(1), "tree").to(DEVICE).layout
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fork.prepare(layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_it_has_the_same_bits_and_one_graph_for_all_packs(fork):
    def layer(fork, query, key, value):
        return fork.attend(query * 2, key, value, scale=0.125, window=None, softcap=None) + 1

    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    packs = laid(random_forest(1), "tree"), laid(random_forest(2, depth=2), "none"), laid(stem_of_many(5000, 2), "tree")
    for number, batch in enumerate(packs):
        prepared = fork.prepare(batch.to(DEVICE).layout)
        leaves = [torch.randn(len(batch.input_ids), n, 64, device=DEVICE, requires_grad=True) for n in (4, 2, 2)]
        expected = layer(prepared, *leaves)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(prepared, *leaves)
        assert torch.equal(expected, found)
        gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (expected, found))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
