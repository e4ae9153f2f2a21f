"""From a recipe and flags to the checked settings of a run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuningfork.data.template_file import read_template
from tuningfork.recipe.check import PATHS, READ, REQUIRED, check_beside, check_run_config
from tuningfork.recipe.help import print_help
from tuningfork.recipe.parse import parse_flags, parse_recipe, read_recipe
from tuningfork.recipe.run_config import SETTINGS, RunConfig


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
    given = parse_recipe(read_recipe(recipe), str(recipe), SETTINGS) if recipe else {}
    given = {key: value for key, value in given.items() if key not in without}
    of_recipe = set(given)
    if {"-h", "--help"} & set(flags):
        print_help(prog, options or {}, given, required)
    by_flag = parse_flags(flags, SETTINGS, options or ())
    given |= by_flag
    given |= {key: _at_home(given[key]) for key in PATHS if key in given}
    config = RunConfig.of(given)
    check_run_config(config, required)
    if recipe:
        check_beside(recipe, {key: given[key] for key in READ if key in of_recipe - by_flag.keys()})
    read_template(config.data.template)  # a file that is not there is said before anything is loaded
    return config


def from_yaml(text: str, name: str) -> RunConfig:
    """The settings that a recipe's text gives, not yet checked across rooms. `name` stands for it in errors."""
    return RunConfig.of(parse_recipe(text, name, SETTINGS))


def _at_home(paths: Any) -> Any:
    """A path, or each of several, with the user's home for a ~ at its beginning."""
    if isinstance(paths, list):
        return [_at_home(path) for path in paths]
    return os.path.expanduser(paths) if isinstance(paths, str) else paths
