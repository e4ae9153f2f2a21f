"""Recipes and flags: one set of rules for both, and messages that say what, where and what instead."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipe.workbench import error, load
from tuningfork.errors import ConfigError
from tuningfork.recipe.load import from_yaml, load_run_config
from tuningfork.recipe.parse import split_flags

SECTIONS = "model, data, objective, pack, reference, train, parallel, output"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.learning_rate", "5e-7", 5e-7),
        ("train.learning_rate", "1E-05", 1e-5),
        ("train.learning_rate", "1", 1.0),
        ("train.learning_rate", ".5", 0.5),
        ("train.epochs", "3", 3.0),
        ("train.seed", "010", 10),
        ("train.max_steps", "null", None),
        ("train.max_grad_norm", "null", None),
        ("train.max_grad_norm", "~", None),
        ("pack.share", "prompt", "prompt"),
        ("model.compile", "on", "on"),
        ("data.template", "none", "none"),
        ("data.eval", "null", None),
    ],
)
def test_a_value_reads_the_same_in_a_recipe_and_as_a_flag(key: str, text: str, value: Any) -> None:
    section, _, name = key.partition(".")
    for loaded in (load(f"{section}:\n  {name}: {text}\n"), load(None, f"--{key}", text)):
        assert (loaded.values()[key], type(loaded.values()[key])) == (value, type(value))


def test_a_flag_that_begins_as_a_mapping_is_one_and_no_path() -> None:
    given = ("--model.path", "", "--model.tokenizer", "bytes")
    assert load(None, "--model.init", "{model_type: llama}", *given).model.init == {"model_type": "llama"}
    twice = error(None, "--model.init", "{hidden_size: 1, hidden_size: 2}", *given)
    assert "hidden_size is given twice (first in line 1); keep one" in twice
    assert "line 1" in error(None, "--model.init", "{hidden_size: 1", *given)


@pytest.mark.parametrize("text", ["7", "1e5", "true", "on", "2024-01-01", "a: b", "[x", "#1", "-x", "ü b"])
def test_text_needs_no_quotes_as_a_flag(text: str) -> None:
    assert load(None, f"--data.train={text}").data.train == text
    assert load(None, "--data.eval", text).data.eval == text
    assert load(None, "--output.dir", text).output.dir == text


def test_sources_may_be_a_list_in_a_recipe_and_as_a_flag() -> None:
    text = "model: {path: m}\ndata:\n  train: [a.jsonl, 'b c.json']\n  shares: [3, 0.5]\n"
    Path("list.yaml").write_text(text)
    flags = ["--model.path=m", "--data.train", "[a.jsonl, 'b c.json']", "--data.shares=[3, 0.5]"]
    for loaded in (load_run_config(Path("list.yaml"), [], "train"), load_run_config(None, flags, "train")):
        assert (loaded.data.train, loaded.data.shares) == (["a.jsonl", "b c.json"], [3, 0.5])
        assert from_yaml(loaded.to_yaml(), "again") == loaded


def test_flags_take_an_equals_sign_and_hyphens() -> None:
    assert load(None, "--train.max-grad-norm=0.5", "--train.warmup_ratio=0").train.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("objective.beta", "-1", "objective.beta is -1; allowed: a number, greater than 0."),
        ("objective.beta", "0", "objective.beta is 0; allowed: a number, greater than 0."),
        ("objective.beta", "much", "objective.beta is the text 'much'; allowed: a number, greater than 0."),
        ("objective.beta", "null", "objective.beta is null; allowed: a number, greater than 0."),
        ("objective.beta", "true", "objective.beta is true; allowed: a number, greater than 0."),
        ("train.learning_rate", ".inf", "train.learning_rate is .inf; allowed: a number, greater than 0."),
        ("objective.gamma", ".nan", "objective.gamma is .nan; allowed: a number, at least 0, or null."),
        ("objective.label_smoothing", "0.5",
         "objective.label_smoothing is 0.5; allowed: a number, at least 0 and less than 0.5."),
        ("train.max_steps", "10.0", "train.max_steps is 10.0; allowed: a whole number, at least 1, or null."),
        ("train.max_steps", "None",
         "train.max_steps is the text 'None'; allowed: a whole number, at least 1, or null."),
        ("train.examples_per_step", "true",
         "train.examples_per_step is true; allowed: a whole number, at least 1."),
        ("pack.share", "true", "pack.share is true; allowed: one of none, prompt, tree."),
        ("model.dtype", "bfloat", "model.dtype is the text 'bfloat'; "
         "allowed: one of auto, bfloat16, float16, float32. Did you mean bfloat16?"),
        ("train.activation_memory", "blocks", "train.activation_memory is the text 'blocks'; "
         "allowed: none, block, budget:<0..1> such as budget:0.5, offload, or auto."),
        ("train.activation_memory", "budget:1.5", "train.activation_memory is the text 'budget:1.5'; "
         "allowed: none, block, budget:<0..1> such as budget:0.5, offload, or auto."),
        ("model.dtype", "int8", "model.dtype is the text 'int8': not supported; "
         "allowed: one of auto, bfloat16, float16, float32."),
    ],
)  # fmt: skip
def test_a_wrong_value_gets_the_same_message_in_a_recipe_and_as_a_flag(key: str, text: str, message: str) -> None:
    section, _, name = key.partition(".")
    assert error(f"{section}:\n  {name}: {text}\n") == f"r.yaml: {message}"
    assert error(None, f"--{key}", text) == f"command line: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  lerning_rate: 1e-6", "train.lerning_rate is not a setting; did you mean train.learning_rate?"),
        ("train:\n  activations_memory: block",
         "train.activations_memory is not a setting; did you mean train.activation_memory?"),
        ("trian:\n  seed: 1", "trian.seed is not a setting; here it is train.seed: 1."),
        ("train:\n  beta: 1", "train.beta is not a setting; here it is objective.beta: 1."),
        ("learning_rate: 1", "learning_rate is not a setting; here it is train.learning_rate: 1."),
        ("zzz: 1", f"zzz is not a setting; the sections are {SECTIONS}."),
        ("1: 1", f"1 is not a setting; the sections are {SECTIONS}."),
        ("train.seed: 1", "train.seed is written with a dot; in a recipe, seed stands below train."),
        ("model:\n  init.window: 8",
         "model.init.window is not a setting; model.init is one mapping, which is given as a whole: model.init: "
         "{window: 8, ...}."),
        ("train: 3", "train is 3; allowed: settings below it, such as train.learning_rate."),
        ("train: [seed]", "train is a list; allowed: settings below it, such as train.learning_rate."),
        ("train:\n  seed: {a: 1}",
         "train.seed is a mapping; allowed: a whole number, at least 0 and less than 4294967296."),
        ('train:\n  learning_rate: "5e-7"',
         "train.learning_rate is the text '5e-7'; allowed: a number, greater than 0."),
        ("model:\n  path: 7", "model.path is 7; allowed: text."),
        ("output:\n  dir: ''", "output.dir is the text ''; allowed: text that is not empty."),
        ("- train", f"r.yaml is a list; allowed: the sections {SECTIONS}."),
        ("hm",
         f"r.yaml is the text 'hm'; allowed: the sections {SECTIONS}."),
        ("", "r.yaml is empty. A recipe gives settings, for example:\n  model:\n    path: ./model"),
        ("# nothing\n", "r.yaml is empty. A recipe gives settings, for example:\n  model:\n    path: ./model"),
        ("train:\n  seed: 1\n  seed: 2", "line 3, column 3: seed is given twice (first in line 2); keep one."),
        ("train: {seed: 1}\npack: {}\ntrain: {}",
         "line 3, column 1: train is given twice (first in line 1); keep one."),
        ("train:\n  seed: [1\n",
         "line 3, column 1: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'."),
        ("train:\n\tseed: 1\n",
         "line 2, column 1: while scanning for the next token, found character '\\t' that cannot start any token."),
        ("? [a]\n: 1", "line 1, column 3: while constructing a mapping, found unhashable key."),
        ("train: !!python/name:os.system",
         "line 1, column 8: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system'."),
    ],
)  # fmt: skip
def test_a_wrong_recipe(text: str, message: str) -> None:
    assert error(text) == (message if message.startswith("r.yaml") else f"r.yaml: {message}")


def test_everything_wrong_is_said_at_once() -> None:
    assert error("objective: {beta: -1}\ntrain: {sed: 1}\npack: 3\n").splitlines() == [
        "r.yaml: pack is 3; allowed: settings below it, such as pack.tokens.",
        "r.yaml: objective.beta is -1; allowed: a number, greater than 0.",
        "r.yaml: train.sed is not a setting; did you mean train.seed?",
    ]


def test_a_section_may_be_empty() -> None:
    assert load("train:\n  # seed: 3\npack: {tokens: 9000}\n").pack.tokens == 9000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.lerning_rate", "1"], "--train.lerning_rate is not a setting; did you mean --train.learning_rate?"),
        (["--learning_rate", "1"], "--learning_rate is not a setting; here it is --train.learning_rate 1."),
        (["--train.lr", "1"], "--train.lr is not a setting; here it is --train.learning_rate 1."),
        (["--lr", "1"], "--lr is not a setting; here it is --train.learning_rate 1."),
        (["--train.wd", "1"], "--train.wd is not a setting; did you mean --train.weight_decay?"),
        (["--model.init.select_count", "2"], "--model.init.select_count is not a setting; model.init is one mapping, "
         "which is given as a whole: in the recipe, or by --model.init '{select_count: 2, ...}'."),
        (["--model.init.rope_parameters.rope_theta=1e6"], "--model.init.rope_parameters.rope_theta is not a setting; "
         "model.init is one mapping, which is given as a whole: in the recipe, or by --model.init "
         "'{rope_parameters: {rope_theta: 1e6}, ...}'."),
        (["--data.columns.question"], "--data.columns.question is not a setting; data.columns is one mapping, which is "
         "given as a whole: in the recipe, or by --data.columns '{question: ..., ...}'."),
        (["--train.seed.x", "1"], "--train.seed.x is not a setting; did you mean --train.seed?"),
        (["--resum"], "--resum is not a setting; did you mean --resume?"),
        (["--train", "1"], "--train is a section; name a setting in it, such as --train.learning_rate."),
        (["--train.seed"], "--train.seed needs a value: a whole number, at least 0 and less than 4294967296."),
        (["--pack.share", "--train.seed", "1"], "--pack.share needs a value: one of none, prompt, tree."),
        (["--train.max_steps="],
         "command line: train.max_steps is the text ''; allowed: a whole number, at least 1, or null."),
        (["--data.eval", ""], "command line: data.eval is the text ''; allowed: text that is not empty or a list "
         "with each entry text that is not empty, or null."),
        (["--data.train", "[a.jsonl, '']"],
         "command line: data.train is a list; allowed: text or a list with each entry text that is not empty."),
        (["--model.init="], "command line: model.init is the text ''; allowed: text that is not empty or a mapping of "
         "settings, or null."),
        (["--model.tokenizer="],
         "command line: model.tokenizer is the text ''; allowed: text that is not empty, or null."),
        (["--train.seed", "1", "--train.seed", "2"], "--train.seed is given twice; keep one."),
        (["more.yaml"], "'more.yaml' is not expected here. Settings are given as --train.seed 3."),
    ],
)  # fmt: skip
def test_a_wrong_flag(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, flags, "tuningfork train", options={"--resume": "go on"})
    assert str(caught.value) == message


def test_a_recipe_that_cannot_be_read() -> None:
    Path("recipes").mkdir()
    Path("recipes/first-run.yaml").touch()
    Path("latin.yaml").write_bytes(b"model: {path: \xfc}")
    for path, message in {
        "recipes/first_run.yml": "recipes/first_run.yml: there is no such recipe. Did you mean recipes/first-run.yaml?",
        "recipes/zzz": "recipes/zzz: there is no such recipe.",
        "nowhere/r.yaml": "nowhere/r.yaml: there is no folder nowhere.",
        "recipes": "recipes is a folder. A recipe is a YAML file.",
        "latin.yaml": "latin.yaml is not UTF-8 text (byte 14). A recipe is a YAML file.",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_run_config(Path(path), [], "tuningfork train")
        assert str(caught.value) == message


def test_split_parts_the_commands_own_arguments_from_settings() -> None:
    own = ("--resume", "--name")
    typed = "--train.seed 3 r.yaml --resume --a.b=1 --typo --name x --objective.beta -1"
    assert split_flags(typed.split(), own) == (
        ["r.yaml", "--resume", "--name", "x"],
        ["--train.seed", "3", "--a.b=1", "--typo", "--objective.beta", "-1"],
    )
    assert split_flags(["r.yaml", "--help"], own) == (["r.yaml"], ["--help"])


@pytest.mark.parametrize("value", ["!!float abc", "!!int abc", "!!timestamp foo", "!!bool maybe", "!!map [a]"])
def test_a_tag_that_does_not_fit_its_value_is_an_error_of_the_recipe(value: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        from_yaml(f"train: {{seed: {value}}}", "r.yaml")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "A.CSV", "a.tsv", "a.parquet"])
def test_a_data_file_given_as_the_recipe_is_said_to_be_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b' [{"prompt": "\xff"}]' * 100_000)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [], "tuningfork train")
    assert str(caught.value) == f"{path} is a data file, not a recipe. Give it as a setting: --data.train {path}"


def test_a_recipe_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"model": {"path": "m"}, "data": {"train": "d"}}')
    assert load_run_config(tmp_path / "r.json", [], "tuningfork train").model.path == "m"


def test_a_field_of_the_files_may_be_left_out() -> None:
    assert load("data: {columns: {tools: null, q: prompt}}").data.columns == {"tools": None, "q": "prompt"}
    assert load(None, "--data.columns", "{tools: null}").data.columns == {"tools": None}
    with pytest.raises(ConfigError, match=r"data\.roles is a mapping; allowed: a mapping of names to names, such as"):
        load("data: {roles: {x: null}}")
    with pytest.raises(ConfigError, match="a mapping of names to names, or to null, such as"):
        load("data: {columns: {x: 3}}")
