"""The reference cache: what it returns is what was scored, or it refuses. A hole is never a number."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import random_examples, random_pairs
from tuningfork.errors import ReferenceMismatch
from tuningfork.records import Source, TokenAnswer, TokenExample
from tuningfork.reference.store import ReferenceStore, answer_key

FINGERPRINT = {"weights": "0123abcd", "dtype": "float32", "share_prompt": "True"}
# numpy leaves the file of a damaged archive to the garbage collector, which complains.
DAMAGED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


def logps_of(examples: list[TokenExample]) -> list[float]:
    """A number for each answer that depends on its content only, with all 53 bits in use."""
    return [
        -math.sqrt(float(e.prompt_ids.sum()) + 1) - math.sqrt(float(a.ids.sum())) for e in examples for a in e.answers
    ]


def filled(folder: Path, examples: list[TokenExample]) -> ReferenceStore:
    store = ReferenceStore(folder, FINGERPRINT)
    store.add(examples, logps_of(examples))
    store.flush()
    return store


def shard_of(folder: Path) -> Path:
    [shard] = folder.glob("rows-*.npz")
    return shard


def test_round_trip_to_the_last_bit(tmp_path):
    examples = random_examples([(3, (4, 5)), (0, (6,)), (7, (1, 2, 3))])
    filled(tmp_path / "cache", examples)
    again = ReferenceStore(tmp_path / "cache", FINGERPRINT)
    assert len(again) == 6
    assert again.missing(examples) == []
    assert again.lookup(examples).tolist() == logps_of(examples)
    # In any order and selection: nothing depends on a place in the data.
    assert again.lookup(examples[::-1]).tolist() == logps_of(examples[::-1])
    assert again.lookup([examples[2]]).dtype == np.float64
    assert again.lookup([]).tolist() == []


def test_what_was_not_flushed_is_missing_after_a_kill(tmp_path):
    examples = random_pairs(5)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    store.add(examples[:3], logps_of(examples[:3]))
    store.flush()
    store.add(examples[3:], logps_of(examples[3:]))  # and here the process is killed
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.missing(examples) == examples[3:]
    with pytest.raises(ReferenceMismatch, match=r"2 of 5 examples are not in the cache, first random:4"):
        again.lookup(examples)
    assert again.lookup(examples[:3]).tolist() == logps_of(examples[:3])


def test_an_example_with_one_answer_missing_is_missing(tmp_path):
    [pair] = random_pairs(1)
    chosen_only = replace(pair, answers=pair.answers[:1])
    store = filled(tmp_path, [chosen_only])
    assert store.missing([pair]) == [pair]
    with pytest.raises(ReferenceMismatch, match="1 of 1"):
        store.lookup([pair])


def test_half_a_write_is_no_shard(tmp_path):
    """A kill while a shard is written leaves a .partial file; it is neither read nor in the way."""
    examples = random_pairs(3)
    filled(tmp_path, examples[:2])
    shard = shard_of(tmp_path)
    (tmp_path / "rows-0123456789ab.npz.partial").write_bytes(shard.read_bytes()[:100])
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.missing(examples) == examples[2:]


def test_growing_data_scores_only_what_is_new(tmp_path):
    """open-instruct#1868: a cache of 8 and a run with 16, shuffled."""
    examples = random_pairs(16)
    filled(tmp_path, examples[:8])
    store = ReferenceStore(tmp_path, FINGERPRINT)
    shuffled = [examples[i] for i in np.random.default_rng(0).permutation(16)]
    new = store.missing(shuffled)
    assert [e.source.row for e in new] == [e.source.row for e in shuffled if e.source.row > 8]
    store.add(new, logps_of(new))
    store.flush()
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.lookup(shuffled).tolist() == logps_of(shuffled)
    assert len(list(tmp_path.glob("rows-*.npz"))) == 2


def test_the_same_content_is_scored_once_wherever_it_stands(tmp_path):
    [example] = random_pairs(1)
    elsewhere = replace(example, source=Source("other.jsonl", 99))
    store = ReferenceStore(tmp_path, FINGERPRINT)
    assert store.missing([example, elsewhere, example]) == [example]
    store.add([example], logps_of([example]))
    assert store.missing([elsewhere]) == []
    assert store.lookup([elsewhere]).tolist() == logps_of([example])


def test_the_same_file_name_with_other_content_is_other_content(tmp_path):
    """The key is what was scored, not where it was read."""
    old, new = random_examples([(5, (4, 4))], seed=1), random_examples([(5, (4, 4))], seed=2)
    assert old[0].source == new[0].source
    store = filled(tmp_path, old)
    assert store.missing(new) == new


