"""The reference cache: what it returns is what was scored, or it refuses. A hole is never a number."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import random_examples, random_pairs
from tuningfork.data.token_table import Subset, TokenTable, columns_of
from tuningfork.errors import ReferenceMismatch, RunFolderError
from tuningfork.records import Source, TokenAnswer, TokenExample
from tuningfork.reference import entries, shards
from tuningfork.reference.store import ReferenceStore

FINGERPRINT = {"weights": "0123abcd", "dtype": "float32", "share": "True"}


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
    [shard] = folder.glob("rows-*.bin")
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


def rewritten(folder: Path, change) -> Path:
    """The folder's one shard with other content under the checksum of that content, as anybody can write it."""
    origin = json.dumps(sorted(FINGERPRINT.items())).encode()
    shard = shards.read_shard(shard_of(folder), origin)
    assert shard.path is not None
    contents, logps = change(np.array(shard.contents), np.array(shard.logps))
    shard.path.unlink()
    digest = shards._digest(contents.tobytes() + logps.tobytes(), origin)
    path = folder / f"rows-{digest}.bin"
    path.write_bytes(contents.tobytes() + logps.tobytes())
    return path


UNLIKE = {
    "the last answer is gone": lambda contents, logps: (contents[:-1], logps[:-1]),
    "the first answer is gone": lambda contents, logps: (contents[1:], logps[1:]),
    "an answer in between is gone": lambda contents, logps: (np.delete(contents, 4), np.delete(logps, 4)),
    "one too many": lambda contents, logps: (np.insert(contents, 4, contents[4]), np.insert(logps, 4, -1.0)),
    "one too many at the end": lambda contents, logps: (np.append(contents, contents[-1:]), np.append(logps, -1.0)),
    "all are one example's": lambda contents, logps: (np.full_like(contents, contents[0]), logps),
}
NEVER_WRITTEN = {
    "not in order": lambda contents, logps: (contents[::-1].copy(), logps),
    "one that is NaN": lambda contents, logps: (contents, np.where(np.arange(len(logps)) == 3, np.nan, logps)),
    "one that is infinite": lambda contents, logps: (contents, np.full(len(logps), -np.inf)),
}


@pytest.mark.parametrize("change", UNLIKE.values(), ids=list(UNLIKE))
def test_a_shard_with_other_answers_than_an_example_has_is_refused(tmp_path, change):
    """Its checksum is right, and shows what a disk has done, not what somebody wrote."""
    examples = random_pairs(5)
    filled(tmp_path, examples)
    path = rewritten(tmp_path, change)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    for ask in (store.lookup, store.missing):
        with pytest.raises(ReferenceMismatch, match=rf"{path.name} has other answers of an example than there are"):
            ask(examples)


@pytest.mark.parametrize("change", NEVER_WRITTEN.values(), ids=list(NEVER_WRITTEN))
def test_a_shard_that_nobody_writes_is_refused(tmp_path, change):
    filled(tmp_path, random_pairs(5))
    path = rewritten(tmp_path, change)
    with pytest.raises(
        ReferenceMismatch, match=rf"{path.name} holds what tuningfork does not write\. Remove that file"
    ):
        ReferenceStore(tmp_path, FINGERPRINT)


def test_half_a_write_is_no_shard(tmp_path):
    """A kill while a shard is written leaves a .partial file; it is neither read nor in the way, and goes. A file that
    somebody else calls so stays."""
    examples = random_pairs(3)
    filled(tmp_path, examples[:2])
    shard = shard_of(tmp_path)
    rest, others = tmp_path / f".{shard.name}.tuningfork-{'0a' * 8}.partial", tmp_path / "rows-0123456789ab.bin.partial"
    for half in (rest, others):
        half.write_bytes(shard.read_bytes()[:100])
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.missing(examples) == examples[2:]
    assert others.exists() and not rest.exists()


