"""How reports word shares, rows and whatever stands in the data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.data.summary.workbench import summary_of_examples
from tests.tiny import random_examples
from tuningfork.accounts import DroppedRow
from tuningfork.data.summary.records import Note, Numbers, SetSummary, Truncation
from tuningfork.records import Source
from tuningfork.report.dataset.wording import (
    account,
    amount,
    by_reason,
    cut,
    given_numbers,
    headline,
    losses,
    rows,
    sentence,
    share,
    short_names,
    signed,
)

SUMMARY = replace(summary_of_examples(random_examples([(3, (5, 4))])), eval=None)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0%"), (1, "100%"), (0.3774, "37.7%"), (0.00049, "<0.1%"), (0.0005, "0.1%"), (0.9996, ">99.9%")],
)
def test_a_share_is_never_rounded_to_none_or_all(value: float, words: str) -> None:
    assert share(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, "1"),
        (0.03125, "0.0312"),
        (2.84375, "2.84"),
        (9.996, "10"),
        (73.09, "73.1"),
        (36, "36"),
        (12345.67, "12,345.7"),
    ],
)
def test_a_mean_has_the_digits_that_say_something(value: float, words: str) -> None:
    assert amount(value) == words


def test_rows_and_what_is_left_out() -> None:
    def at(*numbers: int, file: str = "d/a.jsonl") -> list[Source]:
        return [Source(file, number) for number in numbers]

    alone = {"d/a.jsonl": ""}
    assert rows(at(7), alone) == "row 7" and rows(at(3, 1700), alone) == "rows 3, 1700"
    assert rows(at(*range(1, 9)), alone, most=3) == "rows 1, 2, 3 … 5 more"
    several = {"d/a.jsonl": "a.jsonl", "b.jsonl": "b.jsonl"}
    assert rows([*at(3, 4), *at(1, file="b.jsonl")], several) == "a.jsonl rows 3, 4; b.jsonl row 1"


def test_a_long_text_says_how_long_it_is() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("a" * 1_000_003, 3) == "aaa … 1,000,000 more characters"


def test_sentences_and_differences() -> None:
    assert sentence("the chosen answer is longer") == "The chosen answer is longer."
    assert sentence("pairs.jsonl: 3 rows are dropped: so") == "pairs.jsonl: 3 rows are dropped: so."
    assert [signed(n) for n in (1200, 0, -7)] == ["+1,200", "0", "−7"]


@pytest.mark.parametrize(
    ("used", "left_out", "read", "unit", "words"),
    [
        (2339, {}, 2354, "pair", "2,339 of 2,354 pairs can be trained on"),
        (300, {}, 300, "example", "All 300 examples can be trained on"),
        (1, {}, 1, "pair", "1 pair can be trained on"),
        (16, {"left out of the mix": 3, "weight 0": 1}, 20, "pair", "All 20 pairs can be trained on; 16 are used"),
        (1, {"left out of the mix": 4}, 7, "pair", "5 of 7 pairs can be trained on; 1 is used"),
    ],
)
def test_the_headline(used: int, left_out: dict[str, int], read: int, unit: str, words: str) -> None:
    train = replace(SUMMARY.train, used=used, left_out=left_out, rows_read=read)
    good = replace(SUMMARY, train=train, unit=unit)
    assert headline(good) == headline(replace(good, eval=train)) == words
    other = replace(train, refused={"1 answer, objective dpo compares two": Note(1, [])})
    refused = words.replace("can be trained on", "can be read, but not trained on as they are")
    assert headline(replace(good, train=other)) == headline(replace(good, eval=other)) == refused


def test_files_are_named_where_there_are_several() -> None:
    def data(*files: str) -> SetSummary:
        return replace(SUMMARY.train, tables=[replace(SUMMARY.train.tables[0], file=file) for file in files])

    assert short_names(replace(SUMMARY, train=data("d/a.jsonl"))) == {"d/a.jsonl": ""}
    several = replace(SUMMARY, train=data("d/a.jsonl", "d/b.jsonl", "e/b.jsonl"), eval=data("h.jsonl"))
    assert short_names(several) == {
        **{"d/a.jsonl": "a.jsonl", "d/b.jsonl": "d/b.jsonl", "e/b.jsonl": "e/b.jsonl"},
        "h.jsonl": "",
    }


def test_numbers_that_rows_give() -> None:
    assert given_numbers("weight", None) == []
    assert given_numbers("weight", Numbers(1, min=0.5, mean=0.5, max=0.5)) == ["1 row has a weight of 0.5"]
    assert given_numbers("margin", Numbers(12, min=0.25, mean=4 / 3, max=3.0)) == [
        "12 rows have a margin of 0.25 to 3, mean 1.33"
    ]


def test_the_account_of_rows() -> None:
    data = replace(SUMMARY.train, rows_read=1, used=0, dropped={"empty answer": 1})
    assert account(data) == "1 row read, 0 used, 1 dropped"
    data = replace(SUMMARY.train, rows_read=20, used=16, dropped={"empty answer": 1}, left_out={"weight 0": 3})
    assert account(data) == "20 rows read, 16 used, 1 dropped, 3 left out on purpose"


def test_what_a_limit_costs_has_cuts_only_where_rows_are_cut() -> None:
    limit = Truncation(512, True, 1, 0.1, 2, 0.2, 30, 0.3)
    cut_too = {name: look(limit) for name, look in losses("truncate_answers").items()}
    assert cut_too == {"rows cut": (1, 0.1), "rows lost": (2, 0.2), "tokens lost": (30, 0.3)}
    assert list(losses("drop")) == ["rows lost", "tokens lost"]


def test_dropped_rows_by_reason() -> None:
    dropped = [DroppedRow("a.jsonl", row, reason) for row, reason in ((1, "a"), (2, "b"), (3, "a"))]
    assert by_reason(dropped) == {"a": [dropped[0], dropped[2]], "b": [dropped[1]]}
