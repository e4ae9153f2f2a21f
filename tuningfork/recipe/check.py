"""Checks across rooms: settings that are missing, contradict each other, or that nothing would read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from tuningfork.data.config import CHAT, NO_TEMPLATE, DataConfig
from tuningfork.data.examples.field_names import check_columns
from tuningfork.data.examples.roles import check_roles
from tuningfork.data.sources.apart import would_read
from tuningfork.errors import ConfigError
from tuningfork.models.config import ModelConfig
from tuningfork.recipe.run_config import RunConfig
from tuningfork.recipe.validate import found
from tuningfork.report import sinks
from tuningfork.train.config import TrainConfig
from tuningfork.wording import counted, from_here

REQUIRED = {"model.path": "./model", "data.train": "./pairs.jsonl"}
"""Settings without a usable default, each with an example."""

TO_EVALUATE = {"model.path": "./model", "data.eval": "./held_out.jsonl"}
"""Settings that a command which does not train cannot do without, each with an example."""


PATHS = (
    "model.path",
    "model.init",
    "model.tokenizer",
    "data.train",
    "data.eval",
    "data.cache",
    "data.template",
    "reference.cache",
    "output.dir",
)
"""Settings that name files or folders, or lists of them, in which ~ is the user's home."""

READ = ("model.path", "model.init", "model.tokenizer", "data.train", "data.eval", "data.template")
"""Settings that name what must be there before a command begins."""

WRITTEN = ("output.dir", "data.cache", "reference.cache")
"""Settings that name folders to which a command writes."""

IN_PIECES = ("pieces", "stream")
"""What data.over_length is where documents come in pieces."""

_NO_PATHS = {("data.template", CHAT), ("data.template", NO_TEMPLATE), ("model.tokenizer", "bytes")}
_PERHAPS_OF_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name


def check_run_config(config: RunConfig, required: Mapping[str, str] = REQUIRED) -> None:
    """Refuse settings that are missing, contradict each other, or that nothing would read. Raises ConfigError."""
    name, defaults = config.objective.name, RunConfig()

    made = {"model.path"} if config.model.init is not None else set()
    missing = [key for key in required if not config.values()[key] and key not in made]
    if missing:
        flags = " ".join(f"--{key} {required[key]}" for key in missing)
        raise ConfigError(
            f"{' and '.join(missing)} must be set, in the recipe or by flag; for example: {flags}"
            f"{_of_a_run(config.output.dir)}"
        )
    _check_paths(config.values())
    _check_start(config.model)
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
    if config.model.weights == "bfloat16" and config.train.ema_decay is not None:
        raise ConfigError(
            f"train.ema_decay is {config.train.ema_decay:g}, but model.weights is bfloat16, in which most of what a "
            "step adds to an average would be rounded away. Set model.weights: float32, or remove it."
        )
    if config.model.weights == "float32" and config.train.gradient_dtype == "float32":
        raise ConfigError(
            "train.gradient_dtype is float32, but model.weights is float32, whose gradients are so anyway. Remove it, "
            "or set model.weights: bfloat16."
        )
    if config.model.dtype in ("float16", "float32") and config.model.weights == "bfloat16":
        raise ConfigError(
            f"model.weights is bfloat16, but model.dtype is {config.model.dtype}. Set model.dtype: bfloat16, or auto."
        )
    if config.model.tf32 and config.model.dtype != "float32":
        at = "bfloat16 on a GPU" if config.model.dtype == "auto" else config.model.dtype
        raise ConfigError(
            f"model.tf32 is true, but model.dtype is {config.model.dtype}: products are of {at}, so it would do "
            "nothing. Set model.dtype: float32, or remove it."
        )
    if config.reference != defaults.reference and not config.objective.build().needs_reference:
        raise ConfigError(
            f"reference.cache is {config.reference.cache}, but objective.name {name} has no reference. Remove it."
        )
    _check_order(config.train)
    _check_step(config.train)
    _check_lengths(config.train, config.data)
    _check_stream(config)
    _check_schedule(config.train)
    _check_answers(config)
    sinks.check_names(config.output.sinks)
    _check_pack(config)
    _check_evaluation(config)


