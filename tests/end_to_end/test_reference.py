"""The reference through the command line: one cache, exact, shared, grown, and never believed when it is wrong."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from tests.end_to_end.workbench import Child, Job, make_model, make_pairs, make_tokenizer, write_rows
from tuningfork.data.packing.loader import EpochOrder
from tuningfork.data.prepare import prepare_examples
from tuningfork.models.hf.load import load_tokenizer
from tuningfork.recipe.load import load_run_config
from tuningfork.records import TokenExample
from tuningfork.reference import build
from tuningfork.reference.entries import place
from tuningfork.reference.store import ReferenceStore


def rows_of(cache: Path) -> dict[tuple[bytes, int], float]:
    """Everything in a cache folder, (content, answer) -> log-prob; none may stand in two shards."""
    rows: dict[tuple[bytes, int], float] = {}
    for path in cache.rglob("rows-*.bin"):
        raw = path.read_bytes()
        split = len(raw) // 24 * 16
        count: Counter[bytes] = Counter()
        for content, logp in zip(np.frombuffer(raw[:split], "V16"), np.frombuffer(raw[split:]), strict=True):
            place = (content.tobytes(), count[content.tobytes()])
            assert place not in rows
            rows[place] = float(logp)
            count[content.tobytes()] += 1
    return rows


def write_shard(cache: Path, rows: dict[tuple[bytes, int], float]) -> Path:
    """A shard with these rows, under a name that fits them and their cache."""
    origin = json.dumps(sorted(json.loads((cache / "fingerprint.json").read_text()).items())).encode()
    ordered = sorted(rows)
    raw = b"".join(content for content, _ in ordered) + np.array([rows[key] for key in ordered]).tobytes()
    path = cache / f"rows-{xxhash.xxh3_128_hexdigest(raw + origin)}.bin"
    path.write_bytes(raw)
    return path


def examples_of(job: Job) -> Sequence[TokenExample]:
    config = load_run_config(None, job.arguments("train")[1:], "tuningfork train")
    return prepare_examples(config.data.train, load_tokenizer(config.model.path), config.data, 300)[0]


def keys_of_step(job: Job, step: int) -> list[tuple[bytes, int]]:
    """The cache's keys of a step's answers (steps from 0)."""
    examples, train = examples_of(job), load_run_config(None, job.arguments("train")[1:], "tuningfork train").train
    order = EpochOrder.plan(len(examples), train.examples_per_step, train.seed, train.epochs, train.max_steps)
    return [(examples[i].content, answer) for i in order.indices(step) for answer in range(2)]


@pytest.fixture
def job(job: Job) -> Job:
    """The job with all 40 pairs in one step, so that the step-0 check covers them all."""
    return job.but({"train.examples_per_step": 40})


@pytest.mark.parametrize("tokens, seed, examples_per_step", [(256, 1, 3), (4096, 2, 7)])
def test_a_cache_from_other_packs_serves_training_to_the_bit(
    job: Job, tokens: int, seed: int, examples_per_step: int
) -> None:
    """Built with another pack size, seed and batch size: the margin of step 1 is exactly 0 all the same."""
    others = {"pack.tokens": tokens, "train.seed": seed, "train.examples_per_step": examples_per_step}
    assert "80 answers cached" in job.but(others).done("reference").out
    outcome = job.done()
    assert "step-0 check: margin exactly 0 for all 40 pairs" in outcome.out and "scoring" not in outcome.out
    first = job.metrics()[0]
    assert first["rewards/margin"] == first["rewards/chosen"] == first["rewards/rejected"] == 0.0


def test_head_chunks_do_not_decide_whether_a_cache_fits(job: Job) -> None:
    """head_chunk_rows changes no number, as its help says: a cache built with 7 serves a run with the default."""
    job.but({"objective.head_chunk_rows": 7}).done("reference")
    job.done()


def test_answers_of_one_token_are_exact_in_any_pack(job: Job) -> None:
    """Answers yes and no, no end token; a step of one pair has two logit rows, the reference's packs had many."""
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.eos_token = None
    make_model(job.folder / "model", tokenizer=tokenizer)
    rows = [{"prompt": row["prompt"], "chosen": "y", "rejected": "n"} for row in make_pairs(40)]
    write_rows(job.folder / "pairs.jsonl", rows)
    job = job.but({"model.path": job.folder / "model", "data.train": job.folder / "pairs.jsonl"})
    job = job.but({"data.template": "none", "pack.tokens": 2048, "train.max_steps": 1})
    job.done("reference")
    for seed in range(4):
        job.elsewhere(f"seed-{seed}").but({"train.seed": seed, "train.examples_per_step": 1}).done()


