"""Reading recipes and flags: text -> dotted settings, each validated.

A flag, `--train.learning_rate 5e-7`, is read exactly as if its value stood in the recipe, and checked by the same code.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

from tuningfork.errors import ConfigError
from tuningfork.files import opened
from tuningfork.recipe.dialect import DialectError, TooMuch, load, parse_scalar
from tuningfork.recipe.validate import allowed, found, sections_of, unknown, validate
from tuningfork.wording import shortened

LARGEST = 1 << 20  # bytes of a recipe

_DATA = re.compile(r"\.(?:jsonl|json(?=\.gz)|parquet|csv|tsv)(?:\.gz)?$", re.IGNORECASE)  # names of files with rows


def read_recipe(path: Path) -> str:
    """The text of a recipe file. Raises ConfigError where there is none, naming the file that was probably meant."""
    try:
        with opened(path) as file:
            content = file.read(LARGEST + 1)
        if _DATA.search(path.name) or (path.suffix == ".json" and content.lstrip().startswith(b"[")):
            raise ConfigError(f"{path} is a data file, not a recipe. Give it as a setting: --data.train {path}")
        if len(content) > LARGEST:
            raise ConfigError(f"{path} has more than {LARGEST:,} bytes, so it is no recipe: a YAML file with settings.")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        folder, names = path.parent, list[str]()
        if not folder.is_dir():
            raise ConfigError(f"{path}: there is no folder {folder}.") from None
        with suppress(OSError):
            names = [entry.name for entry in folder.iterdir()]
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
        hint = f" Did you mean {folder / near[0]}?" if near else ""
        raise ConfigError(f"{path}: there is no such recipe.{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}). A recipe is a YAML file.") from None
    except IsADirectoryError:
        here = f" The one of the run there is {path / 'config.yaml'}." if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"{path} is a folder. A recipe is a YAML file.{here}") from None
    except (OSError, ValueError) as error:  # the latter of a name with a NUL
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def parse_recipe(text: str, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> validated value, for the keys that the YAML `text` gives. `settings` maps each key to its type.

    Raises ConfigError, with one line for everything that is wrong. `name` says where the text comes from.
    """
    try:
        tree = load(text)
    except DialectError as error:
        raise ConfigError(f"{name}: {shortened(str(error))}.") from None
    if tree is None:
        raise ConfigError(f"{name} is empty. A recipe gives settings, for example:", "  model:", "    path: ./model")
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} is {found(tree)}; allowed: the sections {', '.join(sections_of(settings))}.")
    sections = {section: content for section, content in tree.items() if isinstance(content, dict)}
    given = {f"{section}.{key}": value for section, content in sections.items() for key, value in content.items()}
    others = {str(section): content for section, content in tree.items() if section not in sections}
    return validate(given, settings, f"{name}: ", others)


def parse_flags(flags: Sequence[str], settings: Mapping[str, Any], options: Collection[str] = ()) -> dict[str, Any]:
    """Dotted key -> validated value. Takes `--key value` and `--key=value`, and hyphens for underscores.

    Raises ConfigError. `options` are the command's other flags, for the suggestion when a name is unknown.
    """
    given: dict[str, Any] = {}
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} is not expected here. Settings are given as --train.seed 3.")
        name, equals, text = flag[2:].partition("=")
        key = name.replace("-", "_")
        if key not in settings:
            following = text if equals else next((text for text in rest[:1] if not text.startswith("--")), None)
            names = [option.lstrip("-") for option in options]
            raise ConfigError(unknown(name, settings, "--", names, following, _in_pairs(flags)).said)
        if key in given:
            raise ConfigError(f"--{name} is given twice; keep one.")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value: {allowed(settings[key])}.")
            text = rest.pop(0)
        given[key] = _value(text, settings[key])
    return validate(given, settings, "command line: ")


def split_flags(arguments: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """(the command's own arguments, flags that are settings). `own` are its options, such as "--resume".

    Every other `--name value` is taken for a setting; a mistyped one meets `parse_flags`, which names the nearest.
    """
    mine: list[str] = []
    flags: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            flags.append(argument)
        elif argument.startswith("--") and argument.partition("=")[0] not in own:
            flags.append(argument)
            if "=" not in argument and rest and not rest[0].startswith("--"):
                flags.append(rest.pop(0))
        else:
            mine.append(argument)
    return mine, flags


def _in_pairs(flags: Sequence[str]) -> dict[str, Any]:
    """The names of flags with their values, of which none is checked."""
    split = [(flag[2:].partition("="), following) for flag, following in zip(flags, [*flags[1:], ""], strict=True)]
    return {name: parse_scalar(text if equals else following) for (name, equals, text), following in split}


def _value(text: str, hint: Any) -> Any:
    """A flag's text as the recipe's value. Where a setting is text, `7` is text without quotes; nothing is not null.

    Where it may be a list, `[a, b]` is one; where it may be a mapping, `{a: b}`. What only begins like a list may be a
    pattern of files.
    """
    for kind, opening in ((list, "["), (dict, "{")):
        if any(get_origin(arm) is kind for arm in (hint, *get_args(hint))) and text.startswith(opening):
            try:
                entries = load(text)
            except DialectError as error:
                if kind is dict or isinstance(error.__cause__, TooMuch):
                    raise ConfigError(f"command line: {shortened(text)}: {error}.") from None
                entries = None
            if isinstance(entries, kind):
                return entries
    value = parse_scalar(text)
    is_text = hint is str or any(
        arm is str or (get_origin(arm) is not dict and str in get_args(arm)) for arm in get_args(hint)
    )
    return text if text == "" or (is_text and value is not None) else value
