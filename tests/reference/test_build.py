"""Filling the cache with the frozen model: every missing example, whatever happens meanwhile."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.tiny import limits_of, random_pairs, scorer_of, tiny_policy
from tuningfork.data.packing.loader import build_packs, packs_in_windows
from tuningfork.errors import ReferenceMismatch
from tuningfork.records import PackedBatch
from tuningfork.reference import build
from tuningfork.reference.build import fill
from tuningfork.reference.store import ReferenceStore

FINGERPRINT = {"weights": "any"}


def lengths_as_logps(batch: PackedBatch) -> torch.Tensor:
    return -torch.tensor([float(n) for n in batch.answer_lengths], dtype=torch.float64)


def packs(examples):
    return build_packs(examples, limits_of(tokens=128))


def test_all_missing_examples_are_scored_and_stored(tmp_path):
    examples = random_pairs(9)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    told: list[int] = []
    fill(store, packs(store.missing(examples)), lengths_as_logps, told.append)
    assert sum(told) == 9 and len(told) > 1
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.lookup(examples).tolist() == [-float(len(a.ids)) for e in examples for a in e.answers]
    assert again.missing(examples) == []


def test_windows_leave_no_example_between_them(tmp_path):
    """The packs of the other rooms serve here: 10 examples in windows of 4, built as they are needed."""
    examples = random_pairs(10)
    built, scored = [], []

    def packs():
        for pack in packs_in_windows(examples, limits_of(tokens=128), window=4):
            built.append(len(pack.examples))
            yield pack

    def score(batch: PackedBatch) -> torch.Tensor:
        scored.append(len(batch.examples))
        assert scored == built
        return lengths_as_logps(batch)

    fill(ReferenceStore(tmp_path, FINGERPRINT), packs(), score)
    assert sum(scored) == 10
    assert len(ReferenceStore(tmp_path, FINGERPRINT)) == 20


def test_an_interrupted_fill_keeps_what_it_had_and_resumes(tmp_path):
    """open-instruct#1182: a killed build left holes, which were then filled with 0."""
    examples = random_pairs(12)
    count = 0

    def score(batch: PackedBatch) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return lengths_as_logps(batch)

    with pytest.raises(KeyboardInterrupt):
        fill(ReferenceStore(tmp_path, FINGERPRINT), packs(examples), score)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    rest = store.missing(examples)
    assert 0 < len(rest) < 12
    with pytest.raises(ReferenceMismatch, match=f"{len(rest)} of 12"):
        store.lookup(examples)
    fill(store, packs(rest), lengths_as_logps)
    assert ReferenceStore(tmp_path, FINGERPRINT).missing(examples) == []


def test_a_kill_without_a_last_word_loses_only_what_was_not_flushed(tmp_path, monkeypatch):
    """With a flush after every pack, as after every 20 seconds, a SIGKILL costs one pack."""
    monkeypatch.setattr(build, "_FLUSH_SECONDS", -1.0)
    examples = random_pairs(12)
    on_disk: list[int] = []

    def score(batch: PackedBatch) -> torch.Tensor:
        on_disk.append(len(ReferenceStore(tmp_path, FINGERPRINT)))  # what a process killed here would leave
        return lengths_as_logps(batch)

    all_packs = packs(examples)
    fill(ReferenceStore(tmp_path, FINGERPRINT), all_packs, score)
    done = np.cumsum([0, *(2 * len(pack.examples) for pack in all_packs)]).tolist()
    assert on_disk == done[:-1]


def test_a_frozen_model_is_scored_without_touching_the_global_generators(tmp_path):
    """A build that advances the generator makes the first run differ from the second."""
    scorer = scorer_of(tiny_policy("llama", torch.float32))
    examples = random_pairs(6)

    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    store = ReferenceStore(tmp_path, FINGERPRINT)
    fill(store, packs(examples), scorer.score)
    assert len(store) == 12
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_model_that_gives_no_number_stops_the_fill(tmp_path):
    examples = random_pairs(4)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    with pytest.raises(ReferenceMismatch, match="nan"):
        fill(store, packs(examples), lambda batch: lengths_as_logps(batch) * float("nan"))
    assert len(ReferenceStore(tmp_path, FINGERPRINT)) == 0
