"""Recipes and flags: one set of rules for both, and messages that say what, where and what instead."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import ConfigDict, TypeAdapter

from tuningfork import config as config_module
from tuningfork.config import PATHS, REQUIRED, SETTINGS, check_run_config, from_yaml, load_run_config
from tuningfork.dialect import parse_scalar, to_text
from tuningfork.errors import ConfigError, DataError
from tuningfork.recipe import split_flags
from tuningfork.report import sinks
from tuningfork.run_config import RunConfig

BOTH = ["--model.path", "m", "--data.train", "d.jsonl"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


# What can be set


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
    "data.max_length": ["--pack.tokens", "8192"],
    "objective.mean_over": ["--objective.name", "sft"],
    "objective.gamma": ["--objective.name", "simpo"],
    "model.weights": ["--train.optimizer", "adamw_8bit"],
    "train.gradient_dtype": ["--train.optimizer", "adamw_8bit", "--model.weights", "bfloat16"],
    "train.eval_every": ["--data.eval", "held_out.jsonl"],
    "train.best_by": ["--data.eval", "held_out.jsonl", "--train.eval_every", "5"],
    "output.export": ["--data.eval", "held_out.jsonl", "--train.eval_every", "5"],
}


OTHER = {  # not any text will do
    "data.date": "2026-01-31",
    "data.columns": {"question": "prompt", "7": "chosen"},
    "data.roles": {"agent": "assistant"},
    "data.template": "none",
    "output.sinks": [],
}


@pytest.mark.parametrize("key", SETTINGS)
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model.weights bfloat16", ("model.weights is bfloat16", "train.optimizer: adamw_8bit")),
        (
            "--train.gradient_dtype float32",
            ("train.gradient_dtype is float32, but model.weights is float32", "model.weights: bfloat16"),
        ),
        (
            "--model.weights bfloat16 --train.optimizer adamw_8bit --model.dtype float32",
            ("model.weights is bfloat16, but model.dtype is float32", "bfloat16, or auto"),
        ),
    ],
)
def test_precisions_that_contradict_each_other_are_refused(flags: str, words: tuple[str, ...]) -> None:
    message = error(None, *flags.split())
    assert all(word in message for word in words)


def test_the_settings_are_sections_of_plain_values_whose_defaults_are_valid() -> None:
    for section in fields(RunConfig):
        assert is_dataclass(getattr(RunConfig(), section.name))
    for key, default in RunConfig().values().items():
        if key not in REQUIRED:
            value = TypeAdapter(SETTINGS[key], config=ConfigDict(strict=True)).validate_python(default)
            assert (value, type(value)) == (default, type(default)), key


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
        ("pack.share_prompt", "false", False),
        ("pack.share_prompt", "False", False),
        ("pack.share_prompt", "true", True),
        ("model.compile", "on", "on"),
        ("data.template", "none", "none"),
        ("data.eval", "null", None),
    ],
)
def test_a_value_reads_the_same_in_a_recipe_and_as_a_flag(key: str, text: str, value: Any) -> None:
    section, _, name = key.partition(".")
    for loaded in (load(f"{section}:\n  {name}: {text}\n"), load(None, f"--{key}", text)):
        assert (loaded.values()[key], type(loaded.values()[key])) == (value, type(value))


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.shares=[1, 2]"], "data.shares has 2 entries, but data.train names 1 source"),
        (["--data.train=[a, b]", "--data.counts=[1]"], "data.counts has 1 entry, but data.train names 2 sources"),
        (["--data.train=[a, b]", "--data.counts=[1, 2]", "--data.shares=[1, 2]"], "both given"),
        (["--data.shares=[0]"], "data.shares is a list; allowed: a list with each entry a number, greater than 0"),
        (["--data.counts=[1.5]"], "data.counts is a list; allowed: a list with each entry a whole number, at least 1"),
    ],
)
def test_a_mix_that_does_not_go_with_its_sources_is_refused(flags: list[str], words: str) -> None:
    assert words in error(None, *flags)


@pytest.mark.parametrize("by", ["accuracy", "margin"])
def test_the_best_step_goes_by_a_number_that_the_objective_has(by: str) -> None:
    flags = ["--data.eval", "held.jsonl", "--train.eval_every", "5", "--train.best_by", by]
    load(None, *flags)
    message = error(None, *flags, "--objective.name", "sft")
    assert f"train.best_by is {by}, which evaluations of objective.name sft do not give" in message
    assert "train.best_by: loss" in message


def test_flags_take_an_equals_sign_and_hyphens() -> None:
    assert load(None, "--train.max-grad-norm=0.5", "--train.warmup_ratio=0").train.max_grad_norm == 0.5


# What is refused


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
        ("pack.share_prompt", "yes", "pack.share_prompt is the text 'yes'; allowed: true or false."),
        ("pack.share_prompt", "1", "pack.share_prompt is 1; allowed: true or false."),
        ("model.dtype", "bfloat", "model.dtype is the text 'bfloat'; "
         "allowed: one of auto, bfloat16, float32. Did you mean bfloat16?"),
        ("train.activation_memory", "blocks", "train.activation_memory is the text 'blocks'; "
         "allowed: none, block, budget:<0..1> such as budget:0.5, offload, or auto."),
        ("train.activation_memory", "budget:1.5", "train.activation_memory is the text 'budget:1.5'; "
         "allowed: none, block, budget:<0..1> such as budget:0.5, offload, or auto."),
        ("model.dtype", "int8", "model.dtype is the text 'int8': not supported; "
         "allowed: one of auto, bfloat16, float32."),
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
        ("zzz: 1", "zzz is not a setting; the sections are model, data, objective, pack, reference, train, output."),
        ("1: 1", "1 is not a setting; the sections are model, data, objective, pack, reference, train, output."),
        ("train.seed: 1", "train.seed is written with a dot; in a recipe, seed stands below train."),
        ("train: 3", "train is 3; allowed: settings below it, such as train.learning_rate."),
        ("train: [seed]", "train is a list; allowed: settings below it, such as train.learning_rate."),
        ("train:\n  seed: {a: 1}",
         "train.seed is a mapping; allowed: a whole number, at least 0 and less than 4294967296."),
        ('train:\n  learning_rate: "5e-7"',
         "train.learning_rate is the text '5e-7'; allowed: a number, greater than 0."),
        ("model:\n  path: 7", "model.path is 7; allowed: text."),
        ("output:\n  dir: ''", "output.dir is the text ''; allowed: text that is not empty."),
        ("- train", "r.yaml is a list; allowed: the sections model, data, objective, pack, reference, train, output."),
        ("hm",
         "r.yaml is the text 'hm'; allowed: the sections model, data, objective, pack, reference, train, output."),
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
        (["--resum"], "--resum is not a setting; did you mean --resume?"),
        (["--train", "1"], "--train is a section; name a setting in it, such as --train.learning_rate."),
        (["--train.seed"], "--train.seed needs a value: a whole number, at least 0 and less than 4294967296."),
        (["--pack.share_prompt", "--train.seed", "1"], "--pack.share_prompt needs a value: true or false."),
        (["--train.max_steps="],
         "command line: train.max_steps is the text ''; allowed: a whole number, at least 1, or null."),
        (["--data.eval", ""], "command line: data.eval is the text ''; allowed: text that is not empty or a list "
         "with each entry text, or null."),
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


PATHS_OF_NO_USE = {
    "a\0b": "embedded null byte",
    "n" * 300: "File name too long",
    "loop": "Too many levels of symbolic links",
    "loop/within": "Too many levels of symbolic links",
    "\ud800": "surrogates not allowed",
}


@pytest.mark.parametrize("path", PATHS_OF_NO_USE, ids=range(len(PATHS_OF_NO_USE)))
@pytest.mark.parametrize("key", PATHS)
def test_a_path_that_no_file_system_takes_is_named_by_its_setting(key: str, path: str) -> None:
    why = PATHS_OF_NO_USE[path]
    for link in ("loop", "loop.jinja"):
        Path(link).symlink_to(link)
    if key == "data.template":
        path += ".jinja"
    section, _, name = key.partition(".")
    given: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "data": {"train": "d"}}
    given.setdefault(section, {})[name] = path
    lists = [[*("d" for _ in range(3)), path]] if key in ("data.train", "data.eval") else []
    for value in (path, *lists):
        given[section][name] = value
        with pytest.raises(ConfigError) as caught:
            check_run_config(from_yaml(to_text(given), "r.yaml"))
        message = str(caught.value).removeprefix("r.yaml: ")
        assert message.startswith(f"{key} is ")
        assert why in message or "\ud800" in path  # which is refused as text, where text has bounds


def test_every_setting_that_is_a_path_is_known_to_be_one() -> None:
    named = {key for key in SETTINGS if key.rpartition(".")[2] in ("path", "dir", "cache", "train", "eval", "template")}
    assert named == {*PATHS}


def test_required_settings() -> None:
    cases = {
        "": "model.path and data.train must be set, in the recipe or by flag; "
        "for example: --model.path ./model --data.train ./pairs.jsonl",
        "--data.train=d": "model.path must be set, in the recipe or by flag; for example: --model.path ./model",
        "--model.path=m": "data.train must be set, in the recipe or by flag; for example: --data.train ./pairs.jsonl",
    }
    for flag, message in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_run_config(None, [flag] if flag else [], "tuningfork train")
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--objective.name ipo --objective.label_smoothing 0.1",
         "objective.label_smoothing is 0.1, but objective.name ipo does not use it. "
         "Remove it, or choose dpo or dpo_norm."),
        ("--objective.gamma 0", "objective.gamma is 0.0, but objective.name dpo does not use it. "
         "Remove it, or choose simpo."),
        ("--objective.name simpo --reference.cache c",
         "reference.cache is c, but objective.name simpo has no reference. Remove it."),
        ("--pack.tokens 2047", "pack.tokens is 2047, but one answer of data.max_length 2048 can need 2048. "
         "Raise pack.tokens to 2048 or lower data.max_length to 2047."),
        ("--pack.tokens 4095 --pack.share_prompt false",
         "pack.tokens is 4095, but two answers, each with a prompt of its own, of data.max_length 2048 can need 4096. "
         "Raise pack.tokens to 4096 or lower data.max_length to 2047."),
        ("--output.sinks [tensorbord]", "output.sinks has 'tensorbord', which is no sink; allowed: "
         f"{', '.join(sinks.NAMES)}. "
         "Did you mean tensorboard?"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(flags: str, message: str) -> None:
    assert error(None, *flags.split()) == message


@pytest.mark.parametrize(
    "flags",
    ["--objective.label_smoothing 0.1", "--objective.name dpo_norm --objective.label_smoothing 0.1",
     "--objective.name simpo --objective.gamma 0", "--objective.name simpo", "--pack.tokens 2048",
     "--pack.tokens 4096 --pack.share_prompt false"],
)  # fmt: skip
def test_settings_that_go_together(flags: str) -> None:
    check_run_config(load(None, *flags.split()))


# Saving, comparing, splitting, help


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


def test_split_parts_the_commands_own_arguments_from_settings() -> None:
    own = ("--resume", "--name")
    typed = "--train.seed 3 r.yaml --resume --a.b=1 --typo --name x --objective.beta -1"
    assert split_flags(typed.split(), own) == (
        ["r.yaml", "--resume", "--name", "x"],
        ["--train.seed", "3", "--a.b=1", "--typo", "--objective.beta", "-1"],
    )
    assert split_flags(["r.yaml", "--help"], own) == (["r.yaml"], ["--help"])


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
        "pack.share_prompt": ["true|false", "(default: true)"],
        "model.compile": ["auto|on|off", "(default: auto)"],
        "train.max_steps": ["INTEGER|null", "(default: null)"],
        "data.train": ["TEXT|[TEXT,..]", "(recipe: mine.jsonl)"],
        "data.shares": ["[NUMBER,..]|null", "(default: null)"],
        "model.path": ["TEXT", "(required)"],
    }.items():
        for part in expected:
            assert part in shown[key], (key, part)


def test_every_setting_has_a_meaning() -> None:
    """A docstring below each field: it is what --help prints."""
    import ast
    import inspect

    for section in fields(RunConfig):
        room = type(getattr(RunConfig(), section.name))
        module = ast.parse(inspect.getsource(inspect.getmodule(room) or config_module))
        body = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == room.__name__).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
                assert documented, f"{room.__name__}.{ast.unparse(node.target)}"


@pytest.mark.parametrize("value", ["!!float abc", "!!int abc", "!!timestamp foo", "!!bool maybe", "!!map [a]"])
def test_a_tag_that_does_not_fit_its_value_is_an_error_of_the_recipe(value: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        from_yaml(f"train: {{seed: {value}}}", "r.yaml")


def test_a_recipe_that_is_looked_at_gives_a_terminal_no_order() -> None:
    """A run's config.yaml may hold whatever a file is called; it reads back as what it was."""
    name = "a" + "".join(chr(code) for code in (*range(1, 0xA0), 0x61C, 0x200E, *range(0x2028, 0x2070)) if code != 10)
    text = to_text({"data": {"train": [name], "columns": {name: "prompt"}}})
    assert not set(text) & {chr(code) for code in (*range(10), *range(11, 32), *range(0x7F, 0xA0))}
    assert not set(text) & set("\u061c\u200e\u2028\u2029\u202a\u202e\u2066\u2067\u2068\u2069")
    assert yaml.safe_load(text) == {"data": {"train": [name], "columns": {name: "prompt"}}}


