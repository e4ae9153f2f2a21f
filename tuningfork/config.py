"""From a recipe and flags to the checked settings of a run. Only checks across rooms live here."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, field, fields, make_dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from tuningfork import recipe as recipes
from tuningfork.data.config import CHAT, NO_TEMPLATE, DataConfig, PackConfig
from tuningfork.data.examples.field_names import check_columns
from tuningfork.data.examples.roles import check_roles
from tuningfork.data.sources.apart import would_read
from tuningfork.data.template_file import read_template
from tuningfork.errors import ConfigError
from tuningfork.report import sinks
from tuningfork.run_config import RunConfig
from tuningfork.train.config import TrainConfig
from tuningfork.wording import counted, from_here

SETTINGS = recipes.settings_of(RunConfig)
"""Dotted key -> type, for every setting there is."""

REQUIRED = {"model.path": "./model", "data.train": "./pairs.jsonl"}
"""Settings without a usable default, each with an example."""

TO_EVALUATE = {"model.path": "./model", "data.eval": "./held_out.jsonl"}
"""Settings that a command which does not train cannot do without, each with an example."""


PATHS = ("model.path", "data.train", "data.eval", "data.cache", "data.template", "reference.cache", "output.dir")
"""Settings that name files or folders, or lists of them, in which ~ is the user's home."""

READ = ("model.path", "data.train", "data.eval", "data.template")
"""Settings that name what must be there before a command begins."""

WRITTEN = ("output.dir", "data.cache", "reference.cache")
"""Settings that name folders to which a command writes."""

_NO_PATHS = {("data.template", CHAT), ("data.template", NO_TEMPLATE)}
_PERHAPS_OF_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name

_METAVAR: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: "true|false"}
_LONGEST_METAVAR = 50  # characters; longer ones are named in the meaning
_WIDEST_TEXT = 100  # columns


def load_run_config(
    recipe: Path | None,
    flags: Sequence[str],
    prog: str,
    *,
    options: Mapping[str, str] | None = None,
    required: Mapping[str, str] = REQUIRED,
    without: Collection[str] = (),
) -> RunConfig:
    """The checked settings of a run: defaults, then the recipe, then dotted flags.

    `--help` among the flags prints every setting, with the recipe's values, and exits. `options` are the command's own
    flags with their meanings, so that a mistyped one is recognised; `required` the settings that it cannot do without;
    `without` those that are not taken from the recipe.
    Raises ConfigError; DataError for a template file.
    """
    given = recipes.parse_recipe(recipes.read_recipe(recipe), str(recipe), SETTINGS) if recipe else {}
    given = {key: value for key, value in given.items() if key not in without}
    of_recipe = set(given)
    if {"-h", "--help"} & set(flags):
        print_help(prog, options or {}, given, required)
    by_flag = recipes.parse_flags(flags, SETTINGS, options or ())
    given |= by_flag
    given |= {key: _at_home(given[key]) for key in PATHS if key in given}
    config = _build(given)
    check_run_config(config, required)
    if recipe:
        _check_beside(recipe, {key: given[key] for key in READ if key in of_recipe - by_flag.keys()})
    read_template(config.data.template)  # a file that is not there is said before anything is loaded
    return config


