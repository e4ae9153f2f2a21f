"""The help page: every setting, with its type, its meaning and its value."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tuningfork.objective.kinds import OBJECTIVES
from tuningfork.recipe import load as loading
from tuningfork.recipe.load import load_run_config
from tuningfork.recipe.run_config import SETTINGS, RunConfig


def test_help_shows_every_setting_with_the_values_of_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # one column of boxes
    Path("r.yaml").write_text("train: {learning_rate: 3e-6, max_grad_norm: null}\ndata: {train: mine.jsonl}\n")
    with pytest.raises(SystemExit) as caught:
        load_run_config(Path("r.yaml"), ["--help"], "tuningfork train", options={"--resume": "go on"})
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: tuningfork train [recipe] ")
    assert lines[2].startswith("recipe     a YAML file") and lines[3] == "--resume   go on"
    shown: dict[str, str] = {}  # key -> its line and its meaning, as one line
    for line in lines:
        if match := re.match(r"[│ ] +--(\w+\.\w+) ", line):
            key = match[1]
            shown[key] = ""
        if shown:
            shown[key] += line.strip("│ ") + " "
    assert list(shown) == list(SETTINGS)
    for key, expected in {
        "train.learning_rate": ["NUMBER", "Peak learning rate", "(recipe: 3.0e-06)"],
        "train.max_grad_norm": ["NUMBER|null", "(recipe: null)"],
        "pack.share": ["none|prompt|tree", "(default: tree)"],
        "model.compile": ["auto|on|off", "(default: auto)"],
        "train.max_steps": ["INTEGER|null", "(default: null)"],
        "data.train": ["TEXT|[TEXT,..]", "(recipe: mine.jsonl)"],
        "data.shares": ["[NUMBER,..]|null", "(default: null)"],
        "model.path": ["TEXT", "(required)"],
    }.items():
        for part in expected:
            assert part in shown[key], (key, part)
    for key in SETTINGS:  # that some objectives read
        those = [name for name, kind in OBJECTIVES.items() if key.partition("objective.")[2] in kind.settings()]
        some = 0 < len(those) < len(OBJECTIVES)
        assert ("Read by" in shown[key]) == some and (not some or f"Read by {', '.join(those)}." in shown[key])


def test_every_setting_has_a_meaning() -> None:
    """A docstring below each field: it is what --help prints."""
    import ast
    import inspect

    for section in fields(RunConfig):
        room = type(getattr(RunConfig(), section.name))
        module = ast.parse(inspect.getsource(inspect.getmodule(room) or loading))
        body = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == room.__name__).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
                assert documented, f"{room.__name__}.{ast.unparse(node.target)}"
