"""From the recipe's files to the examples of a run: read, tokenized, and refused where nothing could train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tuningfork.accounts import DataReport
from tuningfork.data.config import DataConfig, PackConfig
from tuningfork.data.packing.pack import PackLimits, split_fitting
from tuningfork.data.prepare import account_line, check_names_used, control_line, prepare_examples, stream_line
from tuningfork.data.sources.expand import Use, check_sources
from tuningfork.data.summary.overlap import overlap
from tuningfork.data.token_table import Subset
from tuningfork.errors import READING, DataError, enough_memory
from tuningfork.models.config import ModelConfig
from tuningfork.models.hf.load import load_config
from tuningfork.models.hf.support import positions
from tuningfork.objective.base import Objective
from tuningfork.records import TokenExample, column
from tuningfork.report.run.console import Console
from tuningfork.train.session import Data
from tuningfork.wording import counted


def read_data(
    model: ModelConfig,
    data: DataConfig,
    pack: PackConfig,
    objective: Objective,
    tokenizer: PreTrainedTokenizerBase,
    compiled: bool,
    console: Console,
    train_too: bool = True,
    group_by: str | None = None,
    shorter: Sequence[int] = (),
) -> Data:
    """Read, tokenize and audit the recipe's files, for every command that scores them. `data` has a date.

    Args:
        train_too: read data.train; otherwise data.eval alone, and there need be no other.
        group_by: what those to train on keep of their rows for their order, see `with_group`.
        shorter: lengths of pieces that those to train on come in, too, see train.length_steps.

    Raises:
        DataError: a file or a row cannot be used, or a row is none that the objective has a loss for.
        ModelError: the model's config cannot be used.
    """
    assert data.date is not None, "two files, and a resumed run, could get two dates"
    config = load_config(model.path)
    if data.eval is not None:
        check_sources(data.eval, "eval")
    train: Sequence[TokenExample] = []
    held_out: Sequence[TokenExample] = []
    train_report, held_out_report = DataReport(), None
    early: list[Sequence[TokenExample]] = []
    if train_too:
        for length in shorter:
            console.print(f"train.length_steps: pieces of at most {length:,} tokens")
            settings = replace(data, max_length=length)
            early.append(read_sources(data.train, tokenizer, settings, pack, config.vocab_size, console)[0])
        train, train_report = read_sources(
            data.train, tokenizer, data, pack, config.vocab_size, console, group_by=group_by
        )
    if data.eval is not None:
        held_out, held_out_report = read_sources(
            data.eval, tokenizer, data, pack, config.vocab_size, console, use="eval"
        )
    if train_too and held_out_report:
        shared = overlap(train, train_report, held_out, held_out_report, tokenizer.bos_token_id)
        if shared:
            console.print(f"! {shared}")
    if train_too or not data.train:  # names of fields may be meant for rows that are not read now
        check_names_used(data, *(report for report in (train_report, held_out_report) if report is not None))
    examples, longest = Subset([train, held_out]), positions(config)
    lengths = column(examples, "longest")
    if longest and lengths.max() > longest:
        scaled = longest < (getattr(config, "max_position_embeddings", None) or longest)
        why = " before its rotary scaling makes examples depend on their neighbours in a pack" if scaled else ""
        raise DataError(
            f"{examples[int(lengths.argmax())].id} has {lengths.max()} tokens, but {model.path} knows {longest} "
            f"positions{why}. Set data.max_length to {longest} or less."
        )
    stages = (*(len(part) for part in early), len(train)) if early else ()
    train = Subset([*early, train]) if early else train
    for part in (train, held_out):
        objective.check(part)
    limits = PackLimits.plan(pack.tokens, pack.share, compiled)
    return Data(train, train_report, held_out, held_out_report, limits, stages)


def read_sources(
    sources: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    pack: PackConfig,
    vocab_size: int,
    console: Console,
    use: Use = "train",
    group_by: str | None = None,
) -> tuple[Sequence[TokenExample], DataReport]:
    """The examples of all sources that a run would use, and the account of their rows. Raises DataError."""
    check_sources(sources, use)  # before its reading is said to have begun
    name = Path(sources).name if isinstance(sources, str) else counted(len(sources), "source")
    with enough_memory(f"reading {name}", READING), console.phase(f"reading {name}", total=0, unit="rows") as phase:

        def progress(done: int, total: int) -> None:
            phase.total = total
            phase.advance(done - phase.done)

        cache = None if data.cache is None else Path(data.cache)
        prepared, report = prepare_examples(
            sources, tokenizer, data, vocab_size, progress, use, cache, console.print, group_by
        )
    examples, too_large = split_fitting(prepared, pack.tokens, pack.share)
    report.used = len(examples)
    report.dropped_rows += too_large
    if not examples:
        raise DataError(
            f"{', '.join(report.sources)}: no example fits a pack of {pack.tokens} tokens. Raise pack.tokens."
        )
    console.print(account_line(name, report))
    if leaks := stream_line(name, report):
        console.print(f"! {leaks}")
    if data.control_tokens is None and (spelt := control_line(name, report)):
        console.print(f"! {spelt}")
    return examples, report
