"""The demo's data and its judge: what is taught keeps the rules by which the answers are counted."""

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from demo.judge import RULES, faults
from tuningfork.recipe.load import load_run_config

DEMO = Path(__file__).parents[1] / "demo"
QUESTION = "What is a fridge for?"


def rows(name: str) -> Iterator[dict[str, str]]:
    for line in (DEMO / name).read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


@pytest.mark.parametrize("name", ["pairs.jsonl", "held_out.jsonl"])
def test_chosen_answers_keep_every_rule(name: str) -> None:
    assert {row["prompt"]: broken for row in rows(name) if (broken := faults(row["prompt"], row["chosen"]))} == {}


def test_pairs_and_held_out_are_the_questions_each_in_one_place() -> None:
    asked = [row["prompt"] for name in ("pairs.jsonl", "held_out.jsonl") for row in rows(name)]
    assert len(set(asked)) == len(asked)
    chosen = {row["prompt"]: row["chosen"] for name in ("pairs.jsonl", "held_out.jsonl") for row in rows(name)}
    assert chosen == {row["prompt"]: row["chosen"] for row in rows("questions.jsonl")}


def test_recipe_takes_other_pairs_as_the_demo_ends_by_saying() -> None:
    mine = ["--data.train", "mine.jsonl", "--data.eval", "null", "--output.dir", "runs/mine"]
    config = load_run_config(DEMO / "recipe.yaml", mine, "tuningfork train")
    assert (config.data.train, config.data.eval, config.output.dir) == ("mine.jsonl", None, "runs/mine")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_answers_side_by_side_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.syspath_prepend(DEMO)
    monkeypatch.chdir(DEMO)  # which main leaves
    with patch.dict(os.environ):  # which it sets for its own process
        demo = importlib.import_module("run")
    monkeypatch.setattr(demo, "prepare_model", lambda: None)
    monkeypatch.setattr(demo, "answers", lambda folder, prompts: ["an answer of many words " * 12] * len(prompts))
    monkeypatch.setattr(demo, "train", lambda config, resume: 0)
    monkeypatch.setattr("sys.argv", ["demo/run.py"])
    monkeypatch.setattr("sys.stdout", out := Terminal())
    assert demo.main() == 0
    shown = [line for line in out.getvalue().splitlines() if "answer of" in line]
    assert max(map(len, shown)) <= min(columns, 100)
    assert out.getvalue().count("many") == demo.SHOWN * 2 * 12  # nothing of an answer is cut


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        ("A fridge keeps food cold so that it stays fresh.", []),
        ("A fridge keeps food cold so that it stays fresh", ["no full stop at the end"]),
        ("A fridge keeps food cold so that it stays...", ["no full stop at the end"]),
        ("A fridge keeps food cold so that it…", ["no full stop at the end"]),
        ("A fridge keeps food cold. It also keeps drinks cold.", ["not one sentence"]),
        ("A fridge keeps food cold! And drinks as well, of course.", ["not one sentence"]),
        ("A fridge.", ["too short"]),
        ("A fridge keeps " + " and ".join(f"food{i}" for i in range(20)) + " cold.", ["too long"]),
        ("It keeps the food in it cold and fresh.", ["subject not named"]),
        ("A fridge has many uses:\n1. It keeps food cold.", ["not one sentence", "a list"]),
        ("I am sure that my fridge keeps food cold.", ["speaks of itself"]),
        ("As an AI, a fridge is for keeping food cold.", ["speaks of itself"]),
        ("A fridge is a fridge for keeping a fridge cold.", ["repeats itself"]),
        ("A fridge keeps food cold and keeps food cold.", ["repeats itself"]),
        ("", ["no full stop at the end", "too short", "subject not named"]),
    ],
)
def test_rules(answer: str, broken: list[str]) -> None:
    assert faults(QUESTION, answer) == broken


def test_every_rule_is_tried_above() -> None:
    marks = next(mark for mark in test_rules.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert {name for _, broken in marks.args[1] for name in broken} == set(RULES)