@pytest.mark.parametrize("name", ["fingerprint.json", "rows-0123.bin"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_a_file_of_the_cache_that_is_none_is_refused(tmp_path, name, kind):
    """A pipe would wait for ever; a link may lead to whatever a stranger wants to be read or replaced."""
    filled(tmp_path / "cache", random_pairs(2))
    path, elsewhere = tmp_path / "cache" / name, tmp_path / "elsewhere"
    path.unlink(missing_ok=True)
    elsewhere.write_text("precious")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(elsewhere if kind == "link" else "absent")
    with pytest.raises(RunFolderError, match=rf"{name} is a (link|named pipe)"):
        ReferenceStore(tmp_path / "cache", FINGERPRINT)
    assert elsewhere.read_text() == "precious" and os.path.lexists(path)


def test_a_cache_folder_may_be_a_link(tmp_path):
    examples = random_pairs(2)
    filled(tmp_path / "disk", examples)
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    assert ReferenceStore(tmp_path / "cache", FINGERPRINT).missing(examples) == []


@pytest.mark.parametrize("kind", ["link", "link to nothing", "file"])
def test_an_entry_that_is_no_folder_is_refused(tmp_path, kind):
    """The cache as a whole may lie on another disk; an entry's name in it leads nowhere else."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    entry, elsewhere = entries.place(tmp_path / "cache", FINGERPRINT), tmp_path / "elsewhere"
    elsewhere.mkdir()
    entry.touch() if kind == "file" else entry.symlink_to(elsewhere if kind == "link" else tmp_path / "absent")
    with pytest.raises(RunFolderError, match=rf"{entry.name} is a (link|file)"):
        entries.open_entry(tmp_path / "cache", FINGERPRINT)
    assert not list(elsewhere.iterdir()) and not (tmp_path / "absent").exists()
    entry.unlink()
    assert entries.open_entry(tmp_path / "cache", FINGERPRINT).folder == entry


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
    assert len(list(tmp_path.glob("rows-*.bin"))) == 2


def test_a_process_may_join_what_another_is_just_writing_too(tmp_path, monkeypatch):
    """Two that score the same examples write the same files; the first joins its own before the second reads one."""
    examples = random_pairs(6)
    first, second = (ReferenceStore(tmp_path, FINGERPRINT) for _ in range(2))
    for part in (examples[:3], examples[3:]):
        first.add(part, logps_of(part))
        first.flush()
    read, joined = shards.read_shard, []

    def late(path, origin):
        if not joined:
            joined.append(path)
            first.join()
            assert not path.exists()
        return read(path, origin)

    monkeypatch.setattr(shards, "read_shard", late)
    for part in (examples[:3], examples[3:]):
        second.add(part, logps_of(part))
        second.flush()
    assert joined
    for store in (first, second, ReferenceStore(tmp_path, FINGERPRINT)):
        assert store.lookup(examples).tolist() == logps_of(examples) and len(store) == 12
    second.join()
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.lookup(examples).tolist() == logps_of(examples) and len(again) == 12


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
    del ours["share"]
    with pytest.raises(ReferenceMismatch) as caught:
        ReferenceStore(tmp_path, ours)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "dtype: this run has 'bfloat16', the cache was built with 'float32'" in message
    assert "compiled: this run has 'True', the cache was built with 'absent'" in message
    assert "share: this run has 'absent', the cache was built with 'True'" in message
    assert "weights" not in message  # what agrees is not listed
    ReferenceStore(tmp_path, dict(reversed(FINGERPRINT.items())))  # the order of facts is no difference


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


def columns(shard: Path) -> tuple[np.ndarray, np.ndarray]:
    """A shard's two columns as its file has them, without any code of ours: contents, log-probs."""
    raw = shard.read_bytes()
    split = len(raw) // 24 * 16
    return np.frombuffer(raw[:split], "S16"), np.frombuffer(raw[split:], "<f8")


def test_a_shard_by_hand(tmp_path):
    """Contents in ascending order, each once for every answer of its example; then the log-probs."""
    examples = random_examples([(3, (4, 5)), (0, (6,)), (7, (1, 2, 3))])
    filled(tmp_path, examples)
    contents, logps = columns(shard_of(tmp_path))
    sure = {e.content.rstrip(b"\0"): logps_of([e]) for e in examples}
    assert contents.tolist() == [content for content in sorted(sure) for _ in sure[content]]
    assert logps.tolist() == [logp for content in sorted(sure) for logp in sure[content]]


def test_a_changed_value_under_the_old_name_is_refused(tmp_path):
    filled(tmp_path, random_pairs(2))
    shard = shard_of(tmp_path)
    contents, logps = columns(shard)
    shard.write_bytes(contents.tobytes() + np.nextafter(logps, 0).tobytes())
    with pytest.raises(ReferenceMismatch, match=rf"{shard.name} is damaged"):
        ReferenceStore(tmp_path, FINGERPRINT)


def test_a_changed_content_under_the_old_name_is_refused(tmp_path):
    filled(tmp_path, random_pairs(2))
    shard = shard_of(tmp_path)
    contents, logps = columns(shard)
    shard.write_bytes(contents[::-1].tobytes() + logps.tobytes())  # the right numbers under the wrong examples
    with pytest.raises(ReferenceMismatch, match="damaged"):
        ReferenceStore(tmp_path, FINGERPRINT)


def test_a_shard_under_another_name_is_refused(tmp_path):
    filled(tmp_path, random_pairs(2))
    shard = shard_of(tmp_path)
    shard.rename(tmp_path / "rows-of-mine.bin")
    with pytest.raises(ReferenceMismatch, match=r"rows-of-mine\.bin is damaged"):
        ReferenceStore(tmp_path, FINGERPRINT)


def test_a_shortened_shard_is_refused_at_any_length(tmp_path):
    filled(tmp_path, random_pairs(2))
    shard = shard_of(tmp_path)
    whole = shard.read_bytes()
    for length in range(0, len(whole), 7):
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


def test_every_flipped_byte_is_noticed(tmp_path):
    examples = random_pairs(1)
    filled(tmp_path, examples)
    outcomes = flip_each_byte(shard_of(tmp_path), examples)
    assert len(outcomes) == 2 * 24 and set(outcomes) == {ReferenceMismatch}


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
    assert len(list(tmp_path.glob("rows-*.bin"))) == 1
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
    with pytest.raises(ValueError, match="3 log-probs for 4 answers"):
        store.add(random_pairs(2), [-1.0, -2.0, -3.0])


def all_at_once(examples: list[TokenExample]) -> Subset:
    """The same examples in columns, as a run has them."""
    table = TokenTable("f", columns_of(examples))
    return Subset([Subset([table]), examples[:1]])


def test_columns_and_lists_are_looked_up_alike(tmp_path):
    examples = random_examples([(3, (4, 5)), (0, (6,)), (7, (1, 2, 3)), (2, (2, 2))])
    store = filled(tmp_path, examples[1:3])
    of_columns = store.missing(all_at_once(examples))
    assert isinstance(of_columns, Subset) and [e.content for e in of_columns] == [
        e.content for e in (examples[0], examples[3])
    ]
    store.add(of_columns, logps_of(list(of_columns)))
    assert store.lookup(all_at_once(examples)).tolist() == logps_of([*examples, examples[0]])
    with pytest.raises(ReferenceMismatch, match="1 of 2 examples are not in the cache, first random:2"):
        store.lookup([examples[0], random_pairs(2, seed=5)[1]])


def test_many_small_shards_become_one_and_rows_stay(tmp_path):
    """A scoring of hours flushes hundreds of times; every moment of it is readable."""
    old, new = random_pairs(60)[:10], random_pairs(60)[10:]
    filled(tmp_path, old)
    [first] = tmp_path.glob("rows-*")
    store = ReferenceStore(tmp_path, FINGERPRINT)
    for n, example in enumerate(new):
        store.add([example], logps_of([example]))
        store.flush()
        assert len(list(tmp_path.glob("rows-*"))) <= 17
        if n % 10 == 5:
            assert ReferenceStore(tmp_path, FINGERPRINT).lookup(new[: n + 1]).tolist() == logps_of(new[: n + 1])
    store.join()
    assert len(list(tmp_path.glob("rows-*"))) == 2 and first.exists()  # another process's rows stay apart
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert again.lookup([*new, *old]).tolist() == logps_of([*new, *old]) and len(again) == len(store) == 120
    assert [(path.name, places.tolist()) for path, places in again.inherited(old)] == [(first.name, [*range(10)])]


def test_a_store_that_opens_while_another_joins_its_shards_reads_all(tmp_path, monkeypatch):
    examples = random_pairs(4)
    store = ReferenceStore(tmp_path, FINGERPRINT)
    for example in examples:
        store.add([example], logps_of([example]))
        store.flush()
    read, joined = shards.read_shard, []

    def reading(path: Path, origin: bytes) -> shards.Shard:
        if not joined:  # the folder was listed, and now its files go
            joined.append(True)
            store.join()
        return read(path, origin)

    monkeypatch.setattr(shards, "read_shard", reading)
    again = ReferenceStore(tmp_path, FINGERPRINT)
    assert joined and again.lookup(examples).tolist() == logps_of(examples)


def test_only_what_was_there_before_is_inherited(tmp_path):
    examples = random_pairs(6)
    filled(tmp_path, examples[:2])
    filled(tmp_path, [*examples[2:4], examples[0]])
    store = ReferenceStore(tmp_path, FINGERPRINT)
    store.add(examples[4:], logps_of(examples[4:]))
    store.flush()
    served = {tuple(places.tolist()) for _, places in store.inherited(examples)}
    assert served == {(0, 1), (2, 3)}
    assert store.inherited(examples[4:]) == []


@given(st.lists(st.integers(0, 11), max_size=12), st.lists(st.integers(0, 11), max_size=12), st.integers(1, 4))
def test_whatever_is_added_and_flushed_is_found_once(tmp_path_factory, added: list[int], asked: list[int], every: int):
    """Against a dict: contents in any order, repeated within a flush and over flushes and processes."""
    folder = tmp_path_factory.mktemp("cache")
    examples = random_examples([(n % 3, [1 + n % 2] * (1 + n % 3)) for n in range(12)], vocab=1000)
    truth: dict[int, list[float]] = {}
    store = ReferenceStore(folder, FINGERPRINT)
    for count, n in enumerate(added):
        truth[n] = logps_of([examples[n]])
        store.add([examples[n]], truth[n])
        if count % every == 0:
            store.flush()
        if count % 5 == 4:
            store = ReferenceStore(folder, FINGERPRINT) if count % every == 0 else store
    known = [n for n in asked if n in truth]
    chosen = [examples[n] for n in known]
    assert store.lookup(chosen).tolist() == [logp for n in known for logp in truth[n]]
    assert len(store) == sum(map(len, truth.values()))
    assert [e.source.row - 1 for e in store.missing([examples[n] for n in asked])] == list(
        dict.fromkeys(n for n in asked if n not in truth)
    )
