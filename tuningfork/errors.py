"""Every error that a user can cause: what was found, where, and what to do about it.

The command line prints the message of a `TuningforkError` without a traceback and exits with status 2, so each message
must stand on its own. Anything else that escapes is a bug of ours and keeps its traceback.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# How torch, its allocators and the libraries below it say it, in errors of a dozen types.
_NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|ALLOC_FAILED")


class TuningforkError(Exception):
    """The base of all errors that are the user's to mend."""


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

    Example: ``reference-cache: built with dtype 'float32', this run has 'bfloat16'. Use another reference.cache ...``
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


@contextmanager
def enough_memory(doing: str) -> Iterator[None]:
    """Turn an allocation that was refused into an OutOfMemory that says while doing what, and the ways out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's own error is a RuntimeError too
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        raise OutOfMemory(
            f"{doing}: {first_line(error)}\n"
            "To need less, lower objective.head_chunk_rows or set train.activation_memory to block or offload, both "
            "also on --resume; or lower pack.tokens, for which a run that has begun needs another output.dir. Weights, "
            "gradients and optimizer take 16 bytes a parameter, 10 with train.optimizer adamw_8bit, and 6 with "
            "model.weights bfloat16 besides."
        ) from error


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust has met what it did not foresee. That is no Exception, nor an order to end."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """What an exception says, on one line; the name of its type if it says nothing. A line that ends in a colon goes
    on in the next."""
    # The text of a KeyError is its key as Python writes it; a sentence given as the key is meant to be read.
    sentence = isinstance(error, KeyError) and len(error.args) == 1 and " " in str(error.args[0])
    lines = (str(error.args[0] if sentence else error).strip() or type(error).__name__).splitlines()
    last = next((i for i, line in enumerate(lines) if not line.rstrip().endswith(":")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[: last + 1])


def counted(n: int, one: str, many: str = "") -> str:
    """A number of things in words: ``1 row``, ``2,354 rows``; `many` where it is not `one` with an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
