"""Defaults, then the recipe, then flags: every setting, by either way."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml

from tests.recipe.workbench import BOTH, load
from tuningfork.errors import ConfigError, DataError
from tuningfork.recipe import load as loading
from tuningfork.recipe.check import PATHS, REQUIRED
from tuningfork.recipe.dialect import to_text
from tuningfork.recipe.load import from_yaml, load_run_config
from tuningfork.recipe.run_config import SETTINGS, RunConfig


def another(hint: Any, default: Any) -> Any:
    """A valid value of a setting that is not its default."""
    if hint == SETTINGS["train.activation_memory"]:
        return "budget:0.5"
    if get_origin(hint) is Annotated:
        hint = hint.__origin__
    if get_origin(hint) is list:
        return [another(get_args(hint)[0], None)]
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != default)
    if get_args(hint):
        return another(get_args(hint)[0], default)
    if hint is str:
        return f"{default}-other"
    if hint is bool:
        return not default
    return {int: (default and default * 2) or 7, float: default / 2 if default else 0.25}[hint]


# What must stand beside a setting for it to be read at all.
NEEDS = {
    "data.answers": ["--objective.name", "sft"],
    "data.max_length": ["--pack.tokens", "8192"],
    "objective.mean_over": ["--objective.name", "sft"],
    "objective.gamma": ["--objective.name", "simpo"],
    "model.tf32": ["--model.dtype", "float32"],
    "model.weights": ["--train.optimizer", "adamw_8bit"],
    "train.gradient_dtype": ["--train.optimizer", "adamw_8bit", "--model.weights", "bfloat16"],
    "train.eval_every": ["--data.eval", "held_out.jsonl"],
    "train.decay_start": ["--train.schedule", "wsd"],
    "train.length_steps": [
        "--objective.name=lm",
        "--data.over_length=pieces",
        "--train.tokens_per_step=9",
        "--train.max_steps=9",
    ],
    "train.group_by": ["--train.order", "grouped"],
    "train.group_most": ["--train.order", "grouped"],
    "train.best_by": ["--data.eval", "held_out.jsonl", "--train.eval_every", "5"],
    "train.early_stopping_patience": ["--data.eval", "held_out.jsonl", "--train.eval_every", "5"],
    "train.early_stopping_threshold": [
        "--data.eval=held_out.jsonl",
        "--train.eval_every=5",
        "--train.early_stopping_patience=2",
    ],
    "output.export": ["--data.eval", "held_out.jsonl", "--train.eval_every", "5"],
}


FROM_NOTHING = ("model.init", "model.init_seed", "model.tokenizer")  # which stand together, in the place of model.path
OTHER = {  # not any text will do
    "data.date": "2026-01-31",
    "data.columns": {"question": "prompt", "7": "chosen"},
    "data.roles": {"agent": "assistant"},
    "data.template": "none",
    "output.sinks": [],
    "train.length_steps": [[5, 16]],
}


@pytest.mark.parametrize("key", [key for key in SETTINGS if key not in FROM_NOTHING])
def test_every_setting_can_be_given_in_a_recipe_and_as_a_flag_which_wins(key: str) -> None:
    section, _, name = key.partition(".")
    before = load(None, *NEEDS.get(key, [])).values()[key]
    value = OTHER[key] if key in OTHER else another(SETTINGS[key], RunConfig().__dict__[section].__dict__[name])
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]

    by_flag = load(None, f"--{key}", text, *NEEDS.get(key, []))
    assert by_flag.values()[key] == value != before
    assert type(by_flag.values()[key]) is type(value)

    Path("r.yaml").write_text(to_text({section: {name: value}}))
    if key not in REQUIRED:
        by_recipe = load_run_config(Path("r.yaml"), [*BOTH, *NEEDS.get(key, [])], "tuningfork train")
        assert by_recipe.differing(load(None, *BOTH, *NEEDS.get(key, []))).keys() == {key}
        flag = before if isinstance(before, str) else yaml.safe_dump(before, default_flow_style=True).split("\n")[0]
        back = load_run_config(Path("r.yaml"), [*BOTH, f"--{key}={flag}", *NEEDS.get(key, [])], "tuningfork train")
        assert back.values()[key] == before


def test_a_model_from_nothing_can_be_given_in_a_recipe_and_as_flags() -> None:
    """Its config as a mapping, whatever is in it, or as the path of one."""
    config = {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 1e4},
        "layer_types": ["full_attention"],
        "x": None,
    }
    for given in (config, "config.json"):
        Path("r.yaml").write_text(to_text({"model": {"init": given, "init_seed": 7, "tokenizer": "bytes"}}))
        text = given if isinstance(given, str) else yaml.safe_dump(given, default_flow_style=True).strip()
        flags = ["--model.init", text, "--model.init_seed", "7", "--model.tokenizer", "bytes"]
        by_recipe = load_run_config(Path("r.yaml"), ["--data.train", "d"], "tuningfork train")
        by_flags = load_run_config(None, [*flags, "--data.train", "d"], "tuningfork train")
        assert by_recipe == by_flags and by_flags.model.init == given
        assert from_yaml(by_flags.to_yaml(), "r.yaml") == by_flags


def test_a_tilde_is_the_home_of_the_user_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(loading, "read_template", lambda name: None)
    given: dict[str, Any] = {
        "model.path": "~/model",
        "data.train": ["~/a.jsonl", "hub:x/~y", "b.jsonl"],
        "data.eval": "~/held/*.jsonl",
        "data.cache": "~/tokens",
        "data.template": "~/t.jinja",
        "reference.cache": "~",
        "output.dir": "~/runs/first",
    }
    assert {*given, "model.init", "model.tokenizer"} == {*PATHS}
    tree: dict[str, Any] = {}
    for key, value in given.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    Path("r.yaml").write_text(to_text(tree))
    found = load_run_config(Path("r.yaml"), [], "tuningfork train").values()
    assert {key: found[key] for key in given} == {
        "model.path": "/home/me/model",
        "data.train": ["/home/me/a.jsonl", "hub:x/~y", "b.jsonl"],
        "data.eval": "/home/me/held/*.jsonl",
        "data.cache": "/home/me/tokens",
        "data.template": "/home/me/t.jinja",
        "reference.cache": "/home/me",
        "output.dir": "/home/me/runs/first",
    }
    assert load(None, "--output.dir=~/other").output.dir == "/home/me/other"
    made = ["--data.train=d", "--model.init=~/config.json", "--model.tokenizer=~/words"]
    model = load_run_config(None, made, "tuningfork train").model
    assert (model.init, model.tokenizer) == ("/home/me/config.json", "/home/me/words")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            None,
            "data.template t.jinja: there is no such file. Give chat, none or a .jinja file. That is HERE/t.jinja: "
            "relative paths start at the current directory, not at the recipe.",
        ),
        (b"", "data.template t.jinja: is empty."),
        (b"\xff", "data.template t.jinja: is not UTF-8 text (byte 0). Save it as UTF-8."),
        (b"x" * (1 << 20 | 1), "data.template t.jinja: has more than 1,048,576 bytes, so it is no chat template."),
    ],
)
def test_a_template_file_that_cannot_be_used_is_said_with_the_recipe(content: bytes | None, message: str) -> None:
    if content is not None:
        Path("t.jinja").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(None, "--data.template", "t.jinja")
    assert str(caught.value) == message.replace("HERE", str(Path.cwd()))
    with pytest.raises(
        ConfigError,
        match=r"allowed: chat \(the tokenizer's own template\), none, or the path of a file that ends in \.jinja",
    ):
        load(None, "--data.template", "llama3")
