"""The gate of the tensors: `build` against a slow construction that anyone can check by eye."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import random_examples
from tuningfork.data.packing.layout import build_pack
from tuningfork.data.packing.tree import Share
from tuningfork.records import ROOT, ForkLayout, PackedBatch, Segment, Source, TokenAnswer, TokenExample

SHAPE = st.tuples(st.integers(0, 20), st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple))
SHAPES = st.lists(SHAPE, min_size=1, max_size=12)
PADDING = st.integers(0, 3) | st.integers(4, 70)


@dataclass
class Obvious:
    """The layout as lists, one element a row, filled by loops that follow records.ForkLayout's words."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequence: list[list[int]] = field(default_factory=list)  # of each row: its own sequence up to itself
    segments: list[tuple[list[int], list[int]]] = field(default_factory=list)  # (own rows, rows of its ancestors)
    logit_rows: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    answer_of_logit_row: list[int] = field(default_factory=list)

    def segment(self, ids: list[int], prompt: list[int]) -> list[int]:
        """Lay a segment behind what is there; returns its rows."""
        rows: list[int] = []
        for token in ids:
            rows.append(len(self.ids))
            self.ids.append(token)
            self.sequence.append([*prompt, *rows])
            self.positions.append(len(self.sequence[-1]) - 1)
        if rows:
            self.segments.append((rows, prompt))
        return rows


def obvious(examples: list[TokenExample], share: Share) -> Obvious:
    """The content of a pack, padding left out."""
    out = Obvious()
    answers = 0
    for example in examples:
        prompt: list[int] = []
        for i, answer in enumerate(example.answers):
            if i == 0 or not share:
                prompt = out.segment(example.prompt_ids.tolist(), [])
            for j, row in enumerate(out.segment(answer.ids.tolist(), prompt)):
                before = out.sequence[row][:-1]
                if answer.mask[j] and before:
                    out.logit_rows.append(before[-1])
                    out.targets.append(int(answer.ids[j]))
                    out.answer_of_logit_row.append(answers)
            answers += 1
    return out


def segments_of(layout: ForkLayout) -> list[tuple[list[int], list[int]]]:
    """(own rows, rows of the ancestors) of each entry in use, as an attention kernel reads them."""
    return [
        (list(range(s.start, s.end)), list(range(s.ancestors_start, s.ancestors_end)))
        for s in entries(layout)
        if s.start != s.end
    ]


def entries(layout: ForkLayout) -> list[Segment]:
    return [Segment(*entry) for entry in layout.segments.tolist()]


def visible(layout: ForkLayout) -> np.ndarray:
    """bool [T, T]: which row sees which, by segments' own rows and their ancestors' alone."""
    mask = np.zeros((len(layout.position_of_row),) * 2, dtype=bool)
    for rows, ancestors in segments_of(layout):
        for i, row in enumerate(rows):
            mask[row, ancestors] = True
            mask[row, rows[: i + 1]] = True
    return mask


def pack_of(shapes, padding: int, share: bool) -> tuple[PackedBatch, list[TokenExample], Obvious]:
    examples = random_examples(shapes, holes=True)
    expected = obvious(examples, share)
    return build_pack(examples, len(expected.ids) + padding, share), examples, expected


@settings(max_examples=120, deadline=None)
@given(shapes=SHAPES, padding=PADDING, share=st.booleans())
def test_content_equals_the_obvious_construction(shapes, padding, share):
    batch, examples, expected = pack_of(shapes, padding, share)
    n = len(expected.ids)
    assert batch.used_slots == n
    assert len(batch.input_ids) == len(batch.layout.position_of_row) == n + padding
    assert batch.input_ids[:n].tolist() == expected.ids
    assert batch.layout.position_of_row[:n].tolist() == expected.positions
    assert batch.logit_rows.tolist() == expected.logit_rows
    assert batch.targets.tolist() == expected.targets
    assert batch.answer_of_logit_row.tolist() == expected.answer_of_logit_row
    assert segments_of(batch.layout)[: len(expected.segments)] == expected.segments
    assert batch.examples == tuple(examples)
    assert batch.answers_per_example == [len(e.answers) for e in examples]
    counts = np.bincount(expected.answer_of_logit_row, minlength=sum(batch.answers_per_example))
    assert batch.answer_lengths == counts.tolist()
    # Padding: plain sequences of somebody's token, none of them longer than the longest of the examples.
    longest = max(expected.positions) + 1
    starts = range(n, n + padding, longest)
    padded = [list(range(start, min(start + longest, n + padding))) for start in starts]
    assert segments_of(batch.layout)[len(expected.segments) :] == [(rows, []) for rows in padded]
    assert set(batch.input_ids[n:].tolist()) <= {0}
    assert batch.layout.position_of_row[n:].tolist() == [i for rows in padded for i in range(len(rows))]


