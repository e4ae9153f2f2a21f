"""CSV and TSV: cells are text as they stand, rows that do not fit the header are named, formats read them as others."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.bounds import within
from tests.data.rows import read_examples
from tuningfork.data.tables.read import read_rows
from tuningfork.errors import DataError
from tuningfork.records import Message

PAIRS = ("prompt", "chosen", "rejected")


def written(path: Path, *rows: Sequence[object], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_cells_are_text_as_they_stand(name: str, delimiter: str, tmp_path: Path) -> None:
    cells = ['say "hi", twice;\tplease', "two\nlines\r\nand a third ", "007", "ü 🙂", " 1.50", "null", "true"]
    path = written(tmp_path / name, PAIRS, *((cell, f"a{cell}", "b") for cell in cells), delimiter=delimiter)
    expected = [(place, {"prompt": c, "chosen": f"a{c}", "rejected": "b"}) for place, c in enumerate(cells, 1)]
    assert list(read_rows(path)) == expected
    zipped = tmp_path / f"{name}.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_rows(zipped)) == expected


def test_a_mark_of_utf_8_empty_lines_and_an_empty_cell_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,chosen,rejected,system\r\n\r\np,a,b,\r\n\r\nq,c,d,"be kind"\r\n\r\n')
    assert list(read_rows(path)) == [
        (1, {"prompt": "p", "chosen": "a", "rejected": "b", "system": None}),
        (2, {"prompt": "q", "chosen": "c", "rejected": "d", "system": "be kind"}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'prompt,chosen,rejected\np,a,b\n"two\nlines",a,b\np,a\n',
            "row 3, which ends in line 5, has 2 cells, but the",
        ),
        (b"prompt,chosen,rejected\np,a,b,c\n", "row 1, which ends in line 2, has 4 cells, but the header names 3"),
        (
            b'prompt,chosen,rejected\np,a,b\np,"a,b\nq,c,d\n',
            "row 2, at line 4, cannot be read (unexpected end of data)",
        ),
        (b'prompt,chosen,rejected\np,"a"x,b\n', "row 1, at line 2, cannot be read ("),
        (b"prompt,chosen,prompt\np,a,b\n", "its header names 'prompt' twice"),
        (b"prompt,,rejected\np,a,b\n", "column 2 of its header has no name"),
        (
            b"prompt;chosen;rejected\np;a;b\n",
            "stand between semicolons: 'prompt;chosen;rejected'. Save it with commas.",
        ),
        (b"prompt\tchosen\tits\np\ta\tb\n", "stand between tabs"),
        (b"prompt,chosen,rejected\n", "the file has no rows"),
        (b"prompt,chosen,rejected\np,a,\xff\n", "line 2 is not UTF-8 text"),
    ],
)
def test_what_cannot_be_read_is_named_by_row_and_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert message in str(caught.value) and str(caught.value).startswith(f"{path}: ")


def test_json_text_in_cells_is_read_as_in_other_tables(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "why, please?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("because", "no")]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    row = [json.dumps(value) for value in (asked, *answers, tools)]
    found = read_examples(written(tmp_path / "a.csv", (*PAIRS, "tools"), row), as_text=False)
    [example] = found.examples
    assert example.prompt == (Message("user", "why, please?"),)
    assert example.answers == ((Message("assistant", "because"),), (Message("assistant", "no"),))
    assert dict(example.template)["tools"] == tools


def test_numbers_and_truth_values_are_read_where_a_format_wants_them_and_nowhere_else(tmp_path: Path) -> None:
    rows = [("1", "2", "3", "0.5", "1.5"), ("4", "5", "6", "", "")]
    path = written(tmp_path / "a.csv", (*PAIRS, "w", "margin"), *rows)
    first, second = read_examples(path, True, columns={"w": "weight"}).examples
    assert (first.prompt, first.answers, first.weight, first.margin) == ("1", ("2", "3"), 0.5, 1.5)
    assert (second.weight, second.margin) == (1.0, None)

    path = written(tmp_path / "b.csv", ("input", "output_1", "output_2", "label"), ("p", "a", "b", 2))
    assert read_examples(path, True).examples[0].answers == ("b", "a")
    labelled = [("p", "a", True), ("p", "b", "false"), ("p", "c", "perhaps")]
    found = read_examples(written(tmp_path / "c.csv", ("prompt", "completion", "label"), *labelled), True)
    assert [example.label for example in found.examples] == [True, False]
    assert [(row.row, row.reason) for row in found.dropped] == [(3, "unknown label")]


def test_an_empty_cell_that_a_format_needs_costs_its_row(tmp_path: Path) -> None:
    found = read_examples(written(tmp_path / "a.csv", PAIRS, ("p", "a", "b"), ("q", "", "b"), ("r", "a", "b")), True)
    assert [(row.row, row.reason) for row in found.dropped] == [(2, "null field")]


def test_a_field_that_is_left_out_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", (*PAIRS, "tools", "weight"), ("p", "a", "b", "no JSON", "heavy"))
    assert [row.reason for row in read_examples(path, False).dropped] == ["wrong type"]
    found = read_examples(path, False, columns={"tools": None, "weight": None})
    assert (len(found.examples), found.notes) == (1, {})


def test_a_header_of_many_columns_is_read_at_once(tmp_path: Path) -> None:
    names = [*PAIRS, *(f"c{number}" for number in range(50_000))]
    path = written(tmp_path / "a.csv", names, names)
    with within(30):
        assert next(iter(read_rows(path)))[1]["c49999"] == "c49999"
    written(path, [*names, "c7"], names)
    with pytest.raises(DataError, match="its header names 'c7' twice"):
        list(read_rows(path))


def test_a_row_that_does_not_fit_is_told_how_cells_are_quoted(tmp_path: Path) -> None:
    for suffix, delimiter, called in ((".csv", ",", "a comma"), (".tsv", "\t", "a tab")):
        path = written(tmp_path / f"a{suffix}", PAIRS, ("q", "a", "b", "c"), delimiter=delimiter)
        with pytest.raises(DataError, match=f"A cell that holds {called}, a quote or a line break stands in quotes"):
            list(read_rows(path))
