"""tuningfork: preference training that pays for no token twice and can show its numbers are right.

The names below are the library's front door; docs/api.md shows them in use. They are imported when they are first asked
for, since PyTorch takes seconds to import and many a process does without.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_PLACES = {
    "api": ("build_scorer", "load_recipe", "open_reference", "pack", "read_examples", "run_recipe"),
    "data.config": ("DataConfig",),
    "models.hf.load": ("load_tokenizer",),
    "models.scorer": ("Scorer",),
    "objective.pairs": ("DPO", "DPONorm", "IPO", "IPOSum", "SimPO"),
    "objective.sft": ("SFT",),
    "accounts": ("DataReport",),
    "records": ("PackedBatch", "Source", "TokenAnswer", "TokenExample"),
    "reference.store": ("ReferenceStore",),
    "recipe.run_config": ("RunConfig",),
    "train.batch": ("StepBatch",),
    "train.step": ("train_step",),
    "errors": (
        *("TuningforkError", "ConfigError", "DataError", "ModelError", "NonFiniteError", "OutOfMemory"),
        *("ReferenceMismatch", "RunFolderError"),
    ),
}
_MODULE = {name: module for module, names in _PLACES.items() for name in names}

__all__ = sorted(["__version__", *_MODULE])  # a list of strings, made of the table above


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'tuningfork' has no attribute {name!r}")
    return getattr(import_module(f"tuningfork.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
