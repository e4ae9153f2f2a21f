"""The head on a GPU where answers share logit rows: the same bits as without, gradients that repeat, and no waiting."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from tests.models.shared_answers import hidden_states, paths, shared_pairs
from tuningfork.data.packing.layout import build_pack
from tuningfork.kernels.select import select
from tuningfork.models.head import Head
from tuningfork.records import LogitTransform, PackedBatch, Source, TokenAnswer, TokenExample

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDTH, VOCABULARY = 256, 32_000


def examples() -> list[TokenExample]:
    """Those of the tests on a CPU, and an answer that 70 pairs share: more than the threads that sum a row together."""
    rng = np.random.default_rng(1)

    def draw(n: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, n).astype(np.int32)

    def answer(n: int) -> TokenAnswer:
        return TokenAnswer(draw(n), np.ones(n, dtype=bool))

    prompt, chosen = draw(20), answer(30)
    many = [TokenExample(Source("many", row), prompt, (chosen, answer(5 + row % 20))) for row in range(1, 71)]
    return [*shared_pairs(VOCABULARY), *many]


@cache
def laid(share: str) -> tuple[PackedBatch, torch.Tensor, list[bytes]]:
    """A pack on the GPU, its hidden states in bfloat16 and their paths."""
    batch = build_pack(examples(), sum(example.plain_tokens for example in examples()), share)
    return batch.to(CUDA), hidden_states(batch, WIDTH).to(CUDA, torch.bfloat16), paths(batch)


@cache
def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5).to(CUDA)


def head(chunk_rows: int) -> Head:
    return Head(select({"row_logps": {}}, CUDA, torch.bfloat16), LogitTransform(), chunk_rows)


def loss(first: int, last: int, logps: torch.Tensor) -> torch.Tensor:
    """With a gradient of its own for each answer."""
    factors = torch.cos(torch.arange(first, last, dtype=torch.float64, device=logps.device))
    return (factors * logps + 1e-3 * logps.square()).sum()


def gradients(share: str, chunk_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradients of hidden states and of the weight."""
    batch, hidden, _ = laid(share)
    leaf, its_weight = hidden.clone().requires_grad_(), weight().clone().requires_grad_()
    _, logps = head(chunk_rows).backward(leaf, its_weight, batch, loss)
    return logps, leaf.grad, its_weight.grad


def test_log_probs_have_the_same_bits_however_answers_are_shared():
    expected = None
    for share, sizes in (("none", (100, 8192)), ("prompt", (8192,)), ("tree", (1, 7, 128, 1000, 8192))):
        batch, hidden, _ = laid(share)
        for chunk_rows in sizes:
            logps = head(chunk_rows).score(hidden, weight(), batch)
            expected = logps if expected is None else expected
            assert torch.equal(logps, expected), (share, chunk_rows)
    for share in ("none", "tree"):
        assert torch.equal(gradients(share, 500)[0], expected)


def test_gradients_of_shared_rows_repeat_to_the_bit_and_are_those_of_unshared_ones():
    batch, _, tree_paths = laid("tree")
    assert torch.bincount(batch.logit_row_of_counted).max() >= 70
    for chunk_rows in (128, 8192):
        _, d_hidden, d_weight = gradients("tree", chunk_rows)
        for _ in range(4):
            _, again, weight_again = gradients("tree", chunk_rows)
            assert torch.equal(d_hidden, again) and torch.equal(d_weight, weight_again)

        def by_path(row_paths: list[bytes], rows: torch.Tensor) -> torch.Tensor:
            """Sums of rows that have a path in common, in the order of the tree's paths."""
            place = {path: n for n, path in enumerate(dict.fromkeys(tree_paths))}
            sums = torch.zeros(len(place), WIDTH, dtype=torch.float64)
            return sums.index_add(0, torch.tensor([place[path] for path in row_paths]), rows.double().cpu())

        _, unshared, weight_unshared = gradients("none", 8192)
        true, found = by_path(laid("none")[2], unshared), by_path(tree_paths, d_hidden)
        # The gradient of the logits is rounded to bfloat16, and that of the hidden states once more; here and there.
        assert (found - true).norm() <= 4 * torch.finfo(torch.bfloat16).eps * true.norm()
        off = (d_weight.double() - weight_unshared.double()).norm()
        assert off <= 2 * torch.finfo(torch.bfloat16).eps * weight_unshared.double().norm()


def test_the_host_does_not_wait_for_shared_rows():
    """Which rows and answers a chunk has is known on the host."""
    for chunk_rows in (128, 8192):
        gradients("tree", chunk_rows)  # compiles the kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            gradients("tree", chunk_rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
