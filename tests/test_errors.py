"""Allocations that are refused, in the many ways that torch says so; and messages that stay our own."""

from __future__ import annotations

import errno
import pickle
import re

import pytest
import torch

from tuningfork.errors import LOADING, READING, SAVING, SCORING, TRAINING, DataError, OutOfMemory, enough_memory
from tuningfork.recipe.run_config import SETTINGS
from tuningfork.wording import first_line

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


def test_a_message_has_the_lines_that_we_gave_it_and_no_others() -> None:
    """Also where it has gone from one process to another."""
    name = "rows\ntuningfork: done\x1b[2J\u202e.jsonl"
    shown = "rows↵tuningfork: done⟨U+001B⟩[2J⟨U+202E⟩.jsonl"
    error = DataError(f"{name}: is empty.", f"  {name}")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == f"{shown}: is empty.\n  {shown}"
    assert first_line(error) == f"{shown}: is empty."
    assert str(DataError()) == ""
