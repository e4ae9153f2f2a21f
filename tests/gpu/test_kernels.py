"""G8 on a GPU: a fast kernel's error to the truth is at most twice what the plain version loses in the same dtype.

Kernels of attention: test_attention.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.forests import no_worse
from tests.tiny import one_pack, random_pairs
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import select
from tuningfork.models.head import Head
from tuningfork.records import LogitTransform, PackedBatch, TokenExample

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.25, 30.0)], ids=["raw", "softcapped"])
@pytest.mark.parametrize("rows,vocab", [(1, 2), (3, 97), (130, 4096), (57, 4097), (64, 50_001)])  # block edges
def test_row_logps(rows, vocab, transform, dtype):
    from tuningfork.kernels.row_logps import fast

    torch.manual_seed(0)
    logits = (torch.randn(rows, vocab, device="cuda") * 8).to(dtype)
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    grads = torch.randn(rows, device="cuda")
    truth, truth_lse = plain_rows.row_logps(logits.double(), targets, transform)
    plain, plain_lse = plain_rows.row_logps(logits, targets, transform)
    ours, lse = fast.row_logps(logits, targets, transform)
    no_worse(ours, plain, truth, "logps")
    no_worse(lse, plain_lse, truth_lse, "lse")
    wide = logits.double()
    d_truth = plain_rows.logits_gradient(wide, targets, truth_lse, grads.double(), transform, wide)
    for out_dtype in {dtype, torch.bfloat16}:
        room = [torch.empty(rows, vocab + 5, device="cuda", dtype=out_dtype)[:, :vocab] for _ in range(2)]
        d_plain = plain_rows.logits_gradient(logits, targets, plain_lse, grads, transform, room[0])
        d_ours = fast.logits_gradient(logits, targets, lse, grads, transform, room[1])
        no_worse(d_ours, d_plain, d_truth, f"gradient of the logits in {out_dtype}")
    elsewhere = fast.logits_gradient(logits, targets, lse, grads, transform, torch.empty_like(logits))
    assert torch.equal(fast.logits_gradient(logits, targets, lse, grads, transform, logits), elsewhere)


def _pack_of(examples: list[TokenExample], rows_of: dict[str, torch.Tensor]) -> tuple[PackedBatch, torch.Tensor]:
    """A pack, and the hidden states of its logit rows, which each example brings with it."""
    batch = one_pack(examples, "prompt", tokens=2**15).to(torch.device("cuda"))
    return batch, torch.cat([rows_of[example.id] for example in examples])


@pytest.mark.parametrize("vocabulary", [32_000, 50_257], ids=["even", "odd"])
def test_the_heads_bits_and_error(vocabulary):
    """Logits of bfloat16 factors keep float32's digits, and a log-prob its bits in any chunk, order and company."""
    width = 1024
    examples = random_pairs(60, longest=200, vocab=vocabulary)
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, width, device="cuda") * width**-0.5
    batch, _ = _pack_of(examples, {example.id: torch.empty(0) for example in examples})
    # As of a trained model: a target's logit is about 14, and its log-prob about -0.5.
    hidden = (2 * torch.randn(len(batch.targets), width, device="cuda") + 14 * weight[batch.targets]).bfloat16()
    rows = [sum(example.answer_tokens(i) for i in range(2)) for example in examples]
    rows_of = {example.id: part for example, part in zip(examples, hidden.split(rows), strict=True)}
    kernels = select({"row_logps": {}}, torch.device("cuda"), torch.bfloat16)

    def scores(some, chunk_rows):
        pack, its_hidden = _pack_of(some, rows_of)
        logps = Head(kernels, LogitTransform(), chunk_rows).score(its_hidden, weight, pack)
        return {example.id: pair for example, pair in zip(some, logps.view(-1, 2).tolist(), strict=True)}

    first = scores(examples, 8192)
    for chunk_rows in (1, 100, 1000, 4096):
        assert scores(examples, chunk_rows) == first, chunk_rows
    assert scores(examples[::-1], 2048) == first
    assert scores(examples[:7], 8192) == {example.id: first[example.id] for example in examples[:7]}

    logits = hidden.double() @ weight.bfloat16().double().t()
    true = logits.log_softmax(1).gather(1, batch.targets[:, None])[:, 0]
    true = torch.zeros(2 * len(examples), dtype=torch.float64, device="cuda").index_add(
        0, batch.answer_of_counted, true[batch.logit_row_of_counted]
    )
    ours = torch.tensor([first[example.id] for example in examples], device="cuda", dtype=torch.float64).flatten()
    # Logits rounded to bfloat16 are off by 1/100 a token, and by tenths of a nat on the longest answers.
    assert ((ours - true).abs() <= 1e-4 * torch.tensor(batch.answer_lengths, device="cuda")).all()

    pack, its_hidden = _pack_of(examples, rows_of)
    gradients = []
    for chunk_rows in (512, 8192, 8192):
        leaf, its_weight = its_hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        Head(kernels, LogitTransform(), chunk_rows).backward(leaf, its_weight, pack, lambda a, b, logps: -logps.sum())
        gradients.append((leaf.grad, its_weight.grad))
    d_logits = logits.softmax(1)
    d_logits[torch.arange(len(d_logits)), batch.targets] -= 1
    for ours, again, cut, expected in zip(
        *reversed(gradients), (d_logits @ weight.bfloat16().double(), d_logits.t() @ hidden.double()), strict=True
    ):
        assert torch.equal(ours, again)
        for found in (ours, cut):
            # The gradient of the logits, and that of the hidden states, are rounded to bfloat16 once.
            assert (found.double() - expected).norm() <= 2 * torch.finfo(torch.bfloat16).eps * expected.norm()


def test_row_logps_of_extreme_logits():
    """Huge, equal and infinite logits give the right finite numbers, or NaN where there is no number."""
    from tuningfork.kernels.row_logps import fast

    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[1e4, -1e4, 0.0], [5.0, 5.0, 5.0], [-inf, 0.0, 0.0], [nan, 0.0, 0.0], [nan, -inf, -inf], [inf, 0.0, 0.0]]
    )
    logps, _ = fast.row_logps(logits.cuda(), torch.tensor([0, 1, 1, 1, 1, 1]).cuda(), LogitTransform())
    expected = torch.tensor([0.0, -1.0986123, -0.6931472])
    torch.testing.assert_close(logps[:3].cpu(), expected)
    assert logps[3:].isnan().all()
