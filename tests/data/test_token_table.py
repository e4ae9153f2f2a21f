"""Flat columns of token examples: what goes in comes out, from memory and from files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tuningfork.data import token_table
from tuningfork.data.packing.pack import slots_of_each
from tuningfork.data.token_table import Subset, TokenTable, columns_of, joined_columns, mapped_columns, write_columns
from tuningfork.records import Source, TokenAnswer, TokenExample, column

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
ANSWER = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=5)
ROW = st.tuples(
    IDS,
    st.lists(ANSWER, min_size=1, max_size=4),
    st.sampled_from([None, True, False]),
    st.floats(0, 1e9),
    st.none() | st.floats(-1e9, 1e9),
    st.integers(0, 2**64 - 1),
)


def example(row: int, prompt: list[int], answers: list[list[tuple[int, bool]]], *said) -> TokenExample:
    tokens = [
        TokenAnswer(np.array([i for i, _ in a], dtype=np.int32), np.array([c for _, c in a], dtype=bool))
        for a in answers
    ]
    return TokenExample(Source("f", row), np.array(prompt, dtype=np.int32), tuple(tokens), *said)


def told(e: TokenExample) -> tuple:
    """All that an example says, comparable."""
    answers = tuple((tuple(a.ids.tolist()), tuple(a.mask.tolist())) for a in e.answers)
    return e.source, tuple(e.prompt_ids.tolist()), answers, e.label, e.weight, e.margin, e.group


@given(st.lists(ROW, max_size=6), st.integers(0, 6))
def test_blocks_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows: list, cut: int) -> None:
    examples = [example(7 + n, *row) for n, row in enumerate(rows)]
    blocks = [columns_of(examples[:cut]), columns_of(examples[cut:])]
    folder = tmp_path_factory.mktemp("table")
    write_columns(folder, iter(blocks))
    for table in (TokenTable("f", joined_columns(blocks)), TokenTable("f", mapped_columns(folder))):
        assert list(map(told, table)) == list(map(told, examples))
        assert [told(table[i]) for i in range(-len(examples), 0)] == list(map(told, examples))
        for one in table:
            assert one.prompt_ids.dtype == np.int32 and {(a.ids.dtype.str, a.mask.dtype.str) for a in one.answers} == {
                ("<i4", "|b1")
            }


def test_columns_by_hand(tmp_path: Path) -> None:
    """Files of plain numbers: what a reader without this code would expect to find."""
    first = example(3, [5], [[(6, True)], [(7, False), (8, True)]], None, 0.5, 2.0)
    second = example(9, [], [[(1, True)]], False)
    write_columns(tmp_path, [columns_of([first, second])])
    raw = {name: np.fromfile(tmp_path / name, kind).tolist() for name, kind in
           {"row": "<i8", "answers": "<i4", "prompt": "<i4", "label": "i1", "weight": "<f8", "answer": "<i4",
            "ids": "<i4", "counts": "?"}.items()}  # fmt: skip
    assert raw == {
        "row": [3, 9], "answers": [2, 1], "prompt": [1, 0], "label": [-1, 0], "weight": [0.5, 1.0], "answer": [1, 2, 1],
        "ids": [5, 6, 7, 8, 1], "counts": [False, True, False, True, True],
    }  # fmt: skip
    lengths = [np.array(cut, "<i8").tobytes() for cut in ([3, 1, 1, 2], [2, 0, 1])]
    tokens = [np.array(ids, "<i4").tobytes() for ids in ([5, 6, 7, 8], [1])]
    counted = [b"\0\1\0\1", b"\1"]
    content = [xxhash.xxh3_128_digest(b"".join(parts)) for parts in zip(lengths, tokens, counted, strict=True)]
    assert (tmp_path / "content").read_bytes() == b"".join(content)
    margins = np.fromfile(tmp_path / "margin", "<f8")
    assert margins[0] == 2.0 and np.isnan(margins[1])


def test_slots_of_each_by_hand() -> None:
    """A prompt of 3 before answers of 1 and 2, one of 4 before one of 5, a document of 6: shared, and each alone."""
    lengths = [(3, (1, 2)), (4, (5,)), (0, (6,))]
    made = [
        example(row, [1] * prompt, [[(2, True)] * n for n in answers]) for row, (prompt, answers) in enumerate(lengths)
    ]
    table = TokenTable("f", columns_of(made))
    for examples in (made, table, Subset([made]), Subset([table]), Subset([Subset([table]), []])):
        assert slots_of_each(examples, share="prompt").tolist() == [3 + 1 + 2, 4 + 5, 6]
        assert slots_of_each(examples, share="none").tolist() == [3 + 1 + 3 + 2, 4 + 5, 6]
    assert slots_of_each(Subset([made, table], [5, 0, 0]), share="prompt").tolist() == [6, 6, 6]
    for nothing in ([], Subset([]), TokenTable("f", columns_of([]))):
        assert slots_of_each(nothing, "prompt").tolist() == slots_of_each(nothing, "none").tolist() == []


@given(st.lists(ROW, max_size=6), st.data())
def test_columns_say_what_the_examples_say(rows: list, data: st.DataObject) -> None:
    """Of a list, of a table, and of a selection of both: the same as example by example."""
    examples = [example(7 + n, *row) for n, row in enumerate(rows)]
    table = TokenTable("f", columns_of(examples))
    both = Subset([Subset([table]), [], examples])
    places = data.draw(st.lists(st.integers(0, len(both) - 1), max_size=6) if rows else st.just([]))
    told_of = {
        "content": lambda e: e.content.rstrip(b"\0"),  # numpy gives no zeros back at the end of bytes
        "answers": lambda e: len(e.answers),
        "longest": lambda e: e.longest,
        "plain_tokens": lambda e: e.plain_tokens,
        "prompt_hash": lambda e: xxhash.xxh3_64_intdigest(e.prompt_ids.tobytes()) if len(e.prompt_ids) else 0,
        "unique_tokens": lambda e: e.unique_tokens,
        "label": lambda e: {None: -1, False: 0, True: 1}[e.label],
        "weight": lambda e: e.weight,
    }
    for some in (examples, table, both, both.take(places)):
        for name, of in told_of.items():
            assert column(some, name).tolist() == [of(e) for e in some], name
        margins = column(some, "margin")
        assert [None if np.isnan(m) else m for m in margins.tolist()] == [e.margin for e in some]


def test_a_content_names_tokens_cuts_and_what_counts_and_nothing_else() -> None:
    base = example(1, [1, 2], [[(3, True), (4, True)], [(5, True)]])
    others = [
        example(1, [1, 9], [[(3, True), (4, True)], [(5, True)]]),
        example(1, [1], [[(2, True), (3, True), (4, True)], [(5, True)]]),
        example(1, [1, 2], [[(3, True)], [(4, True), (5, True)]]),
        example(1, [1, 2], [[(5, True)], [(3, True), (4, True)]]),
        example(1, [1, 2], [[(3, True), (4, False)], [(5, True)]]),
        example(1, [1, 2], [[(3, True), (4, True), (5, True)]]),
        example(1, [1, 2], [[(3, True), (4, True)], [(5, True)], []]),
        example(1, [], [[(1, True), (2, True), (3, True), (4, True)], [(5, True)]]),
    ]
    assert len({e.content for e in (base, *others)}) == 9
    said = replace(base, source=Source("elsewhere", 99), label=True, weight=0.5, margin=2.0)
    wide = replace(base, prompt_ids=base.prompt_ids.astype(np.int64))
    assert base.content == said.content == wide.content and len(base.content) == 16


def test_an_example_out_of_range_is_an_error() -> None:
    table = TokenTable("f", columns_of([example(1, [1], [[(2, True)]])]))
    for places in (table, Subset([table, table], [1, 0])):
        with pytest.raises(IndexError):
            places[len(places)]


def test_a_selection_counts_through_its_parts() -> None:
    parts = [[example(row, [row], [[(1, True)]]) for row in rows] for rows in ([10, 11], [], [20, 21, 22])]

    def rows(chosen: Subset) -> list[int]:
        assert [chosen[i].source.row for i in range(len(chosen))] == [e.source.row for e in chosen]
        return [e.source.row for e in chosen]

    everything = Subset(parts)
    assert rows(everything) == [10, 11, 20, 21, 22]
    assert rows(Subset(parts, [4, 0, 2])) == [22, 10, 20]
    assert rows(everything.take([3, 1]).take([1, 1])) == [11, 11]
    assert rows(everything[1:4]) == [11, 20, 21]
    assert rows(Subset([])) == rows(Subset([[], []])) == []
    assert everything[-1].source.row == 22


HOSTILE = {
    "no answers": {"answers": [0, 3]},
    "fewer answers than there are": {"answers": [1, 1]},
    "an offset beyond the tokens": {"prompt": [2, 90]},
    "an answer of no length": {"answer": [2, 0, 3]},
    "a prompt of less than none": {"prompt": [-2, 6]},
    "an id below zero": {"ids": [-1] * 9},
    "fewer ids": {"ids": [1] * 8},
    "an answer of which no token counts": {"counts": [0, 0, 0, 1, 0, 0, 1, 0, 1]},
    "a prompt that counts": {"counts": [1, 0, 1, 1, 0, 0, 1, 1, 1]},
    "a mask of other bytes": {"counts": [0, 0, 7, 1, 0, 0, 1, 1, 1]},
    "a label of another kind": {"label": [5, -1]},
    "a weight that is none": {"weight": [np.nan, 1]},
    "a row before the first": {"row": [0, 2]},
    "a row less": {"row": [1]},
    "a group less": {"group": [7]},
    "a piece before the first": {"piece": [0, -1]},
    "a piece less": {"piece": [1]},
    "a text of less than none": {"text": [1, -1, 0]},
    "a text less": {"text": [1, 1]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_columns_that_no_examples_make_are_told(name: str) -> None:
    good = {
        **{"row": [1, 2], "answers": [2, 1], "prompt": [2, 2], "label": [-1, -1], "weight": [1, 2]},
        **{"margin": [np.nan, 1], "group": [0, 7], "content": [b"a", b"b"], "answer": [1, 1, 3], "ids": range(9)},
        "counts": [0, 0, 1, 1, 0, 0, 1, 0, 1],
        "piece": [0, 2],
        "text": [3, 0, 5],
    }

    def columns(values: dict[str, Any]) -> token_table.Columns:
        types = token_table.TYPES | {"counts": np.dtype(np.uint8)}
        raw = {name: np.array(value, types[name]) for name, value in values.items()}
        return raw | {"counts": raw["counts"].view(bool)}

    token_table.check_consistent(columns(good))
    token_table.check_consistent(columns({name: [] for name in good}))
    with pytest.raises(ValueError, match=r"columns|example|id|weight|answer|text"):
        token_table.check_consistent(columns(good | HOSTILE[name]))
