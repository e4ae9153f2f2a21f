"""Every error that a user can cause: what was found, where, and what to do about it.

The command line prints the message of a `TuningforkError` without a traceback and exits with status 2, so each message
must stand on its own. Anything else that escapes is a bug of ours and keeps its traceback.
"""

import errno
import pickle
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# How torch, its allocators and the libraries below it say it, in errors of a dozen types.
_NO_MEMORY = re.compile(  # private: torch by its words for too little memory
    r"out.of.memory|not enough memory|(can't|cannot|unable to) allocate|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)

# What JSON and YAML let stand as it is: delete and C1 control codes, marks that turn or part lines of writing.
_OBEYED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


# What the categories of Unicode call letters, marks and symbols, and a reader sees nothing of, or a space: fillers,
# selectors of variants, joiners, blank signs. Unicode's Default_Ignorable_Code_Point, and the blanks beside it.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U00013441\U00013442\U00016fe4"
    "\U0001d159\U000e0100-\U000e01ef]"
)


class TuningforkError(Exception):
    """The base of all errors that are the user's to mend. Each argument is one line of the message.

    A line may quote what a file holds or is called, so a line end or a control character in it is shown, see `visible`:
    nobody's file speaks in our name.
    """

    def __str__(self) -> str:
        return "\n".join(visible(str(line)) for line in self.args)


class ConfigError(TuningforkError):
    """A recipe or a flag is wrong: an unknown key, a bad value, or two settings that contradict each other.

    Example: ``recipe.yaml: train.lerning_rate is not a setting; did you mean train.learning_rate?``
    """


class DataError(TuningforkError):
    """A data file cannot be used at all. A row that cannot be used is not an error: it is dropped and listed.

    Example: ``pairs.jsonl: line 17 is not JSON (Expecting ',' delimiter, column 40). Mend or remove the line.``
    """


class ModelError(TuningforkError):
    """A model folder cannot be loaded, or the model has a part that cannot be trained correctly.

    Example: ``./model: no weights found (looked for model.safetensors ...).``
    """


class ReferenceMismatch(TuningforkError):
    """Cached reference log-probs do not belong to this model, these kernels or this data.

    Example: ``reference-cache/1f9e...: log-probs of before are not those that the starting model has now: ...``
    """


class RunFolderError(TuningforkError):
    """A run folder is in the way, is not the one that belongs to this recipe, or cannot be written.

    Example: ``runs/first exists. Add --resume to continue it, or choose another output.dir.``
    """


class NonFiniteError(TuningforkError):
    """A loss, log-prob or gradient became NaN or infinite. Raised before the optimizer step, so weights are unharmed.

    Example: ``step 12: the log-prob of answer 1 of pairs.jsonl:88 is nan.``
    """


class OutOfMemory(TuningforkError):
    """The GPU, or the machine, has not the memory that the settings need.

    Example: ``step 12: CUDA out of memory. Tried to allocate 3.06 GiB. [...] Lower objective.head_chunk_rows, ...``
    """


# What there is to do about too little memory, by what it was needed for.
READING = (
    "This is the machine's memory, not a GPU's. To need less, lower data.workers, for each of these processes has "
    "memory of its own, or keep data.cache set, for tokens then lie in files; or stop other programs."
)
LOADING = (
    "The weights alone take 4 bytes a parameter. To need less, set model.weights: bfloat16 with train.optimizer: "
    "adamw_8bit, which keeps matrices in 2 bytes; or stop other programs on this device, or train a smaller model."
)
SCORING = (
    "To need less, lower objective.head_chunk_rows or set train.activation_memory to block or offload, for scoring "
    "keeps what training keeps; or lower pack.tokens, for which a run that has begun needs another output.dir."
)
TRAINING = (
    "To need less, lower objective.head_chunk_rows or set train.activation_memory to block or offload, both also on "
    "--resume; or lower pack.tokens, for which a run that has begun needs another output.dir. Weights, gradients and "
    "optimizer take 16 bytes a parameter, 10 with train.optimizer adamw_8bit, and 6 with model.weights bfloat16 "
    "besides."
)
SAVING = (
    "This is the machine's memory, which needs room for a copy of the weights while they are written. Stop other "
    "programs, then continue with --resume: what was saved before is whole."
)


@contextmanager
def enough_memory(doing: str, ways_out: str = TRAINING) -> Iterator[None]:
    """Turn an allocation that was refused into an OutOfMemory that says while doing what, and the ways out."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:  # torch's own error is a RuntimeError too
        if not is_of_memory(error):
            raise
        raise OutOfMemory(f"{doing}: {first_line(error)}", ways_out) from error


def is_of_memory(error: Exception) -> bool:
    """Whether an error says that an allocation was refused, in whatever type and words."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust has met what it did not foresee. That is no Exception, nor an order to end."""
    return type(error).__name__ == "PanicException"  # private: tokenizers.PanicException


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
