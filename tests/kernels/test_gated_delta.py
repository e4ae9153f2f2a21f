"""The fast kernels of the gated delta rule without a GPU, by Triton's interpreter: slowly.

Its products do not know bfloat16, so float16 stands for a dtype whose operands are rounded.

TRITON_INTERPRET=1 pytest tests/kernels/test_gated_delta.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.delta_rule import Heads, check_error_and_repeat, check_paths_decide_bits
from tests.forests import laid, random_forest
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
