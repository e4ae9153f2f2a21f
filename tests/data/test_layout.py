"""The gate of the tensors: `build` against a slow construction that anyone can check by eye."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import random_examples
from tuningfork.data.layout import build
from tuningfork.data.pack import Rung, pack, plan_limits, split_fitting
from tuningfork.records import ForkLayout, PackedBatch, Source, TokenAnswer, TokenExample

SHAPE = st.tuples(st.integers(0, 20), st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple))
SHAPES = st.lists(SHAPE, min_size=1, max_size=8)


@dataclass
class Obvious:
    """The layout as lists, one element a row, filled by loops that follow records.ForkLayout's words."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    example: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    segments: list[tuple[list[int], list[int]]] = field(default_factory=list)  # (query rows, key rows)
    logit_rows: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    answer_of_logit_row: list[int] = field(default_factory=list)

    def row(self, token: int, position: int, example: int, answer: int) -> int:
        self.ids.append(token)
        self.positions.append(position)
        self.example.append(example)
        self.answer.append(answer)
        return len(self.ids) - 1


def obvious(examples: list[TokenExample], share_prompt: bool) -> Obvious:
    """The content of a pack, padding left out."""
    out = Obvious()
    answers = 0
    group = 0
    for example in examples:
        p = len(example.prompt_ids)
        prompt_rows: list[int] = []
        for i, answer in enumerate(example.answers):
            lays_prompt = i == 0 or not share_prompt
            if lays_prompt:
                group += 1
                prompt_rows = [out.row(int(t), j, group, -1) for j, t in enumerate(example.prompt_ids)]
            rows = [out.row(int(t), p + j, group, i) for j, t in enumerate(answer.ids)]
            out.segments.append(((prompt_rows if lays_prompt else []) + rows, prompt_rows + rows))
            for j, row in enumerate(rows):
                before = rows[j - 1] if j > 0 else (prompt_rows[-1] if prompt_rows else None)
                if answer.mask[j] and before is not None:
                    out.logit_rows.append(before)
                    out.targets.append(out.ids[row])
                    out.answer_of_logit_row.append(answers)
            answers += 1
    return out


def segments_of(layout: ForkLayout) -> list[tuple[list[int], list[int]]]:
    """(query rows, key rows) of each segment, as an attention kernel reads them."""
    q, k = layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    rows = list(range(q[-1])) if layout.kv_index is None else layout.kv_index.tolist()
    return [(list(range(q[i], q[i + 1])), rows[k[i] : k[i + 1]]) for i in range(len(q) - 1)]


def visible(segments: list[tuple[list[int], list[int]]], rows: int) -> np.ndarray:
    """bool [T, T]: which row sees which, causal and aligned to the bottom right of each segment."""
    mask = np.zeros((rows, rows), dtype=bool)
    for queries, keys in segments:
        for i, query in enumerate(queries):
            mask[query, keys[: len(keys) - len(queries) + i + 1]] = True
    return mask


def packs_of(shapes, tokens: int, share: bool, seed: int = 0) -> list[tuple[Rung, PackedBatch, list[TokenExample]]]:
    examples, _ = split_fitting(random_examples(shapes, seed, holes=True), tokens, share)
    if not examples:
        return []
    limits = plan_limits(examples, tokens, share, compiled=False)
    return [(rung, build(members, rung, share), members) for rung, members in pack(examples, limits)]


@settings(max_examples=120, deadline=None)
@given(shapes=SHAPES, tokens=st.sampled_from([64, 100, 256]), share=st.booleans())
def test_content_equals_the_obvious_construction(shapes, tokens, share):
    for _, batch, members in packs_of(shapes, tokens, share):
        expected = obvious(members, share)
        n = len(expected.ids)
        assert batch.unique_rows == n
        assert batch.input_ids[:n].tolist() == expected.ids
        assert batch.layout.position_of_row[:n].tolist() == expected.positions
        assert batch.layout.example_of_row[:n].tolist() == expected.example
        assert batch.layout.answer_of_row[:n].tolist() == expected.answer
        assert batch.logit_rows.tolist() == expected.logit_rows
        assert batch.targets.tolist() == expected.targets
        assert batch.answer_of_logit_row.tolist() == expected.answer_of_logit_row
        assert segments_of(batch.layout)[: len(expected.segments)] == expected.segments
        assert batch.answers_per_example == [len(e.answers) for e in members]
        counts = np.bincount(expected.answer_of_logit_row, minlength=sum(batch.answers_per_example))
        assert batch.answer_lengths == counts.tolist()


