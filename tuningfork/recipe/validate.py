"""Values of settings in their types, and what is said of names and values that settings do not have.

Which settings exist is handed in: a mapping of dotted key -> type, as `run_config.SETTINGS` is.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tuningfork.errors import ConfigError
from tuningfork.recipe.dialect import as_written
from tuningfork.recipe.hints import UNSUPPORTED, hint, value_hint
from tuningfork.wording import shortened

_NO_SETTING = " is not a setting; "
_PARAGRAPH = 200  # characters that are not said twice
_MOST_SAID = 20  # lines of what is wrong with one
_MOST_SAID_OF_OTHERS = 40  # where most of it is known from other trainers
_MOST_LOOKED_AT = 200
_LEAST_TO_GUESS = 5  # characters of a value: dpo and adam are a letter away from other methods
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def validate(
    given: Mapping[str, Any], settings: Mapping[str, Any], prefix: str, others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Each value in its setting's type. Raises one ConfigError with a line, led by `prefix`, for everything wrong: what
    other trainers have and is not supported first; and no more than the first twenty lines, or forty of a recipe that
    is mostly one of theirs. `others` are entries that stand in no section."""
    values: dict[str, Any] = {}
    beside = {**(others or {}), **given}
    wrong = chain(_nosections_of(others or {}, settings, beside), _wrong(given, settings, values, beside))
    said = _joined(list(dict.fromkeys(islice(wrong, _MOST_LOOKED_AT))))  # a section that does not exist is named once
    theirs = 2 * sum(line.recognised for line in said) >= len(said)
    most = _MOST_SAID_OF_OTHERS if theirs else _MOST_SAID
    lines = [line.said for line in sorted(said, key=lambda line: f"; {UNSUPPORTED}" not in line.said)]
    if len(lines) > most:
        lines[most:] = ["and so on." if theirs else "and so on; this may be no recipe at all."]
    if lines:
        raise ConfigError(*(prefix + line for line in lines))
    return values


class _Wrong(NamedTuple):
    """What is wrong with one entry, and whether it was recognised: as a setting, or as another trainer's."""

    said: str
    recognised: bool = True


def _nosections_of(
    entries: Mapping[str, Any], settings: Mapping[str, Any], beside: Mapping[str, Any]
) -> Iterator[_Wrong]:
    """What is wrong with entries of a recipe that have no settings below them."""
    for section, content in entries.items():
        if section not in sections_of(settings):
            yield unknown(section, settings, value=content, beside=beside)
        elif content is not None:  # a section whose lines are all commented out is null, and fine
            first = _first(section, settings)
            yield _Wrong(f"{section} is {found(content)}; allowed: settings below it, such as {first}.")


def _joined(wrong: Sequence[_Wrong]) -> list[_Wrong]:
    """What is wrong with names, joined where one paragraph is to be said of several, as of the two parts of a batch."""
    names: dict[str, list[str]] = {}
    for line in wrong:
        name, _, rest = line.said.partition(_NO_SETTING)
        names.setdefault(rest if len(rest) > _PARAGRAPH else line.said, []).append(name)
    return [
        line if len(alike) == 1 else _Wrong(f"{', '.join(alike[:-1])} and {alike[-1]} are not settings; {rest}")
        for line in wrong
        if (alike := names.pop(rest := line.said.partition(_NO_SETTING)[2], None) or names.pop(line.said, None))
    ]


def _wrong(
    given: Mapping[str, Any], settings: Mapping[str, Any], values: dict[str, Any], beside: Mapping[str, Any]
) -> Iterator[_Wrong]:
    """What is wrong with given values; those with which nothing is go into `values`, in their setting's type."""
    for key, value in given.items():
        if key not in settings:
            yield unknown(key, settings, value=value, beside=beside)
            continue
        try:
            values[key] = TypeAdapter(settings[key], config=_STRICT).validate_python(value)
        except (ValidationError, OverflowError):
            choices = _choices(settings[key])
            of_list = choices and isinstance(value, list) and get_origin(settings[key]) is list
            amiss = next((item for item in value if item not in choices), value) if of_list else value
            elsewhere = value_hint(key, amiss)
            near = "" if elsewhere else _meant(str(amiss), choices)
            here, hint = f": {elsewhere}" if elsewhere else "", f" Did you mean {near}?" if near else ""
            verb = "has" if of_list else "is"
            yield _Wrong(f"{key} {verb} {found(amiss)}{here}; allowed: {allowed(settings[key])}.{hint}")


def _meant(value: str, choices: list[str]) -> str:
    """The choice of which a value is a small misspelling; none where it may be the name of something else, as a short
    one or one with another number may be."""
    near = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.8) if len(value) >= _LEAST_TO_GUESS else []
    numbers = re.findall(r"[0-9]+", value)
    return next((name for name in near if numbers in ([], re.findall(r"[0-9]+", name))), "")