@settings(max_examples=120, deadline=None)
@given(shapes=SHAPES, padding=PADDING, share=st.booleans())
def test_segments_tile_the_rows_and_the_table_has_few_lengths(shapes, padding, share):
    batch, _, expected = pack_of(shapes, padding, share)
    table = batch.layout.segments
    used = table[table[:, 0] < table[:, 1]]
    # In order, without a gap: each row, padding too, lies in exactly one segment.
    assert [row for rows, _ in segments_of(batch.layout) for row in rows] == list(range(len(batch.input_ids)))
    # Entries in use come first; behind them only as many empty ones as round their number up.
    count = len(expected.segments) + -(-padding // (max(expected.positions) + 1))
    assert torch.equal(table[:count], used)
    assert len(table) % 32 == 0 and 0 <= len(table) - count < 32
    # An empty entry reads and writes nothing, whatever it is taken for.
    for empty in (Segment(*entry) for entry in table[count:].tolist()):
        assert empty.start == empty.end == empty.subtree_end and empty.parent == ROOT
        assert empty.ancestors_start == empty.ancestors_end


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, padding=PADDING, share=st.booleans())
def test_entries_form_trees_that_lie_depth_first(shapes, padding, share):
    batch, examples, _ = pack_of(shapes, padding, share)
    table = entries(batch.layout)
    for place, segment in enumerate(table):
        if segment.parent == ROOT:
            assert segment.ancestors_start == segment.ancestors_end <= segment.start
            continue
        # A parent comes before its children, is a whole segment, and all of a child's subtree lies within the parent's.
        parent = table[segment.parent]
        assert 0 <= segment.parent < place and parent.parent == ROOT
        assert (segment.ancestors_start, segment.ancestors_end) == (parent.start, parent.end)
        assert parent.end <= segment.start <= segment.subtree_end <= parent.subtree_end
    # They are the segments that the examples themselves speak of, and after which costs are counted.
    trees = examples if share else [alone for example in examples for alone in example.alone()]
    expected = [sizes for example in trees for sizes in example.segments]
    found = [(s.ancestors_end - s.ancestors_start, s.end - s.start) for s in table[: len(expected)]]
    assert found == expected
    assert all(segment.parent == ROOT for segment in table[len(expected) :])


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, padding=PADDING, share=st.booleans())
def test_a_row_sees_its_own_sequence_up_to_itself(shapes, padding, share):
    batch, _, expected = pack_of(shapes, padding, share)
    mask = visible(batch.layout)
    n = batch.used_slots
    assert [np.flatnonzero(mask[row]).tolist() for row in range(n)] == expected.sequence
    assert not mask[n:, :n].any() and not mask[:n, n:].any()
    # A window counts positions: along what a row sees, they are 0, 1, 2, .. without a gap.
    for seen in mask:
        positions = batch.layout.position_of_row[torch.from_numpy(seen)]
        assert positions.tolist() == list(range(len(positions)))


@settings(max_examples=120, deadline=None)
@given(shapes=SHAPES, padding=PADDING, share=st.booleans())
def test_a_subtree_ends_right_where_its_root_is_seen_no_more(shapes, padding, share):
    """A kernel takes the gradient of a segment's keys from all rows between: each must see them, none may lack."""
    batch, _, _ = pack_of(shapes, padding, share)
    mask = visible(batch.layout)
    for segment in entries(batch.layout):
        start, end = segment.start, segment.end
        if start < end:
            seers = np.flatnonzero(mask[:, start:end].any(axis=1))
            assert segment.subtree_end == seers[-1] + 1
            assert seers.tolist() == list(range(start, segment.subtree_end))
            assert mask[end : segment.subtree_end, start:end].all()


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, padding=PADDING, share=st.booleans())
def test_each_logit_row_has_seen_exactly_what_comes_before_its_target(shapes, padding, share):
    """The definition of the whole layout: what predicts token j of an answer sees prompt + answer[:j] and no more."""
    batch, examples, _ = pack_of(shapes, padding, share)
    mask = visible(batch.layout)
    wanted = [
        (place, [*e.prompt_ids.tolist(), *a.ids[:j].tolist()], int(a.ids[j]))
        for place, (e, a) in enumerate((e, a) for e in examples for a in e.answers)
        for j in range(len(a.ids))
        if a.mask[j] and len(e.prompt_ids) + j > 0
    ]
    got = [
        (place, batch.input_ids[torch.from_numpy(mask[row])].tolist(), target)
        for place, row, target in zip(
            batch.answer_of_logit_row.tolist(), batch.logit_rows.tolist(), batch.targets.tolist(), strict=True
        )
    ]
    assert got == wanted


