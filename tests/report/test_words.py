"""How reports word shares, rows and whatever stands in the data."""

from __future__ import annotations

import pytest

from tuningfork.report.words import by_reason, cut, headline, rows, sentence, share, signed, visible


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0%"), (1, "100%"), (0.3774, "37.7%"), (0.00049, "<0.1%"), (0.0005, "0.1%"), (0.9996, ">99.9%")],
)
def test_a_share_is_never_rounded_to_none_or_all(value: float, words: str) -> None:
    assert share(value) == words


def test_rows_and_what_is_left_out() -> None:
    assert rows([7]) == "row 7" and rows([3, 1700]) == "rows 3, 1700"
    assert rows(range(1, 9), most=3) == "rows 1, 2, 3 … 5 more"


def test_a_long_text_says_how_long_it_is() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("a" * 1_000_003, 3) == "aaa … 1,000,000 more characters"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain, é, 日本, עברית, 🙂", "plain, é, 日本, עברית, 🙂"),
        ("a\nb\tc", "a↵b⇥c"),
        ("\x00\x1b[31m\x7f\x85", "⟨U+0000⟩⟨U+001B⟩[31m⟨U+007F⟩⟨U+0085⟩"),
        ("\u202ecod\u2066", "⟨U+202E⟩cod⟨U+2066⟩"),
        ("half \ud83d", "half ⟨U+D83D⟩"),
        ("\u2028\u200b\ufeff\ue000", "⟨U+2028⟩⟨U+200B⟩⟨U+FEFF⟩⟨U+E000⟩"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(text: str, seen: str) -> None:
    assert visible(text) == seen


def test_sentences_and_differences() -> None:
    assert sentence("the chosen answer is longer") == "The chosen answer is longer."
    assert sentence("pairs.jsonl: 3 rows are dropped: so") == "pairs.jsonl: 3 rows are dropped: so."
    assert [signed(n) for n in (1200, 0, -7)] == ["+1,200", "0", "−7"]


def test_the_headline() -> None:
    assert (
        headline({"train": {"used": 2339, "rows_read": 2354}, "unit": "pairs"})
        == "2,339 of 2,354 pairs can be trained on"
    )
    assert (
        headline({"train": {"used": 300, "rows_read": 300}, "unit": "examples"}) == "All 300 examples can be trained on"
    )


def test_dropped_rows_by_reason() -> None:
    dropped = [{"row": 1, "reason": "a"}, {"row": 2, "reason": "b"}, {"row": 3, "reason": "a"}]
    assert by_reason(dropped) == {"a": [dropped[0], dropped[2]], "b": [dropped[1]]}
