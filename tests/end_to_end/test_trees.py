"""Whole runs whose examples begin alike: what is laid once changes what is computed, and no number."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.workbench import Job, write_rows

SHARES = ("tree", "prompt", "none")
RULES = "answer in plain words and be kind to whoever asks you about bread rivers lamps gardens or letters "


def rankings(prompts: int, seed: int = 0) -> list[dict[str, str]]:
    """Nine pairs a prompt, of three chosen and three rejected answers; all prompts have the same rules."""
    words, draw = ("bread", "river", "lamp", "garden", "stone", "winter"), np.random.default_rng(seed)

    def answers(kind: str) -> list[str]:
        return [f"{kind} {n} {' '.join(draw.choice(words, 6))}" for n in range(3)]

    rows = []
    for number in range(prompts):
        prompt = f"{RULES} {number} {' '.join(draw.choice(words, 3))}"
        pairs = product(answers("gladly"), answers("no"))
        rows += [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    return rows


@pytest.fixture
def ranked(job: Job) -> Job:
    """Four steps of nine pairs, nearly all of a prompt together, and a held-out set that shares the rules."""
    write_rows(job.folder / "ranked.jsonl", rankings(4))
    write_rows(job.folder / "held.jsonl", rankings(2, seed=1))
    return job.but(
        {
            "data.train": job.folder / "ranked.jsonl",
            "data.eval": job.folder / "held.jsonl",
            "pack.tokens": 1024,
            "train.examples_per_step": 9,
            "train.order": "grouped",
            "train.group_most": 9,
        }
    )


def entries(cache: Path) -> dict[str, Any]:
    return {str(path.relative_to(cache)): path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


def test_a_run_has_the_same_numbers_whatever_is_laid_once(ranked: Job) -> None:
    runs = {share: ranked.elsewhere(share).but({"pack.share": share}) for share in SHARES}
    scored = {}
    for share, run in runs.items():
        outcome = run.done()
        assert "step-0 check: margin exactly 0 for 9 of 9 pairs" in outcome.out
        scored[share] = entries(run.cache)
    # One cache serves all: its log-probs are those of an answer's tokens, in whatever tree it was scored.
    assert scored["tree"] == scored["prompt"] == scored["none"] and len(list(ranked.cache.iterdir())) == 1

    lines = {share: run.metrics() for share, run in runs.items()}
    assert {len(found) for found in lines.values()} == {4}
    for share in SHARES[1:]:
        for a, b in zip(lines["tree"], lines[share], strict=True):
            for key in ("tokens", "answer_tokens", "examples"):
                assert a[key] == b[key]
            for key in ("loss", "grad_norm", "rewards/margin", "logps/chosen"):
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), (share, key, a["step"])
        held = runs["tree"].evaluations()[0], runs[share].evaluations()[0]  # before the first step
        assert held[0]["eval/loss"] == pytest.approx(held[1]["eval/loss"], rel=1e-12)
    unique = [sum(line["unique_tokens"] for line in lines[share]) for share in SHARES]
    assert 2 * unique[0] < unique[1] < unique[2]
    assert all(line["rewards/margin"] == 0.0 for line in (lines[share][0] for share in SHARES))


def test_trees_repeat_to_the_bit(ranked: Job) -> None:
    first, again = ranked, ranked.elsewhere("again").but({"reference.cache": ranked.folder / "other-cache"})
    for run in (first, again):
        run.done()
    assert {name: weight.tolist() for name, weight in first.exported().items()} == {
        name: weight.tolist() for name, weight in again.exported().items()
    }
