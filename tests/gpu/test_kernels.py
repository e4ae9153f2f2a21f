"""G8 on a GPU: a fast kernel's error to the truth is at most twice what the plain version loses in the same dtype.

Uninitialised memory is filled with NaN, so that an element that a kernel leaves unwritten cannot pass.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.tiny import one_pack, random_examples, random_pairs
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.kernels.row_logps import plain as plain_rows
from tuningfork.kernels.select import select
from tuningfork.models.head import Head
from tuningfork.records import LogitTransform, PackedBatch, TokenExample

pytestmark = pytest.mark.gpu
# Triton's interpreter (TRITON_INTERPRET=1) runs the kernels of attention on a CPU, slowly.
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (9, (1, 1)), (130, (70, 20)), (17, (13, 140))]


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def _no_worse(fast: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, what: str) -> None:
    assert torch.isfinite(fast).all(), f"{what}: not every element was written"
    error, allowed = (fast.double() - truth).norm(), 2 * (plain.double() - truth).norm()
    # A plain version that happens to be exact still allows the rounding of one result.
    assert error <= allowed + torch.finfo(fast.dtype).eps * truth.norm(), f"{what}: {error:.3e} > {allowed:.3e}"


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
    _no_worse(ours, plain, truth, "logps")
    _no_worse(lse, plain_lse, truth_lse, "lse")
    wide = logits.double()
    d_truth = plain_rows.logits_gradient(wide, targets, truth_lse, grads.double(), transform, wide)
    for out_dtype in {dtype, torch.bfloat16}:
        room = [torch.empty(rows, vocab + 5, device="cuda", dtype=out_dtype)[:, :vocab] for _ in range(2)]
        d_plain = plain_rows.logits_gradient(logits, targets, plain_lse, grads, transform, room[0])
        d_ours = fast.logits_gradient(logits, targets, lse, grads, transform, room[1])
        _no_worse(d_ours, d_plain, d_truth, f"gradient of the logits in {out_dtype}")
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


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("heads,kv_heads,width", [(4, 4, 8), (4, 2, 80), (2, 1, 128), (2, 2, 256)])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(dtype, softcap, heads, kv_heads, width, window, share_prompt):
    from tuningfork.kernels.attention.fork import ForkAttention

    batch = one_pack(random_examples(SHAPES), share_prompt, tokens=768).to(torch.device("cuda"))
    rows = len(batch.input_ids)
    torch.manual_seed(0)
    inputs = [torch.randn(rows, h, width, device="cuda").to(dtype) for h in (heads, kv_heads, kv_heads)]
    out_grad = torch.randn(rows, heads, width, device="cuda").to(dtype)

    def run(form, to):
        leaves = [t.to(to).requires_grad_() for t in inputs]
        prepared = form.prepare(batch.layout)
        out = prepared.attend(*leaves, scale=width**-0.5, window=window, softcap=softcap)
        out.backward(out_grad.to(to))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    truth, plain, ours = run(PlainAttention, torch.float64), run(PlainAttention, dtype), run(ForkAttention, dtype)
    for what, o, p, t in zip(("out", "d query", "d key", "d value"), ours, plain, truth, strict=True):
        _no_worse(o, p, t, what)


@pytest.mark.parametrize("share_prompt", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    "widths,softcap,has_sinks",
    [
        ((64, 64), None, True),  # gpt-oss
        ((64, 64), 20.0, True),
        ((24, 16), None, False),  # queries and keys, and values: MiniCPM3's compressed attention, made small
        ((16, 24), None, True),
        ((512, 512), None, False),  # Gemma 4's global layers
        ((320, 320), 20.0, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_with_sinks_wide_heads_and_values_of_another_width(
    dtype, widths, softcap, has_sinks, window, share_prompt
):
    from tuningfork.kernels.attention.fork import ForkAttention

    heads, kv_heads, (width, value_width) = 16, 8, widths
    batch = one_pack(random_examples(SHAPES), share_prompt, tokens=768).to(DEVICE)
    rows = len(batch.input_ids)
    torch.manual_seed(0)
    shapes = [(rows, heads, width), (rows, kv_heads, width), (rows, kv_heads, value_width)]
    inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    sinks = [torch.randn(heads, device=DEVICE)] if has_sinks else []  # a vector, so held in float32
    out_grad = torch.randn(rows, heads, value_width, device=DEVICE).to(dtype)

    def run(form, to):
        leaves = [t.to(to).requires_grad_() for t in inputs]
        leaves += [t.to(torch.promote_types(to, torch.float32)).requires_grad_() for t in sinks]
        more = {"sinks": leaves[3]} if sinks else {}
        out = form.prepare(batch.layout).attend(*leaves[:3], scale=width**-0.5, window=window, softcap=softcap, **more)
        out.backward(out_grad.to(to))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    truth, plain, ours = run(PlainAttention, torch.float64), run(PlainAttention, dtype), run(ForkAttention, dtype)
    names = ("out", "d query", "d key", "d value", "d sinks")
    for what, o, p, t in zip(names, ours, plain, truth, strict=False):
        _no_worse(o, p, t, what)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_attention_of_an_example_has_the_same_bits_wherever_and_however_it_lies(softcap, dtype):
    """At another place, among others, its answers in another order, the prompt shared or repeated."""
    from tuningfork.kernels.attention.fork import ForkAttention

    [pair] = random_examples([(130, (70, 200))])
    others = random_examples([(17, (13, 140)), (1, (1, 3))], seed=1)
    swapped = TokenExample(pair.source, pair.prompt_ids, pair.answers[::-1])
    torch.manual_seed(0)
    parts = [[torch.randn(n, 2, 64, device="cuda").to(dtype) for n in (130, 70, 200)] for _ in range(3)]

    def outs(examples, share_prompt, place, order):
        """The pair's prompt and two answers; it lies from row `place` on with its pieces in this order."""
        batch = one_pack(examples, share_prompt, tokens=1152).to(torch.device("cuda"))
        inputs = [torch.zeros(1152, 2, 64, device="cuda", dtype=dtype) for _ in range(3)]
        spans, row = {}, place
        for piece in order:
            spans[piece] = slice(row, row + len(parts[0][piece]))
            for into, of in zip(inputs, parts, strict=True):
                into[spans[piece]] = of[piece]
            row = spans[piece].stop
        out = ForkAttention.prepare(batch.layout).attend(*inputs, scale=0.125, window=None, softcap=softcap)
        return [out[spans[piece]] for piece in (0, 1, 2)]

    first = outs([pair], True, 0, (0, 1, 2))
    for case in (
        outs([*others, pair], True, 175, (0, 1, 2)),
        outs([swapped, *others], True, 0, (0, 2, 1)),
        outs([pair, *others], False, 0, (0, 1, 0, 2)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(first, case, strict=True))