def check_run_config(config: RunConfig, required: Mapping[str, str] = REQUIRED) -> None:
    """Refuse settings that are missing, contradict each other, or that nothing would read. Raises ConfigError."""
    name, defaults = config.objective.name, RunConfig()

    missing = [key for key in required if not config.values()[key]]
    if missing:
        flags = " ".join(f"--{key} {required[key]}" for key in missing)
        raise ConfigError(
            f"{' and '.join(missing)} must be set, in the recipe or by flag; for example: {flags}"
            f"{_of_a_run(config.output.dir)}"
        )
    _check_paths(config.values())
    _check_mix(config.data)
    _check_date(config.data.date)
    check_columns(config.data.columns or {})
    check_roles(config.data.roles or {})
    cache, run = config.data.cache, Path(config.output.dir).resolve()
    if cache is not None and Path(cache).resolve().is_relative_to(run):
        raise ConfigError(
            f"data.cache {cache} lies in output.dir {config.output.dir}. Give it a folder elsewhere: a run keeps its "
            "folder to itself, and a cache is shared."
        )
    _check_apart(config.values())
    for setting, readers in config.objective.unread().items():
        raise ConfigError(
            f"objective.{setting} is {getattr(config.objective, setting)}, but objective.name {name} "
            f"does not use it. Remove it, or choose {' or '.join(readers)}."
        )
    if config.model.weights == "bfloat16" and config.train.optimizer != "adamw_8bit":
        raise ConfigError(
            f"model.weights is bfloat16, but train.optimizer {config.train.optimizer} rounds to the nearest: updates "
            "smaller than the spacing of bfloat16, most of them at usual learning rates, would be lost. Set "
            "train.optimizer: adamw_8bit, which rounds stochastically, or model.weights: float32."
        )
    if config.model.weights == "float32" and config.train.gradient_dtype == "float32":
        raise ConfigError(
            "train.gradient_dtype is float32, but model.weights is float32, whose gradients are so anyway. Remove it, "
            "or set model.weights: bfloat16."
        )
    if config.model.dtype == "float32" and config.model.weights == "bfloat16":
        raise ConfigError("model.weights is bfloat16, but model.dtype is float32. Set model.dtype: bfloat16, or auto.")
    if config.reference != defaults.reference and not config.objective.build().needs_reference:
        raise ConfigError(
            f"reference.cache is {config.reference.cache}, but objective.name {name} has no reference. Remove it."
        )
    sinks.check_names(config.output.sinks)
    _check_pack(config.pack, config.data.max_length)
    _check_evaluation(config)


def _of_a_run(folder: str) -> str:
    """A sentence on the recipe of the run in a folder; none where there is no run."""
    recipe = Path(folder) / "config.yaml"
    return f". {recipe} has all settings of the run in output.dir, and is a recipe" if recipe.is_file() else ""


def _check_evaluation(config: RunConfig) -> None:
    """Raises ConfigError where settings of evaluations have nothing to work on."""
    every, train, output = config.train.eval_every, config.train, config.output
    if every is not None and config.data.eval is None:
        raise ConfigError(
            f"train.eval_every is {every}, but there is nothing to evaluate on. Set data.eval to held-out rows, or "
            "remove it."
        )
    if every is None and train.best_by != TrainConfig().best_by:
        raise ConfigError(
            f"train.best_by is {train.best_by}, but only with train.eval_every is there a best step. Set that, or "
            "remove it."
        )
    objective = config.objective.build()
    if train.best_by not in ("loss", *objective.headline):
        raise ConfigError(
            f"train.best_by is {train.best_by}, which evaluations of objective.name {objective.name} do not give. Set "
            "train.best_by: loss."
        )
    if every is None and output.export == "best":
        raise ConfigError(
            "output.export is best, but only with train.eval_every is there a best step. Set that, or output.export: "
            "last."
        )


def _check_pack(pack: PackConfig, max_length: int) -> None:
    """Raises ConfigError where examples as long as `max_length` allows could never fit a pack.

    How much of two answers is their shared prompt is known from the rows alone: those that need more are dropped there.
    """
    sequences = 1 if pack.share_prompt else 2
    if pack.tokens < sequences * max_length:
        what = "one answer" if sequences == 1 else "two answers, each with a prompt of its own,"
        raise ConfigError(
            f"pack.tokens is {pack.tokens}, but {what} of data.max_length {max_length} can need "
            f"{sequences * max_length}. Raise pack.tokens to {sequences * max_length} or lower data.max_length to "
            f"{pack.tokens // sequences}."
        )


