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


UNSEEN = """
    00ad 034f 061c 115f 1160 17b4 17b5 180b 180c 180d 180e 180f 200b 200c 200d 200e 200f 202a 202e 2060 2061 2064 206f
    2800 3164 fe00 fe0e fe0f feff ffa0 fff0 fff8 fffb 13440 13441 13442 16fe4 1bca0 1bca3 1d159 1d173 1d17a e0000 e0001
    e0020 e007f e0100 e01ef e0fff
"""
"""Code points that Unicode calls ignorable by default, and blank signs: what a font draws nothing for."""


@pytest.mark.parametrize("point", UNSEEN.split())
def test_a_character_without_a_shape_is_shown_by_its_number(point: str) -> None:
    character = chr(int(point, 16))
    assert visible(f"a{character}b") == f"a⟨U+{point.upper():0>4}⟩b"


def test_words_of_all_languages_stay_what_they_are() -> None:
    words = "naïve\u0301 ﬁ, 한국어, हिन्दी, ไทย, မြန်မာ, ᠮᠣᠩᠭᠣᠯ, \u00a0\u202f\u3000, ⠃⠗, 👩🏽, ☃, 𓀀, 𝄞"
    assert visible(words) == words
