"""Allocations that are refused, in the many ways that torch says so; and errors without a word."""

from __future__ import annotations

import errno
import pickle
import re

import pytest
import torch

from tuningfork.config import SETTINGS
from tuningfork.errors import (
    LOADING,
    READING,
    SAVING,
    SCORING,
    TRAINING,
    DataError,
    OutOfMemory,
    enough_memory,
    first_line,
    shortened,
    visible,
)

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


def refused_by_this_machine() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def raising(error: Exception):
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (raising(torch.OutOfMemoryError(f"{CUDA}\nmore of it")), CUDA),
        (raising(torch.cuda.OutOfMemoryError(CUDA)), CUDA),
        (raising(RuntimeError("Triton Error [CUDA]: out of memory")), "Triton Error [CUDA]: out of memory"),
        (raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")), "ALLOC_FAILED"),
        (raising(MemoryError()), "MemoryError"),
        (raising(MemoryError("std::bad_alloc")), "std::bad_alloc"),
        (raising(RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY")), "CUDA_ERROR_OUT_OF_MEMORY"),
        (raising(OSError(errno.ENOMEM, "Cannot allocate memory")), "Cannot allocate memory"),
        (refused_by_this_machine, "1125899906842624 bytes"),
    ],
)
def test_too_little_memory_is_an_error_that_names_the_ways_out(allocate, said):
    with pytest.raises(OutOfMemory) as caught, enough_memory("step 3"):
        allocate()
    what, ways_out = str(caught.value).splitlines()
    assert what.startswith("step 3: ") and said in what
    for key in ("pack.tokens", "objective.head_chunk_rows", "train.activation_memory"):
        assert key in ways_out


def test_any_other_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shapes"), enough_memory("step 3"):
        raise RuntimeError("shapes do not fit")
    with pytest.raises(PermissionError), enough_memory("step 3"):
        raise PermissionError(errno.EACCES, "Permission denied")


# Settings that change what a phase needs; others in its advice would be tried in vain.
MATTERS = {
    READING: {"data.workers", "data.cache"},
    LOADING: {"model.weights", "train.optimizer"},
    SCORING: {"objective.head_chunk_rows", "train.activation_memory", "pack.tokens", "output.dir"},
    TRAINING: {
        *("objective.head_chunk_rows", "train.activation_memory", "pack.tokens", "output.dir", "train.optimizer"),
        "model.weights",
    },
    SAVING: set(),
}


@pytest.mark.parametrize("ways_out", MATTERS, ids=["reading", "loading", "scoring", "training", "saving"])
def test_the_ways_out_name_settings_that_matter_and_that_there_are(ways_out):
    named = set(re.findall(r"\b[a-z]+\.[a-z_]+\b", ways_out))
    assert named == MATTERS[ways_out] <= SETTINGS.keys()
    with pytest.raises(OutOfMemory) as caught, enough_memory("doing something", ways_out):
        refused_by_this_machine()
    assert str(caught.value).splitlines()[1] == ways_out


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


def test_a_message_has_the_lines_that_we_gave_it_and_no_others() -> None:
    """Also where it has gone from one process to another."""
    name = "rows\ntuningfork: done\x1b[2J\u202e.jsonl"
    shown = "rows↵tuningfork: done⟨U+001B⟩[2J⟨U+202E⟩.jsonl"
    error = DataError(f"{name}: is empty.", f"  {name}")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == f"{shown}: is empty.\n  {shown}"
    assert first_line(error) == f"{shown}: is empty."
    assert str(DataError()) == ""