def test_another_number_of_threads_is_not_called_a_spoiled_cache(job: Job) -> None:
    """Built with 1 thread, trained with 2: exact, or refused because of the threads."""
    job.done("reference")
    outcome = Child(job.arguments("train"), job.folder, partial(torch.set_num_threads, 2)).wait()
    assert outcome.status == 0 or "threads: this run has" in outcome.err


def test_reference_leaves_no_run_folder(job: Job) -> None:
    """`tuningfork reference` fills the cache and nothing else."""
    job.done("reference")
    assert not job.run.exists()
    assert len(rows_of(job.cache)) == 80 and {path.suffix for path in job.entry.iterdir()} == {".json", ".bin"}


def test_a_second_start_scores_nothing(job: Job) -> None:
    """The fingerprint of the same model is the same: every row hits, no shard is added."""
    assert "scoring the reference: 40/40 examples" in job.done("reference").out
    before = sorted(job.entry.iterdir())
    for outcome in (job.done("reference"), job.done()):
        assert "scoring" not in outcome.out
    assert sorted(job.entry.iterdir()) == before


def test_the_cache_grows_with_the_data(job: Job) -> None:
    """20 rows more: only those are scored, and the shards that are there keep their bytes."""
    job.done("reference")
    before = {path: path.read_bytes() for path in job.entry.iterdir()}
    write_rows(job.folder / "more.jsonl", [*make_pairs(20, seed=77), *make_pairs(40)])
    more = job.but({"data.train": job.folder / "more.jsonl"})
    assert "scoring the reference: 20/20 examples" in more.done("reference").out
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(rows_of(job.cache)) == 120
    assert "scoring" not in more.done().out


def test_a_subset_in_another_order_needs_no_scoring(job: Job) -> None:
    """Rows are found by content: half of the file, backwards, with some rows twice."""
    job.done("reference")
    rows = make_pairs(40)[::-2]
    write_rows(job.folder / "half.jsonl", rows + rows[:5])
    outcome = job.but({"data.train": job.folder / "half.jsonl"}).done()
    assert "scoring" not in outcome.out and "margin exactly 0" in outcome.out


def test_a_number_changed_in_the_cache_stops_the_run_before_its_first_step(job: Job) -> None:
    """One log-prob of a pair of the first step is off by 1e-6, in a shard whose name fits."""
    job = job.but({"train.examples_per_step": 4})
    job.done("reference")
    (shard,) = job.entry.glob("rows-*.bin")
    rows = rows_of(job.cache)
    rows[keys_of_step(job, 0)[3]] += 1e-6
    shard.unlink()
    path = write_shard(job.entry, rows)
    message = job.refused()
    assert f"{path}: 1 log-prob, worst " in message
    assert "pairs.jsonl:" in message and "answer 1: model -" in message
    assert not (job.run / "checkpoints").exists() and not (job.run / "metrics.jsonl").exists()


