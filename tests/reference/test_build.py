"""Filling the cache with the frozen model: every missing example, whatever happens meanwhile."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.tiny import head_of, limits_for, random_pairs, tiny_policy
from tuningfork.data.loader import build_packs
from tuningfork.errors import ReferenceMismatch
from tuningfork.records import PackedBatch
from tuningfork.reference import build
from tuningfork.reference.build import fill
from tuningfork.reference.store import ReferenceStore

FINGERPRINT = {"weights": "any"}


def lengths_as_logps(batch: PackedBatch) -> torch.Tensor:
    return -torch.tensor([float(n) for n in batch.answer_lengths], dtype=torch.float64)


def packs(examples):
    return build_packs(examples, limits_for(examples, tokens=128))


def test_all_missing_examples_are_scored_and_stored(tmp_path):
    examples = random_pairs(9)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    told: list[int] = []
    fill(store, store.missing(examples), packs, lengths_as_logps, told.append)
    assert sum(told) == 9 and len(told) > 1
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.lookup(examples).tolist() == [-float(len(a.ids)) for e in examples for a in e.answers]
    fill(again, again.missing(examples), packs, lambda batch: pytest.fail("scored what is stored"))


def test_windows_leave_no_example_between_them(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_WINDOW", 4)
    examples = random_pairs(10)
    sizes: list[int] = []

    def packs_of(some):
        sizes.append(len(some))
        return packs(some)

    store = ReferenceStore(tmp_path, FINGERPRINT)
    fill(store, examples, packs_of, lengths_as_logps)
    assert sizes == [4, 4, 2]
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
        fill(ReferenceStore(tmp_path, FINGERPRINT), examples, packs, score)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    rest = store.missing(examples)
    assert 0 < len(rest) < 12
    with pytest.raises(ReferenceMismatch, match=f"{len(rest)} of 12"):
        store.lookup(examples)
    fill(store, rest, packs, lengths_as_logps)
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
    fill(ReferenceStore(tmp_path, FINGERPRINT), examples, packs, score)
    done = np.cumsum([0, *(2 * len(pack.examples) for pack in all_packs)]).tolist()
    assert on_disk == done[:-1]


def test_a_frozen_model_is_scored_without_touching_the_global_generators(tmp_path):
    """A build that advances the generator makes the first run differ from the second."""
    policy = tiny_policy("llama", torch.float32)
    head = head_of(policy)
    examples = random_pairs(6)

    def score(batch: PackedBatch) -> torch.Tensor:
        with torch.no_grad():
            return head.score(policy.hidden_rows(batch), policy.head_weight, batch)

    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    store = ReferenceStore(tmp_path, FINGERPRINT)
    fill(store, examples, packs, score)
    assert len(store) == 12
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_model_that_gives_no_number_stops_the_fill(tmp_path):
    examples = random_pairs(4)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    with pytest.raises(ReferenceMismatch, match="nan"):
        fill(store, examples, packs, lambda batch: lengths_as_logps(batch) * float("nan"))
    assert len(ReferenceStore(tmp_path, FINGERPRINT)) == 0
