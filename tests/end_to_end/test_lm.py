"""Documents through the whole trainer: pieces, steps by tokens, held-out bits a byte, kill -9 and resume."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.workbench import Child, Job, assert_same_state, make_pairs, write_rows


def texts(count: int, seed: int) -> list[str]:
    return [" ".join((row["prompt"], row["chosen"], row["rejected"])) + " ä" for row in make_pairs(count, seed)]


@pytest.fixture
def lm(job: Job) -> Job:
    """Documents in pieces of at most 16 tokens, steps of at most 100 tokens."""
    write_rows(job.folder / "docs.jsonl", [{"text": text} for text in texts(16, 0)])
    write_rows(job.folder / "held_out.jsonl", [{"text": text} for text in texts(7, 5)])
    return job.but(
        {"data.train": job.folder / "docs.jsonl", "data.eval": job.folder / "held_out.jsonl", "reference.cache": None},
        objective={"name": "lm"},
        data={"max_length": 16, "over_length": "pieces", "template": "none"},
        train={"tokens_per_step": 100, "examples_per_step": None, "epochs": 1, "learning_rate": 1e-2},
        pack={"tokens": 64},
    )


def plain_nll(folder: str) -> tuple[float, int, int]:
    """Nats, targets and their bytes of the held-out documents, each cut by hand, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, targets, size = 0.0, 0, 0
    for text in texts(7, 5):
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        size += len(text.encode()) - len(tokenizer.decode(ids[:1]))  # the first token has no predictor
        for start in range(0, len(ids) - 1, 15):
            piece = torch.tensor(ids[start : start + 16])
            logps = model(piece[None]).logits[0].log_softmax(-1)
            nats -= float(logps[torch.arange(len(piece) - 1), piece[1:]].detach().sum())
            targets += len(piece) - 1
    return nats, targets, size


def test_a_run_learns_documents_and_says_bits_a_byte(lm: Job) -> None:
    out = lm.done().out
    assert "step-0" not in out and "reference" not in out
    assert "docs.jsonl: 16 rows read, 16 of them cut into" in out and "bits/byte" in out
    scores = json.loads((lm.run / "eval.json").read_text())
    lines, report = lm.metrics(), lm.report()
    assert report["pieces"]["rows"] == 16 and report["used"] == report["pieces"]["pieces"]
    for when, folder in (("before", lm.settings["model.path"]), ("after", lm.run / "model")):
        nats, targets, size = plain_nll(str(folder))
        assert scores[when]["loss"] == pytest.approx(nats / targets, rel=1e-5) == scores[when]["nll/token"]
        assert scores[when]["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-4)
        assert scores[when]["bits/byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert scores["after"]["loss"] < scores["before"]["loss"] - 0.1
    assert all(84 < line["tokens"] <= 100 for line in lines[:-1]) and lines[-1]["epoch"] == 1
    assert len({line["examples"] for line in lines}) > 1
    assert "about" in " ".join(lm.done("data").out.split())


def test_killed_at_a_step_it_goes_on_to_the_bit(lm: Job) -> None:
    lm = lm.but({"output.save_every": 2, "train.eval_every": 3})
    whole = lm.elsewhere("whole")
    whole.done()
    child = Child(lm.arguments("train"), lm.folder)
    assert child.kill_when(lambda: (lm.run / "checkpoints" / "step-4").exists())
    assert "continuing from" in lm.done("train", "--resume").out
    last = whole.metrics()[-1]["step"]
    assert_same_state(lm, whole, last)
    assert numbers_of(lm) == numbers_of(whole) and lm.evaluations() == whole.evaluations()


def numbers_of(job: Job) -> list[dict[str, float]]:
    """The lines of training steps, without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.endswith("_s") and k != "mfu"} for line in job.metrics()]
