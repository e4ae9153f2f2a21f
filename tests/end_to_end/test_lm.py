"""From nothing to a model through the whole trainer: documents, steps by tokens, kill -9 and resume, and DPO on it."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.workbench import Child, Job, assert_same_state, make_pairs, write_rows
from tuningfork.train import held_out
from tuningfork.train import steps as training


def texts(count: int, seed: int) -> list[str]:
    return [" ".join((row["prompt"], row["chosen"], row["rejected"])) + " ä" for row in make_pairs(count, seed)]


LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def lm(job: Job) -> Job:
    """A model from nothing on documents in pieces of at most 32 bytes, steps of at most 200 tokens."""
    write_rows(job.folder / "docs.jsonl", [{"text": text} for text in texts(16, 0)])
    write_rows(job.folder / "held_out.jsonl", [{"text": text} for text in texts(7, 5)])
    return job.but(
        {"data.train": job.folder / "docs.jsonl", "data.eval": job.folder / "held_out.jsonl", "reference.cache": None},
        model={"path": None, "init": LLAMA, "init_seed": 3, "tokenizer": "bytes"},
        objective={"name": "lm"},
        data={"max_length": 32, "over_length": "pieces", "template": "none"},
        train={"tokens_per_step": 200, "examples_per_step": None, "learning_rate": 1e-2},
        pack={"tokens": 128},
    )


def test_a_step_or_an_evaluation_that_stands_still_is_said_and_where(lm: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step, and both evaluations, which stand before the first step and behind the last."""

    def standing_still(module: Any, name: str, calls: set[int]) -> None:
        act, number = getattr(module, name), itertools.count(1)

        def slow(*given: Any, **named: Any) -> Any:
            if next(number) in calls:
                time.sleep(1.2)
            return act(*given, **named)

        monkeypatch.setattr(module, name, slow)

    standing_still(training, "train_step", {2})
    standing_still(held_out, "evaluate", {1, 2})
    out = lm.but({"output.stall_s": 0.4, "train.max_steps": 3}).done().out
    stalls = lm.run / "stalls.txt"
    for what in ("evaluating the starting model", "step 2", "evaluating the trained model"):
        assert f"! nothing is heard of {what} for 0.4 s; where its threads stand is in {stalls}" in out
        assert f"the run goes on: {what} came to an end after" in out
        assert f"nothing is heard of {what}" in (lm.run / "log.txt").read_text()
    assert stalls.read_text().count("in slow") == 3


def test_what_a_run_would_begin_from_is_replaced_by_that_run_alone(lm: Job) -> None:
    """Before a run's first step its starting model is all that is there of it, and other commands leave that alone."""
    absent = {"data.train": lm.folder / "absent.jsonl"}
    other, deeper = lm.but(model={"init_seed": 4}), lm.but(model={"init": LLAMA | {"num_hidden_layers": 3}})
    weights = lm.run / "start" / "model.safetensors"
    assert "absent.jsonl" in lm.but(absent).refused()
    before = weights.read_bytes()
    other.done("data")  # no seed decides what that shows
    assert "was made from another config, seed or tokenizer" in deeper.refused("data")
    assert weights.read_bytes() == before
    outcome = other.but(absent)()
    assert "drawn from seed 4, in place of one from which no run began" in outcome.out
    assert weights.read_bytes() != before


