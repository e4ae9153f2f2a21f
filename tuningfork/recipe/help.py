"""The help page of a command: every setting with its type, its meaning and its value."""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, field, fields, make_dataclass
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from tuningfork.objective import kinds
from tuningfork.recipe.run_config import SETTINGS, RunConfig
from tuningfork.recipe.validate import allowed, found

_METAVAR: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: "true|false"}
_LONGEST_METAVAR = 50  # characters; longer ones are named in the meaning
_WIDEST_TEXT = 100  # columns


def print_help(
    prog: str, options: Mapping[str, str], given: Mapping[str, Any], required: Mapping[str, str]
) -> NoReturn:
    """Print what a command takes: a recipe, its options, and every setting with its type, meaning and value, which is
    the default unless the recipe has `given` it. Then exit with status 0.

    tyro draws the page. It does not parse: its spelling of booleans and null and the look of its errors are not ours.
    """
    import tyro  # here, because it takes half a second
    from docstring_parser import parse_from_object
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _as_in_a_recipe(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if not (metavar := _metavar(info.type)):
            return None  # a section
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda texts: texts[0],
            is_instance=lambda value: True,
            str_from_instance=lambda value: [_as_written(value)],
        )

    shown = RunConfig.of(dict.fromkeys(required, tyro.MISSING) | dict(given))
    for section in fields(shown):  # tyro takes a label from a type only, so a room is shown as a class of its own,
        # and keeps the line breaks of a docstring, so it is given words
        room = getattr(shown, section.name)
        meanings = {meaning.arg_name: meaning.description or "" for meaning in parse_from_object(type(room)).params}
        labelled = []
        for name in asdict(room):
            key = f"{section.name}.{name}"
            words = " ".join(meanings[name].split()) + _named_in_text(SETTINGS[key]) + _read_by(key)
            hint = (lambda value: f"(recipe: {value})") if key in given else None
            label = tyro.conf.arg(help=words, help_behavior_hint=hint)
            labelled.append((name, Annotated[SETTINGS[key], label], field(default=None)))
        docs = {"__doc__": type(room).__doc__}
        own = make_dataclass(type(room).__name__, labelled, bases=(type(room),), namespace=docs)
        setattr(shown, section.name, own(**asdict(room)))
    takes = {"recipe": "a YAML file with any of the settings below"} | dict(options)
    wrapped = partial(textwrap.fill, width=min(shutil.get_terminal_size().columns, _WIDEST_TEXT))
    head = [wrapped(f"{name:<10} {meaning}", subsequent_indent=" " * 11) for name, meaning in takes.items()]
    about = wrapped(inspect.getdoc(RunConfig) or "", initial_indent="  ", subsequent_indent="  ")  # else it is joined
    tyro.cli(
        RunConfig,
        default=shown,
        args=["--help"],
        prog=f"{prog} [recipe]",
        description="\n".join([*head, "", about]),
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
        registry=registry,
    )
    raise SystemExit(0)


def _as_written(value: Any) -> str:
    """A value as it may stand in a recipe."""
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else found(value)


def _named_in_text(hint: Any) -> str:
    """The values of a setting, or of the entries of its list, that has too many to stand behind its name."""
    if get_origin(hint) is list:
        return _named_in_text(get_args(hint)[0])
    too_many = get_origin(hint) is Literal and _metavar(hint) == _METAVAR[str]
    return f" {allowed(hint).capitalize()}." if too_many else ""


def _read_by(key: str) -> str:
    """The objectives that read a setting, where others do not."""
    section, _, name = key.partition(".")
    those = kinds.readers(name) if section == "objective" else []
    return f" Read by {', '.join(those)}." if 0 < len(those) < len(kinds.OBJECTIVES) else ""


def _metavar(hint: Any) -> str:
    """How the help page names a setting's values; empty for what is no setting."""
    arms = get_args(hint)
    if get_origin(hint) is Literal:
        values = "|".join(arms)
        return values if len(values) <= _LONGEST_METAVAR else _METAVAR[str]
    if get_origin(hint) is list:
        return f"[{_metavar(arms[0])},..]"
    if get_origin(hint) is dict:
        return "{NAME: NAME,..}"
    if get_origin(hint) is Annotated:  # T with constraints
        return _metavar(arms[0])
    if arms:  # T | U | None
        return "|".join("null" if arm is type(None) else _metavar(arm) for arm in arms)
    return _METAVAR.get(hint, "")