def _check_paths(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a path that no file system takes, or that may not be looked at. It may be absent."""
    for key in PATHS:
        for path in values[key] if isinstance(values[key], list) else [values[key]]:
            try:
                os.stat(path or "")
            except (FileNotFoundError, NotADirectoryError):  # whoever reads it knows what should be there
                continue
            except (OSError, ValueError) as error:  # the latter of a NUL, or of text that has no bytes
                why = getattr(error, "strerror", None) or error
                raise ConfigError(f"{key} is {recipes.found(path)}, which cannot be used as a path: {why}.") from None


def _check_apart(values: Mapping[str, Any]) -> None:
    """Refuse to write into a folder of which all files are data: the next command would take ours for data, too."""
    for key in ("data.train", "data.eval"):
        given = values[key]
        for source in [given] if isinstance(given, str) else given or []:
            for written in WRITTEN:
                if (folder := values[written]) is not None and would_read(source, Path(folder)):
                    raise ConfigError(
                        f"{written} {folder} lies in {key} {source}, so that what is written there would be read as "
                        f"data the next time. Give it a folder elsewhere, or name the files of {key}."
                    )


def _check_beside(recipe: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a relative path in a recipe that is not there, but would be if it began at the recipe."""
    for key, value in values.items():
        for path in value if isinstance(value, list) else [value]:
            if not path or (key, path) in _NO_PATHS or (key == "model.path" and _PERHAPS_OF_HUB.fullmatch(path)):
                continue
            beside = recipe.parent / path
            if not os.path.lexists(path) and os.path.lexists(beside):
                raise ConfigError(
                    f"{recipe}: {key} {path}: there is no such file.{from_here(Path(path))} One lies beside the "
                    f"recipe: write {beside}"
                )


def _check_mix(data: DataConfig) -> None:
    """Raises ConfigError where shares or counts do not go with the sources."""
    given = {name: numbers for name in ("shares", "counts") if (numbers := getattr(data, name)) is not None}
    if len(given) > 1:
        raise ConfigError("data.shares and data.counts are both given. Keep one: parts of the whole, or numbers.")
    sources = [data.train] if isinstance(data.train, str) else data.train
    for name, numbers in given.items():
        if not data.train:
            raise ConfigError(f"data.{name} is for data.train, which is not given. Remove it, or name data.train.")
        if len(numbers) != len(sources):
            raise ConfigError(
                f"data.{name} has {counted(len(numbers), 'entry', 'entries')}, but data.train names "
                f"{counted(len(sources), 'source')}. Give one for each."
            )


def _check_date(day: str | None) -> None:
    try:
        known = day is None or date.fromisoformat(day).isoformat() == day
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"data.date {day!r} is no day. Write it as 2026-01-31.")


def from_yaml(text: str, name: str) -> RunConfig:
    """The settings that a recipe's text gives, not yet checked across rooms. `name` stands for it in errors."""
    return _build(recipes.parse_recipe(text, name, SETTINGS))


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

    shown = _build(dict.fromkeys(required, tyro.MISSING) | dict(given))
    for section in fields(shown):  # tyro takes a label from a type only, so a room is shown as a class of its own,
        # and keeps the line breaks of a docstring, so it is given words
        room = getattr(shown, section.name)
        meanings = {meaning.arg_name: meaning.description or "" for meaning in parse_from_object(type(room)).params}
        labelled = []
        for name in asdict(room):
            key = f"{section.name}.{name}"
            words = " ".join(meanings[name].split()) + _named_in_text(SETTINGS[key])
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


def _build(given: Mapping[str, Any]) -> RunConfig:
    """A config from validated dotted keys; the defaults stand where a key is not given."""
    config = RunConfig()
    for section in fields(config):
        room = getattr(config, section.name)
        for setting in fields(room):
            key = f"{section.name}.{setting.name}"
            setattr(room, setting.name, given.get(key, getattr(room, setting.name)))
    return config


def _as_written(value: Any) -> str:
    """A value as it may stand in a recipe."""
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else recipes.found(value)


def _named_in_text(hint: Any) -> str:
    """The values of a setting that has too many to stand behind its name."""
    too_many = get_origin(hint) is Literal and _metavar(hint) == _METAVAR[str]
    return f" {recipes.allowed(hint).capitalize()}." if too_many else ""


def _at_home(paths: Any) -> Any:
    """A path, or each of several, with the user's home for a ~ at its beginning."""
    if isinstance(paths, list):
        return [_at_home(path) for path in paths]
    return os.path.expanduser(paths) if isinstance(paths, str) else paths


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