def unknown(
    key: str,
    settings: Mapping[str, Any],
    dashes: str = "",
    others: Iterable[str] = (),
    value: Any = None,
    beside: Mapping[str, Any] | None = None,
) -> _Wrong:
    """What to say about a key that does not exist: what stands for it here where it is another trainer's, else the
    nearest one that does, by its own name or initials first. `beside` are all keys that are given."""
    key = shortened(key, 80)
    if key in sections_of(settings):
        return _Wrong(f"{dashes}{key} is a section; name a setting in it, such as {dashes}{_first(key, settings)}.")
    if within := _of_mapping(key, settings, dashes, value):
        return _Wrong(within)
    choices = {
        name: {choice: f"[{choice}]" if get_origin(setting) is list else choice for choice in _choices(setting)}
        for name, setting in settings.items()
    }
    if elsewhere := hint(key, shortened(value, 80) if isinstance(value, str) else value, dashes, beside, choices):
        return _Wrong(elsewhere)
    names, own = [*settings, *others], key.rpartition(".")[2]
    same_name = [name for name in names if name.rpartition(".")[2] == own]
    if key in settings:  # "train.seed: 1" on one line
        section, _, name = key.partition(".")
        return _Wrong(f"{key} is written with a dot; in a recipe, {name} stands below {section}.")
    if len(same_name) == 1 and isinstance(value, str | int | float):
        shown = shortened(str(value).lower() if isinstance(value, bool) else str(value), 80)
        given = f"{same_name[0]}{' ' if dashes else ': '}{shown}"
        return _Wrong(f"{dashes}{key} is not a setting; here it is {dashes}{given}.")
    short_for = [name for name in names if len(own) > 1 and _initials(name.rpartition(".")[2]) == own]
    near = same_name or short_for or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if not near:
        return _Wrong(f"{dashes}{key} is not a setting; the sections are {', '.join(sections_of(settings))}.", False)
    return _Wrong(f"{dashes}{key} is not a setting; did you mean {dashes}{near[0]}?", bool(same_name or short_for))


def _of_mapping(key: str, settings: Mapping[str, Any], dashes: str, value: Any) -> str:
    """How to give an entry of a setting that is a mapping, where `key` names one as if it were a setting of its own;
    empty where it does not."""
    whole = next((name for name in settings if key.startswith(f"{name}.")), None)
    if whole is None or not any(get_origin(arm) is dict for arm in (settings[whole], *get_args(settings[whole]))):
        return ""
    entry = "..."
    if value is not None and not isinstance(value, (dict, list)):
        entry = shortened(value if isinstance(value, str) else as_written(value), 80)
    for name in reversed(key.removeprefix(f"{whole}.").split(".")):
        entry = f"{{{name}: {entry}}}"
    entry = f"{entry[:-1]}, ...}}"  # the outermost has others
    how = f"in the recipe, or by {dashes}{whole} {shlex.quote(entry)}" if dashes else f"{whole}: {entry}"
    return f"{dashes}{key} is not a setting; {whole} is one mapping, which is given as a whole: {how}."


def allowed(hint: Any) -> str:
    """The values that a setting may have, in words."""
    if get_origin(hint) is Annotated:
        base, *_ = get_args(hint)
        words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
        limits = [
            f"{word} {getattr(rule, name)}"
            # private: pydantic.fields.FieldInfo
            for rule in getattr(hint.__metadata__[0], "metadata", [])
            for name, word in words.items()
            if hasattr(rule, name)
        ]
        if base is str:
            return getattr(hint.__metadata__[0], "description", None) or "text that is not empty"
        return f"{allowed(base)}, {' and '.join(limits)}" if limits else allowed(base)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is list:
        return f"a list with each entry {allowed(get_args(hint)[0])}"
    if get_origin(hint) is dict and get_args(hint)[1] is Any:
        return "a mapping of settings"
    if get_origin(hint) is dict:
        left_out = ", or to null" if type(None) in get_args(get_args(hint)[1]) else ""
        return f"a mapping of names to names{left_out}, such as {{theirs: ours}}"
    if arms := get_args(hint):  # T | U | None
        either = " or ".join(allowed(arm) for arm in arms if arm is not type(None))
        return f"{either}, or null" if type(None) in arms else either
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


def found(value: Any) -> str:
    """A value from a recipe, as a message names it."""
    if isinstance(value, str):
        return f"the text {shortened(value)!r}"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return shortened(as_written(value))


def _choices(hint: Any) -> list[str]:
    """The words that a setting takes, or each entry of its list; empty where it takes others."""
    hint = get_args(hint)[0] if get_origin(hint) is list else hint
    return list(get_args(hint)) if get_origin(hint) is Literal else []


def sections_of(settings: Mapping[str, Any]) -> list[str]:
    """The sections that dotted keys stand in, in their order."""
    return list(dict.fromkeys(key.partition(".")[0] for key in settings))


def _first(section: str, settings: Mapping[str, Any]) -> str:
    return next(key for key in settings if key.startswith(f"{section}."))


def _initials(name: str) -> str:
    """``learning_rate`` -> ``lr``, which people type for it."""
    return "".join(word[:1] for word in name.split("_"))
