"""The record of all settings: what it may hold, and that it is saved and read back as it was."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from pydantic import ConfigDict, TypeAdapter

from tests.recipe.workbench import load
from tuningfork.recipe.check import REQUIRED
from tuningfork.recipe.dialect import parse_scalar, to_text
from tuningfork.recipe.load import from_yaml, load_run_config
from tuningfork.recipe.run_config import SETTINGS, RunConfig


def test_the_settings_are_sections_of_plain_values_whose_defaults_are_valid() -> None:
    for section in fields(RunConfig):
        assert is_dataclass(getattr(RunConfig(), section.name))
    for key, default in RunConfig().values().items():
        if key not in REQUIRED:
            value = TypeAdapter(SETTINGS[key], config=ConfigDict(strict=True)).validate_python(default)
            assert (value, type(value)) == (default, type(default)), key


@pytest.mark.parametrize(
    "text",
    ["on", "yes", "No", "null", "~", "true", "5e-7", "1:30", "2024-01-01", "010", "0x10", "1_000", ".inf", "<<", "=",
     " x ", "a: b", "- a", "#x", "'", '"', "ü\n\tx", "!x", "&a", "*a", "%", "@", "\x85", "x" * 300],
)  # fmt: skip
def test_any_text_survives_saving(text: str) -> None:
    config = load()
    config.output.dir = text
    saved = config.to_yaml()
    assert from_yaml(saved, "saved") == config
    assert yaml.safe_load(saved)["output"]["dir"] == text  # and any other reader of YAML sees the same


@pytest.mark.parametrize("number", [5e-7, 1e-8, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 1e16, 1e22, 123456789.123])
def test_floats_survive_saving_to_the_last_bit(number: float) -> None:
    config = load()
    config.train.learning_rate = number
    loaded = from_yaml(config.to_yaml(), "saved")
    assert loaded == config
    assert loaded.train.learning_rate.hex() == number.hex()
    assert parse_scalar(repr(number)) == number


def test_a_saved_config_loads_as_a_recipe() -> None:
    config = load("train: {learning_rate: 5e-7, max_grad_norm: null}\nmodel: {compile: on}\n", "--train.seed", "3")
    Path("config.yaml").write_text(config.to_yaml())
    assert load_run_config(Path("config.yaml"), [], "tuningfork train") == config
    assert list(yaml.safe_load(config.to_yaml())) == [field.name for field in fields(RunConfig)]


def test_differing_settings() -> None:
    a = load("train: {seed: 3}")
    b = load("train: {max_grad_norm: null}")
    assert a.differing(b) == {"train.seed": (3, 0), "train.max_grad_norm": (1.0, None)}
    assert a.differing(a) == {}


def test_a_recipe_that_is_looked_at_gives_a_terminal_no_order() -> None:
    """A run's config.yaml may hold whatever a file is called; it reads back as what it was."""
    name = "a" + "".join(chr(code) for code in (*range(1, 0xA0), 0x61C, 0x200E, *range(0x2028, 0x2070)) if code != 10)
    text = to_text({"data": {"train": [name], "columns": {name: "prompt"}}})
    assert not set(text) & {chr(code) for code in (*range(10), *range(11, 32), *range(0x7F, 0xA0))}
    assert not set(text) & set("\u061c\u200e\u2028\u2029\u202a\u202e\u2066\u2067\u2068\u2069")
    assert yaml.safe_load(text) == {"data": {"train": [name], "columns": {name: "prompt"}}}
