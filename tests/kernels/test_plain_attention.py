"""Plain fork attention against a dense masked softmax in float64 (G8), and what it may never do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.forests import (
    Case,
    Known,
    attended,
    check_error_and_repeat,
    check_paths_decide_bits,
    laid,
    mask_of,
    normal,
    random_forest,
    ways_to_lie,
)
from tests.repeated import slow
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.attention.plain import PlainAttention
from tuningfork.records import PackedBatch, TokenExample

# k = 1, 2 and 3; an empty prompt, alone and forked; one-token prompts and answers; two examples longer than a window.
SHAPES = [(7, (5, 9)), (1, (1, 3)), (12, (8, 2, 4)), (0, (6,)), (0, (3, 5)), (9, (1, 1)), (4, (11,))]
HEADS, WIDTH = 4, 8
NEAR = {"rtol": 1e-11, "atol": 1e-11}  # float64 throughout, and sums of at most some thousand terms


def forks(examples: list[TokenExample], share: str) -> list[tuple[list[int], list[list[int]]]]:
    """(rows of a prompt, rows of each answer forked from it), all through a pack, from the definition alone."""
    found: list[tuple[list[int], list[list[int]]]] = []
    row = 0

    def lay(tokens: int) -> list[int]:
        nonlocal row
        row += tokens
        return list(range(row - tokens, row))

    for example in examples:
        for i, answer in enumerate(example.answers):
            if i == 0 or share == "none":
                found.append((lay(len(example.prompt_ids)), []))
            found[-1][1].append(lay(len(answer.ids)))
    return found


def sees(examples: list[TokenExample], share: str, rows: int, window: int | None) -> torch.Tensor:
    """bool [T, T], written from the definition alone: each row sees its own sequence up to itself.

    Padding rows see themselves here; what they hold is nobody's.
    """
    mask = np.eye(rows, dtype=bool)
    for prompt, answers in forks(examples, share):
        for answer in answers:
            sequence = prompt + answer
            for place, row in enumerate(sequence):
                start = 0 if window is None else max(0, place - window + 1)
                mask[row, sequence[start : place + 1]] = True
    return torch.from_numpy(mask)


def dense(q, k, v, mask, scale, softcap, sinks=None):
    """[T, H, d] attention with all T x T scores; sinks as one more key, which every row sees and whose value is 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def random_qkv(rows: int, kv_heads: int, dtype=torch.float64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, kv_heads, kv_heads)
    return [torch.randn(rows, h, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


def attend(batch: PackedBatch, q, k, v, scale=0.3, window=None, softcap=None, sinks=None):
    prepared = PlainAttention.prepare(batch.layout)
    return prepared.attend(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("share", ["prompt", "none"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 5, 13, 1000])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_values_and_gradients_are_those_of_a_dense_masked_softmax(share, softcap, window, kv_heads):
    examples = random_examples(SHAPES)
    batch = one_pack(examples, share)
    n = batch.used_slots
    q, k, v = (t.requires_grad_() for t in random_qkv(len(batch.input_ids), kv_heads))
    mask = sees(examples, share, len(batch.input_ids), window)

    expected = dense(q, k, v, mask, 0.3, softcap)[:n]
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    true_gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    out = attend(batch, q, k, v, window=window, softcap=softcap)[:n]
    gradients = torch.autograd.grad(out, (q, k, v), upstream)

    # The capped softmax and the fused one are float64 throughout: 1e-10 is generous.
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for ours, true in zip(gradients, true_gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("share", ["prompt", "none"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "softcap"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("value_width", [4, WIDTH, 12])
@pytest.mark.parametrize("has_sinks", [True, False], ids=["sinks", "no sinks"])
def test_sinks_and_values_of_another_width_are_those_of_a_dense_softmax(has_sinks, value_width, window, softcap, share):
    examples = random_examples(SHAPES)
    batch = one_pack(examples, share)
    n, rows = batch.used_slots, len(batch.input_ids)
    generator = torch.Generator().manual_seed(2)
    q, k, _ = random_qkv(rows, 2)
    v = torch.randn(rows, 2, value_width, generator=generator, dtype=torch.float64)
    sinks = [torch.randn(HEADS, generator=generator, dtype=torch.float64)] if has_sinks else []
    leaves = [t.requires_grad_() for t in (q, k, v, *sinks)]
    q, k, v, *sinks = leaves

    expected = dense(q, k, v, sees(examples, share, rows, window), 0.3, softcap, *sinks)[:n]
    out = attend(batch, q, k, v, 0.3, window, softcap, *sinks)[:n]
    assert out.shape == (n, HEADS, value_width)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    true_gradients = torch.autograd.grad(expected, leaves, upstream)
    for ours, true in zip(torch.autograd.grad(out, leaves, upstream), true_gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_dense_attention_in_the_same_dtype(dtype, softcap):
    examples = random_examples(SHAPES)
    batch = one_pack(examples, "prompt")
    n, rows = batch.used_slots, len(batch.input_ids)
    inputs = random_qkv(rows, 2, dtype)
    mask = sees(examples, True, rows, 5)

    def run(kind, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        if kind == "ours":
            out = attend(batch, *leaves, window=5, softcap=softcap)[:n]
        else:
            out = dense(*leaves, mask, 0.3, softcap)[:n]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    for true, ours, plain in zip(run("dense", torch.float64), run("ours", dtype), run("dense", dtype), strict=True):
        assert (ours.double() - true).norm() <= 2 * (plain.double() - true).norm()


def test_the_prompts_gradient_is_the_sum_over_its_answers():
    """Sharing a prompt means: one copy of its keys gets what the copies of a plain trainer get together."""
    [example] = random_examples([(6, (4, 7, 3))])
    shared, unshared = one_pack([example], "prompt"), one_pack([example], "none")
    [q, k, v] = random_qkv(len(shared.input_ids), 2)
    # Row of the shared pack behind each row of the unshared one.
    rows = [*range(6), *range(6, 10), *range(6), *range(10, 17), *range(6), *range(17, 20)]
    spread = torch.tensor(rows + [20] * (len(unshared.input_ids) - len(rows)))
    answers_only = torch.zeros(len(unshared.input_ids), 1, 1, dtype=torch.float64)
    answers_only[[*range(6, 10), *range(16, 23), *range(29, 32)]] = 1

    k_leaf, v_leaf = k.clone().requires_grad_(), v.clone().requires_grad_()
    attend(shared, q, k_leaf, v_leaf)[6:20].square().sum().backward()
    k_twin, v_twin = k.clone().requires_grad_(), v.clone().requires_grad_()
    (attend(unshared, q[spread], k_twin[spread], v_twin[spread]) * answers_only).square().sum().backward()
    for ours, true in ((k_leaf.grad, k_twin.grad), (v_leaf.grad, v_twin.grad)):
        assert ours is not None and true is not None
        torch.testing.assert_close(ours[:20], true[:20], rtol=1e-10, atol=1e-10)
        assert (ours[:6] != 0).all()


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "softcap"])
@pytest.mark.parametrize("share", ["prompt", "none"])
def test_not_a_number_in_one_segment_reaches_only_who_sees_it(share, softcap):
    """NaN survives a weight of exactly 0, so this finds even a masked read of a neighbour: of another example, or of
    the other answer. Padding is poisoned too."""
    examples = random_examples(SHAPES)
    batch = one_pack(examples, share)
    rows = len(batch.input_ids)
    q, k, v = random_qkv(rows, 2, torch.float32)
    clean = attend(batch, q, k, v, window=5, softcap=softcap)
    mask = sees(examples, share, rows, window=None)
    for start, end in batch.layout.segments[:, :2].tolist():
        segment = list(range(start, end))
        poisoned = [t.clone() for t in (q, k, v)]
        for t in poisoned:
            t[segment] = float("nan")
        out = attend(batch, *poisoned, window=5, softcap=softcap)
        untouched = ~mask[:, segment].any(1)
        untouched[batch.used_slots :] = start < batch.used_slots
        assert torch.equal(out[untouched], clean[untouched])
        assert out[segment].isnan().all()


@pytest.mark.parametrize("share", ["prompt", "none"])
def test_a_pack_filled_to_the_last_row_is_the_same_as_a_padded_one(share):
    examples = random_examples(SHAPES)
    padded = one_pack(examples, share)
    n = padded.used_slots
    full = one_pack(examples, share, tokens=n)
    inputs = random_qkv(len(padded.input_ids), 2, torch.float32)
    out = attend(full, *(t[:n] for t in inputs), window=5)
    assert torch.equal(out, attend(padded, *inputs, window=5)[:n])


def test_every_row_of_the_result_is_written_padding_too():
    batch = one_pack(random_examples(SHAPES), "prompt")
    out = attend(batch, *random_qkv(len(batch.input_ids), 2, torch.float32))
    assert out.shape == (len(batch.input_ids), HEADS, WIDTH)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_example_has_the_same_bits_at_any_place_of_any_pack(dtype):
    examples = random_examples(SHAPES)
    reference: dict[str, torch.Tensor] = {}
    for order, tokens in ((examples, 256), (examples[::-1], 256), (examples[2:] + examples[:2], 512)):
        batch = one_pack(order, "prompt", tokens)
        start = 0
        q, k, v = (torch.zeros(tokens, h, WIDTH, dtype=dtype) for h in (HEADS, 2, 2))
        places = {}
        for example in order:  # the same numbers for the same example, wherever it lies
            rows = slice(start, start + example.unique_tokens)
            for into, of in zip((q, k, v), random_qkv(512, 2, dtype, seed=example.source.row), strict=True):
                into[rows] = of[: example.unique_tokens]
            places[example.id] = rows
            start = rows.stop
        out = attend(batch, q, k, v, window=5)
        for name, rows in places.items():
            assert torch.equal(out[rows], reference.setdefault(name, out[rows]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "softcap"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("prompt", [0, 1, 33])
def test_an_answer_has_the_same_bits_wherever_and_however_it_lies(prompt, window, softcap, dtype):
    """As answer 0, 1 or 2, alone or behind others, the prompt shared or repeated; its own gradients, too."""
    lengths = (17, 70, 1)
    [ranking] = random_examples([(prompt, lengths)])
    others = random_examples(SHAPES[:3], seed=1)
    parts = [random_qkv(n, 2, dtype, seed=n) for n in (prompt, *lengths)]  # the prompt, then each answer
    upstream = [random_qkv(n, 2, dtype, seed=n + 1000)[0] for n in lengths]

    def run(order: tuple[int, ...], share: str, before: list[TokenExample]) -> dict[int, list[torch.Tensor]]:
        """Output of the prompt (0) and of each answer (1, 2, 3) with its gradients; answers lie in this order."""
        example = TokenExample(ranking.source, ranking.prompt_ids, tuple(ranking.answers[i - 1] for i in order))
        batch = one_pack([*before, example], share, tokens=320)
        leaves = [torch.zeros(320, heads, WIDTH, dtype=dtype) for heads in (HEADS, 2, 2)]
        out_grad = torch.zeros(320, HEADS, WIDTH, dtype=dtype)
        spans: list[tuple[int, list[int]]] = []
        for n, (rows, answers) in enumerate(forks([*before, example], share)[len(forks(before, share)) :]):
            spans += [(0, rows), *zip(order if share == "prompt" else order[n : n + 1], answers, strict=True)]
        for piece, rows in spans:
            for into, of in zip(leaves, parts[piece], strict=True):
                into[rows] = of
            if piece > 0:
                out_grad[rows] = upstream[piece - 1]
        leaves = [t.requires_grad_() for t in leaves]
        out = attend(batch, *leaves, window=window, softcap=softcap)
        gradients = torch.autograd.grad(out, leaves, out_grad)
        found: dict[int, list[torch.Tensor]] = {}
        for piece, rows in spans:
            mine = [out[rows], *(g[rows] for g in gradients if piece > 0)]
            assert all(torch.equal(a, b) for a, b in zip(mine, found.setdefault(piece, mine), strict=True))
        return found

    first = run((1, 2, 3), "prompt", [])
    cases = [((2, 1, 3), "prompt", []), ((3, 1, 2), "prompt", others)]
    cases += [((1, 2, 3), "none", []), ((2, 3, 1), "none", others)]
    cases += [((n,), share, before) for n in (1, 2, 3) for share, before in (("prompt", []), ("none", others))]
    for case in cases:
        for piece, ours in run(*case).items():
            assert all(torch.equal(a, b) for a, b in zip(ours, first[piece], strict=True)), (case, piece)


def test_blocks_are_those_of_segments_with_rows():
    batch = one_pack([random_examples([(7, (5, 9))])[0]], "prompt", tokens=21)
    prepared = PlainAttention.prepare(batch.layout)
    [blocks] = prepared.blocks  # a prompt of 7 rows and answers of 5 and 9, each within the first block of its path
    rows = [[row for row in block.tolist() if row < 21] for block in blocks.queries]
    assert rows == [[*range(7)], [*range(7, 12)], [*range(12, 21)]]
    seen = [[row for row in block.tolist() if row < 21] for block in blocks.keys]
    assert seen == [[*range(7)], [*range(12)], [*range(7), *range(12, 21)]]


def test_the_result_can_be_viewed_as_models_do():
    """transformers' own attention functions return contiguous outputs, and some models call .view on them."""
    batch = one_pack(random_examples(SHAPES), "prompt")
    out = attend(batch, *random_qkv(len(batch.input_ids), 2, torch.float32))
    out[None].view(1, len(batch.input_ids), -1)


# --- trees ------------------------------------------------------------------------------------------------------------

CASES = [
    Case(),
    Case(4, 2, 24, window=40),
    Case(2, 1, 16, window=64, softcap=20.0),
    Case(4, 2, 16, has_sinks=True),
    Case(2, 1, 16, window=1, value_width=24, has_sinks=True, softcap=2.0),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_a_tree_has_the_values_and_gradients_of_its_sequences_alone(seed, case):
    """In float64; a row that is repeated in other layouts has its part of the gradient in each of them."""
    examples = random_forest(seed, depth=8, longest=200)
    known = Known()
    tree, alone = laid(examples, "tree"), laid(examples, "none")
    rows, copies = known.rows(tree), known.rows(alone)
    many = torch.bincount(copies, minlength=len(known.of_path))
    found = attended(PlainAttention, tree, rows, case, torch.float64)
    repeated = attended(PlainAttention, alone, copies, case, torch.float64, share_of=1 / many[copies].double())
    repeated[0] /= many[copies, None, None]
    used = slice(tree.used_slots)
    for ours, parts in zip(found[:4], repeated[:4], strict=True):
        parts = parts[: alone.used_slots]
        expected = parts.new_zeros(len(many), *parts.shape[1:]).index_add(0, copies[: alone.used_slots], parts)
        torch.testing.assert_close(ours[used], expected[rows[used]], **NEAR)

    leaves = [normal(rows, *shape, seed=n).requires_grad_() for n, shape in enumerate(case.shapes)]
    sinks = [normal(torch.arange(case.heads), seed=8).float().double().requires_grad_()] * case.has_sinks
    expected = dense(*leaves, mask_of(tree, case.window), case.width**-0.5, case.softcap, *sinks)
    upstream = normal(rows, *expected.shape[1:], seed=9)
    true = [expected.detach(), *torch.autograd.grad(expected, [*leaves, *sinks], upstream)]
    for ours, theirs in zip(found, true, strict=True):
        torch.testing.assert_close(ours, theirs, **NEAR)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(seed, dtype, case):
    check_paths_decide_bits(PlainAttention, ways_to_lie(seed), case, dtype)


@cases
def test_gradients_repeat_to_the_bit(case):
    check_error_and_repeat(PlainAttention, laid(random_forest(2), "tree"), case, torch.bfloat16)


def test_a_path_of_thousands_of_tokens_needs_little_memory():
    """Without a copy of its keys, or of its scores, for each block that reads them."""
    [example] = random_examples([(4096, (1,))])
    batch = one_pack([example], "prompt", tokens=4160)
    q, k, v = (t.requires_grad_() for t in random_qkv(4160, 2, torch.float32))
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
            return out

    held = []
    with Sizes():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
            out = attend(batch, q, k, v)
        out.sum().backward()
    assert largest <= 4160 * HEADS * max(WIDTH, 64)
    assert sum(held) <= 4 * q.numel()