@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, padding=PADDING)
def test_sharing_changes_nothing_where_nothing_can_be_shared(shapes, padding):
    """One answer, or no prompt: both ways of laying it are the same pack."""
    for alike in ([(p, answers[:1]) for p, answers in shapes], [(0, answers) for _, answers in shapes]):
        shared, unshared = pack_of(alike, padding, True)[0], pack_of(alike, padding, False)[0]
        assert [v.tolist() for v in tensors(shared)] == [v.tolist() for v in tensors(unshared)]


def tensors(record) -> list[torch.Tensor]:
    values = [getattr(record, item.name) for item in fields(record)]
    own = [v for v in values if isinstance(v, torch.Tensor)]
    return own + [t for v in values if isinstance(v, ForkLayout) for t in tensors(v)]


def hand_made(prompt: list[int], *answers: tuple[list[int], list[bool]]) -> TokenExample:
    token_answers = tuple(TokenAnswer(np.array(ids, dtype=np.int32), np.array(mask)) for ids, mask in answers)
    return TokenExample(Source("hand", 1), np.array(prompt, dtype=np.int32), token_answers)


def used_and_rest(layout: ForkLayout) -> tuple[list[list[int]], list[list[int]]]:
    """The entries in use, and those behind them. An empty run may lie anywhere: here it is where its segment is."""
    table = layout.segments.tolist()
    used = [[a, b, up, *((c, d) if c < d else (a, a)), e] for a, b, up, c, d, e in table if a < b]
    return used, table[len(used) :]


def unused(rows: int, entries: int) -> list[list[int]]:
    return [[rows, rows, ROOT, rows, rows, rows]] * entries


PAIR = hand_made([10, 11], ([20, 21, 22], [True, False, True]), ([30, 31], [True, True]))
DOCUMENT = hand_made([], ([40, 41, 42], [True, True, True]))
ONE_TOKEN = hand_made([50], ([60], [True]), ([70], [True]), ([80], [True]))


def test_the_pack_that_is_drawn_where_layouts_are_defined():
    example = hand_made([1, 2, 3], ([4, 5], [True] * 2), ([6, 7, 8, 9], [True] * 4))
    assert example.segments == [(0, 3), (3, 2), (3, 4)]
    shared, unshared = (
        build_pack([example], 9, share="prompt").layout,
        build_pack([example], 12, share="none").layout,
    )
    assert shared.position_of_row.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert entries(shared)[:3] == [(0, 3, ROOT, 0, 0, 9), (3, 5, 0, 0, 3, 5), (5, 9, 0, 0, 3, 9)]
    assert [entry.parent for entry in entries(unshared)[:4]] == [ROOT, 0, ROOT, 2]


def test_a_shared_pack_written_out_by_hand():
    batch = build_pack([PAIR, DOCUMENT, ONE_TOKEN], 18, share="prompt")
    #                                  10  11| 20  21  22| 30  31| 40  41  42| 50| 60| 70| 80| padding
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 30, 31, 40, 41, 42, 50, 60, 70, 80, 0, 0, 0, 0]
    assert batch.layout.position_of_row.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 1, 1, 1, 0, 1, 2, 3]
    used, rest = used_and_rest(batch.layout)
    assert used == [
        [0, 2, ROOT, 0, 0, 7],  # the pair's prompt, seen to the end of its second answer
        [2, 5, 0, 0, 2, 5],
        [5, 7, 0, 0, 2, 7],
        [7, 10, ROOT, 7, 7, 10],  # the document
        [10, 11, ROOT, 10, 10, 14],  # one token, seen by three answers of one token
        [11, 12, 4, 10, 11, 12],
        [12, 13, 4, 10, 11, 13],
        [13, 14, 4, 10, 11, 14],
        [14, 18, ROOT, 14, 14, 18],  # padding
    ]
    assert rest == unused(18, 23)
    # 20 and 30 are both predicted by row 1, the last of the prompt; the masked 21 and the document's 40 by none.
    assert batch.logit_rows.tolist() == [1, 3, 1, 5, 7, 8, 10, 10, 10]
    assert batch.targets.tolist() == [20, 22, 30, 31, 41, 42, 60, 70, 80]
    assert batch.answer_of_logit_row.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    assert batch.answer_lengths == [2, 2, 2, 1, 1, 1]
    assert batch.used_slots == 14


