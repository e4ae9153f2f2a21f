"""Recipes and flags for tests: loaded, or refused."""

from pathlib import Path

import pytest

from tuningfork.errors import ConfigError
from tuningfork.recipe.check import REQUIRED
from tuningfork.recipe.load import load_run_config
from tuningfork.recipe.run_config import RunConfig

BOTH = ["--model.path", "m", "--data.train", "d.jsonl"]


def load(text: str | None = None, *flags: str) -> RunConfig:
    """The config of a recipe with `text`, and flags. The required keys are given by flag."""
    if text is not None:
        Path("r.yaml").write_text(text)
    named = {flag.partition("=")[0] for flag in flags}
    given = [f"--{key}=m" for key in REQUIRED if f"--{key}" not in named]
    return load_run_config(Path("r.yaml") if text is not None else None, [*given, *flags], "tuningfork train")


def error(text: str | None = None, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *flags)
    return str(caught.value)
