"""The fast kernels of attention without a GPU, by Triton's interpreter: slowly, in float32 alone, and without softcap.

TRITON_INTERPRET=1 pytest tests/kernels/test_fork_attention.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.forests import Case, check_error_and_repeat, check_paths_decide_bits, laid, random_forest, stem_of_many

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.fixture
def fork() -> Iterator[type]:
    from tuningfork.kernels.attention.fork import ForkAttention

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN
    yield ForkAttention
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [Case(1, 1, 16), Case(2, 1, 16, window=40, has_sinks=True), Case(1, 1, 160)])
def test_a_small_tree_has_its_error_and_its_bits(case, fork):
    examples = random_forest(1, depth=3, longest=110)
    check_error_and_repeat(fork, laid(examples, "tree"), case, torch.float32)
    check_paths_decide_bits(fork, [laid(examples, share) for share in ("tree", "none")], case, torch.float32)


def test_a_window_as_wide_as_numbers_go_is_none(fork):
    batch = laid(random_forest(1, depth=3, longest=110)[:4], "tree")
    check_error_and_repeat(fork, batch, Case(1, 1, 16, window=2**31 - 1), torch.float32)


@pytest.mark.parametrize("case", [Case(2, 1, 16), Case(1, 1, 16, window=50)])
def test_parts_are_added_up(case, fork, monkeypatch):
    monkeypatch.setattr("tuningfork.kernels.attention.fork.SMALLEST_PART", 64)
    batch = laid(stem_of_many(300, 3), "prompt")
    assert int(fork.prepare(batch.layout).merges[:, 3].max()) == 6
    check_error_and_repeat(fork, batch, case, torch.float32)
