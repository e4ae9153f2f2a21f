"""The recipes that are there to be copied: each is one that a run would begin with, and says what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tuningfork.errors import ConfigError
from tuningfork.recipe.load import load_run_config

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_there_are_recipes():
    assert {path.stem.split("-")[0] for path in RECIPES} >= {"dpo", "simpo", "ipo", "sft", "scratch"}


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "demo" / "recipe.yaml"], ids=lambda path: path.stem)
def test_a_recipe_passes_the_checks_of_a_run(path):
    config = load_run_config(path, [], "tuningfork train")
    of_name = path.stem.split("-")[0] if path in RECIPES else "dpo"
    assert config.objective.name.split("_")[0] == {"scratch": "lm"}.get(of_name, of_name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_needs_and_where_its_values_come_from(path):
    about = [line for line in path.read_text().splitlines() if line.startswith("# ")]
    assert sum("# Needs " in line for line in about) == sum("# Values: " in line for line in about) == 1
    assert all(len(line) <= 120 for line in path.read_text().splitlines())


def test_no_two_recipes_share_a_run_folder():
    folders = [yaml.safe_load(path.read_text())["output"]["dir"] for path in RECIPES]
    assert len({*folders}) == len(folders)


def test_a_setting_that_is_not_there_is_refused(tmp_path):
    """Guards the guard: the check is that of a run, and reads every key."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(RECIPES[0].read_text() + "\nnothing: {at: all}\n")
    with pytest.raises(ConfigError, match="nothing"):
        load_run_config(wrong, [], "tuningfork train")
