"""Recipes that are broken, or made to hang whoever reads them: an error that says where, at once."""

import os
from pathlib import Path

import pytest

from tests.bounds import within
from tuningfork.errors import ConfigError
from tuningfork.recipe.dialect import MOST_VALUES, DialectError, load
from tuningfork.recipe.load import from_yaml, load_run_config
from tuningfork.recipe.parse import LARGEST, parse_flags, parse_recipe
from tuningfork.recipe.run_config import SETTINGS

LAUGHS = "\n".join(
    ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
)  # 10**9 values in 392 bytes


def error(text: str) -> str:
    with within(20), pytest.raises(ConfigError) as caught:
        from_yaml(text, "r.yaml")
    assert len(str(caught.value)) < 5000
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "r.yaml: line 5, column 35: more than 20,000 values, with those that aliases (*) repeat"),
        (f"data:\n  train: &a [{'x, ' * 400}x]\n  eval: [{'*a, ' * 400}*a]", "line 3, column 202: more than 20,000"),
        (f"data: {{train: [{'x, ' * MOST_VALUES}x]}}", "line 1, column 60010: more than 20,000 values."),
        ("train: &a [*a]", "line 1, column 12: an alias (*) stands within what it repeats; write it out."),
        ("train: *b", "line 1, column 8: found undefined alias 'b'."),
        ("train: " + "[" * 100_000, "line 1, column 27: lists and mappings lie in each other 20 times."),
        ("train: " + "{a: " * 5000, "lists and mappings lie in each other 20 times."),
        ("\n".join(" " * i + "- a:" for i in range(0, 2000, 2)), "lists and mappings lie in each other 20 times."),
        ("base: &b {seed: 1}\ntrain:\n  <<: *b", "line 3, column 3: a merge key (<<), which YAML 1.2 does not have"),
        ("train:\n  !!merge x: 3", "line 2, column 14: while constructing a mapping, expected a mapping or list"),
        ('train: {seed: "\\q"}', "line 1, column 17: while scanning a double-quoted scalar, found unknown escape"),
        ("model:\n  path: a\0b", "line 2: the character U+0000, which no YAML text has."),
        (
            "m\0o\0d\0e\0l\0:\0",
            "line 1: the character U+0000, which no YAML text has. Is this UTF-16",
        ),
        ("train: {seed: 1}\n--- \ntrain: {seed: 2}", "line 2, column 1: expected a single document in the stream"),
        ("? {a: b}\n: 1", "line 1, column 3: while constructing a mapping, found unhashable key."),
        ("train: {seed: !!int " + "9" * 5000 + "}", "line 1, column 15: Exceeds the limit (4300 digits)"),
        ("train: {seed: " + "9" * 5000 + "}", "train.seed is the text '9999"),
        ("train: {seed: " + "9" * 3000 + "}", "train.seed is 9999"),
        ("train: {seed: !!float '" + "1:" * 2000 + "1'}", "line 1, column 15: could not convert string to float"),
        ("train: {learning_rate: 1e999}", "train.learning_rate is .inf; allowed: a number, greater than 0."),
        ("train: {seed: 2026-01-31}", "train.seed is the text '2026-01-31'"),
        ("train: {seed: !!timestamp 2026-01-31}", "train.seed is 2026-01-31"),
        ("train: {seed: !!binary aaaa}", "train.seed is !!binary"),
        ("train: {seed: !!set {a, b}}", "train.seed is !!set"),
        ("train: {seed: !!python/object/apply:os.system [ls]}", "could not determine a constructor for the tag"),
        ("k" * 1000 + ": 1", f"{'k' * 80}... (1,000 characters) is not a setting; the sections are "),
        ("train: {seed: " + "x" * 100_000 + "}", "(100,000 characters)'; allowed: a whole number"),
        ("!<" + "t" * 10_000 + "> a", "line 1, column 1: could not determine a constructor for the tag"),
    ],
    ids=lambda value: value[:20].encode("unicode_escape").decode() if isinstance(value, str) else "",
)
def test_a_hostile_recipe_is_an_error_that_says_where(text: str, said: str) -> None:
    assert said in error(text)


def test_a_long_list_of_what_is_wrong_is_cut() -> None:
    """Each name is compared with those that there are, which takes its time."""
    lines = error("train:\n" + "".join(f"  x{i}: 1\n" for i in range(4_000))).splitlines()
    assert len(lines) == 21 and lines[-1] == "r.yaml: and so on; this may be no recipe at all."
    assert len(error("".join(f"x{i}: 1\n" for i in range(4_000))).splitlines()) == 21


def test_aliases_that_stay_small_are_read() -> None:
    text = "data:\n  train: &files [a, b]\n  eval: *files\n"
    assert parse_recipe(text, "r.yaml", SETTINGS) == {"data.train": ["a", "b"], "data.eval": ["a", "b"]}


def test_the_bounds_count_what_aliases_repeat_and_nothing_twice() -> None:
    assert len(load("a: &a [1, 2]\nb: [" + "*a, " * 6_000 + "]")["b"]) == 6_000  # 3 values each
    with pytest.raises(DialectError, match="more than 20,000"):
        load("a: &a [1, 2]\nb: [" + "*a, " * 7_000 + "]")


@pytest.mark.parametrize("text", ["[" * 1000, "[&a [" + "x, " * 300 + "x], " + "*a, " * 1000 + "]", "[&a [*a]]"])
def test_a_hostile_flag_is_refused_as_a_recipe_is(text: str) -> None:
    with within(20), pytest.raises(ConfigError, match=r"command line: \[.*: line 1, column \d+: "):
        parse_flags(["--data.train", text], SETTINGS)


def refused(path: str | Path) -> str:
    with within(20), pytest.raises(ConfigError) as caught:
        load_run_config(Path(path), [], "tuningfork train")
    return str(caught.value)


def test_what_is_no_recipe_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("large").write_bytes(b"#" * (LARGEST + 1))
    Path("utf16").write_text("model: {path: m}", encoding="utf-16")
    assert refused("pipe") == "pipe cannot be read: it is a named pipe, not a file."
    assert refused("/dev/zero") == "/dev/zero cannot be read: it is a device, not a file."
    assert refused("loop") == "loop cannot be read: Too many levels of symbolic links."
    assert refused("n" * 300) == f"{'n' * 300} cannot be read: File name too long."
    assert refused("a\0b") == "a⟨U+0000⟩b cannot be read: embedded null byte."
    assert refused("large").startswith("large has more than 1,048,576 bytes, so it is no recipe")
    assert refused("utf16") == "utf16 is not UTF-8 text (byte 0). A recipe is a YAML file."


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbfmodel: {path: m}\ndata: {train: d}\n")
    assert load_run_config(tmp_path / "r.yaml", [], "tuningfork train").model.path == "m"
