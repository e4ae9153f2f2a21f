"""The recipes of models from nothing: each passes a run's checks, and has as many parameters as it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tuningfork.models.hf import own
from tuningfork.recipe.load import load_run_config

RECIPES = sorted((Path(__file__).parent.parent / "recipes" / "scratch").glob("*.yaml"))
MILLIONS = {"hydra-100m": 84.1, "hydra-100m-dense": 100.0, "hydra-220m": 214.3, "hydra-220m-dense": 258.3}
MILLIONS |= {"m7c-125m": 78.7, "m7c-125m-dense": 73.6, "nsa-tiny": 1.1, "nsa-toy": 0.3}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_the_checks_of_a_run_and_has_the_size_that_it_says(path):
    config = load_run_config(path, [], "tuningfork train")
    assert config.objective.name == "lm"
    assert config.output.dir == f"runs/{path.stem}"
    text = path.read_text()
    assert text.count("# Values: ") == 1 and "Needs " in text
    settings = dict(config.model.init)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    millions = round(sum(weight.numel() for weight in model.parameters()) / 1e6, 1)
    if path.stem in MILLIONS:
        assert millions == MILLIONS[path.stem]
        assert f"{millions} M parameters" in " ".join(text.replace("#", "").split())


def test_each_has_a_dense_twin():
    names = {path.stem for path in RECIPES}
    assert {name for name in names if not name.endswith("-dense")} == {
        name.removesuffix("-dense") for name in names if name.endswith("-dense")
    }
    assert {"tuningfork_ccgqa", "tuningfork_nsa"} == own.FAMILIES.keys()
