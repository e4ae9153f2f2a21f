"""What the demo asks of an answer: one plain sentence that says what it is about. Told by rule, form only, not fact."""

from __future__ import annotations

import re
from collections.abc import Callable

SHORTEST, LONGEST = 6, 25  # words
OFTEN = 3  # a content word this many times in one sentence is the model going in circles
SPEAKS_OF_ITSELF = {"i", "i'm", "i'd", "i'll", "i've", "me", "my", "ai", "assistant", "chatbot", "smollm"}


def faults(question: str, answer: str) -> list[str]:
    """The rules that an answer breaks, by name. Empty for an answer of the kind that the demo teaches."""
    return [name for name, broken in RULES.items() if broken(question, answer)]


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text.lower())


# Words that say nothing of a subject. Shared by question and answer, they do not show that both are of one thing.
FILLING = set(
    _words("""
    a an and are as at be because but by can could did do does for from get give gives happens has have he her
    his how if in into is it its job like made make makes many may most need of on one or other our people
    person place should so some something take takes tell that the their them then there they thing things this
    to up us use used uses was we what when where which who why will with work works would you your
    """)
)


def _content(text: str) -> list[str]:
    """The words that carry meaning, their plural `s` taken off."""
    return [word.removesuffix("s") for word in _words(text) if word not in FILLING]


def _repeats(answer: str) -> bool:
    words, content = _words(answer), _content(answer)
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(runs)) < len(runs) or any(content.count(word) >= OFTEN for word in content)


RULES: dict[str, Callable[[str, str], bool]] = {
    "no full stop at the end": lambda question, answer: not answer.rstrip().endswith(".") or answer.endswith(".."),
    "not one sentence": lambda question, answer: bool(re.search(r"[.!?]\s", answer.strip())),
    "too short": lambda question, answer: len(_words(answer)) < SHORTEST,
    "too long": lambda question, answer: len(_words(answer)) > LONGEST,
    "subject not named": lambda question, answer: not set(_content(question)) & set(_content(answer)),
    "a list": lambda question, answer: bool(re.search(r"[\n:]|\d[.)]\s", answer.strip())),
    "speaks of itself": lambda question, answer: bool(SPEAKS_OF_ITSELF & set(_words(answer))),
    "repeats itself": lambda question, answer: _repeats(answer),
}
