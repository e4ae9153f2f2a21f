"""How errors are quoted, and how text of strangers is shown."""

from __future__ import annotations

import pytest

from tuningfork.wording import first_line, shortened, visible


def test_a_long_text_is_quoted_by_its_beginning():
    assert shortened("a" * 300) == "a" * 300
    assert shortened("a" * 4000) == "a" * 300 + "... (4,000 characters)"


def test_the_first_line_of_an_error_without_a_word_is_its_type():
    assert first_line(ValueError(" one\ntwo")) == "one"
    assert first_line(ValueError("for one:\n  two:\n three\nfour")) == "for one: two: three"
    assert first_line(ValueError("one:")) == "one:"
    assert (first_line(KeyError("one")), first_line(KeyError("one 'two'"))) == ("'one'", "one 'two'")
    assert first_line(EOFError()) == "EOFError"
    assert first_line(ValueError("a" * 5000)) == "a" * 1000 + "... (5,000 characters)"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain, é, 日本, עברית, 🙂", "plain, é, 日本, עברית, 🙂"),
        ("a\nb\tc", "a↵b⇥c"),
        ("\x00\x1b[31m\x7f\x85", "⟨U+0000⟩⟨U+001B⟩[31m⟨U+007F⟩⟨U+0085⟩"),
        ("\u202ecod\u2066", "⟨U+202E⟩cod⟨U+2066⟩"),
        ("half \ud83d", "half ⟨U+D83D⟩"),
        ("\u200e\u200f\u202a\u2069\u2029", "⟨U+200E⟩⟨U+200F⟩⟨U+202A⟩⟨U+2069⟩⟨U+2029⟩"),
        ("\r\x0b\x9b", "⟨U+000D⟩⟨U+000B⟩⟨U+009B⟩"),
        ("\u2028\u200b\ufeff\ue000", "⟨U+2028⟩⟨U+200B⟩⟨U+FEFF⟩⟨U+E000⟩"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(text: str, seen: str) -> None:
    assert visible(text) == seen
