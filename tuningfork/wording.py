"""How messages are worded: numbers of things, what an error says, what may have been meant, and text of strangers made
visible."""

import difflib
import pickle
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

# What JSON and YAML let stand as it is: delete and C1 control codes, marks that turn or part lines of writing.
_OBEYED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# What the categories of Unicode call letters, marks and symbols, and a reader sees nothing of, or a space: fillers,
# selectors of variants, joiners, blank signs. Unicode's Default_Ignorable_Code_Point, and the blanks beside it.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U00013441\U00013442\U00016fe4"
    "\U0001d159\U000e0100-\U000e01ef]"
)


def first_line(error: BaseException) -> str:
    """What an exception says, on one line; the name of its type if it says nothing. A line that ends in a colon goes
    on in the next."""
    # The text of a KeyError is its key as Python writes it; a sentence given as the key is meant to be read.
    sentence = isinstance(error, KeyError) and len(error.args) == 1 and " " in str(error.args[0])
    lines = (str(error.args[0] if sentence else error).strip() or type(error).__name__).splitlines()
    last = next((i for i, line in enumerate(lines) if not line.rstrip().endswith(":")), len(lines) - 1)
    return shortened(" ".join(line.strip() for line in lines[: last + 1]), 1000)


def of_pickle(error: pickle.UnpicklingError) -> str:
    """Why a pickle was not loaded, in words that do not advise to run it, as the library's do."""
    asked = re.search(r"GLOBAL (\S+)", str(error))  # private: torch.load by its words
    if asked:
        return (
            f"it calls for {asked[1]!r}, which is neither a tensor nor a plain value: to load it would be to run what "
            "its maker wrote. Nothing of it was run"
        )
    return "it is broken, or holds more than tensors and plain values. Nothing of it was run"


def shortened(text: str, most: int = 300) -> str:
    """A text as a message quotes it: no more than its beginning where it is long."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def from_here(path: Path) -> str:
    """A sentence on where a path is looked for that does not say so itself; none for one that does."""
    if path.is_absolute():
        return ""
    return f" That is {path.absolute()}: relative paths start at the current directory, not at the recipe."


def counted(n: int, one: str, many: str = "") -> str:
    """A number of things in words: ``1 row``, ``2,354 rows``; `many` where it is not `one` with an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The question after the nearest of the known names, to stand behind a sentence; empty where none is near.

    `cutoff`: how alike the two must be, 0 to 1; see `difflib.get_close_matches`.
    """
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""


def visible(text: str, newline: str = "↵") -> str:
    """The text with everything to be seen that a reader would not see, or that would reorder or hide what is around it.

    Line ends become `newline` and tabs ⇥. Other control characters, what only formats (such as a mark that turns the
    writing direction), what is no character (half a surrogate pair) and letters without a shape (such as a filler)
    become their code points: ⟨U+202E⟩. Spaces of other widths stay.
    """
    if text.isprintable() and not _UNSEEN.search(text):
        return text
    return "".join(_seen(c, newline) for c in text)


def escaped(text: str) -> str:
    """JSON or YAML with what a terminal would obey in its strings as their own escapes, so that it says the same."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _seen(character: str, newline: str) -> str:
    if character in "\n\t":
        return newline if character == "\n" else "⇥"
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp") or _UNSEEN.match(character)
    return f"⟨U+{ord(character):04X}⟩" if hidden else character
