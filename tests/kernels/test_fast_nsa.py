"""The fast kernels of native sparse attention without a GPU, by Triton's interpreter: slowly.

Its products do not know bfloat16, so float16 stands for a dtype whose operands are rounded.

TRITON_INTERPRET=1 pytest tests/kernels/test_fast_nsa.py

It needs a NumPy before 2.4, which made an error of what the interpreter does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.fx.experimental._config  # private: torch.fx.experimental._config.use_duck_shape
from torch.utils.flop_counter import FlopCounterMode

from tests.forests import Known, laid, paths, random_forest
from tests.sparse_attention import (
    Form,
    Sizes,
    check_choices,
    check_error_and_repeat,
    check_paths_decide_bits,
    check_selected,
    random_inputs,
)
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.nsa._blocks import Blocks
from tuningfork.kernels.nsa._readers import Readers
from tuningfork.kernels.nsa._tables import Entries, Pieces
from tuningfork.kernels.nsa.plain import Choice, Grid
from tuningfork.records import GRID

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # of lanes that are masked
]

SMALL = Sizes(2, 1)
CASES = {
    "one head a group": Sizes(2, 2),
    "three": Sizes(3, 1, 4, 8, Grid(4, 2, 4), Choice(3, 1, 1)),
    "six, no overlap": Sizes(6, 1, 8, 4, Grid(8, 8, 8), Choice(5, 0, 1)),
    "sixteen, many strides": Sizes(16, 1, 24, 6, Grid(16, 4, 48), Choice(2, 1, 1)),
    "a block a row": Sizes(2, 1, 4, 4, Grid(1, 1, 1), Choice(9, 2, 3)),
    "blocks of two steps": Sizes(1, 1, 4, 4, Grid(16, 8, 80), Choice(1, 0, 1)),
}


@pytest.fixture
def fast() -> Iterator[type]:
    from tuningfork.kernels.nsa.fast import TritonNsa

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN
    yield TritonNsa
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["by row", "by block"])
def form(request, monkeypatch) -> str:
    """Selected attention takes this form, whatever the sizes."""
    monkeypatch.setattr("tuningfork.kernels.nsa.fast.LEAST_HEADS_BY_ROW", 0 if request.param == "by row" else 1000)
    monkeypatch.setattr("tuningfork.kernels.nsa.fast.WIDEST_BY_BLOCK", 1000)
    return request.param


@interpreted
@pytest.mark.parametrize("sizes", [SMALL, *CASES.values()], ids=["two", *CASES])
def test_a_small_tree_has_its_error_and_repeats(sizes, fast):
    batch = laid(random_forest(1, depth=4, longest=110, most=6), "tree")
    check_error_and_repeat(fast, batch, sizes, torch.float32)
    check_choices(fast, batch, sizes, torch.float32)


@interpreted
@pytest.mark.parametrize("sizes", [SMALL, *CASES.values()], ids=["two", *CASES])
def test_selected_attention_has_its_error_in_both_forms(sizes, form, fast, monkeypatch):
    batch = laid(random_forest(1, depth=4, longest=110, most=6), "tree")
    check_selected(fast, batch, sizes, torch.float32)
    check_selected(fast, one_pack(random_examples([(60, (50, 7))]), "prompt", tokens=128), sizes, torch.float16)


@interpreted
@pytest.mark.parametrize("sizes", [SMALL, CASES["six, no overlap"], CASES["blocks of two steps"]])
def test_launches_and_parts_do_not_touch_what_a_row_has(sizes, fast, monkeypatch):
    batch = laid(random_forest(1, depth=4, longest=110, most=6), "tree")
    whole = check_selected(fast, batch, sizes, torch.float32)
    monkeypatch.setattr("tuningfork.kernels.nsa._by_block._HELD", 1)  # 64 rows
    monkeypatch.setattr("tuningfork.kernels.nsa._by_block._PART", 5)
    parts = check_selected(fast, batch, sizes, torch.float32)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


@interpreted
def test_operands_that_are_rounded(fast):
    batch = one_pack(random_examples([(60, (50, 7))]), "prompt", tokens=128)
    check_error_and_repeat(fast, batch, SMALL, torch.float16, mean=True)
    check_choices(fast, batch, SMALL, torch.float16)


@interpreted
def test_documents_of_a_few_rows(fast):
    lengths = (1, 7, 8, 9, 15, 16, 17, 35)
    check_error_and_repeat(
        fast, one_pack(random_examples([(0, (n,)) for n in lengths]), "none", tokens=128), SMALL, torch.float32
    )


@interpreted
def test_a_row_has_the_same_bits_wherever_its_path_is_cut(form, fast):
    examples = random_forest(1, depth=4, longest=150, most=5)
    check_paths_decide_bits(fast, [laid(examples, share) for share in ("tree", "none")], SMALL, torch.float32)


@interpreted
def test_an_answer_has_the_same_bits_shared_and_alone(fast):
    [ranking] = random_examples([(70, (1, 64, 20))])
    packs = [laid([ranking], share) for share in ("prompt", "none")]
    alone = [one_pack([example], "none", tokens=example.unique_tokens) for example in ranking.alone()[1:]]
    check_paths_decide_bits(fast, [*packs, *alone], SMALL, torch.float32)


@interpreted
def test_equal_scores_go_to_the_lowest_blocks(fast):
    batch = one_pack(random_examples([(0, (300,))]), "none", tokens=320)
    sizes = SMALL._replace(choice=Choice(5, 1, 2))
    query, ck, cv, *_ = (torch.ones_like(t) for t in random_inputs(Known().rows(batch), sizes, torch.float32))
    op = fast.prepare(batch.layout, sizes.grid)
    _, chosen = op.compressed(query, op.mean(ck), op.mean(cv), scale=sizes.scale, choice=sizes.choice)
    assert chosen[299].tolist() == [[0, 1, 2, 17, 18]]


@interpreted
def test_chosen_blocks_may_be_given_in_any_order(fast):
    batch = laid(random_forest(2, depth=3, longest=100, most=4), "tree")
    numbers = Known().rows(batch)
    *_, q, k, v = random_inputs(numbers, SMALL, torch.float32)
    op = fast.prepare(batch.layout, SMALL.grid)
    _, chosen = Form(fast, batch.layout).read(random_inputs(numbers, SMALL, torch.float32), SMALL)
    read = op.selected(q, k, v, chosen, scale=SMALL.scale)
    again = op.selected(q, k, v, chosen.flip(-1), scale=SMALL.scale)
    torch.testing.assert_close(read, again, rtol=1e-5, atol=1e-6)


@interpreted
@torch.fx.experimental._config.patch(use_duck_shape=False)  # as models are compiled: tables have sizes of their own
def test_a_compiler_takes_it_whole(fast):
    """Whatever the pack, in one graph; here without code of its own."""

    def layer(form, cq, ck, cv, q, k, v):
        keys, values = form.mean(ck * 0.5), form.blocks(cv).sum(1)
        out, chosen = form.compressed(cq, keys, values, scale=SMALL.scale, choice=SMALL.choice)
        return out + form.selected(q, k, v, chosen, scale=SMALL.scale)

    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    for number, shape in enumerate([(40, (10, 30)), (0, (50,))]):
        batch = laid(random_examples([shape]), "prompt")
        form = fast.prepare(batch.layout, SMALL.grid)
        leaves = [t.requires_grad_() for t in random_inputs(Known().rows(batch), SMALL, torch.float32)]
        expected = layer(form, *leaves)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(form, *leaves)
        assert torch.equal(expected, found)
        gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (expected, found))
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@interpreted
def test_its_flops_are_those_of_what_rows_read(fast):
    batch = laid(random_examples([(0, (64,))]), "none")
    given = random_inputs(Known().rows(batch), SMALL, torch.float32)
    with FlopCounterMode(display=False) as counter:
        Form(fast, batch.layout, mean=True).read(given, SMALL)
    rows, heads, dk, dv = len(batch.input_ids), SMALL.heads, SMALL.key_width, SMALL.value_width
    entries = len(Blocks.of(batch.layout, SMALL.grid).rows)
    read = min(rows, SMALL.choice.count * SMALL.grid.select)
    assert counter.get_total_flops() == 2 * rows * heads * (entries * (2 * dk + dv) + read * (dk + dv))


@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
@pytest.mark.parametrize("grid", [Grid(8, 4, 16), Grid(4, 2, 4), Grid(1, 1, 1), Grid(16, 4, 48)])
def test_tables_say_where_the_entries_and_the_chosen_blocks_of_a_path_lie(grid, share):
    batch = laid(random_forest(3, longest=300, depth=8, most=12), share)
    blocks, entries, pieces = (kind.of(batch.layout, grid) for kind in (Blocks, Entries, Pieces))
    ended, steps, seams = (t.tolist() for t in (blocks.ended, entries.steps, entries.seams))
    segments, of_entries = batch.layout.segments.tolist(), entries.segments.tolist()
    table, rows = pieces.table.tolist(), pieces.rows.tolist()
    for row, path in enumerate(paths(batch)):
        segment = int(pieces.segment_of_row[row])
        start, end, *_, steps_start = segments[segment]
        assert start <= row < end
        if row < end - 1:
            continue
        first, above = of_entries[segment]
        for i, last in enumerate(path[grid.length - 1 :: grid.stride]):
            step = i // GRID * GRID
            base = steps[steps_start + i // GRID] if step < above else first + step - above
            assert (base + i % GRID if base >= 0 else seams[-1 - base][i % GRID]) == ended[last] - 1
        for begin in range(0, len(path), grid.select):
            its_rows = path[begin : begin + grid.select]
            piece = int(pieces.piece_of_row[its_rows[-1]])
            assert table[piece][0] == begin
            assert rows[piece][: len(its_rows)] == its_rows.tolist()
            base = table[piece][1]
            assert base < 0 or its_rows.tolist() == list(range(base, base + len(its_rows)))


@pytest.mark.parametrize(("rows", "chunk", "most"), [(100, 100, 1000), (100, 64, 7), (130, 64, 1), (64, 64, 3)])
def test_readers_of_a_piece_are_cut_into_parts_of_one_launch_each(rows, chunk, most):
    pieces, groups, count = 9, 2, 4
    numbers = torch.rand(rows, groups, pieces, generator=torch.Generator().manual_seed(rows + most)).argsort(2)
    numbers[:, :, 0] = 0  # all read the first piece, and none the last
    listed = torch.where(numbers[:, :, :count] < pieces - 1, numbers[:, :, :count], pieces)  # the last: there is none
    listed = torch.where(listed < pieces, listed * groups + torch.arange(groups)[:, None], pieces * groups).int()
    found = Readers.of(listed, pieces, chunk, most)
    of_piece: dict[int, list[int]] = {}
    used: dict[int, list[tuple[int, int]]] = {}
    for launch in range(len(found.launches) - 1):
        for part in range(found.launches[launch], found.launches[launch + 1]):
            piece, begin, end, slot = found.parts[part].tolist()
            places = found.order[begin:end].tolist()
            assert 0 < len(places) <= most
            for place in places:
                assert listed.flatten()[place] == piece
                row, group = place // (groups * count), place // count % groups
                assert row // chunk * groups + group == launch
            of_piece.setdefault(piece, []).extend(places)
            assert found.slot_starts[piece] <= slot < found.slot_starts[piece + 1]
            used.setdefault(slot, []).append((launch, begin))
    for piece in range(pieces * groups):
        assert of_piece.get(piece, []) == (listed.flatten() == piece).nonzero()[:, 0].tolist()
    assert sorted(used) == list(range(int(found.slot_starts[-1])))
    assert all(len({launch for launch, _ in of_slot}) == len(of_slot) for of_slot in used.values())
    assert (found.parts[int(found.launches[-1]) :, 2] == 0).all()