def test_a_tilde_is_the_home_of_the_user_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(config_module, "read_template", lambda name: None)
    given: dict[str, Any] = {
        "model.path": "~/model",
        "data.train": ["~/a.jsonl", "hub:x/~y", "b.jsonl"],
        "data.eval": "~/held/*.jsonl",
        "data.cache": "~/tokens",
        "data.template": "~/t.jinja",
        "reference.cache": "~",
        "output.dir": "~/runs/first",
    }
    assert set(given) == set(config_module.PATHS)
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


def test_a_path_that_would_be_right_beside_the_recipe_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever setting has it, and before a name that is near is guessed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dd").mkdir()
    (tmp_path / "empty.jsonl").touch()
    for name in ("train.jsonl", "held.jsonl", "t.jinja", "model"):
        (tmp_path / "dd" / name).write_text("x")
    for key, value, path in (
        ("data.train", "train.jsonl", "train.jsonl"),
        ("data.train", "[empty.jsonl, train.jsonl]", "train.jsonl"),
        ("data.eval", "held.jsonl", "held.jsonl"),
        ("data.template", "t.jinja", "t.jinja"),
        ("model.path", "./model", "./model"),
    ):
        section, _, name = key.partition(".")
        Path("dd/r.yaml").write_text(f"{section}: {{{name}: {value}}}")
        others = [f"--{other}=m" for other in REQUIRED if other != key]
        with pytest.raises(ConfigError) as caught:
            load_run_config(Path("dd/r.yaml"), others, "tuningfork train")
        assert str(caught.value) == (
            f"dd/r.yaml: {key} {path}: there is no such file. That is {tmp_path}/{Path(path)}: relative paths start at "
            f"the current directory, not at the recipe. One lies beside the recipe: write dd/{Path(path)}"
        )
        by_flag = "chat" if key == "data.template" else "empty.jsonl"
        load_run_config(Path("dd/r.yaml"), [*others, f"--{key}={by_flag}"], "tuningfork train")
    (tmp_path / "dd" / "chat").mkdir()
    (tmp_path / "dd" / "owner" / "name").mkdir(parents=True)
    Path("dd/r.yaml").write_text("{data: {template: chat}, model: {path: owner/name}}")  # neither is a path
    load_run_config(Path("dd/r.yaml"), ["--data.train=m"], "tuningfork train")


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


def test_a_field_of_the_files_may_be_left_out() -> None:
    assert load("data: {columns: {tools: null, q: prompt}}").data.columns == {"tools": None, "q": "prompt"}
    assert load(None, "--data.columns", "{tools: null}").data.columns == {"tools": None}
    with pytest.raises(ConfigError, match=r"data\.roles is a mapping; allowed: a mapping of names to names, such as"):
        load("data: {roles: {x: null}}")
    with pytest.raises(ConfigError, match="a mapping of names to names, or to null, such as"):
        load("data: {columns: {x: 3}}")


@pytest.mark.parametrize("written", ["output.dir", "data.cache", "reference.cache"])
def test_nothing_is_written_where_all_files_are_data(written: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    given = {"model.path": "m", "data.train": str(tmp_path / "data"), "output.dir": "run", "data.cache": None}
    given[written] = str(tmp_path / "data" / "ours")
    flags = [text for key, value in given.items() for text in (f"--{key}", "null" if value is None else value)]
    with pytest.raises(ConfigError, match=rf"^{written} .*/data/ours lies in data.train .* would be read as data the"):
        load_run_config(None, flags, "train")
