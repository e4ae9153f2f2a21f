"""The gate of the tensors: a layout against records.ForkLayout's words, followed slowly enough to check by eye."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.packing.alike import SHARES, alike, example_of, sequences
from tests.tiny import random_examples
from tuningfork.data.packing.layout import PADDING_ID, build_pack, lay
from tuningfork.data.packing.tree import Forest, grow
from tuningfork.records import (
    GRID,
    ROOT,
    ForkLayout,
    PackedBatch,
    Segment,
    Source,
    TokenAnswer,
    TokenExample,
)

SHARE = st.sampled_from(SHARES)
PADDING = st.sampled_from([0, 1, 2, 31, 70, 300])
STEMS = st.sampled_from([1, 4, 32])


def entries(layout: ForkLayout) -> list[Segment]:
    return [Segment(*entry) for entry in layout.segments.tolist()]


def used(layout: ForkLayout) -> list[Segment]:
    """The entries that have rows."""
    return [segment for segment in entries(layout) if segment.start < segment.end]


def path_of(layout: ForkLayout, entry: int) -> list[int]:
    """The rows of a segment's path, those of its ancestors first, by parents alone."""
    table, rows = entries(layout), []
    while entry != ROOT:
        rows = [*range(table[entry].start, table[entry].end), *rows]
        entry = table[entry].parent
    return rows


def visible(layout: ForkLayout) -> np.ndarray:
    """bool [T, T]: which row sees which: its path up to itself."""
    mask = np.zeros((len(layout.position_of_row),) * 2, dtype=bool)
    for entry, segment in enumerate(used(layout)):
        path = path_of(layout, entry)
        for n in range(len(path) - (segment.end - segment.start), len(path)):
            mask[path[n], path[: n + 1]] = True
    return mask


def steps_by_hand(layout: ForkLayout) -> list[list[list[int]]]:
    """Of each segment: the rows of each step in which its ancestors have some, GRID of them, by the definition.

    Behind the segment's end the last row is said again.
    """
    found = []
    for entry, segment in enumerate(used(layout)):
        path = path_of(layout, entry)
        starts = range(0, segment.first_position, GRID)
        found.append([[path[min(i, len(path) - 1)] for i in range(start, start + GRID)] for start in starts])
    return found


