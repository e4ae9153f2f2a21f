"""Settings that are missing, contradict each other, or name paths that cannot be used: refused in words."""

from pathlib import Path
from typing import Any

import pytest

from tests.recipe.workbench import error, load
from tuningfork.errors import ConfigError
from tuningfork.objective.kinds import readers
from tuningfork.recipe.check import PATHS, REQUIRED, TO_EVALUATE, check_run_config
from tuningfork.recipe.dialect import to_text
from tuningfork.recipe.load import from_yaml, load_run_config
from tuningfork.recipe.run_config import SETTINGS


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
        (
            "--model.weights bfloat16 --train.optimizer adamw_8bit --train.ema_decay 0.99",
            ("train.ema_decay is 0.99, but model.weights is bfloat16", "model.weights: float32, or remove it"),
        ),
        ("--model.tf32 true", ("model.tf32 is true, but model.dtype is auto: products are of bfloat16 on a GPU",)),
        ("--model.tf32 true --model.dtype float16", ("model.dtype is float16: products are of float16", "float32, or")),
    ],
)
def test_precisions_that_contradict_each_other_are_refused(flags: str, words: tuple[str, ...]) -> None:
    message = error(None, *flags.split())
    assert all(word in message for word in words)


@pytest.mark.parametrize("by", ["accuracy", "margin"])
def test_the_best_step_goes_by_a_number_that_the_objective_has(by: str) -> None:
    flags = ["--data.eval", "held.jsonl", "--train.eval_every", "5", "--train.best_by", by]
    load(None, *flags)
    message = error(None, *flags, "--objective.name", "sft")
    assert f"train.best_by is {by}, which evaluations of objective.name sft do not give" in message
    assert "train.best_by: loss" in message


def test_a_step_has_one_size() -> None:
    message = error(None, "--train.tokens_per_step", "8192", "--train.examples_per_step", "16")
    assert "train.tokens_per_step is 8,192 and train.examples_per_step is 16. Keep one" in message


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"over-length": "drop"}, "data.over_length is drop, which makes no pieces. Set data.over_length: pieces"),
        ({"tokens": None}, "which needs train.tokens_per_step. Set it"),
        ({"max": None}, "which needs train.max_steps. Set it"),
        ({"max": "8"}, "8 steps in all, but train.max_steps is 8, so that no piece of data.max_length 64"),
        ({"lines": "[[5, 32], [3, 32]]"}, "pieces of 32 tokens would follow ones of 32. Lengths rise"),
        ({"lines": "[[5, 32], [3, 64]]"}, "data.max_length is 64: pieces of 64 tokens would follow ones of 64."),
        ({"lines": "[[5, 32, 1]]"}, "but [5, 32, 1] is not [steps, tokens]. Give each line two"),
        ({"lines": "[]"}, "train.length_steps is [], which has no line"),
        ({"lines": "[[5, 1]]"}, "a piece of 1 token has none to be predicted"),
        ({"order": "grouped"}, "but train.order is grouped. Set train.order: shuffled"),
        ({"lines": "[[0, 32]]"}, "train.length_steps"),
    ],
)
def test_pieces_that_grow_need_pieces_steps_by_tokens_and_an_end(changed: dict[str, str | None], words: str) -> None:
    right = {"lines": "[[5, 16], [3, 32]]", "over-length": "pieces", "tokens": "200", "max": "9", "order": "shuffled"}
    names = ("train.length_steps", "data.over_length", "train.tokens_per_step", "train.max_steps", "train.order")

    def flags(values: dict[str, str | None]) -> list[str]:
        always = ["--data.max_length=64", "--objective.name=lm"]
        given = zip(names, values.values(), strict=True)
        return [*always, *(f"--{name}={value}" for name, value in given if value is not None)]

    assert load(None, *flags(right)).train.length_steps == [[5, 16], [3, 32]]
    assert words in " ".join(error(None, *flags({**right, **changed})).split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--train.warmup_steps 10 --train.warmup_ratio 0.2",
            "train.warmup_steps is 10 and train.warmup_ratio is 0.2. Keep",
        ),
        (
            "--train.schedule constant --train.min_lr_ratio 0.1",
            "schedule constant does not use it. Remove it, or choose",
        ),
        (
            "--train.schedule cosine --train.decay_start 0.5",
            "schedule cosine does not use it. Remove it, or choose wsd.",
        ),
    ],
)
def test_a_schedule_has_one_warm_up_and_its_own_settings(flags: str, words: str) -> None:
    assert words in error(None, *flags.split())


