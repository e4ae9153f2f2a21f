"""The plain gated delta rule against its definition, row by row in float64, and what may decide no bit of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.delta_rule import (
    NAMES,
    Definition,
    Heads,
    check_paths_decide_bits,
    random_inputs,
    recurrence,
    scanned,
)
from tests.forests import Known, laid, paths, random_forest, stem_of_many, ways_to_lie
from tests.repeated import slow
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.gated_delta._chunks import CHUNK, Chunks, chains_of
from tuningfork.kernels.gated_delta.plain import PlainGatedDelta
from tuningfork.records import ROOT

LENGTHS = (1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200)
CASES = [Heads(2, 8, 2, 8), Heads(2, 8, 4, 12), Heads(1, 12, 4, 24)]  # as many value heads, twice, four times as many


@pytest.fixture(params=[1, 4], ids=["1 thread", "4 threads"])
def threads(request) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def close(found: list[torch.Tensor], true: list[torch.Tensor], tolerance: float) -> None:
    for name, ours, theirs in zip(NAMES, found, true, strict=True):
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("decay", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("heads", CASES)
def test_values_and_gradients_are_those_of_the_recurrence(heads, decay):
    batch = one_pack(random_examples([(0, (length,)) for length in LENGTHS]), "none", tokens=832)
    numbers = Known().rows(batch)
    found = scanned(PlainGatedDelta, batch, numbers, heads, torch.float64, decay=decay)
    close(found, scanned(Definition(batch), batch, numbers, heads, torch.float64, decay=decay), 1e-12)


@pytest.mark.parametrize("share", ["tree", "prompt"])
@pytest.mark.parametrize("seed", range(2))
def test_a_forest_has_the_gradients_of_the_recurrence_along_each_path(seed, share):
    """Those of rows that several paths have are sums over them."""
    batch = laid(random_forest(seed, longest=200), share)
    numbers = Known().rows(batch)
    found = scanned(PlainGatedDelta, batch, numbers, Heads(), torch.float64)
    close(found, scanned(Definition(batch), batch, numbers, Heads(), torch.float64), 1e-12)


def test_keys_that_are_all_the_same_and_rates_of_two_are_no_trouble():
    """The worst that a layer with negative eigenvalues can ask for: reflections along one direction."""
    batch = one_pack(random_examples([(0, (200,))]), "none")
    numbers = Known().rows(batch)
    query, key, value, decay, beta = random_inputs(numbers, Heads())
    given = query, key[:1].expand_as(key), value, decay * 0, torch.full_like(beta, 2.0)
    out = PlainGatedDelta.prepare(batch.layout).scan(*given)
    torch.testing.assert_close(out, recurrence(batch, *given), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(seed, dtype, threads):
    check_paths_decide_bits(PlainGatedDelta, ways_to_lie(seed), Heads(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)])
def test_an_answer_has_the_same_bits_shared_and_alone(dtype, threads):
    prompts = (0, 1, 63, 64, 65, 130)
    rankings = random_examples([(prompt, (1, 64, 70)) for prompt in prompts])
    packs = [laid(rankings, share) for share in ("prompt", "none")]
    examples = [example for ranking in rankings[:4] for example in ranking.alone()]
    # With fewer products in a batch than threads, libraries cut up each of them: no run has packs of one chunk.
    alone = [one_pack([example], "none", tokens=max(256, example.unique_tokens)) for example in examples]
    check_paths_decide_bits(PlainGatedDelta, [*packs, *alone], Heads(2, 32, 2, 48), dtype)


@pytest.mark.parametrize(
    "heads", [Heads(1, 5, 3, 7), Heads(1, 8, 1, 1), Heads(2, 1, 2, 7), Heads(1, 15, 1, 11)], ids=str
)
def test_heads_that_fill_no_vector_register_have_the_same_bits_in_every_pack(heads):
    """Where a narrow or odd matrix lies in memory decides how libraries add it up."""
    together = random_examples([(10, (length - 10,)) for length in (130, 75, 140, 66)])
    alone = [
        one_pack([example], "none", tokens=example.unique_tokens + -example.unique_tokens % 64) for example in together
    ]
    check_paths_decide_bits(PlainGatedDelta, [one_pack(together, "none", tokens=448), *alone], heads, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_lies_beside_a_path_changes_nothing_however_large(dtype):
    batch = laid(random_forest(3), "tree")
    given = random_inputs(Known().rows(batch), Heads(), dtype)
    form = PlainGatedDelta.prepare(batch.layout)
    clean = form.scan(*given)
    for path in [path for path in paths(batch) if len(path) > 120][::20]:
        others = torch.ones(len(batch.input_ids), dtype=torch.bool)
        others[path] = False
        query, key, value, decay, beta = (t.clone() for t in given)
        query[others], key[others] = -query[others], key[others].flip(0)
        value[others], decay[others], beta[others] = 1e3, 0.0, 2.0
        assert torch.equal(form.scan(query, key, value, decay, beta)[path], clean[path])


def test_low_precision_is_summed_in_float32():
    batch = laid(random_forest(1), "tree")
    numbers = Known().rows(batch)
    found = scanned(PlainGatedDelta, batch, numbers, Heads(), torch.bfloat16)
    assert [t.dtype for t in found] == [torch.bfloat16] * 4 + [torch.float32] * 2
    # Of the result alone half a unit of bfloat16's last place is lost, and of gradients the same, by their own size.
    true = scanned(PlainGatedDelta, batch, numbers, Heads(), torch.float64, rounded=torch.bfloat16)
    for name, ours, exact in zip(NAMES, found, true, strict=True):
        assert ((ours.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4 * exact.abs().max()).all(), name


def test_autocast_changes_nothing():
    batch = laid(random_forest(1), "tree")
    given = [t.requires_grad_() for t in random_inputs(Known().rows(batch), Heads(), torch.float32)]
    form = PlainGatedDelta.prepare(batch.layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(form.scan(*given), form.scan(*(t.detach() for t in given)))
        out = form.scan(*given)
    assert torch.equal(out, form.scan(*given))


def test_chunks_are_those_of_the_page():
    """Prompt of 70, answers of 60 and 10, then padding: what the docstring of _chunks.py draws."""
    batch = one_pack(random_examples([(70, (60, 10))]), "prompt", tokens=160)
    chunks = Chunks.of(batch.layout)
    rows = [[row for row in line if row < 160] for line in chunks.rows.tolist()]
    assert rows[:4] == [
        list(range(64)),
        list(range(64, 128)),
        [128, 129],
        [*range(64, 70), *range(130, 140)],
    ]
    assert chunks.parent.tolist()[:4] == [ROOT, 0, 1, 0]
    assert chunks.number.tolist()[:5] == [0, 1, 2, 1, 0]
    assert chunks.of_row.tolist()[:140] == [0] * 64 + [1] * 64 + [2] * 2 + [3] * 10


def test_what_paths_share_is_scanned_once():
    batch = laid(stem_of_many(900, 30), "prompt")
    there = Chunks.of(batch.layout).number >= 0
    assert int(there.sum()) <= 1 + 30 + 1  # a whole chunk of the prompt; its last rows go with each answer; padding
    assert len(Chunks.of(laid(random_forest(0), "tree").layout).rows[0]) == CHUNK


@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_a_walk_through_trees_and_chains_hands_each_chunk_its_parents_state(seed, share):
    layout = laid(random_forest(seed, depth=8), share).layout
    chunks = Chunks.of(layout)
    there = int((chunks.number >= 0).sum())
    chains, trees = (table.tolist() for table in chains_of(chunks, len(layout.segments)))
    state_after: dict[int, int] = {}  # by slot: the chunk that left its state
    readers: dict[int, list[int]] = {}  # by slot: which of its readers says that it is the last
    visited = []
    for first, end in trees:
        for begin, stop, source, target, is_last in chains[first:end]:
            before = ROOT if source < 0 else state_after[source]
            readers.setdefault(source, []).append(is_last)
            for chunk in range(begin, stop):
                assert int(chunks.parent[chunk]) == before
                visited.append(before := chunk)
            if target >= 0:
                assert target not in state_after
                state_after[target] = before
    assert sorted(visited) == list(range(there))
    assert max(state_after, default=-1) < len(layout.segments)
    readers.pop(-1)
    assert set(readers) == set(state_after)
    assert all(len(lasts) > 1 and lasts == [0] * (len(lasts) - 1) + [1] for lasts in readers.values())
    sizes = [sum(stop - begin for begin, stop, *_ in chains[first:end]) for first, end in trees]
    assert sizes == sorted(sizes, reverse=True)


def test_gates_that_would_be_rounded_are_refused():
    batch = laid(random_forest(1), "tree")
    query, key, value, decay, beta = random_inputs(Known().rows(batch), Heads(), torch.float32)
    form = PlainGatedDelta.prepare(batch.layout)
    with pytest.raises(TypeError, match=r"beta have to be torch\.float32, and they are torch\.bfloat16"):
        form.scan(query, key, value, decay.bfloat16(), beta)
    with pytest.raises(TypeError, match=r"have to be torch\.float64, and they are torch\.float32 and torch\.float32"):
        form.scan(query.double(), key.double(), value.double(), decay, beta)