@settings(max_examples=120, deadline=None)
@given(shapes=SHAPES, tokens=st.sampled_from([64, 100, 256]), share=st.booleans())
def test_every_row_and_every_key_lies_in_one_segment_and_shapes_are_the_rungs(shapes, tokens, share):
    for rung, batch, members in packs_of(shapes, tokens, share):
        layout, n = batch.layout, batch.unique_rows
        forked = share and any(len(e.answers) > 1 for e in members)
        q, k = layout.cu_seqlens_q, layout.cu_seqlens_k
        # Static sizes: exactly what the rung says.
        assert len(batch.input_ids) == rung.tokens
        assert len(q) == len(k) == rung.segments + 1
        assert (layout.kv_index is not None) == forked
        keys = rung.keys if forked else rung.tokens
        assert layout.kv_index is None or len(layout.kv_index) == keys
        for row_facts in (layout.example_of_row, layout.answer_of_row, layout.position_of_row):
            assert len(row_facts) == rung.tokens
        # Borders rise from 0 to the very end, so each row and each key is in exactly one segment.
        for borders, end in ((q, rung.tokens), (k, keys)):
            assert borders[0] == 0 and borders[-1] == end and (borders.diff() >= 0).all()
        assert max(int(q.diff().max()), int(k.diff().max())) <= layout.max_seqlen == rung.max_seqlen
        # A query never has fewer keys than rows: it would have a row that sees nothing.
        lengths_q, lengths_k = q.diff(), k.diff()
        assert (lengths_k >= lengths_q).all()
        # Every row is gathered as its own key; the spare keys gather padding, never row 0.
        segments = segments_of(layout)
        for queries, seen in segments:
            assert not queries or seen[len(seen) - len(queries) :] == queries
        assert rung.tokens - n >= 1
        content_keys = sum(len(keys) for _, keys in obvious(members, share).segments)
        tail = [row for _, seen in segments for row in seen][content_keys:]
        assert all(n <= row < rung.tokens for row in tail)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, tokens=st.sampled_from([64, 256]), share=st.booleans())
def test_segments_and_row_facts_describe_the_same_attention(shapes, tokens, share):
    """Varlen kernels read segments, FlexAttention reads example, answer and position of each row: one truth."""
    for rung, batch, _ in packs_of(shapes, tokens, share):
        layout = batch.layout
        from_segments = visible(segments_of(layout), rung.tokens)
        example, answer = layout.example_of_row.numpy(), layout.answer_of_row.numpy()
        earlier = np.arange(rung.tokens)[:, None] >= np.arange(rung.tokens)[None, :]
        same = example[:, None] == example[None, :]
        forked_from = (answer[None, :] == -1) | (answer[None, :] == answer[:, None])
        assert (from_segments == (earlier & same & forked_from)).all()
        # A window counts positions: along what a row of the content sees, they are 0, 1, 2, .. without a gap.
        for row in range(batch.unique_rows):
            seen = layout.position_of_row[torch.from_numpy(from_segments[row])]
            assert seen.tolist() == list(range(len(seen)))


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, share=st.booleans())
def test_each_logit_row_has_seen_exactly_what_comes_before_its_target(shapes, share):
    """The definition of the whole layout: what predicts token j of an answer sees prompt + answer[:j] and no more."""
    for rung, batch, members in packs_of(shapes, 256, share):
        mask = visible(segments_of(batch.layout), rung.tokens)
        wanted = [
            (place, [*e.prompt_ids.tolist(), *a.ids[:j].tolist()], int(a.ids[j]))
            for place, (e, a) in enumerate((e, a) for e in members for a in e.answers)
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


def hand_made(prompt: list[int], *answers: tuple[list[int], list[bool]]) -> TokenExample:
    token_answers = tuple(TokenAnswer(np.array(ids, dtype=np.int32), np.array(mask)) for ids, mask in answers)
    return TokenExample(Source("hand", 1), np.array(prompt, dtype=np.int32), token_answers)


PAIR = hand_made([10, 11], ([20, 21, 22], [True, False, True]), ([30, 31], [True, True]))
DOCUMENT = hand_made([], ([40, 41, 42], [True, True, True]))
ONE_TOKEN = hand_made([50], ([60], [True]), ([70], [True]), ([80], [True]))


def test_a_shared_pack_written_out_by_hand():
    batch = build([PAIR, DOCUMENT, ONE_TOKEN], Rung(tokens=18, segments=12, keys=25, max_seqlen=5), share_prompt=True)
    layout = batch.layout
    #                                  10  11  20  21  22  30  31| 40  41  42| 50  60  70  80|  padding
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 30, 31, 40, 41, 42, 50, 60, 70, 80, 0, 0, 0, 0]
    assert layout.position_of_row.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 1, 1, 1, 0, 1, 2, 3]
    assert layout.example_of_row.tolist() == [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1, -1, -1]
    assert layout.answer_of_row.tolist() == [-1, -1, 0, 0, 0, 1, 1, 0, 0, 0, -1, 0, 1, 2, -1, -1, -1, -1]
    #              segments:      [P A0] [A1] [doc] [P A0] [A1] [A2] [pad] [spare] unused
    assert layout.cu_seqlens_q.tolist() == [0, 5, 7, 10, 12, 13, 14, 18, 18, 18, 18, 18, 18]
    assert layout.cu_seqlens_k.tolist() == [0, 5, 9, 12, 14, 16, 18, 22, 25, 25, 25, 25, 25]
    assert layout.kv_index is not None
    assert layout.kv_index.tolist() == [
        *(0, 1, 2, 3, 4), *(0, 1, 5, 6), *(7, 8, 9), *(10, 11), *(10, 12), *(10, 13), *(14, 15, 16, 17), *(14, 14, 14)
    ]  # fmt: skip
    # 20 and 30 are both predicted by row 1, the last of the prompt; the masked 21 and the document's 40 by none.
    assert batch.logit_rows.tolist() == [1, 3, 1, 5, 7, 8, 10, 10, 10]
    assert batch.targets.tolist() == [20, 22, 30, 31, 41, 42, 60, 70, 80]
    assert batch.answer_of_logit_row.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    assert batch.answer_lengths == [2, 2, 2, 1, 1, 1]
    assert batch.unique_rows == 14