def _check_start(model: ModelConfig) -> None:
    """Raises ConfigError where a model is to be made and read, or made of half of what that takes."""
    if model.init is None:
        for name in ("init_seed", "tokenizer"):
            if (given := getattr(model, name)) != getattr(ModelConfig(), name):
                raise ConfigError(
                    f"model.{name} is {given}, but only a model from nothing has one: set model.init, or remove it."
                )
    elif model.path:
        raise ConfigError(
            f"model.path is {model.path}, and model.init is given. Keep one: a model that is read, or one from nothing."
        )
    elif model.tokenizer is None:
        raise ConfigError(
            "model.init makes a model from nothing, which has no tokenizer yet. Set model.tokenizer: bytes, or to a "
            "folder with a tokenizer.json."
        )


def _of_a_run(folder: str) -> str:
    """A sentence on the recipe of the run in a folder; none where there is no run."""
    recipe = Path(folder) / "config.yaml"
    return f". {recipe} has all settings of the run in output.dir, and is a recipe" if recipe.is_file() else ""


def _check_order(train: TrainConfig) -> None:
    """Raises ConfigError where settings of groups are given and examples are not grouped."""
    for name in ("group_by", "group_most"):
        given = getattr(train, name)
        if train.order != "grouped" and given != getattr(TrainConfig(), name):
            raise ConfigError(
                f"train.{name} is {given}, but train.order is {train.order}, which has no groups. Remove it, or set "
                "train.order: grouped."
            )


def _check_stream(config: RunConfig) -> None:
    """Raises ConfigError where rows are joined and are to be grouped."""
    if config.data.over_length == "stream" and config.train.order == "grouped":
        raise ConfigError(
            "data.over_length is stream, whose pieces are of several rows, and train.order is grouped, which puts rows "
            "together. Set train.order: shuffled, or data.over_length: pieces."
        )


def _check_step(train: TrainConfig) -> None:
    """Raises ConfigError where a step has two sizes."""
    if train.tokens_per_step is not None and train.examples_per_step != TrainConfig().examples_per_step:
        raise ConfigError(
            f"train.tokens_per_step is {train.tokens_per_step:,} and train.examples_per_step is "
            f"{train.examples_per_step:,}. Keep one: a step is so many tokens, or so many examples."
        )


def _check_lengths(train: TrainConfig, data: DataConfig) -> None:
    """Raises ConfigError where pieces that grow have no documents, no steps of like size, no end, or do not grow."""
    if train.length_steps is None:
        return
    said = f"train.length_steps is {train.length_steps}"
    for line in train.length_steps:
        if len(line) != 2:
            raise ConfigError(f"{said}, but {line} is not [steps, tokens]. Give each line two numbers.")
    if not train.length_steps:
        raise ConfigError(f"{said}, which has no line. Give it lines of [steps, tokens], or remove it.")
    lengths = [tokens for _, tokens in train.length_steps]
    if data.over_length not in IN_PIECES:
        raise ConfigError(
            f"{said}, but data.over_length is {data.over_length}, which makes no pieces. Set data.over_length: pieces, "
            "or remove it."
        )
    if train.order != TrainConfig().order:
        raise ConfigError(f"{said}, but train.order is {train.order}. Set train.order: shuffled, or remove one.")
    for name in ("tokens_per_step", "max_steps"):
        if getattr(train, name) is None:
            raise ConfigError(f"{said}, which needs train.{name}. Set it, or remove train.length_steps.")
    if lengths[0] < 2:
        raise ConfigError(f"{said}, but a piece of {lengths[0]} token has none to be predicted. Give it 2 or more.")
    longer = [*lengths[1:], data.max_length]
    for one, other in zip(lengths, longer, strict=True):
        if one >= other:
            raise ConfigError(
                f"{said} and data.max_length is {data.max_length:,}: pieces of {other:,} tokens would follow ones of "
                f"{one:,}. Lengths rise from line to line, and stay below data.max_length, which the rest has."
            )
    steps = sum(steps for steps, _ in train.length_steps)
    assert train.max_steps is not None
    if steps >= train.max_steps:
        raise ConfigError(
            f"{said}, {counted(steps, 'step')} in all, but train.max_steps is {train.max_steps:,}, so that no piece of "
            f"data.max_length {data.max_length:,} would come. Raise train.max_steps, or give the lines fewer steps."
        )