def test_an_unshared_pack_written_out_by_hand():
    batch = build_pack([PAIR, DOCUMENT], 15, share="none")
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 10, 11, 30, 31, 40, 41, 42, 0, 0, 0]
    assert batch.layout.position_of_row.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    used, rest = used_and_rest(batch.layout)
    # Each answer has its own prompt; the second copy of it must not see the first.
    assert used == [
        [0, 2, ROOT, 0, 0, 5],
        [2, 5, 0, 0, 2, 5],
        [5, 7, ROOT, 5, 5, 9],
        [7, 9, 2, 5, 7, 9],
        [9, 12, ROOT, 9, 9, 12],
        [12, 15, ROOT, 12, 12, 15],
    ]
    assert rest == unused(15, 26)
    assert batch.logit_rows.tolist() == [1, 3, 6, 7, 9, 10]
    assert batch.targets.tolist() == [20, 22, 30, 31, 41, 42]
    assert batch.answer_of_logit_row.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.used_slots == 12


def test_a_pack_may_be_filled_to_the_last_row():
    batch = build_pack([PAIR], 7, share="prompt")
    used, rest = used_and_rest(batch.layout)
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 30, 31]
    assert used == [[0, 2, ROOT, 0, 0, 7], [2, 5, 0, 0, 2, 5], [5, 7, 0, 0, 2, 7]]
    assert rest == unused(7, 29)
    assert batch.used_slots == 7


@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_forked_answers_of_an_empty_prompt_stand_alone(share):
    pair = hand_made([], ([20, 21], [True, True]), ([30], [True]))
    batch = build_pack([pair], 6, share)
    assert batch.layout.position_of_row.tolist() == [0, 1, 0, 0, 1, 0]
    padding = [[3, 5, ROOT, 3, 3, 5], [5, 6, ROOT, 5, 5, 6]]  # no longer than the longer answer
    assert used_and_rest(batch.layout)[0] == [[0, 2, ROOT, 0, 0, 2], [2, 3, ROOT, 2, 2, 3], *padding]
    assert batch.logit_rows.tolist() == [0]  # 21 after 20; the first token of neither answer has a predictor
    assert batch.targets.tolist() == [21]
    assert batch.answer_lengths == [1, 0]


def test_an_empty_prompt_does_not_take_its_neighbours():
    """What was the prompt of the example before, and how far it is seen, ends with that example."""
    batch = build_pack([PAIR, hand_made([], ([40], [True]), ([41], [True])), PAIR], 16, share="prompt")
    assert used_and_rest(batch.layout)[0] == [
        *([0, 2, ROOT, 0, 0, 7], [2, 5, 0, 0, 2, 5], [5, 7, 0, 0, 2, 7]),
        *([7, 8, ROOT, 7, 7, 8], [8, 9, ROOT, 8, 8, 9]),
        *([9, 11, ROOT, 9, 9, 16], [11, 14, 5, 9, 11, 14], [14, 16, 5, 9, 11, 16]),
    ]


def test_masks_at_the_ends_of_an_answer():
    example = hand_made([10], ([20, 21, 22], [False, True, False]), ([30, 31], [False, False]))
    batch = build_pack([example], 8, share="prompt")
    assert batch.logit_rows.tolist() == [1]
    assert batch.targets.tolist() == [21]
    assert batch.answer_of_logit_row.tolist() == [0]
    assert batch.answer_lengths == [1, 0]


@pytest.mark.parametrize(("documents", "padding", "entries"), [(31, 0, 32), (31, 1, 32), (32, 0, 32), (32, 1, 64)])
def test_the_table_of_segments_has_a_multiple_of_32_entries(documents, padding, entries):
    batch = build_pack(random_examples([(0, (2,))] * documents), 2 * documents + padding, share="prompt")
    assert batch.layout.segments.shape == (entries, 6)


def test_layout_dtypes_are_what_kernels_take():
    batch = build_pack([PAIR], 18, share="prompt")
    layout = batch.layout
    assert [item.name for item in fields(ForkLayout)] == ["segments", "position_of_row"]
    int64 = (batch.input_ids, batch.logit_rows, batch.targets, batch.answer_of_logit_row, layout.position_of_row)
    assert {t.dtype for t in int64} == {torch.int64}
    assert layout.segments.dtype == torch.int32
    assert layout.segments.is_contiguous()  # kernels read entry s at 6·s


@pytest.mark.parametrize("share", [True, False])
def test_to_a_device_keeps_every_field(share):
    batch = build_pack([PAIR, DOCUMENT], 20, share)
    moved = batch.to(torch.device("cpu"))

    def parts(record):
        for item in fields(record):
            value = getattr(record, item.name)
            yield from parts(value) if isinstance(value, ForkLayout) else [(item.name, value)]

    for (name, ours), (_, theirs) in zip(parts(batch), parts(moved), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, name