def key(prompt, ids, mask=None) -> bytes:
    mask = [True] * len(ids) if mask is None else mask
    return answer_key(np.array(prompt, np.int32), np.array(ids, np.int32), np.array(mask, bool))


def test_the_key_tells_apart_all_that_changes_a_log_prob():
    base = key([1, 2], [3, 4])
    others = {
        "prompt": key([1, 9], [3, 4]),
        "answer": key([1, 2], [3, 9]),
        "order": key([1, 2], [4, 3]),
        "mask": key([1, 2], [3, 4], [True, False]),
        "border moved right": key([1, 2, 3], [4]),
        "border moved left": key([1], [2, 3, 4]),
        "no prompt": key([], [1, 2, 3, 4]),
        "longer": key([1, 2], [3, 4, 0]),
    }
    assert len({base, *others.values()}) == 1 + len(others)
    # Glued together without the lengths, these two would be the same bytes: four false in a mask are one id 0.
    masked = key([], [1, 2, 3, 4, 5], [False, False, False, False, True])
    assert masked != key([1, 2, 3, 4, 5], [0], [True])
    # and nothing else: an id's integer type is no content
    assert answer_key(np.array([1, 2], np.int64), np.array([3, 4], np.int64), np.array([1, 1], np.uint8)) == base


def test_a_changed_mask_is_scored_anew(tmp_path):
    [example] = random_examples([(3, (6, 6))])
    store = filled(tmp_path, [example])
    mask = example.answers[1].mask.copy()
    mask[2] = False
    changed = replace(example, answers=(example.answers[0], TokenAnswer(example.answers[1].ids, mask)))
    assert store.missing([changed]) == [changed]


def test_another_fingerprint_is_refused_and_both_values_are_printed(tmp_path):
    """direct-preference-optimization#34: a reference in another dtype is not this run's reference."""
    filled(tmp_path, random_pairs(2))
    ours = {**FINGERPRINT, "dtype": "bfloat16", "compiled": "True"}
    del ours["share_prompt"]
    with pytest.raises(ReferenceMismatch) as caught:
        ReferenceStore(tmp_path, ours)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "dtype: this run has 'bfloat16', the cache was built with 'float32'" in message
    assert "compiled: this run has 'True', the cache was built with 'absent'" in message
    assert "share_prompt: this run has 'absent', the cache was built with 'True'" in message
    assert "weights" not in message  # what agrees is not listed
    ReferenceStore(tmp_path, dict(reversed(FINGERPRINT.items())))  # the order of facts is no difference


@DAMAGED
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'"text"',
    ],
)
def test_a_damaged_fingerprint_is_refused(tmp_path, content):
    filled(tmp_path, random_pairs(2))
    (tmp_path / "fingerprint.json").write_bytes(content)
    with pytest.raises(ReferenceMismatch, match=r"fingerprint\.json"):
        ReferenceStore(tmp_path, FINGERPRINT)


def test_rows_of_unknown_origin_are_refused(tmp_path):
    filled(tmp_path, random_pairs(2))
    (tmp_path / "fingerprint.json").unlink()
    with pytest.raises(ReferenceMismatch):
        ReferenceStore(tmp_path, {**FINGERPRINT, "weights": "another model"})


def test_a_shard_of_another_cache_is_refused(tmp_path):
    """Two caches merged by copying files, or two runs that started one empty folder at the same moment."""
    examples = random_pairs(2)
    filled(tmp_path / "mine", examples[:1])
    other = ReferenceStore(tmp_path / "other", {**FINGERPRINT, "weights": "another model"})
    other.add(examples[1:], logps_of(examples[1:]))
    other.flush()
    shard = shard_of(tmp_path / "other")
    shard.rename(tmp_path / "mine" / shard.name)
    with pytest.raises(ReferenceMismatch):
        ReferenceStore(tmp_path / "mine", FINGERPRINT).lookup(examples)


def rewritten(shard: Path, **changes: np.ndarray) -> None:
    """The shard with some arrays changed, as another program would write it."""
    with np.load(shard) as old:
        arrays = {name: old[name] for name in old.files}
    shard.unlink()
    with shard.open("wb") as file:
        np.savez(file, **{**arrays, **changes})


def test_a_changed_value_with_the_old_digest_is_refused(tmp_path):
    examples = random_pairs(2)
    filled(tmp_path, examples)
    values = np.array(logps_of(examples))
    values[2] += 1e-9
    rewritten(shard_of(tmp_path), logps=values)
    with pytest.raises(ReferenceMismatch, match=rf"{shard_of(tmp_path).name} is damaged"):
        ReferenceStore(tmp_path, FINGERPRINT)


