"""`tuningfork data`: what is in the recipe's data, and what a run on it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tuningfork import __version__
from tuningfork.commands.inputs import READING_MODEL
from tuningfork.commands.resolve import dated_as_its_run, located
from tuningfork.data.packing.pack import PackLimits
from tuningfork.data.prepare import check_names_used
from tuningfork.data.sources.expand import Use, check_sources
from tuningfork.data.summary.sets import SetData
from tuningfork.data.summary.summarize import summarize
from tuningfork.data.template_file import with_template
from tuningfork.models.hf.load import load_config, load_tokenizer
from tuningfork.models.hf.support import positions
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.dataset import report_files
from tuningfork.report.dataset.terminal import draw_report
from tuningfork.report.run.console import Console
from tuningfork.train.order import asked_of_rows, compared_with, order_of
from tuningfork.train.setup.data import read_sources
from tuningfork.train.setup.device import choose_compile, choose_device


def data(config: RunConfig, strict: bool, console: Console | None = None) -> int:
    """`tuningfork data`: what is in the recipe's data and what a run on it costs, before any GPU is asked for.

    Returns 1 if training would refuse to start, or if `strict` and something is wrong that a careful person would stop
    on. Packs are those of this machine, where train.device does not name another.
    """
    console = console or Console()
    config = dated_as_its_run(config)
    folder = Path(config.output.dir) / report_files.FOLDER
    report_files.check_report_folder(folder)  # before minutes of reading
    config, _ = located(config, console, weights=False)
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
        PackLimits.plan(config.pack.tokens, config.pack.share, compiled),
        counted_for,
        compared_with(train.examples, config.train),
    )
    console.draw(draw_report(summary))
    if device.type == "cpu" and config.train.device == "auto":
        console.print("no GPU is seen here; --train.device cuda counts the packs of a run on one")
    console.print()
    for path in report_files.write(folder, summary, __version__):
        console.print(str(path))
    return 1 if summary.refused or (strict and summary.strict) else 0
