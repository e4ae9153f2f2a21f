"""Settings with all that they leave open: the day, and of what is from the hub its commit and place here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tuningfork.data.sources.hub import commit_in, newest_commit, pinned_sources
from tuningfork.distributed.tensor import check_has_plan
from tuningfork.errors import ConfigError, RunFolderError
from tuningfork.files import scratch
from tuningfork.models.hf.hub import HUB, HubName, fetch, hub_name
from tuningfork.models.hf.initial import has_weights, make
from tuningfork.models.hf.load import load_config
from tuningfork.recipe.check import check_run_config
from tuningfork.recipe.load import from_yaml
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import Console
from tuningfork.train import run_folder


def run_in(folder: Path) -> RunConfig | None:
    """The settings of the run in a folder, None if there is none. Raises ConfigError, RunFolderError."""
    text = run_folder.read_config(folder)
    if text is None:
        return None
    path = folder / run_folder.CONFIG
    before = from_yaml(text, str(path))
    try:
        check_run_config(before)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return before


def as_before(config: RunConfig, run: RunConfig | None) -> RunConfig:
    """Settings with what the run in their folder has settled: the day, and the commits of what is from the hub."""
    config = _dated(config, run)
    if run is None:
        return config
    model, data = config.model, config.data
    ours, theirs = (None if not path else hub_name(path) for path in (model.path, run.model.path))
    if ours is not None and theirs is not None and ours == HubName(theirs.repository, None):
        model = replace(model, path=run.model.path)
    data = replace(data, train=pinned_sources(data.train, commit_in(run.data.train)))
    if data.eval is not None:
        data = replace(data, eval=pinned_sources(data.eval, commit_in(run.data.eval)))
    return replace(config, model=model, data=data)


def dated_as_its_run(config: RunConfig) -> RunConfig:
    """Settings with a day, for a command that only reads. Raises ConfigError where the run does not tell its day."""
    try:
        return as_before(config, run_in(Path(config.output.dir)))
    except (ConfigError, RunFolderError) as error:
        if config.data.date is not None:
            return config
        raise ConfigError(
            *error.args,
            "It was read for the day that the chat templates of the run in output.dir print. Set data.date, or choose "
            "another output.dir.",
        ) from error


def _dated(config: RunConfig, run: RunConfig | None) -> RunConfig:
    """Settings with the day that chat templates print: its own, or that of the `run` in its folder, or today."""
    return replace(config, data=config.data.with_day(began=run.data.date if run else None))


def located(config: RunConfig, console: Console, weights: bool = True, to_begin: bool = False) -> tuple[RunConfig, str]:
    """Settings with everything from the hub at one commit and the model's path on this machine, also of one from
    nothing; and as config.yaml keeps it, where the model's name with that commit, or what it is made from, stands for
    its path. `to_begin` says that a run is to begin, or to go on, in output.dir, which is held for it. Raises
    ConfigError, ModelError, RunFolderError."""
    _check_splits(config, console)
    data = replace(config.data, train=pinned_sources(config.data.train, newest_commit))
    if data.eval is not None:
        data = replace(data, eval=pinned_sources(data.eval, newest_commit))
    config = replace(config, data=data)
    if config.model.init is not None:
        made = replace(config.model, path=made_model(config, console, weights, to_begin), init=None)
        return replace(config, model=made), config.to_yaml()
    name = hub_name(config.model.path)
    if name is None:
        return config, config.to_yaml()
    folder, fixed = fetched(name, console, weights)
    kept = replace(config, model=replace(config.model, path=f"{HUB}{fixed}"))
    return replace(config, model=replace(config.model, path=folder)), kept.to_yaml()


def _check_splits(config: RunConfig, console: Console) -> None:
    """Raises ConfigError where parallel.tensor is to split a model that has no plan for it, before weights are made,
    fetched or read, and whatever the number of processes: a run that begins on one could not go on with many."""
    model, tensor = config.model, config.parallel.tensor
    if tensor == 1:
        return
    with scratch() as aside:
        if model.init is not None:
            assert model.tokenizer is not None
            path = str(aside / run_folder.START)
            make(Path(path), model.init, model.init_seed, model.tokenizer, weights=False)
        else:
            name = hub_name(model.path)
            path = model.path if name is None else fetched(name, console, weights=False)[0]
        check_has_plan(load_config(path), tensor)


def made_model(config: RunConfig, console: Console, weights: bool, to_begin: bool) -> str:
    """The folder of a model from nothing, which is made unless it is there. Raises ConfigError, ModelError, and
    RunFolderError where another with weights would have to go: only what a run that is `to_begin` finds of an attempt
    that did not come to its first step is made anew."""
    model = config.model
    folder = Path(config.output.dir) / run_folder.START
    assert model.init is not None and model.tokenizer is not None
    with console.stage("initial model", "making the model from its config and seed"):
        before = has_weights(folder)
        may_replace = to_begin and not run_folder.has_begun(folder.parent)
        longest = config.data.max_length
        made = make(folder, model.init, model.init_seed, model.tokenizer, weights, may_replace, longest)
    if made and weights:
        instead = ", in place of one from which no run began" if before else ""
        console.print(f"{folder}: a model from nothing, its values drawn from seed {model.init_seed}{instead}")
    return str(folder)


def fetched(name: HubName, console: Console, weights: bool) -> tuple[str, HubName]:
    """The folder of a model of the hub on this machine, and its name with a commit. Raises ModelError."""
    with console.bytes_phase(f"downloading {name}") as progress:
        folder, fixed = fetch(name, weights, progress)
    console.print(f"{fixed}: {folder}")
    return folder, fixed