def steps_read(layout: ForkLayout) -> list[list[list[int]]]:
    """The same, read as a kernel reads it."""
    steps, seams = layout.steps.tolist(), layout.seams.tolist()
    found = []
    for segment in used(layout):
        count = -(-segment.first_position // GRID)
        own = steps[segment.steps_start : segment.steps_start + count]
        found.append([list(range(step, step + GRID)) if step >= 0 else seams[-1 - step] for step in own])
    return found


def pack_of(examples: list[TokenExample], share: str, stem: int, padding: int) -> tuple[PackedBatch, Forest]:
    forest = grow(examples, share, stem).of(range(len(examples)))
    return lay(examples, forest, forest.rows + padding), forest


@settings(max_examples=100)
@given(examples=alike(), share=SHARE, stem=STEMS, padding=PADDING)
def test_a_forests_nodes_are_the_first_segments_in_their_order(examples, share, stem, padding):
    batch, forest = pack_of(examples, share, stem, padding)
    table = used(batch.layout)[: len(forest.nodes)]
    assert batch.used_slots == forest.rows and len(batch.input_ids) == forest.rows + padding
    assert [segment.parent for segment in table] == [node.parent for node in forest.nodes]
    assert [segment.end - segment.start for segment in table] == [len(node.ids) for node in forest.nodes]
    assert batch.spans == [(node.position, len(node.ids)) for node in forest.nodes]
    assert batch.input_ids[: forest.rows].tolist() == [token for node in forest.nodes for token in node.ids.tolist()]
    assert batch.examples == tuple(examples)
    assert batch.answers_per_example == [len(e.answers) for e in examples]
    # All that it takes to know which rows an answer has.
    for example, leaves in zip(examples, forest.leaves, strict=True):
        for sequence, leaf in zip(sequences(example), leaves, strict=True):
            assert tuple(batch.input_ids[path_of(batch.layout, leaf)].tolist()) == sequence


@settings(max_examples=100)
@given(examples=alike(), share=SHARE, stem=STEMS, padding=PADDING)
def test_padding_is_plain_sequences_of_somebodys_token(examples, share, stem, padding):
    batch, forest = pack_of(examples, share, stem, padding)
    n, longest = forest.rows, max(example.longest for example in examples)
    padded = used(batch.layout)[len(forest.nodes) :]
    assert [(s.start, s.end) for s in padded] == [
        (start, min(start + longest, n + padding)) for start in range(n, n + padding, longest)
    ]
    assert all((s.parent, s.first_position, s.subtree_end) == (ROOT, 0, s.end) for s in padded)
    assert set(batch.input_ids[n:].tolist()) <= {PADDING_ID}


@settings(max_examples=100)
@given(examples=alike(), share=SHARE, stem=STEMS, padding=PADDING)
def test_segments_tile_the_rows_and_tables_have_few_lengths(examples, share, stem, padding):
    layout = pack_of(examples, share, stem, padding)[0].layout
    table, count, rows = entries(layout), len(used(layout)), len(layout.position_of_row)
    # Entries in use come first, without a gap; behind them only as many empty ones as round their number up.
    assert [row for s in table[:count] for row in range(s.start, s.end)] == list(range(rows))
    assert len(table) % 32 == 0 and 0 <= len(table) - count < 32 and layout.seams.shape == (len(table), GRID)
    # An empty entry reads and writes nothing, whatever it is taken for.
    assert set(table[count:]) <= {Segment(rows, rows, ROOT, 0, rows, 0)}
    # Each segment's steps lie behind those of the one before.
    ends = [segment.steps_start + -(-segment.first_position // GRID) for segment in table[:count]]
    assert [segment.steps_start for segment in table[:count]] == [0, *ends][:count]
    assert len(layout.steps) == max(-(-ends[-1] // 256), 1) * 256
    assert not layout.steps[ends[-1] :].any()


@settings(max_examples=100)
@given(examples=alike(), share=SHARE, stem=STEMS, padding=PADDING)
def test_positions_are_places_in_the_path(examples, share, stem, padding):
    layout = pack_of(examples, share, stem, padding)[0].layout
    for entry, segment in enumerate(used(layout)):
        assert segment.parent < entry
        path = path_of(layout, entry)
        assert segment.first_position == len(path) - (segment.end - segment.start)
        assert layout.position_of_row[path].tolist() == list(range(len(path)))


@settings(max_examples=100)
@given(examples=alike(), share=SHARE, stem=STEMS, padding=PADDING)
def test_a_subtree_ends_right_where_its_root_is_seen_no_more(examples, share, stem, padding):
    """A kernel takes the gradient of a segment's keys from all rows between: each must see them, none may lack."""
    layout = pack_of(examples, share, stem, padding)[0].layout
    mask = visible(layout)
    for segment in used(layout):
        seers = np.flatnonzero(mask[:, segment.start : segment.end].any(axis=1))
        assert seers.tolist() == list(range(segment.start, segment.subtree_end))
        assert mask[segment.end : segment.subtree_end, segment.start : segment.end].all()


@settings(max_examples=200)
@given(examples=alike(), share=SHARE, stem=STEMS, padding=PADDING)
def test_steps_lie_on_the_grid_of_positions_whatever_the_cuts(examples, share, stem, padding):
    layout = pack_of(examples, share, stem, padding)[0].layout
    assert steps_read(layout) == steps_by_hand(layout)
    steps = layout.steps.tolist()
    for entry, segment in enumerate(used(layout)):
        own = steps[segment.steps_start : segment.steps_start + -(-segment.first_position // GRID)]
        path = path_of(layout, entry)
        for i, step in enumerate(own):
            # A step is read row by row only where a cut lies within it: its rows are not one behind the other, or it
            # goes on with the segment's own.
            rows = path[GRID * i : GRID * (i + 1)]
            inside = GRID * (i + 1) > segment.first_position
            assert (step < 0) == (inside or rows[-1] - rows[0] != GRID - 1 or _cut_within(layout, entry, i))
            assert step >= 0 or -1 - step <= entry
        # Where it begins within a step, this is its own line; else its line is of no use, and says its first row.
        line = layout.seams[entry].tolist()
        if segment.first_position % GRID:
            assert own[-1] == -1 - entry
        else:
            assert set(line) == {segment.start}


def _cut_within(layout: ForkLayout, entry: int, step: int) -> bool:
    """Whether one of a segment's ancestors, or it itself, begins within a step, and not with it."""
    table = entries(layout)
    while entry != ROOT:
        if GRID * step < table[entry].first_position < GRID * (step + 1):
            return True
        entry = table[entry].parent
    return False


@settings(max_examples=100)
@given(examples=alike(), share=SHARE, stem=STEMS, padding=PADDING)
def test_each_counted_token_has_its_row_and_no_logit_is_computed_twice(examples, share, stem, padding):
    """The definition of the whole layout: what predicts a token sees exactly what comes before it and no more."""
    batch, _ = pack_of(examples, share, stem, padding)
    mask = visible(batch.layout)
    answers = [(example, n) for example in examples for n in range(len(example.answers))]
    wanted = [
        (place, sequences(example)[n][:at], sequences(example)[n][at])
        for place, (example, n) in enumerate(answers)
        for at in range(max(len(example.prompt_ids), 1), len(sequences(example)[n]))
        if example.answers[n].mask[at - len(example.prompt_ids)]
    ]
    places = batch.logit_row_of_counted.tolist()
    rows, targets = batch.logit_rows.tolist(), batch.targets.tolist()
    seen = {row: tuple(batch.input_ids[np.flatnonzero(mask[row])].tolist()) for row in {*rows}}
    got = [
        (answer, seen[rows[n]], targets[n]) for answer, n in zip(batch.answer_of_counted.tolist(), places, strict=True)
    ]
    assert got == wanted
    assert batch.answer_lengths == [sum(place == n for place, _, _ in wanted) for n in range(len(answers))]
    assert batch.answer_lengths == [example.answer_tokens(n) for example, n in answers]
    pairs = [*zip(rows, targets, strict=True)]
    assert len({*pairs}) == len(pairs)
    # In the order of the first counted token that needs each; none that nobody needs.
    assert [*dict.fromkeys(places)] == list(range(len(rows)))


@settings(max_examples=150)
@given(examples=alike(), share=SHARE, stem=STEMS)
def test_groups_share_logit_rows_with_no_other_and_are_as_small_as_can_be(examples, share, stem):
    batch, _ = pack_of(examples, share, stem, 0)
    needs: list[set[int]] = [set() for _ in batch.answer_lengths]
    for row, answer in zip(batch.logit_row_of_counted.tolist(), batch.answer_of_counted.tolist(), strict=True):
        needs[answer].add(row)
    ends = np.cumsum(batch.answers_per_example).tolist()
    clean = [end for end in ends if not set().union(*needs[:end]) & set().union(*needs[end:])]
    cuts = [0, *clean]
    assert batch.groups == [
        (after - before, len(set().union(*needs[before:after]))) for before, after in zip(cuts, clean, strict=False)
    ]
    first = 0
    for (answers, rows), before in zip(batch.groups, cuts, strict=False):
        assert set().union(*needs[before : before + answers]) == set(range(first, first + rows))
        first += rows
    assert first == len(batch.logit_rows)


@pytest.mark.parametrize("prompt", [0, 1, 31, 32, 33, 63, 64, 65, 100])
@pytest.mark.parametrize("longest", [1, 31, 32, 33])
def test_steps_of_a_prompt_by_hand(prompt, longest):
    """Answers of one token and of more behind one prompt: all steps but the last are rows."""
    layout = build_pack(random_examples([(prompt, (longest, 1))]), prompt + longest + 1, "prompt").layout
    answers = used(layout)[1 if prompt else 0 :]
    whole, rest = divmod(prompt, GRID)
    for answer in answers:
        own = layout.steps[answer.steps_start :][: whole + (rest > 0)].tolist()
        entry = used(layout).index(answer)
        assert own == [*range(0, GRID * whole, GRID), *([-1 - entry] if rest else [])]
        if rest:
            line = [*range(GRID * whole, prompt), *range(answer.start, answer.end)]
            assert layout.seams[entry].tolist() == (line + [answer.end - 1] * GRID)[:GRID]


def test_steps_over_several_cuts_by_hand():
    """One row after another, each a segment, until a step is full: it is the line of the last of them."""
    stem = list(range(30))
    examples = [example_of(row, [*stem, *range(50, 50 + row)], [90 + row], [80 + row]) for row in range(4)]
    layout = build_pack(examples, 30 + 3 + 8, "tree").layout
    table = used(layout)
    chain = [s for s in range(len(table)) if any(t.parent == s for t in table)]
    assert [(table[s].first_position, table[s].end - table[s].start) for s in chain] == [
        (0, 30),
        (30, 1),
        (31, 1),
        (32, 1),
    ]
    a, b, c, d = (table[s] for s in chain)
    rows = [*range(a.start, a.end), b.start, c.start, d.start]
    # The third goes to the end of the first step, and those behind it read its line.
    assert layout.seams[chain[2]].tolist() == rows[:32]
    assert layout.seams[chain[1]].tolist() == [*rows[:31], b.start]
    last = [s for s in range(len(table)) if table[s].parent == chain[3]]
    assert len(last) == 2
    for s in last:
        assert layout.steps[table[s].steps_start :][:2].tolist() == [-1 - chain[2], -1 - s]
        assert layout.seams[s].tolist() == [d.start, *[table[s].start] * 31]
    assert layout.steps[d.steps_start].item() == -1 - chain[2]


def hand_made(prompt: list[int], *answers: tuple[list[int], list[bool]]) -> TokenExample:
    token_answers = tuple(TokenAnswer(np.array(ids, dtype=np.int32), np.array(mask)) for ids, mask in answers)
    return TokenExample(Source("hand", 1), np.array(prompt, dtype=np.int32), token_answers)


PAIR = hand_made([10, 11], ([20, 21, 22], [True, False, True]), ([30, 31], [True, True]))
DOCUMENT = hand_made([], ([40, 41, 42], [True, True, True]))
ONE_TOKEN = hand_made([50], ([60], [True]), ([70], [True]), ([80], [True]))


def test_the_pack_that_is_drawn_where_layouts_are_defined():
    p, a, b, c = [1, 2, 3], [4, 5], [6, 7], [8, 9]
    examples = [example_of(1, p, a, b), example_of(2, [*p, *b], c)]
    batch = lay(examples, grow(examples, "tree", smallest_stem=1).of([0, 1]), 9)
    assert batch.input_ids.tolist() == [*p, *a, *b, *c]
    assert batch.layout.position_of_row.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    table = [tuple(segment[:5]) for segment in used(batch.layout)]
    assert table == [(0, 3, ROOT, 0, 9), (3, 5, 0, 3, 5), (5, 7, 0, 3, 9), (7, 9, 2, 5, 9)]
    # Each answer's ancestors lie in one step, which goes on with its own rows: a line each.
    assert [segment.steps_start for segment in used(batch.layout)] == [0, 0, 1, 2]
    assert batch.layout.steps[:3].tolist() == [-2, -3, -4]
    assert batch.layout.seams[1:4].tolist() == [
        [0, 1, 2, 3, *[4] * 28],
        [0, 1, 2, 5, *[6] * 28],
        [0, 1, 2, 5, 6, 7, *[8] * 26],
    ]
    # A and B both follow row 2. B is no answer of the second example, whose C follows it.
    assert batch.logit_rows.tolist() == [2, 3, 2, 5, 6, 7]
    assert batch.targets.tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.logit_row_of_counted.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.answer_of_counted.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.groups == [(2, 4), (1, 2)]
    apart = build_pack([example_of(1, p, a, b, [*b, *c])], 3 * 3 + 2 + 2 + 4, "none").layout
    assert [segment.parent for segment in used(apart)] == [ROOT] * 3


def table_of(batch: PackedBatch) -> list[tuple[int, int, int, int, int]]:
    """Start, end, parent, first position and end of the subtree of the entries in use."""
    return [tuple(segment[:5]) for segment in used(batch.layout)]


def test_a_pack_of_forks_written_out_by_hand():
    batch = build_pack([PAIR, DOCUMENT, ONE_TOKEN], 18, share="prompt")
    #                                  10  11| 20  21  22| 30  31| 40  41  42| 50| 60| 70| 80| padding
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 30, 31, 40, 41, 42, 50, 60, 70, 80, 0, 0, 0, 0]
    assert batch.layout.position_of_row.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 1, 1, 1, 0, 1, 2, 3]
    assert table_of(batch) == [
        (0, 2, ROOT, 0, 7),  # the pair's prompt, seen to the end of its second answer
        (2, 5, 0, 2, 5),
        (5, 7, 0, 2, 7),
        (7, 10, ROOT, 0, 10),  # the document
        (10, 11, ROOT, 0, 14),  # one token, seen by three answers of one token
        (11, 12, 4, 1, 12),
        (12, 13, 4, 1, 13),
        (13, 14, 4, 1, 14),
        (14, 18, ROOT, 0, 18),  # padding
    ]
    # 20 and 30 are both predicted by row 1, the last of the prompt; the masked 21 and the document's 40 by none.
    assert batch.logit_rows.tolist() == [1, 3, 1, 5, 7, 8, 10, 10, 10]
    assert batch.targets.tolist() == [20, 22, 30, 31, 41, 42, 60, 70, 80]
    assert batch.answer_of_counted.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    assert batch.logit_row_of_counted.tolist() == list(range(9))
    assert batch.answer_lengths == [2, 2, 2, 1, 1, 1]
    assert batch.groups == [(2, 4), (1, 2), (3, 3)]
    assert batch.used_slots == 14


def test_a_pack_without_sharing_written_out_by_hand():
    batch = build_pack([PAIR, DOCUMENT], 15, share="none")
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 10, 11, 30, 31, 40, 41, 42, 0, 0, 0]
    assert batch.layout.position_of_row.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert table_of(batch) == [(0, 5, ROOT, 0, 5), (5, 9, ROOT, 0, 9), (9, 12, ROOT, 0, 12), (12, 15, ROOT, 0, 15)]
    assert not batch.layout.steps.any()
    assert batch.logit_rows.tolist() == [1, 3, 6, 7, 9, 10]
    assert batch.targets.tolist() == [20, 22, 30, 31, 41, 42]
    assert batch.answer_of_counted.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.used_slots == 12


def test_logit_rows_that_answers_share_by_hand():
    """Two pairs of one prompt with the same chosen answer, and one of another prompt."""
    prompt = list(range(40))
    chosen, others = [50, 51], ([60], [61])
    pairs = [example_of(row, prompt, chosen, other) for row, other in enumerate(others)]
    batch = build_pack([*pairs, PAIR], 40 + 2 + 1 + 1 + 7, share="tree")
    # The stem and each answer; then the other prompt, whose answers have no row in common with these.
    assert table_of(batch) == [
        *((0, 40, ROOT, 0, 44), (40, 42, 0, 40, 42), (42, 43, 0, 40, 43), (43, 44, 0, 40, 44)),
        *((44, 46, ROOT, 0, 51), (46, 49, 4, 2, 49), (49, 51, 4, 2, 51)),
    ]
    assert batch.logit_rows.tolist() == [39, 40, 39, 39, 45, 47, 45, 49]
    assert batch.targets.tolist() == [50, 51, 60, 61, 20, 22, 30, 31]
    assert batch.logit_row_of_counted.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7]
    assert batch.answer_of_counted.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert batch.groups == [(4, 4), (2, 4)]


def test_a_pack_may_be_filled_to_the_last_row():
    batch = build_pack([PAIR], 7, share="prompt")
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 30, 31]
    assert table_of(batch) == [(0, 2, ROOT, 0, 7), (2, 5, 0, 2, 5), (5, 7, 0, 2, 7)]
    assert batch.used_slots == 7


@pytest.mark.parametrize("share", SHARES)
def test_forked_answers_of_an_empty_prompt_stand_alone(share):
    pair = hand_made([], ([20, 21], [True, True]), ([30], [True]))
    batch = build_pack([pair], 6, share)
    assert batch.layout.position_of_row.tolist() == [0, 1, 0, 0, 1, 0]
    padding = [(3, 5, ROOT, 0, 5), (5, 6, ROOT, 0, 6)]  # no longer than the longer answer
    assert table_of(batch) == [(0, 2, ROOT, 0, 2), (2, 3, ROOT, 0, 3), *padding]
    assert batch.logit_rows.tolist() == [0]  # 21 after 20; the first token of neither answer has a predictor
    assert batch.targets.tolist() == [21]
    assert batch.answer_lengths == [1, 0]
    assert batch.groups == [(2, 1)]


def test_an_empty_prompt_does_not_take_its_neighbours():
    """What was the prompt of the example before, and how far it is seen, ends with that example."""
    batch = build_pack([PAIR, hand_made([], ([40], [True]), ([41], [True])), PAIR], 16, share="prompt")
    assert table_of(batch) == [
        *((0, 2, ROOT, 0, 7), (2, 5, 0, 2, 5), (5, 7, 0, 2, 7)),
        *((7, 8, ROOT, 0, 8), (8, 9, ROOT, 0, 9)),
        *((9, 11, ROOT, 0, 16), (11, 14, 5, 2, 14), (14, 16, 5, 2, 16)),
    ]
    assert batch.groups == [(2, 4), (2, 0), (2, 4)]


def test_masks_at_the_ends_of_an_answer():
    example = hand_made([10], ([20, 21, 22], [False, True, False]), ([30, 31], [False, False]))
    batch = build_pack([example], 8, share="prompt")
    assert batch.logit_rows.tolist() == [1]
    assert batch.targets.tolist() == [21]
    assert batch.answer_of_counted.tolist() == [0]
    assert batch.answer_lengths == [1, 0]


def test_a_pack_of_nothing_is_padding():
    batch = build_pack([], 3, "tree")
    assert table_of(batch) == [(0, 3, ROOT, 0, 3)]
    assert (batch.used_slots, batch.groups, batch.answer_lengths) == (0, [], [])


@pytest.mark.parametrize(("documents", "padding", "entries"), [(31, 0, 32), (31, 1, 32), (32, 0, 32), (32, 1, 64)])
def test_the_table_of_segments_has_a_multiple_of_32_entries(documents, padding, entries):
    batch = build_pack(random_examples([(0, (2,))] * documents), 2 * documents + padding, share="prompt")
    assert batch.layout.segments.shape == (entries, 6)
    assert batch.layout.seams.shape == (entries, GRID)


@pytest.mark.parametrize(("answers", "entries"), [(255, 256), (256, 256), (257, 512)])
def test_the_table_of_steps_has_a_multiple_of_256_entries(answers, entries):
    batch = build_pack(random_examples([(GRID, (1,) * answers)]), GRID + answers, share="prompt")
    assert batch.layout.steps.shape == (entries,)


def test_layout_dtypes_are_what_kernels_take():
    batch = build_pack([PAIR], 18, share="prompt")
    layout = batch.layout
    assert [item.name for item in fields(ForkLayout)] == ["segments", "position_of_row", "steps", "seams"]
    int64 = [batch.input_ids, batch.logit_rows, batch.targets, batch.logit_row_of_counted, batch.answer_of_counted]
    assert {t.dtype for t in [*int64, layout.position_of_row]} == {torch.int64}
    for table in (layout.segments, layout.steps, layout.seams):  # kernels read entry s at 6·s, line s at GRID·s
        assert table.dtype == torch.int32 and table.is_contiguous()


@pytest.mark.parametrize("share", SHARES)
def test_to_a_device_keeps_every_field(share):
    batch = build_pack([PAIR, DOCUMENT], 20, share)
    moved = batch.to(torch.device("cpu"))

    def parts(record):
        for item in fields(record):
            value = getattr(record, item.name)
            yield from parts(value) if isinstance(value, ForkLayout) else [(item.name, value)]

    for (name, ours), (_, theirs) in zip(parts(batch), parts(moved), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, name
