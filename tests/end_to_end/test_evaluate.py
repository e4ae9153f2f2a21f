"""`tuningfork eval`: the numbers of a policy on held-out pairs against the recipe's reference."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.workbench import Job, call, make_model, make_pairs, make_tokenizer, write_rows
from tuningfork.commands import evaluate as evaluate_command
from tuningfork.commands import inputs, train


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Filled with the exact numbers behind the table that the command prints."""
    seen: dict[str, Any] = {}
    real = evaluate_command.evaluate_packs

    def evaluate(*args: Any) -> Any:
        result = real(*args)
        seen.update(result.as_dict())
        return result

    monkeypatch.setattr(evaluate_command, "evaluate_packs", evaluate)
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
    assert shown["margin"] == f"{after['rewards/margin']:.4g}" and shown["loss"] == f"{after['loss']:.4g}"
    assert shown["accuracy"] == f"{after['rewards/accuracy']:.1%}" and shown["pairs"] == "11"
    assert "scoring the reference" not in outcome.out


def test_the_starting_model_scores_exactly_nothing(finished: Job, scores: dict[str, Any]) -> None:
    """Policy and reference are one: margin exactly 0, every pair a tie, loss ln 2."""
    shown = table_of(finished.done("eval", "--policy", str(finished.settings["model.path"])).out)
    assert scores["rewards/margin"] == scores["rewards/chosen"] == 0.0 and scores["rewards/accuracy"] == 0.5
    assert scores["loss"] == pytest.approx(math.log(2), rel=1e-15)
    assert (shown["margin"], shown["accuracy"], shown["loss"]) == ("0", "50.0%", "0.6931")


def test_another_model_is_scored_against_the_same_reference(finished: Job, scores: dict[str, Any], shelf: Any) -> None:
    """A random other model: log-ratios are its own, so the margin is not 0."""
    finished.done("eval", "--policy", str(shelf / "other-model"))
    assert scores["rewards/margin"] != 0.0 and scores["pairs"] == 11


def test_a_policy_that_is_no_model_is_refused_before_anything_is_read(finished: Job, tmp_path: Path) -> None:
    """A run's folder in place of its model's, which is named; or a folder without a config."""
    for policy, said in (
        (finished.run, f"{finished.run} is the folder of a run, not of a model. Did you mean {finished.run}/model?"),
        (tmp_path, f"{tmp_path}: no config.json"),
    ):
        outcome = finished("eval", "--policy", str(policy))
        assert outcome.status == 2 and said in outcome.err and "reading" not in outcome.out


def test_eval_adds_a_file_to_the_run_folder_and_changes_none(finished: Job, scores: dict[str, Any]) -> None:
    """A second time is the same evaluation, which has one file; its numbers are exact."""
    evaluations = finished.run / "evaluations"
    before = {path: path.stat().st_mtime_ns for path in finished.run.rglob("*") if path.is_file()}
    outcome = finished.done("eval")
    path = Path(outcome.out.splitlines()[-1].removeprefix("written to "))
    found = json.loads(path.read_text())
    assert re.fullmatch(r"model-on-held_out-[0-9a-f]{16}\.json", path.name)
    assert path.parent == evaluations and found["scores"] == scores and found["made_by"] == "tuningfork eval"
    assert found["policy_path"] == str(finished.run / "model") and found["policy"] != found["reference"]
    assert found["data_eval"] == str(finished.settings["data.eval"]) and found["rows"]["used"] == 11
    there = set(evaluations.iterdir())
    assert finished.done("eval").out.splitlines()[-1] == f"written to {path}" and set(evaluations.iterdir()) == there
    after = {path: path.stat().st_mtime_ns for path in finished.run.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before if path.parent != evaluations} == {
        path: time for path, time in before.items() if path.parent != evaluations
    }


def test_each_evaluation_has_a_file_of_its_own(finished: Job, shelf: Path) -> None:
    """Another model, other pairs and another objective are other evaluations; what is not ours is not replaced."""
    other_pairs = {"data.eval": write_rows(finished.folder / "other.jsonl", make_pairs(5, seed=8))}
    files = [
        Path(job.done("eval", *options).out.splitlines()[-1].removeprefix("written to "))
        for job, options in (
            (finished, ()),
            (finished, ("--policy", str(shelf / "other-model"))),
            (finished.but(other_pairs), ()),
            (finished.but({"objective.beta": 0.2}), ()),
        )
    ]
    found = [json.loads(path.read_text()) for path in files]
    assert len(set(files)) == 4
    assert found[0]["policy"] != found[1]["policy"] and found[0]["reference"] == found[1]["reference"]
    assert found[0]["data"] != found[2]["data"] and found[3]["objective"]["beta"] == 0.2
    content = files[3].read_bytes()
    files[3].write_text("mine")
    assert f"{files[3]} exists and was not made by" in finished.but({"objective.beta": 0.2}).refused("eval")
    assert files[3].read_text() == "mine"
    files[3].write_bytes(content)


