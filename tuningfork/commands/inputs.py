"""What a command works with: the data of its recipe, and the starting model."""

from __future__ import annotations

from tuningfork.data.template_file import with_template
from tuningfork.distributed.ranks import Ranks
from tuningfork.distributed.shared import check_shared
from tuningfork.models.hf.load import load_tokenizer
from tuningfork.recipe.run_config import RunConfig
from tuningfork.report.run.console import Console
from tuningfork.train.order import asked_of_rows
from tuningfork.train.session import Data, Session
from tuningfork.train.setup.data import read_data
from tuningfork.train.setup.device import choose_compile, choose_device
from tuningfork.train.setup.model import start_model

READING_MODEL = "reading the model's config and tokenizer"


def shared_folders(config: RunConfig) -> dict[str, str]:
    """What all machines of a run must see as one: setting -> folder."""
    folders = {"output.dir": config.output.dir}
    if config.objective.build().needs_reference:
        folders["reference.cache"] = config.reference.cache
    return folders


def data_and_model(config: RunConfig, console: Console, ranks: Ranks, train_too: bool = True) -> tuple[Data, Session]:
    """Data and model of a run whose data has a date; without `train_too`, the held-out data alone.

    Raises ConfigError where the machines do not see the same folders, before anything is read.
    """
    check_shared(ranks, shared_folders(config))
    device = choose_device(config.train.device)
    with ranks.first_of_each_node():
        data = data_of(config, console, train_too)
    return data, start_model(config, device, console, ranks)


def data_of(config: RunConfig, console: Console, train_too: bool = True) -> Data:
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
            config.model, settings, config.pack, objective, tokenizer, compiled, console, train_too, group_by,
            [tokens for _, tokens in config.train.length_steps or []],
        )  # fmt: skip
