"""`tuningfork eval`: a trained model on held-out pairs."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from tuningfork import __version__
from tuningfork.commands.inputs import data_and_model
from tuningfork.commands.resolve import dated_as_its_run, fetched, located
from tuningfork.commands.summary import evaluation_rows
from tuningfork.data.prepare import dataset_digest
from tuningfork.distributed.load import replace_spread
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.world import world
from tuningfork.errors import ModelError
from tuningfork.models.config import ModelConfig
from tuningfork.models.hf.comparable import comparable
from tuningfork.models.hf.hub import hub_name
from tuningfork.models.hf.load import load_config, replace_weights
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run import eval_files
from tuningfork.report.run.console import Console, table
from tuningfork.train.evaluate import evaluate as evaluate_packs
from tuningfork.train.exported import MODEL
from tuningfork.train.session import Session
from tuningfork.train.setup.device import choose_device, device_name, dtype_name
from tuningfork.train.setup.reference import model_digest, open_reference, starting_weights


def evaluate(config: RunConfig, policy: str | None, console: Console | None = None) -> int:
    """`tuningfork eval`: a trained model on the held-out pairs, against the recipe's reference; without data.train."""
    with world(config.parallel, choose_device(config.train.device).type == "cuda") as ranks:
        return _evaluate(config, policy, console or Console(), ranks)


def _evaluate(config: RunConfig, policy: str | None, console: Console, ranks: Ranks) -> int:
    path = policy or str(Path(config.output.dir) / MODEL)
    if (name := hub_name(path)) is not None:
        path = fetched(name, console, weights=True)[0]
    if not Path(path).is_dir():
        raise ModelError(f"{path} is not a folder. Train first, or name a model folder with --policy.")
    if os.path.lexists(inside := Path(path) / MODEL / "config.json") and not os.path.lexists(Path(path) / inside.name):
        raise ModelError(f"{path} is the folder of a run, not of a model. Did you mean {inside.parent}?")
    load_config(path)  # for what it refuses
    folder = Path(config.output.dir) / eval_files.FOLDER
    eval_files.check_eval_folder(folder)  # before minutes of scoring
    with ranks.first_of_each_node():
        config, _ = located(dated_as_its_run(config), console)
    data, session = data_and_model(config, console, ranks, train_too=False)
    weights = starting_weights(session.policy, console, session.ranks)
    starting, store = model_digest(session.policy, weights), None
    if session.objective.needs_reference:
        store = open_reference(config, session, data.held_out, data.limits, console, weights=weights)
    _take_weights(session, path, config.model, console)
    with console.phase("evaluating", len(data.held_out), session.objective.unit) as phase:
        result = evaluate_packs(session, data.held_out, data.limits, store, phase.advance)
    console.print(
        *table(
            f"{path} on {config.data.eval}", evaluation_rows({"": result.as_dict()}, session.objective, "loss")
        ).split("\n")
    )
    facts = {
        "policy": model_digest(session.policy, starting_weights(session.policy, console, session.ranks)),
        "reference": None if store is None else starting,
        "data": dataset_digest(data.held_out),
        "objective": asdict(config.objective),
        "dtype": dtype_name(session.policy.dtype) + (", products in TF32" if config.model.tf32 else ""),
        "device": device_name(session.policy.device),
    }
    report = data.held_out_report
    assert report is not None
    more = {
        "policy_path": os.path.abspath(path),
        "reference_path": None if store is None else config.model.path,
        "data_eval": config.data.eval,
        "data_date": config.data.date,
        "rows": {"read": report.rows_read, "used": report.used, "dropped": report.dropped},
        "seconds": result.seconds,
        "version": __version__,
    }
    if not ranks.first:
        return 0
    said = f"{Path(policy or MODEL).name} on {Path(next(iter(report.formats))).stem}"
    console.print("", f"written to {eval_files.write(folder, said, facts, result.as_dict(), more)}")
    return 0


def _take_weights(session: Session, path: str, starting: ModelConfig, console: Console) -> None:
    """Load another model's weights into the starting model, if the two are alike in all but weights."""
    ours, theirs = comparable(session.policy.config), comparable(load_config(path))
    other = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if other:
        raise ModelError(
            f"{path} is not a model of the same architecture as {starting.path}: their config.json differ in "
            f"{', '.join(other)}."
        )
    model, spread = session.policy.model, session.policy.spread
    if spread is not None:
        spread.release()
    for note in replace_weights(model, path) if spread is None else replace_spread(model, path):
        console.print(f"{path}: {note}")
