"""`tuningfork reference`: the starting model's log-probs, before any run asks for them."""

from __future__ import annotations

from tuningfork.commands.inputs import data_and_model
from tuningfork.commands.resolve import dated_as_its_run, located
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.world import world
from tuningfork.errors import ConfigError
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import Console
from tuningfork.train.setup.device import choose_device
from tuningfork.train.setup.reference import open_reference
from tuningfork.wording import counted


def reference(config: RunConfig, console: Console | None = None) -> int:
    """`tuningfork reference`: fill the reference cache and nothing else."""
    with world(config.parallel, choose_device(config.train.device).type == "cuda") as ranks:
        return _reference(config, console or Console(), ranks)


def _reference(config: RunConfig, console: Console, ranks: Ranks) -> int:
    config = dated_as_its_run(config)
    if not config.objective.build().needs_reference:
        raise ConfigError(f"objective.name {config.objective.name} has no reference; there is nothing to score.")
    with ranks.first_of_each_node():
        config, _ = located(config, console)
    data, session = data_and_model(config, console, ranks)
    store = open_reference(config, session, data.train, data.limits, console, data.held_out)
    covered = counted(len(data.train) + len(data.held_out), "example")
    console.print(f"{store.folder}: {counted(len(store), 'answer')} cached, all of {covered} covered")
    return 0
