"""`tuningfork train`: the main job."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from tuningfork.commands.inputs import data_of, shared_folders
from tuningfork.commands.resolve import as_before, located, run_in
from tuningfork.commands.summary import summary
from tuningfork.data.config import CHAT, NO_TEMPLATE
from tuningfork.distributed.alike import check_alike, versions
from tuningfork.distributed.ranks import ONE_PROCESS, Ranks
from tuningfork.distributed.shared import check_shared
from tuningfork.distributed.world import restarted, world
from tuningfork.errors import RunFolderError
from tuningfork.files import exclusive
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report import sinks
from tuningfork.report.run.console import Console
from tuningfork.train import checkpoint, optimizer, run_folder
from tuningfork.train.early_stop import stopped_early
from tuningfork.train.ended import has_ended, is_whole, places
from tuningfork.train.run import run
from tuningfork.train.setup.device import check_tf32, choose_device
from tuningfork.train.setup.model import choose_activations, start_model
from tuningfork.wording import counted


def train(config: RunConfig, resume: bool, console: Console | None = None) -> int:
    """`tuningfork train`: the main job."""
    folder, ranks = Path(config.output.dir), ONE_PROCESS
    try:
        with world(config.parallel, choose_device(config.train.device).type == "cuda") as ranks:
            return _train(config, resume, folder, console or Console(), ranks)
    except KeyboardInterrupt:
        begun = run_folder.has_begun(folder)
        go_on = f"continue with {run_folder.to_go_on(folder, ranks)}"
        how = go_on if begun else "no step was done: give the command again"
        raise KeyboardInterrupt(f"what was saved is whole, {how}") from None


def _train(config: RunConfig, resume: bool, folder: Path, console: Console, ranks: Ranks) -> int:
    """The main job in its folder, which is made and held meanwhile, by the first rank for all."""
    same = "Give all of them the same command, in the same environment."
    check_alike(ranks, {**versions(), **config.values()}, same)
    check_shared(ranks, shared_folders(config))
    if ranks.any(restarted()):
        resume = resume or ranks.from_first(run_folder.has_begun(folder))
    with ExitStack() as held:
        if ranks.first:
            if resume and not os.path.exists(folder):
                run_folder.check_run_folder(folder, resume)  # before it, or a folder above it, is made
            held.enter_context(exclusive(folder, cure="Choose another output.dir, or make room or permit it."))
            run_folder.check_run_folder(folder, resume)
            checkpoint.newest(folder / run_folder.CHECKPOINTS)  # clears away what a kill left
        ranks.barrier()
        before = run_in(folder)
        config = as_before(config, before)
        if before is not None:
            run_folder.check_settings(folder, before.differing(config), RunConfig().values())
        check_tf32(config.model, choose_device(config.train.device))
        optimizer.check_optimizer(config.train)  # before minutes of reading and scoring
        sinks.check_installed(config.output.sinks)
        last = checkpoint.newest(folder / run_folder.CHECKPOINTS, ranks)
        if before is not None and last is None:
            console.print(f"{folder}: the run had not come to its first checkpoint; it begins at its first step")
        changed = set() if before is None else before.differing(config).keys() - {"output.dir"}
        with ranks.first_of_each_node():
            config, text = located(config, console, to_begin=True)
            data = data_of(config, console)
        saved = None if last is None else checkpoint.progress(last)
        if saved is not None and has_ended(saved, data, config.train):
            steps = f"all {counted(saved.step, 'step')} are done"
            console.print(f"nothing left to train: {steps}; raise train.epochs or train.max_steps to go on")
            if not changed and is_whole(folder, saved, data, config.train, config.output, config.model.path):
                console.print("", *places(folder, saved.step, len(data.held_out) > 0))
                return 0
        elif saved is not None and (why := stopped_early(folder, saved, data, config.train)):
            said = f"it stops early behind step {saved.step:,}: {why}"
            cure = "raise train.early_stopping_patience, or set it to null, to go on"
            if changed & set(run_folder.LENGTH):
                raise RunFolderError(f"{folder} is to become longer, but {said}. For more steps {cure}.")
            console.print(f"{folder}: nothing left to train, for {said}; {cure}")
        session = start_model(config, choose_device(config.train.device), console, ranks)
        choose_activations(session, config.train, data.limits, last, console)
        result = run(config, session, data, console, kept=text, before=None if before is None else before.train)
    if not result.finished:
        return 130
    console.print("", *summary(result, data, session.objective).split("\n"))
    if config.data.template not in (CHAT, NO_TEMPLATE):
        console.print(f"! the exported model has its old chat template: copy {config.data.template} over it, see above")
    return 0