def test_an_unshared_pack_written_out_by_hand():
    batch = build([PAIR, DOCUMENT], Rung(tokens=20, segments=9, keys=64, max_seqlen=5), share_prompt=False)
    layout = batch.layout
    assert batch.input_ids.tolist() == [10, 11, 20, 21, 22, 10, 11, 30, 31, 40, 41, 42, 0, 0, 0, 0, 0, 0, 0, 0]
    assert layout.position_of_row.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]
    # Each sequence is a group of its own: the second copy of the prompt must not see the first.
    assert layout.example_of_row.tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, -1, -1, -1, -1, -1, -2, -2, -2]
    assert layout.answer_of_row.tolist() == [-1, -1, 0, 0, 0, -1, -1, 1, 1, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1]
    assert layout.cu_seqlens_q.tolist() == [0, 5, 9, 12, 17, 20, 20, 20, 20, 20]
    assert torch.equal(layout.cu_seqlens_k, layout.cu_seqlens_q)
    assert layout.kv_index is None
    assert batch.logit_rows.tolist() == [1, 3, 6, 7, 9, 10]
    assert batch.targets.tolist() == [20, 22, 30, 31, 41, 42]
    assert batch.answer_of_logit_row.tolist() == [0, 0, 1, 1, 2, 2]


def test_forked_answers_of_an_empty_prompt_stand_alone():
    pair = hand_made([], ([20, 21], [True, True]), ([30], [True]))
    batch = build([pair], Rung(tokens=6, segments=5, keys=8, max_seqlen=3), share_prompt=True)
    assert batch.layout.position_of_row.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.layout.cu_seqlens_q.tolist() == [0, 2, 3, 6, 6, 6]
    assert batch.layout.cu_seqlens_k.tolist() == [0, 2, 3, 6, 8, 8]
    assert batch.layout.kv_index is not None
    assert batch.layout.kv_index.tolist() == [0, 1, 2, 3, 4, 5, 3, 3]
    assert batch.logit_rows.tolist() == [0]  # 21 after 20; the first token of neither answer has a predictor
    assert batch.targets.tolist() == [21]
    assert batch.answer_lengths == [1, 0]


def test_masks_at_the_ends_of_an_answer():
    example = hand_made([10], ([20, 21, 22], [False, True, False]), ([30, 31], [False, False]))
    batch = build([example], Rung(tokens=8, segments=5, keys=9, max_seqlen=4), share_prompt=True)
    assert batch.logit_rows.tolist() == [1]
    assert batch.targets.tolist() == [21]
    assert batch.answer_of_logit_row.tolist() == [0]
    assert batch.answer_lengths == [1, 0]


def test_layout_dtypes_are_what_kernels_take():
    batch = build([PAIR], Rung(tokens=18, segments=12, keys=25, max_seqlen=5), share_prompt=True)
    layout = batch.layout
    assert layout.kv_index is not None
    int64 = (batch.input_ids, batch.logit_rows, batch.targets, batch.answer_of_logit_row, layout.kv_index)
    assert {t.dtype for t in (*int64, layout.position_of_row)} == {torch.int64}
    borders = (layout.cu_seqlens_q, layout.cu_seqlens_k, layout.example_of_row, layout.answer_of_row)
    assert {t.dtype for t in borders} == {torch.int32}
    assert type(layout.max_seqlen) is int  # a tensor here would stop the host at every layer


@pytest.mark.parametrize("share", [True, False])
def test_to_a_device_keeps_every_field(share):
    batch = build([PAIR, DOCUMENT], Rung(tokens=20, segments=20, keys=64, max_seqlen=5), share)
    moved = batch.to(torch.device("cpu"))

    def parts(record):
        for item in fields(record):
            value = getattr(record, item.name)
            yield from parts(value) if isinstance(value, ForkLayout) else [(item.name, value)]

    for (name, ours), (_, theirs) in zip(parts(batch), parts(moved), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, name
