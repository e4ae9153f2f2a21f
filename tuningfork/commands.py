"""What each command does, from a checked config to its last line on the screen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tuningfork import __version__
from tuningfork.config import check_run_config, from_yaml
from tuningfork.data.config import CHAT, NO_TEMPLATE
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.prepare import check_names_used, dataset_digest
from tuningfork.data.sources.expand import Use, check_sources
from tuningfork.data.sources.hub import commit_in, newest_commit, pinned_sources
from tuningfork.data.summary.sets import SetData
from tuningfork.data.summary.summarize import summarize
from tuningfork.data.template_file import with_template
from tuningfork.errors import ConfigError, ModelError, RunFolderError
from tuningfork.files import exclusive
from tuningfork.models.config import ModelConfig
from tuningfork.models.hf.hub import HUB, HubName, fetch, hub_name
from tuningfork.models.hf.load import comparable, load_config, load_tokenizer, replace_weights
from tuningfork.models.hf.support import positions
from tuningfork.objective.base import Objective
from tuningfork.records import DataReport
from tuningfork.report import sinks
from tuningfork.report.dataset import report_files
from tuningfork.report.dataset.terminal import draw_report
from tuningfork.report.run import eval_files
from tuningfork.report.run.console import Console, score, table
from tuningfork.report.run.writer import Scores
from tuningfork.run_config import RunConfig
from tuningfork.train import checkpoint, optimizer, run_folder
from tuningfork.train.ended import has_ended, is_whole, places
from tuningfork.train.evaluate import evaluate as evaluate_packs
from tuningfork.train.exported import MODEL
from tuningfork.train.order import asked_of_rows, order_of
from tuningfork.train.run import RunResult, run
from tuningfork.train.session import Data, Session
from tuningfork.train.setup.data import read_data, read_sources
from tuningfork.train.setup.device import check_one_process, choose_compile, choose_device, device_name, dtype_name
from tuningfork.train.setup.model import choose_activations, start_model
from tuningfork.train.setup.reference import model_digest, open_reference, starting_weights
from tuningfork.wording import counted

READING_MODEL = "reading the model's config and tokenizer"


def train(config: RunConfig, resume: bool, console: Console | None = None) -> int:
    """`tuningfork train`: the main job."""
    console = console or Console()
    check_one_process()
    folder = Path(config.output.dir)
    if resume and not os.path.exists(folder):
        run_folder.check_run_folder(folder, resume)  # before it, or a folder above it, is made
    try:
        return _train(config, resume, folder, console)
    except KeyboardInterrupt:
        begun = run_folder.has_begun(folder)
        how = f"continue with {run_folder.to_go_on(folder)}" if begun else "no step was done: give the command again"
        raise KeyboardInterrupt(f"what was saved is whole, {how}") from None


def _train(config: RunConfig, resume: bool, folder: Path, console: Console) -> int:
    with exclusive(folder, cure="Choose another output.dir, or make room or permit it."):
        run_folder.check_run_folder(folder, resume)
        before = _run_in(folder)
        config = _as_before(config, before)
        if before is not None:
            run_folder.check_settings(folder, before.differing(config), RunConfig().values())
        optimizer.check_optimizer(config.train)  # before minutes of reading and scoring
        sinks.check_installed(config.output.sinks)
        last = checkpoint.newest(folder / "checkpoints")
        if before is not None and last is None:
            console.print(f"{folder}: the run had not come to its first checkpoint; it begins at its first step")
        changed = set() if before is None else before.differing(config).keys() - {"output.dir"}
        config, text = _located(config, console)
        data = _read(config, console)
        saved = None if last is None else checkpoint.progress(last)
        if saved is not None and has_ended(saved, data, config.train):
            steps = f"all {counted(saved.step, 'step')} are done"
            console.print(f"nothing left to train: {steps}; raise train.epochs or train.max_steps to go on")
            if not changed and is_whole(folder, saved, data, config.train, config.output, config.model.path):
                console.print("", *places(folder, saved.step, len(data.held_out) > 0))
                return 0
        session = start_model(config, choose_device(config.train.device), console)
        choose_activations(session, config.train, data.limits, last, console)
        result = run(config, session, data, console, kept=text, before=None if before is None else before.train)
    if not result.finished:
        return 130
    console.print("", *summary(result, data, session.objective).split("\n"))
    if config.data.template not in (CHAT, NO_TEMPLATE):
        console.print(f"! the exported model has its old chat template: copy {config.data.template} over it, see above")
    return 0


def data(config: RunConfig, strict: bool, console: Console | None = None) -> int:
    """`tuningfork data`: what is in the recipe's data and what a run on it costs, before any GPU is asked for.

    Returns 1 if training would refuse to start, or if `strict` and something is wrong that a careful person would stop
    on. Packs are those of this machine, where train.device does not name another.
    """
    console = console or Console()
    config = _dated_as_its_run(config)
    folder = Path(config.output.dir) / report_files.FOLDER
    report_files.check_report_folder(folder)  # before minutes of reading
    config, _ = _located(config, console, weights=False)
    with console.stage("data", READING_MODEL):
        model, tokenizer = load_config(config.model.path), load_tokenizer(config.model.path)
    config = replace(config, data=with_template(tokenizer, config.data))
    objective = config.objective.build()

    reports = []

    def read(sources: str | list[str], use: Use, group_by: str | None = None) -> SetData:
        settings = (config.data, config.pack, model.vocab_size)
        examples, report = read_sources(sources, tokenizer, *settings, console, use, group_by)
        reports.append(report)
        return SetData.of(examples, report, tokenizer.bos_token_id, objective.refusal)

    if config.data.eval is not None:
        check_sources(config.data.eval, "eval")
    train = read(config.data.train, "train", asked_of_rows(config.train))
    held_out = None if config.data.eval is None else read(config.data.eval, "eval")
    check_names_used(config.data, *reports)
    # A GPU that is asked for by name need not be here.
    device = torch.device("cuda") if config.train.device == "cuda" else choose_device(config.train.device)
    compiled = choose_compile(config.model.compile, device)
    counted_for = f"a {'GPU' if device.type == 'cuda' else 'CPU'}, blocks {'compiled' if compiled else 'not compiled'}"
    summary = summarize(
        train,
        held_out,
        tokenizer,
        model,
        positions(model),
        config.data,
        config.pack,
        order_of(train.examples, config.train),
        PackLimits.plan(config.pack.tokens, config.pack.share_prompt, compiled),
        counted_for,
    )
    console.draw(draw_report(summary))
    if device.type == "cpu" and config.train.device == "auto":
        console.print("no GPU is seen here; --train.device cuda counts the packs of a run on one")
    console.print()
    for path in report_files.write(folder, summary, __version__):
        console.print(str(path))
    return 1 if summary.refused or (strict and summary.strict) else 0


def reference(config: RunConfig, console: Console | None = None) -> int:
    """`tuningfork reference`: fill the reference cache and nothing else."""
    check_one_process()
    console = console or Console()
    config = _dated_as_its_run(config)
    if not config.objective.build().needs_reference:
        raise ConfigError(f"objective.name {config.objective.name} has no reference; there is nothing to score.")
    config, _ = _located(config, console)
    data, session = _prepare(config, console)
    store = open_reference(config, session, data.train, data.limits, console, data.held_out)
    covered = counted(len(data.train) + len(data.held_out), "example")
    console.print(f"{store.folder}: {counted(len(store), 'answer')} cached, all of {covered} covered")
    return 0


def evaluate(config: RunConfig, policy: str | None, console: Console | None = None) -> int:
    """`tuningfork eval`: a trained model on the held-out pairs, against the recipe's reference; without data.train."""
    check_one_process()
    console = console or Console()
    path = policy or str(Path(config.output.dir) / MODEL)
    if (name := hub_name(path)) is not None:
        path = _fetched(name, console, weights=True)[0]
    if not Path(path).is_dir():
        raise ModelError(f"{path} is not a folder. Train first, or name a model folder with --policy.")
    if os.path.lexists(inside := Path(path) / MODEL / "config.json") and not os.path.lexists(Path(path) / inside.name):
        raise ModelError(f"{path} is the folder of a run, not of a model. Did you mean {inside.parent}?")
    load_config(path)  # for what it refuses
    folder = Path(config.output.dir) / eval_files.FOLDER
    eval_files.check_eval_folder(folder)  # before minutes of scoring
    config, _ = _located(_dated_as_its_run(config), console)
    data, session = _prepare(config, console, train_too=False)
    weights = starting_weights(session.policy, console)
    starting, store = model_digest(session.policy, weights), None
    if session.objective.needs_reference:
        store = open_reference(config, session, data.held_out, data.limits, console, weights=weights)
    _take_weights(session, path, config.model, console)
    with console.phase("evaluating", len(data.held_out), session.objective.unit) as phase:
        result = evaluate_packs(session, session.packs(data.held_out, data.limits), store, phase.advance)
    console.print(
        *table(
            f"{path} on {config.data.eval}", _evaluation_rows({"": result.as_dict()}, session.objective, "loss")
        ).split("\n")
    )
    facts = {
        "policy": model_digest(session.policy, starting_weights(session.policy, console)),
        "reference": None if store is None else starting,
        "data": dataset_digest(data.held_out),
        "objective": asdict(config.objective),
        "dtype": dtype_name(session.policy.dtype),
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
    said = f"{Path(policy or MODEL).name} on {Path(next(iter(report.formats))).stem}"
    console.print("", f"written to {eval_files.write(folder, said, facts, result.as_dict(), more)}")
    return 0


def summary(result: RunResult, data: Data, objective: Objective) -> str:
    """What a finished run ended with, as text of several lines."""
    parts = [table("data", _data_rows("train", data.train_report) + _held_out_rows(data))]
    of_steps, of_evaluations = objective.loss_names
    if result.checked is not None:
        parts.append(f"step-0 check: margin exactly 0 for all {result.checked:,} {objective.unit} of the first step")
    if result.ends:
        trained = {f"step {line['step']}": {**line, objective.unit: line["examples"]} for line in result.ends}
        title = f"training {objective.unit}: first and last line of metrics.jsonl"
        parts.append(table(title, _evaluation_rows(trained, objective, of_steps)))
    if result.after is not None:
        columns: dict[str, Scores] = {} if result.before is None else {"before": result.before.as_dict()}
        columns["after"] = result.after.as_dict()
        if result.best is not None and result.best.step != result.steps_done:
            columns[f"step {result.best.step}, the best"] = result.best.scores
        parts.append(table(f"held-out {objective.unit}", _evaluation_rows(columns, objective, of_evaluations)))
        if result.no_gain:
            parts.append(f"! no step is better than the starting model; step {result.exported_step} is exported anyway")
    if result.throughput.get("steps"):
        rates = result.throughput
        rows = [
            ("steps", f"{result.steps_done:,}"),
            ("tokens/s (prompt once per answer)", _number(rates["tokens_per_s"])),
            ("unique tokens/s", _number(rates["unique_tokens_per_s"])),
            ("examples/s", _number(rates["examples_per_s"])),
            ("padding share", f"{rates['pad_share']:.1%}"),
            *([] if rates["mfu"] is None else [("model flops utilisation", f"{rates['mfu']:.1%}")]),
        ]
        if rates["warmup_steps"]:
            rows.append(("warm-up (compilation), not in the rates", f"{rates['warmup_seconds']:.0f} s"))
        parts.append(table("training", rows))
    parts.append("\n".join(places(result.folder, result.exported_step, result.after is not None)))
    return "\n\n".join(parts)


def _run_in(folder: Path) -> RunConfig | None:
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


def _dated(config: RunConfig, run: RunConfig | None) -> RunConfig:
    """Settings with the day that chat templates print: its own, or that of the `run` in its folder, or today."""
    return replace(config, data=config.data.with_day(began=run.data.date if run else None))


def _as_before(config: RunConfig, run: RunConfig | None) -> RunConfig:
    """Settings with what the run in their folder has settled: the day, and the commits of what is from the hub."""
    config = _dated(config, run)
    if run is None:
        return config
    ours, theirs = hub_name(config.model.path), hub_name(run.model.path)
    model, data = config.model, config.data
    if ours is not None and theirs is not None and ours == HubName(theirs.repository, None):
        model = replace(model, path=run.model.path)
    data = replace(data, train=pinned_sources(data.train, commit_in(run.data.train)))
    if data.eval is not None:
        data = replace(data, eval=pinned_sources(data.eval, commit_in(run.data.eval)))
    return replace(config, model=model, data=data)


def _located(config: RunConfig, console: Console, weights: bool = True) -> tuple[RunConfig, str]:
    """Settings with everything from the hub at one commit and the model's path on this machine; and as config.yaml
    keeps it, where the model's name with that commit stands for its path. Raises ModelError."""
    data = replace(config.data, train=pinned_sources(config.data.train, newest_commit))
    if data.eval is not None:
        data = replace(data, eval=pinned_sources(data.eval, newest_commit))
    config = replace(config, data=data)
    name = hub_name(config.model.path)
    if name is None:
        return config, config.to_yaml()
    folder, fixed = _fetched(name, console, weights)
    kept = replace(config, model=replace(config.model, path=f"{HUB}{fixed}"))
    return replace(config, model=replace(config.model, path=folder)), kept.to_yaml()


def _fetched(name: HubName, console: Console, weights: bool) -> tuple[str, HubName]:
    with console.bytes_phase(f"downloading {name}") as progress:
        folder, fixed = fetch(name, weights, progress)
    console.print(f"{fixed}: {folder}")
    return folder, fixed


def _dated_as_its_run(config: RunConfig) -> RunConfig:
    """Settings with a day, for a command that only reads. Raises ConfigError where the run does not tell its day."""
    try:
        return _as_before(config, _run_in(Path(config.output.dir)))
    except (ConfigError, RunFolderError) as error:
        if config.data.date is not None:
            return config
        raise ConfigError(
            *error.args,
            "It was read for the day that the chat templates of the run in output.dir print. Set data.date, or choose "
            "another output.dir.",
        ) from error


def _prepare(config: RunConfig, console: Console, train_too: bool = True) -> tuple[Data, Session]:
    """Data and model of a run whose data has a date; without `train_too`, the held-out data alone."""
    device = choose_device(config.train.device)
    return _read(config, console, train_too), start_model(config, device, console)


def _read(config: RunConfig, console: Console, train_too: bool = True) -> Data:
    """The data of a run that has a date; without `train_too`, the held-out data alone."""
    compiled = choose_compile(config.model.compile, choose_device(config.train.device))
    objective = config.objective.build()
    with console.stage("data", READING_MODEL):
        tokenizer = load_tokenizer(config.model.path)
    settings = with_template(tokenizer, config.data)
    if settings != config.data:
        console.print(
            f"chat template: {config.data.template}; it is no part of the exported model, so put it there as "
            "chat_template.jinja to generate as it was trained"
        )
    group_by = asked_of_rows(config.train)
    with console.startup.time("data"):
        return read_data(
            config.model, settings, config.pack, objective, tokenizer, compiled, console, train_too, group_by
        )


def _take_weights(session: Session, path: str, starting: ModelConfig, console: Console) -> None:
    """Load another model's weights into the starting model, if the two are alike in all but weights."""
    ours, theirs = comparable(session.policy.config), comparable(load_config(path))
    other = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if other:
        raise ModelError(
            f"{path} is not a model of the same architecture as {starting.path}: their config.json differ in "
            f"{', '.join(other)}."
        )
    for note in replace_weights(session.policy.model, path):
        console.print(f"{path}: {note}")


def _data_rows(name: str, report: DataReport) -> list[tuple[str, str]]:
    rows = [(f"{name}: rows read", f"{report.rows_read:,}"), (f"{name}: used", f"{report.used:,}")]
    return rows + [(f"{name}: dropped, {reason}", f"{count:,}") for reason, count in report.dropped.items()]


def _held_out_rows(data: Data) -> list[tuple[str, str]]:
    return [] if data.held_out_report is None else _data_rows("held-out", data.held_out_report)


def _evaluation_rows(columns: Mapping[str, Scores], objective: Objective, loss: str) -> list[tuple[str, ...]]:
    """One row a number, one column an evaluation under its heading; `loss` is what the loss is called."""
    rows: list[tuple[str, ...]] = [("", *columns)]
    for name, key in {**objective.headline, loss: "loss", objective.unit: objective.unit}.items():
        values = [scores[key] for scores in columns.values()]
        shown = [_number(value, name) for value in values]
        rows.append((name, *shown))
    return rows


def _number(value: float | int | None, heading: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else score(heading, value)