def test_a_changed_key_with_the_old_digest_is_refused(tmp_path):
    examples = random_pairs(2)
    filled(tmp_path, examples)
    with np.load(shard_of(tmp_path)) as shard:
        keys = shard["keys"][::-1].copy()  # the right numbers under the wrong answers
    rewritten(shard_of(tmp_path), keys=keys)
    with pytest.raises(ReferenceMismatch, match="damaged"):
        ReferenceStore(tmp_path, FINGERPRINT)


def test_a_shard_without_a_digest_is_refused(tmp_path):
    filled(tmp_path, random_pairs(2))
    shard = shard_of(tmp_path)
    with np.load(shard) as old:
        keys, logps = old["keys"], old["logps"]
    shard.unlink()
    np.savez(shard, keys=keys, logps=logps)
    with pytest.raises(ReferenceMismatch, match="damaged"):
        ReferenceStore(tmp_path, FINGERPRINT)


@DAMAGED
def test_a_shortened_shard_is_refused_at_any_length(tmp_path):
    filled(tmp_path, random_pairs(2))
    shard = shard_of(tmp_path)
    whole = shard.read_bytes()
    for length in range(0, len(whole), 13):
        shard.write_bytes(whole[:length])
        with pytest.raises(ReferenceMismatch, match="Remove that file: its rows are then scored again"):
            ReferenceStore(tmp_path, FINGERPRINT)
    shard.unlink()  # as the message says
    assert len(ReferenceStore(tmp_path, FINGERPRINT)) == 0


def flip_each_byte(shard: Path, examples: list[TokenExample]) -> list[object]:
    """For each byte of a shard: the rows that a store reads after that byte was flipped, or the error."""
    whole = shard.read_bytes()
    results: list[object] = []
    for place in range(len(whole)):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            results.append(ReferenceStore(shard.parent, FINGERPRINT).lookup(examples).tolist())
        except Exception as error:
            results.append(type(error))
    return results


@DAMAGED
def test_no_flipped_byte_ever_changes_a_number(tmp_path):
    examples = random_pairs(1)
    filled(tmp_path, examples)
    outcomes = flip_each_byte(shard_of(tmp_path), examples)
    rows = [outcome for outcome in outcomes if isinstance(outcome, list)]
    assert all(row == logps_of(examples) for row in rows)  # some bytes are dates, which nobody reads
    assert outcomes.count(ReferenceMismatch) > len(outcomes) / 2


@DAMAGED
def test_every_damage_is_explained(tmp_path):
    examples = random_pairs(1)
    filled(tmp_path, examples)
    outcomes = flip_each_byte(shard_of(tmp_path), examples)
    assert {outcome for outcome in outcomes if not isinstance(outcome, list)} == {ReferenceMismatch}


def test_two_runs_fill_one_folder(tmp_path):
    examples = random_pairs(6)
    first, second = ReferenceStore(tmp_path, FINGERPRINT), ReferenceStore(tmp_path, FINGERPRINT)
    first.add(examples[:4], logps_of(examples[:4]))
    second.add(examples[2:], logps_of(examples[2:]))  # both score the two in the middle, to the same bits
    first.flush()
    second.flush()
    both = ReferenceStore(tmp_path, FINGERPRINT)
    assert len(both) == 12
    assert both.lookup(examples).tolist() == logps_of(examples)
    assert json.loads((tmp_path / "fingerprint.json").read_text()) == FINGERPRINT


def test_flush_writes_each_row_once(tmp_path):
    examples = random_pairs(3)
    store = filled(tmp_path, examples)
    store.flush()
    store.flush()
    assert len(list(tmp_path.glob("rows-*.npz"))) == 1
    store.add(examples[:1], logps_of(examples[:1]))
    assert store.lookup(examples).tolist() == logps_of(examples)  # readable before it is flushed


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused(tmp_path, bad):
    store = ReferenceStore(tmp_path, FINGERPRINT)
    with pytest.raises(ReferenceMismatch, match=str(bad)):
        store.add(random_pairs(1), [bad, -2.0])
    assert len(store) == 0


def test_a_refused_pack_stores_nothing(tmp_path):
    store = ReferenceStore(tmp_path, FINGERPRINT)
    with pytest.raises(ReferenceMismatch):
        store.add(random_pairs(2), [-1.0, -2.0, float("nan"), -3.0])
    assert len(store) == 0


def test_a_refused_number_is_traced_to_its_example(tmp_path):
    store = ReferenceStore(tmp_path, FINGERPRINT)
    with pytest.raises(ReferenceMismatch, match="random:2"):
        store.add(random_pairs(2), [-1.0, -2.0, float("nan"), -3.0])


def test_a_wrong_number_of_log_probs_is_an_error(tmp_path):
    store = ReferenceStore(tmp_path, FINGERPRINT)
    with pytest.raises(ValueError, match="zip"):
        store.add(random_pairs(2), [-1.0, -2.0, -3.0])