def _check_schedule(train: TrainConfig) -> None:
    """Raises ConfigError where warm-up has two lengths, or a setting is none of the schedule's."""
    defaults = TrainConfig()
    if train.warmup_steps is not None and train.warmup_ratio != defaults.warmup_ratio:
        raise ConfigError(
            f"train.warmup_steps is {train.warmup_steps:,} and train.warmup_ratio is {train.warmup_ratio}. Keep one: "
            "so many steps, or a share of all."
        )
    for name, readers in (("min_lr_ratio", ("linear", "cosine", "wsd")), ("decay_start", ("wsd",))):
        if (given := getattr(train, name)) != getattr(defaults, name) and train.schedule not in readers:
            raise ConfigError(
                f"train.{name} is {given}, but train.schedule {train.schedule} does not use it. Remove it, or choose "
                f"{' or '.join(readers)}."
            )


def _check_answers(config: RunConfig) -> None:
    """Raises ConfigError where rows are to be cut, or left with a single answer each, and the objective compares
    answers."""
    objective = config.objective.build()
    if config.data.over_length in IN_PIECES and objective.answers > 1:
        raise ConfigError(
            f"data.over_length is {config.data.over_length}, which cuts documents, but objective.name {objective.name} "
            "compares two answers. Set objective.name: lm to train on documents, or data.over_length: drop."
        )
    if config.data.answers == "best" and objective.answers > 1:
        raise ConfigError(
            f"data.answers is best, which leaves one answer of each row, but objective.name {objective.name} compares "
            "two. Remove it, or set objective.name: sft to imitate the best ones."
        )


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
    if every is None and train.early_stopping_patience is not None:
        raise ConfigError(
            f"train.early_stopping_patience is {train.early_stopping_patience}, but only with train.eval_every are "
            "there evaluations to stop by. Set that, or remove it."
        )
    if train.early_stopping_patience is None and train.early_stopping_threshold:
        raise ConfigError(
            f"train.early_stopping_threshold is {train.early_stopping_threshold:g}, but no run stops early without "
            "train.early_stopping_patience. Set that, or remove it."
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


def _check_pack(config: RunConfig) -> None:
    """Raises ConfigError where examples as long as data.max_length allows could never fit a pack.

    How much of two answers is their shared prompt is known from the rows alone: those that need more are dropped there.
    """
    pack, max_length = config.pack, config.data.max_length
    sequences = config.objective.build().answers if pack.share == "none" else 1
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
            if isinstance(path, dict):  # the settings that may stand in a path's place
                continue
            try:
                os.stat(path or "")
            except (FileNotFoundError, NotADirectoryError):  # whoever reads it knows what should be there
                continue
            except (OSError, ValueError) as error:  # the latter of a NUL, or of text that has no bytes
                why = getattr(error, "strerror", None) or error
                raise ConfigError(f"{key} is {found(path)}, which cannot be used as a path: {why}.") from None


def _check_apart(values: Mapping[str, Any]) -> None:
    """Refuse to write into a folder of which all files are data: the next command would take ours for data, too."""
    for key in ("data.train", "data.eval"):
        given = values[key]
        for source in given if isinstance(given, list) else [given] if given else []:  # not set: the current folder is
            for written in WRITTEN:
                if (folder := values[written]) is not None and would_read(source, Path(folder)):
                    raise ConfigError(
                        f"{written} {folder} lies in {key} {source}, so that what is written there would be read as "
                        f"data the next time. Give it a folder elsewhere, or name the files of {key}."
                    )


def check_beside(recipe: Path, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a relative path in a recipe that is not there, but would be if it began at the recipe."""
    for key, value in values.items():
        for path in value if isinstance(value, list) else [value]:
            if (
                not isinstance(path, str)
                or not path
                or (key, path) in _NO_PATHS
                or (key == "model.path" and _PERHAPS_OF_HUB.fullmatch(path))
            ):
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