def test_eval_needs_no_training_data(finished: Job, job: Job, scores: dict[str, Any]) -> None:
    """Not named, or named and not there; its fields' names may be meant for it. The numbers are the same, and a run may
    begin in that folder later."""
    finished.done("eval")
    expected = dict(scores)
    shutil.copytree(finished.run / "model", exported := job.folder / "exported")
    command = ("eval", "--policy", str(exported))
    recipe = finished.but({"data.train": None, "output.dir": job.run, "reference.cache": job.folder / "cache"})
    gone = recipe.but({"data.train": job.folder / "gone.jsonl", "data.columns": "{question: prompt}"})
    for each in (recipe, gone):
        scores.clear()
        outcome = each.done(*command)
        assert scores == expected and "reading held_out.jsonl" in outcome.out and "gone" not in outcome.out
    assert [path.name for path in job.run.iterdir()] == ["evaluations"]
    message = recipe.but({"data.columns": "{question: prompt}"}).refused(*command)
    assert "data.columns" in message and "question" in message  # all rows that there are have been read
    assert "data.shares is for data.train" in recipe.but({"data.shares": "[1]"}).refused(*command)
    assert "data.train must be set" in recipe.refused("train")
    job.done()


def test_the_run_that_exported_a_model_is_its_recipe(
    finished: Job, scores: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a recipe or a setting: starting model, objective, lengths and held-out pairs are those of the run. Where
    to write is not: the run may be a stranger's."""
    finished.done("eval")
    expected = dict(scores)
    scores.clear()
    monkeypatch.chdir(tmp_path)
    settings = ("output.dir", "data.cache", "reference.cache")
    theirs = [path for key in settings for path in Path(str(finished.settings[key])).rglob("*")]
    outcome = call(["eval", "--policy", str(finished.run / "model")])
    assert outcome.status == 0 and scores == expected
    assert outcome.out.startswith(f"recipe: {finished.run / 'config.yaml'}, of the run that the model is from\n")
    assert (
        f"reads model.path {finished.settings['model.path']}, data.eval {finished.settings['data.eval']}" in outcome.out
    )
    assert "writes to output.dir runs/first" in outcome.out
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "token-cache", "reference-cache"}
    assert theirs == [path for key in settings for path in Path(str(finished.settings[key])).rglob("*")]
    named = ["--model.path", str(finished.settings["model.path"])]
    outcome = call(["eval", "--policy", str(finished.run / "model"), *named])  # whoever names one means his own
    assert outcome.status == 2 and "data.eval must be set" in outcome.err


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
    assert "data.eval must be set" in job.refused("eval")


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
    """train, reference and, of held-out rows, eval say the same of the same row, before a model is loaded."""
    for module in (inputs, train):
        monkeypatch.setattr(module, "start_model", None)
    path = write_rows(job.folder / "odd.jsonl", [row, row | {"prompt": "a stone"}])
    files = {"data.train": shelf / "pairs.jsonl", "data.eval": shelf / "held_out.jsonl"} | {key: path}
    job = job.but({"objective.name": objective} | files)
    commanded = [("train",), ("eval", "--policy", str(shelf / "model")), ("reference",)]
    if objective == "simpo":  # which has no reference
        job, commanded = job.but({"reference.cache": None}), commanded[:2]
    if key == "data.train":
        commanded = [command for command in commanded if command[0] != "eval"]
    messages = {job.refused(*command) for command in commanded}
    assert len(messages) == 1 and f"{path}:1: {said}" in messages.pop()


def test_held_out_pairs_that_cannot_be_used_are_named(job: Job) -> None:
    """A malformed line of data.eval stops the command with its place."""
    path = write_rows(job.folder / "held_out.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    path.write_text(path.read_text() + "{not json\n")
    message = job.but({"data.eval": path}).refused("train")
    assert str(path) in message and "line 2" in message
