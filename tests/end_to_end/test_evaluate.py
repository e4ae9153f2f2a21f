"""`tuningfork eval`: the numbers of a policy on held-out pairs against the recipe's reference."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.end_to_end.workbench import Job, make_model, make_tokenizer, write_rows
from tuningfork import commands


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Filled with the exact numbers behind the table that the command prints."""
    seen: dict[str, Any] = {}
    real = commands.evaluate_packs

    def evaluate(*args: Any) -> Any:
        result = real(*args)
        seen.update(result.as_dict())
        return result

    monkeypatch.setattr(commands, "evaluate_packs", evaluate)
    return seen


def table_of(text: str) -> dict[str, str]:
    """The rows of the printed table: name -> value."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_the_trained_model_scores_as_at_the_end_of_its_run(finished: Job, scores: dict[str, Any]) -> None:
    """Every number equals eval.json's "after" to the last bit, and the table shows them."""
    outcome = finished.done("eval")
    after = json.loads((finished.run / "eval.json").read_text())["after"]
    assert scores == after
    shown = table_of(outcome.out)
    assert shown["margin"] == f"{after['rewards/margin']:.3f}" and shown["loss"] == f"{after['loss']:.3f}"
    assert shown["accuracy"] == f"{after['rewards/accuracy']:.1%}" and shown["pairs"] == "11"
    assert "scoring the reference" not in outcome.out


def test_the_starting_model_scores_exactly_nothing(finished: Job, scores: dict[str, Any]) -> None:
    """Policy and reference are one: margin exactly 0, every pair a tie, loss ln 2."""
    shown = table_of(finished.done("eval", "--policy", str(finished.settings["model.path"])).out)
    assert scores["rewards/margin"] == scores["rewards/chosen"] == 0.0 and scores["rewards/accuracy"] == 0.5
    assert scores["loss"] == pytest.approx(math.log(2), rel=1e-15)
    assert (shown["margin"], shown["accuracy"], shown["loss"]) == ("0.000", "50.0%", "0.693")


def test_another_model_is_scored_against_the_same_reference(finished: Job, scores: dict[str, Any], shelf: Any) -> None:
    """A random other model: log-ratios are its own, so the margin is not 0."""
    finished.done("eval", "--policy", str(shelf / "other-model"))
    assert scores["rewards/margin"] != 0.0 and scores["pairs"] == 11


def test_eval_leaves_the_run_folder_as_it_is(finished: Job) -> None:
    """Scoring writes nothing into the run."""
    before = {path: path.stat().st_mtime_ns for path in finished.run.rglob("*")}
    finished.done("eval")
    assert before == {path: path.stat().st_mtime_ns for path in finished.run.rglob("*")}


def test_eval_fills_the_cache_that_it_needs(finished: Job, job: Job, scores: dict[str, Any]) -> None:
    """With an empty cache the held-out pairs are scored under the starting model first: the same numbers."""
    job = finished.but({"reference.cache": job.cache})
    assert "scoring the reference: 11/11 examples" in job.done("eval").out
    assert scores == json.loads((finished.run / "eval.json").read_text())["after"]


def test_a_missing_policy_is_named(job: Job, shelf: Any) -> None:
    """Before training there is no output.dir/model; a mistyped --policy is no folder."""
    job = job.but({"data.eval": shelf / "held_out.jsonl"})
    message = job.refused("eval")
    assert str(job.run / "model") in message and "Train first" in message and "--policy" in message
    assert "no-such-model" in job.refused("eval", "--policy", "no-such-model")


def test_eval_without_held_out_pairs_is_refused(job: Job) -> None:
    """data.eval is named."""
    assert "data.eval" in job.refused("eval")


def test_a_policy_of_another_shape_is_refused(finished: Job, job: Job) -> None:
    """Other hidden size: the message names the folder."""
    make_model(job.folder / "wide", tokenizer=make_tokenizer(), hidden_size=64)
    message = finished.refused("eval", "--policy", str(job.folder / "wide"))
    assert "wide" in message and "not a model of the same architecture" in message


def test_a_policy_with_another_config_is_not_scored_as_if_it_had_ours(finished: Job, job: Job) -> None:
    """Equal shapes under another rotary base give other log-probs; scoring it with our config would be wrong."""
    make_model(job.folder / "other-base", rope_parameters={"rope_type": "default", "rope_theta": 3.0})
    assert "other-base" in finished.refused("eval", "--policy", str(job.folder / "other-base"))


def test_simpo_is_evaluated_without_a_reference(job: Job, shelf: Any, scores: dict[str, Any]) -> None:
    """No cache is made or asked for."""
    simpo = {"objective.name": "simpo", "reference.cache": None, "data.eval": shelf / "held_out.jsonl"}
    job.but(simpo).done()
    job.but(simpo).done("eval")
    assert scores == json.loads((job.run / "eval.json").read_text())["after"]
    assert not (job.folder / "cache").exists()


RANKING = {"prompt": "a lamp", "answers": ["of course", "here", "no", "go away"], "scores": [4, 3, 2, 1]}
SINGLE = {"prompt": "a lamp", "completion": "of course", "label": True}
WITH_MARGIN = {"prompt": "a lamp", "chosen": "of course", "rejected": "no", "margin": 0.5}


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
@pytest.mark.parametrize(
    "row, objective, said",
    [
        (RANKING, "dpo", "has 4 answers, objective dpo compares two"),
        (RANKING, "simpo", "has 4 answers, objective simpo compares two"),
        (SINGLE, "dpo", "has 1 answer, objective dpo compares two"),
        (WITH_MARGIN, "ipo", "has a margin, which objective ipo has no place for"),
    ],
    ids=["ranking", "ranking, simpo", "single", "margin"],
)
def test_no_command_scores_rows_that_the_objective_refuses(
    job: Job, shelf: Any, monkeypatch: pytest.MonkeyPatch, key: str, row: Any, objective: str, said: str
) -> None:
    """train, reference and eval say the same of the same row, before a model is loaded."""
    monkeypatch.setattr(commands, "start_model", None)
    path = write_rows(job.folder / "odd.jsonl", [row, row | {"prompt": "a stone"}])
    files = {"data.train": shelf / "pairs.jsonl", "data.eval": shelf / "held_out.jsonl"} | {key: path}
    job = job.but({"objective.name": objective} | files)
    commanded = [("train",), ("eval", "--policy", str(shelf / "model")), ("reference",)]
    if objective == "simpo":  # which has no reference
        job, commanded = job.but({"reference.cache": None}), commanded[:2]
    messages = {job.refused(*command) for command in commanded}
    assert len(messages) == 1 and f"{path}:1: {said}" in messages.pop()


def test_held_out_pairs_that_cannot_be_used_are_named(job: Job) -> None:
    """A malformed line of data.eval stops the command with its place."""
    path = write_rows(job.folder / "held_out.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    path.write_text(path.read_text() + "{not json\n")
    message = job.but({"data.eval": path}).refused("train")
    assert str(path) in message and "line 2" in message
