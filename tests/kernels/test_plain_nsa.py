"""Plain native sparse attention against its definition, query by query in float64, and what may decide no bit of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.forests import Known, laid, paths, random_forest, ways_to_lie
from tests.repeated import slow
from tests.sparse_attention import (
    NAMES,
    Definition,
    Form,
    Sizes,
    attended,
    check_paths_decide_bits,
    learned,
    random_inputs,
)
from tests.tiny import one_pack, random_examples
from tuningfork.kernels.nsa import plain
from tuningfork.kernels.nsa._blocks import Blocks
from tuningfork.kernels.nsa.plain import Choice, Grid, PlainNsa

SMALL = Sizes()
CASES = {
    "one head a group": Sizes(2, 2),
    "three": Sizes(6, 2, 4, 8, Grid(4, 2, 4), Choice(3, 1, 1)),
    "six, no overlap": Sizes(6, 1, 8, 4, Grid(8, 8, 8), Choice(5, 0, 1)),
    "sixteen, many strides": Sizes(16, 1, 4, 6, Grid(16, 4, 48), Choice(2, 1, 1)),
    "a block a row": Sizes(2, 1, 4, 4, Grid(1, 1, 1), Choice(9, 2, 3)),
}
# Of SMALL: both sides of the lengths of its blocks, of their border, of where a row begins to choose, and of 64 rows.
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 35, 63, 65, 130)


@pytest.fixture(autouse=True)
def both_ways(monkeypatch) -> None:
    """Chosen rows of short sequences are gathered, too, as soon as there is a choice."""
    monkeypatch.setattr(plain, "_SPARSE", 1)


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


def check_definition(batch, sizes: Sizes) -> torch.Tensor:
    numbers = Known().rows(batch)
    found, chosen = attended(Form(PlainNsa, batch.layout), batch, numbers, sizes, torch.float64)
    true, expected = attended(Definition(batch), batch, numbers, sizes, torch.float64)
    close(found, true, 1e-12)
    assert torch.equal(chosen, expected)
    return chosen


@pytest.mark.parametrize("sizes", [SMALL, *CASES.values()], ids=["two", *CASES])
def test_values_gradients_and_choices_are_those_of_the_definition(sizes):
    lengths = LENGTHS if sizes == SMALL else (3, 65, 80)
    check_definition(one_pack(random_examples([(0, (n,)) for n in lengths]), "none", tokens=512), sizes)


@pytest.mark.parametrize("share", ["tree", "prompt"])
@pytest.mark.parametrize("seed", range(2))
def test_a_forest_has_the_gradients_of_the_definition_along_each_path(seed, share):
    """Those of rows that several paths have are sums over them."""
    check_definition(laid(random_forest(seed, longest=120, most=6), share), SMALL)


def test_blocks_that_are_gathered_are_those_behind_a_mask(monkeypatch):
    """Part by part, too: what is computed at once decides nothing but memory."""
    batch = one_pack(random_examples([(150, (120, 40))]), "prompt", tokens=320)
    numbers = Known().rows(batch)
    whole, chosen = attended(Form(PlainNsa, batch.layout), batch, numbers, SMALL, torch.float64)
    monkeypatch.setattr(plain, "_MOST", 1)
    parts, again = attended(Form(PlainNsa, batch.layout), batch, numbers, SMALL, torch.float64)
    assert torch.equal(chosen, again)
    assert all(torch.equal(a, b) for a, b in zip(whole[:2], parts[:2], strict=True))
    close(parts, whole, 1e-14)
    monkeypatch.setattr(plain, "_SPARSE", 8)
    masked, again = attended(Form(PlainNsa, batch.layout), batch, numbers, SMALL, torch.float64)
    assert torch.equal(chosen, again)
    close(masked, whole, 1e-12)


def test_scores_of_blocks_are_the_table_worked_out_by_hand():
    """l = 4, d = 2, l' = 4, n = 3, the first block and the last: of 24 rows the last one chooses one of blocks 1 .. 4.

    S[j] = p[2j - 1] + 2 p[2j] + p[2j + 1], by hundredths, p as given (equation 9 with indices from 0). Read with
    another index it chooses otherwise: with the printed (l'/d) j - m - u, S[j] = p[2j - 2] + 2 p[2j - 1] + p[2j], it
    would choose 4; shifted to the other side, S[j] = p[2j] + 2 p[2j + 1] + p[2j + 2], 1 or 2.
    """
    p = torch.tensor([4, 2, 1, 9, 11, 10, 10, 17, 13, 11, 12], dtype=torch.float64) / 100
    scores = [4 * 2 + 2, 2 + 2 * 1 + 9, 9 + 2 * 11 + 10, 10 + 2 * 10 + 17, 17 + 2 * 13 + 11, 11 + 2 * 12]
    assert scores == [10, 13, 41, 47, 54, 35]
    grid, choice = Grid(4, 2, 4), Choice(3, 1, 1)
    torch.testing.assert_close(
        plain._by_block(p, 6, grid), torch.tensor(scores, dtype=torch.float64) / 100, rtol=1e-15, atol=1e-15
    )
    batch = one_pack(random_examples([(0, (24,))]), "none", tokens=24)
    op = PlainNsa.prepare(batch.layout, grid)
    keys = torch.zeros(len(op.first_positions), 1, 1, dtype=torch.float64)
    keys[:11, 0, 0] = p.log()
    out, chosen = op.compressed(torch.ones(24, 1, 1).double(), keys, keys.exp(), scale=1.0, choice=choice)
    torch.testing.assert_close(out[23, 0, 0], p.square().sum(), rtol=1e-14, atol=0)
    assert chosen[23, 0].tolist() == [0, 4, 5]


def test_equal_scores_go_to_the_lowest_blocks_every_time():
    """Keys that are all the same make all blocks but the first and the last, which fewer cover, equal."""
    batch = one_pack(random_examples([(0, (300,))]), "none", tokens=320)
    sizes = SMALL._replace(choice=Choice(5, 1, 2))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = [torch.ones_like(t) for t in random_inputs(Known().rows(batch), sizes, dtype)]
        _, chosen = Form(PlainNsa, batch.layout).read(given, sizes)
        assert chosen[299].tolist() == [[0, 1, 2, 17, 18]] * 2
        for _ in range(3):
            assert torch.equal(Form(PlainNsa, batch.layout).read(given, sizes)[1], chosen)


def test_with_room_for_all_blocks_a_row_reads_its_whole_path():
    batch = laid(random_forest(1, longest=150, most=8), "tree")
    numbers = Known().rows(batch)
    given = random_inputs(numbers, SMALL)
    _, chosen = Form(PlainNsa, batch.layout).read(given, SMALL._replace(choice=Choice(30, 1, 2)))
    *_, q, k, v = given
    op = PlainNsa.prepare(batch.layout, SMALL.grid)
    read = op.selected(q, k, v, chosen, scale=SMALL.scale)
    dense = plain.PlainAttention.prepare(batch.layout).attend(q, k, v, scale=SMALL.scale, window=None, softcap=None)
    torch.testing.assert_close(read, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_a_row_has_the_same_bits_wherever_its_path_is_cut_and_whatever_lies_beside_it(seed, dtype, threads):
    check_paths_decide_bits(PlainNsa, ways_to_lie(seed), SMALL, dtype)


@pytest.mark.parametrize("sizes", [*CASES.values(), Sizes(3, 1, 32, 32)], ids=[*CASES, "wide"])
def test_an_answer_has_the_same_bits_shared_and_alone(sizes, threads):
    rankings = random_examples([(prompt, (1, 64, 70)) for prompt in (0, 1, 63, 130)])
    packs = [laid(rankings, share) for share in ("prompt", "none")]
    examples = rankings[2].alone()
    alone = [one_pack([example], "none", tokens=example.unique_tokens) for example in examples]
    check_paths_decide_bits(PlainNsa, [*packs, *alone], sizes, torch.float32)


def test_what_lies_beside_a_path_changes_nothing_be_it_no_number():
    batch = laid(random_forest(3, longest=200, most=12), "tree")
    given = random_inputs(Known().rows(batch), SMALL, torch.float32)
    clean, chosen = Form(PlainNsa, batch.layout, mean=True).read(given, SMALL)
    for path in [path for path in paths(batch) if len(path) > 100][::30]:
        others = torch.ones(len(batch.input_ids), dtype=torch.bool)
        others[path] = False
        spoilt = [t.masked_fill(others[:, None, None], float("nan")) for t in given]
        out, choice = Form(PlainNsa, batch.layout, mean=True).read(spoilt, SMALL)
        assert torch.equal(out[path], clean[path])
        assert torch.equal(choice[path], chosen[path])


def test_low_precision_is_summed_in_float32():
    batch = laid(random_forest(1, longest=200, most=12), "tree")
    numbers = Known().rows(batch)
    found, chosen = attended(Form(PlainNsa, batch.layout, mean=True), batch, numbers, SMALL, torch.bfloat16)
    assert {t.dtype for t in found} == {torch.bfloat16}
    true, _ = attended(
        Form(PlainNsa, batch.layout, mean=True, chosen=chosen), batch, numbers, SMALL, torch.float64, torch.bfloat16
    )
    # What is rounded is a block's mean, by half a unit of its last place, and so each score and value by as much; then
    # the result. Gradients are rounded as often.
    for name, ours, exact in zip(NAMES, found, true, strict=True):
        assert (ours.double() - exact).norm() <= 2**-8 * exact.norm(), name


def scores_of_blocks(query: torch.Tensor, keys: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Of one sequence, S[t, g, j] of queries [T, H, dk] and compressed keys [m, G, dk]: the strides that each
    compressed block has in j, times its weight."""
    (length, d, select), t, i = sizes.grid, torch.arange(len(query)), torch.arange(len(keys))
    products = torch.einsum("tgad,igd->tgai", query.unflatten(1, (sizes.groups, -1)), keys) * sizes.scale
    hidden = i * d + length > t[:, None] + 1
    weights = products.masked_fill(hidden[:, None, None], float("-inf")).softmax(3).nan_to_num().sum(2)
    strides = torch.zeros(len(keys), t[-1] // select + 1, dtype=query.dtype)
    for u in range(length // d):
        strides[i, (i + u) * d // select] += 1
    return weights @ strides


def test_a_choice_holds_where_scores_move_less_than_half_their_gap_and_ends_where_two_change_places():
    """The gap: from the last block that is chosen for its score to the first that is not. Queries go down its gradient,
    those of each row and group as far as bisection finds."""
    total, sizes = 200, SMALL._replace(choice=Choice(5, 1, 2))
    batch = one_pack(random_examples([(0, (total,))]), "none", tokens=total)
    query, key, value = random_inputs(Known().rows(batch), sizes)[:3]
    op = PlainNsa.prepare(batch.layout, sizes.grid)
    keys, values = learned(op.blocks(key)), learned(op.blocks(value))
    complete = (total - sizes.grid.length) // sizes.grid.stride + 1

    def scores(query: torch.Tensor) -> torch.Tensor:
        return scores_of_blocks(query, keys[:complete], sizes)

    def chosen(query: torch.Tensor) -> torch.Tensor:
        return op.compressed(query, keys, values, scale=sizes.scale, choice=sizes.choice)[1]

    own = torch.arange(total)[:, None] // sizes.grid.select
    block = torch.arange(int(own[-1]) + 1)
    free = (block >= 1) & (block < own - 1)  # two of them are chosen
    choosing = free.sum(1) > 2
    last, after = scores(query).masked_fill(~free[:, None], -1).topk(3).indices[..., 1:].split(1, dim=2)

    def gap(scores: torch.Tensor) -> torch.Tensor:
        return scores.gather(2, last) - scores.gather(2, after)

    before, whole = scores(query), gap(scores(query))
    (downhill,) = torch.autograd.grad(-gap(scores(query.requires_grad_()))[choosing].sum(), query)
    query = query.detach()

    def moved(steps: torch.Tensor) -> torch.Tensor:
        return query + steps.repeat_interleave(sizes.heads // sizes.groups, dim=1) * downhill

    def change(steps: torch.Tensor) -> torch.Tensor:
        """The largest of a score, [T, G, 1]."""
        return (scores(moved(steps)) - before).abs().amax(2, keepdim=True)

    def bisected(holds: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps [T, G, 1] with which it holds, and some that are hardly longer with which it may not."""
        short, long = torch.zeros_like(whole), torch.full_like(whole, 1e3)
        for _ in range(40):
            middle = (short + long) / 2
            short, long = torch.where(holds(middle), middle, short), torch.where(holds(middle), long, middle)
        return short, long

    almost, _ = bisected(lambda steps: change(steps) < 0.499 * whole)
    assert (change(almost) > 0.49 * whole)[choosing].all()
    assert torch.equal(chosen(moved(almost)), chosen(query))
    _, beyond = bisected(lambda steps: gap(scores(moved(steps))) > 0)
    swapped = gap(scores(moved(beyond)))[..., 0] < 0
    assert swapped[choosing].float().mean() > 0.8
    assert (chosen(moved(beyond)) != chosen(query)).any(2)[swapped].all()


@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "behind a mask"])
def test_gradients_are_those_of_small_differences(gathered, monkeypatch):
    """With blocks chosen before, rows that answers share, compressed blocks across a fork, and rows that have none. A
    random direction of all inputs and one of all outputs at once: all entries count, and few differences are taken."""
    monkeypatch.setattr(plain, "_SPARSE", 1 if gathered else 8)
    sizes = Sizes(2, 1, 2, 1, Grid(4, 2, 4), Choice(3, 1, 1))
    batch = one_pack(random_examples([(9, (5, 4))]), "prompt", tokens=18)
    leaves = [rows.requires_grad_() for rows in random_inputs(Known().rows(batch), sizes)]
    _, chosen = Form(PlainNsa, batch.layout).read(leaves, sizes)
    assert chosen[-1, 0, [0, 2]].tolist() == [0, 3]  # and one of the two blocks between
    form = Form(PlainNsa, batch.layout, chosen=chosen)
    read = lambda *rows: form.read(rows, sizes)[0]  # noqa: E731
    assert torch.autograd.gradcheck(read, leaves, eps=1e-6, atol=1e-8, rtol=1e-7, fast_mode=True)


def test_blocks_are_those_of_the_page():
    """Prompt of 5, answers of 3 and 2: what the docstring of _blocks.py draws."""
    batch = one_pack(random_examples([(5, (3, 2))]), "prompt", tokens=10)
    blocks = Blocks.of(batch.layout, Grid(4, 2, 4))
    assert blocks.rows.tolist()[:5] == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [2, 3, 4, 8], [10] * 4]
    assert blocks.first_positions.tolist()[:5] == [0, 2, 4, 2, 0]
    assert blocks.ended.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("grid", [Grid(8, 4, 16), Grid(32, 16, 64), Grid(3, 1, 5), Grid(40, 8, 40)])
@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
def test_each_path_finds_its_blocks_and_a_shared_one_is_made_once(share, grid):
    batch = laid(random_forest(5, longest=200), share)
    blocks = Blocks.of(batch.layout, grid)
    made = {}
    for row, path in enumerate(paths(batch)):
        first = len(path) - grid.length
        if first >= 0 and first % grid.stride == 0:
            made[int(blocks.ended[row]) - 1] = (path[first:].tolist(), first)
    assert sorted(made) == list(range(len(made)))
    assert [blocks.rows[entry].tolist() for entry in sorted(made)] == [made[entry][0] for entry in sorted(made)]
    assert [int(blocks.first_positions[entry]) for entry in sorted(made)] == [made[entry][1] for entry in sorted(made)]
    assert (blocks.rows[len(made) :] == len(batch.input_ids)).all()
    assert len(blocks.rows) % 64 == 0