def plain_nll(folder: str) -> tuple[float, int]:
    """Nats and targets of the held-out documents, each cut by hand, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, targets = 0.0, 0
    for text in texts(7, 5):
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        for start in range(0, len(ids) - 1, 31):
            piece = torch.tensor(ids[start : start + 32])
            logps = model(piece[None]).logits[0].log_softmax(-1)
            nats -= float(logps[torch.arange(len(piece) - 1), piece[1:]].detach().sum())
            targets += len(piece) - 1
    return nats, targets


def test_a_run_learns_documents_and_says_bits_a_byte(lm: Job) -> None:
    out = lm.done().out
    assert "step-0" not in out and "reference" not in out
    assert "docs.jsonl: 16 rows read, 16 of them cut into" in out and "bits/byte" in out
    scores = json.loads((lm.run / "eval.json").read_text())
    lines, report = lm.metrics(), lm.report()
    assert report["pieces"]["rows"] == 16 and report["used"] == report["pieces"]["pieces"]
    size = sum(len(text.encode()) for text in texts(7, 5))  # behind BOS all bytes are targets
    for when, folder in (("before", "start"), ("after", "model")):
        nats, targets = plain_nll(str(lm.run / folder))
        assert targets == size + 7
        assert scores[when]["loss"] == pytest.approx(nats / targets, rel=1e-5) == scores[when]["nll/token"]
        assert scores[when]["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-4)
        assert scores[when]["bits/byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert scores["before"]["loss"] == pytest.approx(math.log(320), abs=0.05)
    assert scores["after"]["loss"] < scores["before"]["loss"] - 1
    assert all(200 - 32 < line["tokens"] <= 200 for line in lines[:-1]) and lines[-1]["epoch"] == 1
    assert len({line["examples"] for line in lines}) > 1
    assert "about" in " ".join(lm.done("data").out.split())


def test_killed_at_a_step_it_goes_on_to_the_bit(lm: Job) -> None:
    lm = lm.but({"output.save_every": 2, "train.eval_every": 3})
    whole = lm.elsewhere("whole")
    whole.done()
    child = Child(lm.arguments("train"), lm.folder)
    assert child.kill_when(lambda: (lm.run / "checkpoints" / "step-4").exists())
    shutil.rmtree(lm.run / "start")  # it is made again, to the bit
    assert "continuing from" in lm.done("train", "--resume").out
    last = whole.metrics()[-1]["step"]
    assert_same_state(lm, whole, last)
    assert numbers_of(lm) == numbers_of(whole) and lm.evaluations() == whole.evaluations()


def test_pieces_grow_by_step_and_a_run_killed_among_short_ones_goes_on_to_the_bit(lm: Job) -> None:
    lm = lm.but({"output.save_every": 2}, train={"length_steps": [[3, 12], [2, 20]], "max_steps": 8})
    whole = lm.elsewhere("whole")
    out = whole.done().out
    assert "train.length_steps: pieces of at most 12 tokens" in out
    child = Child(lm.arguments("train"), lm.folder)
    assert child.kill_when(lambda: (lm.run / "checkpoints" / "step-2").exists())
    assert "continuing from" in lm.done("train", "--resume").out
    assert_same_state(lm, whole, 8)
    lines = whole.metrics()
    assert numbers_of(lm) == [{k: v for k, v in line.items() if not k.endswith("_s") and k != "mfu"} for line in lines]
    for steps, most in (((1, 2, 3), 12), ((4, 5), 20), ((6, 7, 8), 32)):
        for line in (lines[step - 1] for step in steps):
            assert 200 - most < line["tokens"] <= 200 and most / 2 < line["tokens"] / line["examples"] <= most
    longer = lm.but(train={"max_steps": 9}).done("train", "--resume").out
    assert "the run is extended from 8 to 9 steps" in longer and lm.metrics()[:8] != []


def test_a_stream_says_that_it_leaks_and_a_run_on_it_goes_on_among_short_pieces_to_the_bit(lm: Job) -> None:
    lm = lm.but(data={"over_length": "stream"}, train={"length_steps": [[3, 12]], "max_steps": 5})
    whole = lm.elsewhere("whole")
    out = " ".join(whole.done().out.split())
    assert "16 of them joined into a stream of" in out and "! docs.jsonl: data.over_length is stream" in out
    assert "leaks across documents by design" in (whole.run / "log.txt").read_text()
    lm.but({"train.max_steps": 4, "output.save_every": 2}).done()
    shutil.rmtree(lm.run / "checkpoints" / "step-4")
    assert "continuing from" in lm.but({"output.save_every": 2}).done("train", "--resume").out
    assert numbers_of(lm) == numbers_of(whole)
    tokens = sum(len(text.encode()) + 2 for text in texts(16, 0))
    pieces = -(-(tokens - 1) // 31)
    report = lm.report()
    assert report["pieces"] == {"rows": 0, "joined": 16, "pieces": pieces} and report["used"] == pieces
    lines = lm.metrics()
    assert all(200 - 32 < line["tokens"] <= 200 and line["tokens"] % 32 == 0 for line in lines[3:])
    assert "joined into a stream" in " ".join(lm.done("data").out.split())


def numbers_of(job: Job) -> list[dict[str, float]]:
    """The lines of training steps, without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.endswith("_s") and k != "mfu"} for line in job.metrics()]


# Blocks so short that documents and pairs are long enough to choose among them.
NSA = LLAMA | {
    "model_type": "tuningfork_nsa",
    "head_dim": 8,
    "block_length": 4,
    "block_stride": 2,
    "select_length": 4,
    "select_count": 4,
    "window": 6,
}


def test_dpo_goes_on_from_the_sparse_model_that_was_made(lm: Job) -> None:
    """The reference is scored in other packs; the margin of the first step is exactly 0 all the same."""
    lm.but(model={"init": NSA}, train={"max_steps": 3}).done()
    dpo = lm.elsewhere("dpo").but(
        {"data.train": lm.folder / "pairs.jsonl", "data.eval": None, "reference.cache": lm.folder / "cache"},
        model={"path": lm.run / "model", "init": None, "init_seed": None, "tokenizer": None},
        objective={"name": "dpo"},
        data={"max_length": 128, "over_length": None},
        train={"tokens_per_step": None, "examples_per_step": 4, "learning_rate": 1e-2, "max_steps": 3},
        pack={"tokens": 512},
    )
    write_rows(lm.folder / "pairs.jsonl", make_pairs(12))
    dpo.but(pack={"tokens": 1024}).done("reference")
    out = dpo.done().out
    assert "step-0 check: margin exactly 0" in out and "nsa kernel plain" in out
    lines = dpo.metrics()
    assert lines[0]["rewards/margin"] == 0.0 and lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-14)
    assert lines[-1]["rewards/margin"] > 0


def test_a_report_of_the_data_makes_no_weights_and_a_run_may_follow(lm: Job) -> None:
    lm.done("data")
    assert not (lm.run / "start" / "model.safetensors").exists()
    assert "a model from nothing, its values drawn from seed 3" in lm.but({"train.max_steps": 1}).done().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "model"}, "model.path is model, and model.init is given. Keep one"),
        ({"tokenizer": None}, "Set model.tokenizer: bytes, or to a folder with a tokenizer.json"),
        ({"init": None, "path": "m"}, "model.init_seed is 3, but only a model from nothing has one"),
        ({"init": LLAMA | {"hiden_size": 3}}, "hiden_size is no setting of llama models. Did you mean hidden_size?"),
    ],
)
def test_half_of_a_model_from_nothing_is_refused(lm: Job, settings: dict, words: str) -> None:
    assert words in lm.but(model=settings).refused()
    assert not (lm.run / "checkpoints").exists()
