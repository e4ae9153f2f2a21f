"""Every error that a user can cause: what was found, where, and what to do about it.

The command line prints the message of a `TuningforkError` without a traceback and exits with status 2, so each message
must stand on its own. Anything else that escapes is a bug of ours and keeps its traceback.
"""


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
