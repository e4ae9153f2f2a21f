"""Every error that a user can cause: what was found, where, and what to do about it.

The command line prints the message of a `TuningforkError` without a traceback and exits with status 2, so each message
must stand on its own. Anything else that escapes is a bug of ours and keeps its traceback.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tuningfork.wording import first_line, visible

# How torch, its allocators and the libraries below it say it, in errors of a dozen types.
_NO_MEMORY = re.compile(  # private: torch by its words for too little memory
    r"out.of.memory|not enough memory|(can't|cannot|unable to) allocate|bad_alloc|ALLOC_FAILED", re.IGNORECASE
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


class RankError(TuningforkError):
    """Another process of a run has ended, or did not answer in time.

    Example: ``another process of the run has ended, or did not answer in time ... continue with --resume.``
    """


class SaidElsewhere(TuningforkError):
    """Another process of the run failed first, perhaps likewise, and has said why. This one ends without a word."""


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