def test_pieces_are_of_documents() -> None:
    message = error(None, "--data.over_length", "pieces")
    assert "objective.name dpo compares two answers" in message and "objective.name: lm" in message
    load(None, "--data.over_length", "pieces", "--objective.name", "lm")
    assert "data.over_length is stream, which cuts documents" in error(None, "--data.over_length", "stream")
    stream = ["--data.over_length", "stream", "--objective.name", "lm"]
    load(None, *stream)
    assert "Set train.order: shuffled" in error(None, *stream, "--train.order", "grouped")


@pytest.mark.parametrize(("name", "value"), [("group_by", "conversation"), ("group_most", "8")])
def test_settings_of_groups_are_refused_where_nothing_is_grouped(name: str, value: str) -> None:
    message = error(None, f"--train.{name}", value)
    assert f"train.{name} is {value}, but train.order is shuffled" in message
    assert "Remove it, or set train.order: grouped." in message


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


PATH_NAMES = ("path", "dir", "cache", "train", "eval", "template", "init", "tokenizer")


def test_every_setting_that_is_a_path_is_known_to_be_one() -> None:
    named = {key for key in SETTINGS if key.rpartition(".")[2] in PATH_NAMES}
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
         f"Remove it, or choose {' or '.join(readers('label_smoothing'))}."),
        ("--objective.gamma 0", "objective.gamma is 0.0, but objective.name dpo does not use it. "
         f"Remove it, or choose {' or '.join(readers('gamma'))}."),
        ("--objective.name simpo --reference.cache c",
         "reference.cache is c, but objective.name simpo has no reference. Remove it."),
        ("--pack.tokens 2047", "pack.tokens is 2047, but one answer of data.max_length 2048 can need 2048. "
         "Raise pack.tokens to 2048 or lower data.max_length to 2047."),
        ("--pack.tokens 4095 --pack.share none",
         "pack.tokens is 4095, but two answers, each with a prompt of its own, of data.max_length 2048 can need 4096. "
         "Raise pack.tokens to 4096 or lower data.max_length to 2047."),
        ("--pack.tokens 2047 --pack.share none --objective.name sft",
         "pack.tokens is 2047, but one answer of data.max_length 2048 can need 2048. "
         "Raise pack.tokens to 2048 or lower data.max_length to 2047."),
        ("--data.answers best", "data.answers is best, which leaves one answer of each row, but objective.name dpo "
         "compares two. Remove it, or set objective.name: sft to imitate the best ones."),
        ("--output.sinks [tensorboard,tensorboard]", "output.sinks names tensorboard 2 times. Keep one."),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(flags: str, message: str) -> None:
    assert error(None, *flags.split()) == message


@pytest.mark.parametrize(
    "flags",
    ["--objective.label_smoothing 0.1", "--objective.name dpo_norm --objective.label_smoothing 0.1",
     "--objective.name simpo --objective.gamma 0", "--objective.name simpo", "--pack.tokens 2048",
     "--pack.tokens 4096 --pack.share none", "--pack.tokens 2048 --pack.share none --objective.name sft",
     "--data.answers best --objective.name sft"],
)  # fmt: skip
def test_settings_that_go_together(flags: str) -> None:
    check_run_config(load(None, *flags.split()))


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


def test_an_evaluation_takes_no_training_data_that_is_not_set_for_the_current_folder() -> None:
    flags = ["--model.path", "m", "--data.eval", "held.jsonl", "--data.template", "none", "--data.max_length", "256"]
    config = load_run_config(None, flags, "tuningfork eval", required=TO_EVALUATE)
    assert config.data.train == "" and config.output.dir == "runs/first"
    with pytest.raises(ConfigError, match=r"^output.dir runs/first lies in data.eval \., so that"):
        load_run_config(None, [*flags[:2], "--data.eval", "."], "tuningfork eval", required=TO_EVALUATE)


@pytest.mark.parametrize("written", ["output.dir", "data.cache", "reference.cache"])
def test_nothing_is_written_where_all_files_are_data(written: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    given = {"model.path": "m", "data.train": str(tmp_path / "data"), "output.dir": "run", "data.cache": None}
    given[written] = str(tmp_path / "data" / "ours")
    flags = [text for key, value in given.items() for text in (f"--{key}", "null" if value is None else value)]
    with pytest.raises(ConfigError, match=rf"^{written} .*/data/ours lies in data.train .* would be read as data the"):
        load_run_config(None, flags, "train")