def test_the_step_0_check_sees_what_re_scoring_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large shard only some rows are scored again; the first step's are compared all the same."""
    monkeypatch.setattr("tuningfork.reference.build.RESCORED", 1)
    job.done("reference")
    (shard,) = job.entry.glob("rows-*.bin")
    rows = rows_of(job.cache)
    scored: list[bytes] = []
    choose = build.to_rescore

    def choosing(store: Any, parts: Any) -> Any:
        chosen = choose(store, parts)
        scored.extend(parts[part][int(place)].content for part, places in chosen for place in places)
        return chosen

    monkeypatch.setattr("tuningfork.train.setup.reference.to_rescore", choosing)
    job.done("reference")
    assert len(scored) == 1
    rows[next(key for key in rows if key[0] != scored[0])] += 1e-6
    shard.unlink()
    write_shard(job.entry, rows)
    assert "step-0 check: 1 of 80 log-probs of the starting model are not those in the cache" in job.refused()


def test_rows_that_other_code_scored_are_refused_wherever_they_lie(job: Job) -> None:
    """All rows of the first step are right, all others in two older shards wrong, under the right fingerprint: what an
    attention of another scale leaves behind that no digest knows of. The shards are named; without them it trains."""
    job = job.but({"train.examples_per_step": 4})
    job.done("reference")
    (shard,) = job.entry.glob("rows-*.bin")
    rows, first = rows_of(job.cache), set(keys_of_step(job, 0))
    shard.unlink()
    write_shard(job.entry, {key: logp for key, logp in rows.items() if key in first})
    wrong = [key for key in rows if key not in first]
    half = {key for key, _ in wrong[: len(wrong) // 2]}
    paths = [
        write_shard(job.entry, {key: 1.05 * rows[key] for key in wrong if (key[0] in half) == is_first})
        for is_first in (True, False)
    ]
    for outcome in (job.refused(), job.refused("reference")):
        assert all(f"{path}: " in outcome for path in paths) and "Remove these files" in outcome
    for path in paths:
        path.unlink()
    assert "scoring the reference: 36/36 examples" in job.done().out
    assert rows_of(job.cache) == rows


def test_wrong_rows_of_the_held_out_set_are_refused(job: Job, shelf: Path) -> None:
    """A few held-out rows beside the training rows in one shard: both sets are looked at, by every command."""
    job = job.but({"data.eval": shelf / "held_out.jsonl"})
    job.done("reference")
    (shard,) = job.entry.glob("rows-*.bin")
    rows, trained = rows_of(job.cache), {example.content for example in examples_of(job)}
    shard.unlink()
    held_out = [key for key in rows if key[0] not in trained]
    assert len(held_out) == 22
    path = write_shard(job.entry, rows | {key: rows[key] - 1e-9 for key in held_out})
    # Of 51 examples a tenth is scored again, two of each set; eval has the held-out ones alone, and looks at one.
    commands = {"train": 4, "reference": 4, "eval": 2}
    for command, count in commands.items():
        options = ("--policy", str(shelf / "model")) if command == "eval" else ()
        message = job.refused(command, *options)
        assert f"{path}: {count} log-probs, worst {shelf / 'held_out.jsonl'}:" in message


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_a_shard_with_damaged_bytes_is_named(job: Job, damage: str) -> None:
    """Removing that file, as the message says, makes good the damage."""
    job.done("reference")
    (shard,) = job.entry.glob("rows-*.bin")
    before, content = rows_of(job.cache), bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes({"cut": bytes(content[: len(content) // 2]), "flipped": bytes(content), "emptied": b""}[damage])
    message = job.refused()
    assert f"{shard} is damaged" in message and "Remove that file" in message
    shard.unlink()
    job.done()
    assert rows_of(job.cache) == before


def test_a_damaged_fingerprint_is_named(job: Job) -> None:
    """fingerprint.json cut short: refused, not guessed."""
    job.done("reference")
    (job.entry / "fingerprint.json").write_text('{"weights": "12')
    assert f"{job.entry}/fingerprint.json is damaged" in job.refused("reference")


def entries_of(cache: Path) -> dict[str, dict[str, str]]:
    """Name -> fingerprint of each entry."""
    return {path.name: json.loads((path / "fingerprint.json").read_text()) for path in cache.iterdir()}


def test_one_cache_serves_any_number_of_models(job: Job, shelf: Path) -> None:
    """Each has an entry of its own, which is found again; the files of the others keep their bytes, and it is said
    which entry is used and in what it differs from the others."""
    out = job.done("reference").out
    (ours,) = entries_of(job.cache)
    assert f"reference cache: {job.cache / ours}, new\n" in out
    before = {path: path.read_bytes() for path in job.entry.iterdir()}
    other = job.but({"model.path": shelf / "other-model"}).elsewhere("other")
    out = other.done().out
    (theirs,) = entries_of(job.cache).keys() - {ours}
    said = f"reference cache: {job.cache / theirs}, new; of 1 other entry the nearest, {ours}, differs in weights\n"
    assert said in out and "margin exactly 0" in out and "scoring the reference: 40/40 examples" in out
    assert len(rows_of(job.cache / ours)) == len(rows_of(job.cache / theirs)) == 80
    for each, name in ((job, ours), (other.elsewhere("again"), theirs)):
        out = each.done().out
        assert f"reference cache: {job.cache / name}, 80 answers\n" in out and "scoring" not in out
    assert {path: path.read_bytes() for path in (job.cache / ours).iterdir()} == before


@pytest.mark.parametrize("share", ["none", "prompt"])
def test_every_way_to_share_has_one_entry(job: Job, share: str) -> None:
    """A row's bits depend on the tokens of its path alone; some of what is cached is scored again, and is the same."""
    job.but({"pack.share": "tree"}).done("reference")
    out = job.but({"pack.share": share}).done("reference").out
    assert f"reference cache: {job.entry}, 80 answers\n" in out and "scoring the reference" not in out


def test_another_setup_has_an_entry_of_its_own(job: Job, shelf: Path) -> None:
    """What may change a bit of a log-prob is part of the fingerprint; the nearest entry is one of the same model."""
    job.but({"model.path": shelf / "other-model"}).done("reference")
    job.done("reference")
    out = job.but({"model.dtype": "bfloat16"}).done("reference").out
    said = "differs in dtype (here 'bfloat16', there 'float32')"
    assert "of 2 other entries the nearest, " in out and said in out and "scoring the reference: 40/40" in out
    assert len(list(job.cache.iterdir())) == 3


@pytest.mark.parametrize("fact", ["code", "model code", "triton"])
def test_what_other_code_scored_is_not_used(job: Job, fact: str) -> None:
    """As after an update of tuningfork, Triton or the model's code in transformers: a new entry beside the old."""
    job.done("reference")
    facts = json.loads((job.entry / "fingerprint.json").read_text()) | {fact: "of yesterday"}
    old, rows = job.entry, rows_of(job.entry)
    (old / "fingerprint.json").write_text(json.dumps(facts))
    assert f"{old} holds the reference log-probs of another set-up" in job.refused("reference")  # by hand, in its place
    old.rename(place(job.cache, facts))
    out = job.done("reference").out
    assert f"differs in {fact}" in out and "scoring the reference: 40/40 examples" in out
    assert old.exists() and rows_of(place(job.cache, facts)) == rows


def test_a_config_that_changes_the_numbers_is_another_model(job: Job) -> None:
    """Equal weights under another rotary base have another entry; under another name of the folder they have not."""
    make_model(job.folder / "a")
    make_model(job.folder / "b", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    make_model(job.folder / "c")
    a, b, c = (job.but({"model.path": job.folder / name}) for name in "abc")
    a.done("reference")
    assert "differs in weights, config\n" in b.done("reference").out
    assert "scoring" not in c.done("reference").out


def test_a_cache_of_an_earlier_version_stays_and_is_not_used(job: Job) -> None:
    """It had fingerprint and rows in the folder itself."""
    job.done("reference")
    for path in (entry := job.entry).iterdir():
        path.rename(job.cache / path.name)
    entry.rmdir()
    before = {path: path.read_bytes() for path in job.cache.iterdir()}
    out = job.done("reference").out
    assert f"{job.cache}/fingerprint.json and the rows beside it are of an earlier version's cache; they stay" in out
    assert "scoring the reference: 40/40 examples" in out
    assert all(path.read_bytes() == content for path, content in before.items())


def die_scoring() -> None:
    """kill -9 oneself when more than half of the answers are scored and every pack was flushed."""
    add = ReferenceStore.add

    def adding(self: ReferenceStore, examples: Any, logps: Any) -> None:
        if len(self) > 40:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, examples, logps)
        self.flush()

    ReferenceStore.add = adding  # type: ignore[method-assign]


def test_a_killed_build_goes_on_where_it_was(job: Job, filled_cache: Path) -> None:
    """What was flushed is kept, the rest is scored, and the numbers are those of an unbroken build."""
    small = job.but({"pack.tokens": 256})
    assert Child(small.arguments("reference"), job.folder, die_scoring).wait().status == -signal.SIGKILL
    kept = rows_of(job.cache)
    assert 40 < len(kept) < 80
    missing = (80 - len(kept)) // 2
    assert f"scoring the reference: {missing}/{missing} examples" in small.done("reference").out
    complete, unbroken = rows_of(job.cache), rows_of(filled_cache)
    assert len(complete) == 80 and all(unbroken[key] == logp for key, logp in complete.items())


def die_flushing() -> None:
    """kill -9 oneself in the middle of writing the first shard."""
    fsync: Any = os.fsync
    count = iter(range(1, 1000))

    def syncing(handle: Any) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        if name.startswith(".rows-") and name.endswith(".partial") and next(count) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    os.fsync = syncing  # type: ignore[assignment]


def test_a_half_written_shard_is_cleared_away(job: Job) -> None:
    """The cache folder does not collect what kills leave behind."""
    assert Child(job.arguments("reference"), job.folder, die_flushing).wait().status == -signal.SIGKILL
    assert list(job.entry.glob("*.partial"))
    job.done("reference")
    assert len(rows_of(job.cache)) == 80
    assert not list(job.entry.glob("*.partial"))


def halves(job: Job) -> list[Job]:
    """The job on each half of the data, with a run folder of its own."""
    jobs = []
    for name, rows in (("first", make_pairs(40)[:20]), ("second", make_pairs(40)[20:])):
        write_rows(job.folder / f"{name}.jsonl", rows)
        jobs.append(job.elsewhere(name).but({"data.train": job.folder / f"{name}.jsonl"}))
    return jobs


def test_two_runs_at_once_fill_one_cache(job: Job) -> None:
    """Started together with different halves of the data: both train, and the cache then has both."""
    first, second = halves(job)
    write_rows(job.folder / "one.jsonl", make_pairs(1))
    job.but({"data.train": job.folder / "one.jsonl"}).done("reference")
    children = []
    for each in (first, second):
        (each.folder / f"{each.run.name}-output").mkdir()
        children.append(Child(each.arguments("train"), each.folder / f"{each.run.name}-output"))
    assert [child.wait().status for child in children] == [0, 0]
    assert len(rows_of(job.cache)) == 80 and "scoring" not in job.done().out


@pytest.mark.parametrize("file", ["fingerprint.json", "rows-"])
def test_two_runs_of_a_sweep_that_start_at_the_same_moment(
    job: Job, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Both score the same pairs into one new cache; the second writes a file while the first is about to."""
    replace, entered = os.replace, list[Any]()

    def replacing(source: Any, target: Any) -> None:
        if Path(target).name.startswith(file) and not entered:
            entered.append(target)
            job.done("reference")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replacing)
    job.done("reference")
    assert entered and len(rows_of(job.cache)) == 80


def test_simpo_has_no_reference_to_score(job: Job) -> None:
    """The command says so, and training makes no cache."""
    simpo = job.but({"objective.name": "simpo", "reference.cache": None})
    assert "simpo has no reference" in simpo.refused("reference")
