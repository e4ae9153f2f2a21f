"""The whole way from a file to token examples, with an account of every row: used, or dropped for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from tuningfork.accounts import DataReport, DroppedRow, in_pieces
from tuningfork.data.config import DataConfig
from tuningfork.data.examples.field_names import check_renames_used
from tuningfork.data.examples.groups import check_group_found
from tuningfork.data.sources.expand import Use, expand_sources
from tuningfork.data.sources.mix import mixed_indices
from tuningfork.data.token_cache import Notice, TokenTables
from tuningfork.data.token_table import Subset
from tuningfork.data.tokens.control_tokens import CUT, RENDERED, WRITTEN
from tuningfork.data.tokens.encode_table import Progress, TableAccount
from tuningfork.data.tokens.tokenize import check_ids, check_vocabulary
from tuningfork.data.tokens.truncate import size_of
from tuningfork.errors import DataError, OutOfMemory
from tuningfork.records import Source, TokenExample, column
from tuningfork.wording import counted, first_line

LEFT_OUT = "left out of the mix"
ON_PURPOSE = (LEFT_OUT, "weight 0")
"""Reasons for which a row is not used although nothing is wrong with it: the recipe or the row itself asks for it."""

REASONS = 3  # for dropping rows that one line names
NOTED = 20  # rows that a written report names for a note; all of them are counted


def prepare_examples(
    sources: str | Path | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    vocab_size: int,
    progress: Progress | None = None,
    use: Use = "train",
    cache: Path | None = None,
    notice: Notice = lambda text: None,
    group_by: str | None = None,
) -> tuple[Subset, DataReport]:
    """Read, render, encode and, where asked, truncate the examples of all sources, in their order.

    Those to train on are mixed by the recipe's shares or counts. Rows that are not used are listed in the report;
    rows_read = used + dropped, where no row was cut into pieces, or joined. vocab_size is the number of rows of the
    model's embedding. With a `cache` folder, tokens of before are taken from there and new ones kept there, mapped, not
    in memory. `group_by` says what examples keep of their rows for their order, see `with_group`. Raises DataError
    where a source or the tokenizer are unfit, or where no row is left; ConfigError where no row has what they are
    grouped by.
    """
    check_vocabulary(tokenizer, vocab_size)
    names = [str(sources)] if isinstance(sources, str | Path) else list(sources)
    report = DataReport()
    groups: list[Subset] = []
    with TokenTables(tokenizer, config, cache, notice, group_by) as opened:
        for tables in expand_sources(names, use):
            report.sources[tables.source] = tables.taken
            report.passed_over += tables.left
            found = []
            for table in tables.taken:
                with _enough_memory(table):
                    examples, account = opened.open(table, _from(report.rows_read, progress))
                check_ids(examples, vocab_size)
                found.append(examples)
                _enter(table, account, column(examples, "piece"), report)
            groups.append(Subset(found))
    used = Subset(_mix(groups, tokenizer, config, report) if use == "train" else groups)
    report.used = len(used)
    unused = {Source(row.file, row.row) for row in report.dropped_rows if not row.piece}
    noted = {note: [place for place in found if place not in unused] for note, found in report.notes.items()}
    report.notes = {note: found for note, found in noted.items() if found}
    examples_read = report.rows_read - report.cut - report.joined + report.pieces
    assert examples_read == report.used + sum(report.dropped.values()), "a row was lost"
    if not used:
        raise DataError(_unusable(report, names))
    if group_by is not None:
        check_group_found(group_by, column(used, "group"), report.fields)
    return used, report


@contextmanager
def _enough_memory(table: str) -> Iterator[None]:
    """Turn a refusal of memory into an OutOfMemory that names the table and the settings of this room that need less.

    A process that turns rows into tokens is killed rather than refused, of which `Workers` tells.
    """
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(
            f"{table}: there is not the memory to read its rows and to make tokens of them ({first_line(error)}). Set "
            "data.workers to less; set data.cache to a folder, so that tokens lie there and not in memory; or split "
            "the table."
        ) from error


def _from(before: int, progress: Progress | None) -> Progress | None:
    """Progress that counts the rows of earlier tables, too."""
    return None if progress is None else lambda done, whole: progress(before + done, before + whole)


def _enter(table: str, account: TableAccount, piece: np.ndarray, report: DataReport) -> None:
    """Put what became of a table's rows into the report. `piece` says of each example which of its row it is."""
    report.rows_read += account.rows_read
    report.rows_of[table] = account.rows_read
    report.cut += 0 if account.joined else int((piece == 1).sum())
    report.joined += account.joined
    report.pieces += int((piece > 0).sum())
    report.formats[table] = account.format
    report.fields |= dict.fromkeys(account.fields)
    report.dropped_rows += (DroppedRow(table, row, reason, detail) for row, reason, detail in account.dropped)
    for note, rows in account.notes.items():
        report.notes.setdefault(note, []).extend(Source(table, row) for row in rows)
    report.sizes |= {Source(table, row): size for row, size in account.sizes.items()}


def _mix(
    groups: Sequence[Subset],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    report: DataReport,
) -> list[Subset]:
    """Of each source the examples that the recipe's shares or counts take; the others are listed.

    Raises DataError where a source of a mix has none.
    """
    names = list(report.sources)
    if config.shares is not None or config.counts is not None:
        for name, group in zip(names, groups, strict=True):
            if not group:
                key = "shares" if config.counts is None else "counts"
                raise DataError(f"{_unusable(report, [name])} data.{key} takes a part of every source.")
    taken = mixed_indices([len(group) for group in groups], names, config.shares, config.counts, config.mix_seed)
    for group, indices in zip(groups, taken, strict=True):
        for example in group.take(np.setdiff1d(np.arange(len(group)), indices)):
            source = example.source
            report.dropped_rows.append(DroppedRow(source.file, source.row, LEFT_OUT, piece=source.piece))
            report.sizes.setdefault(source.whole, size_of(example, tokenizer.bos_token_id))
    return [group.take(indices) for group, indices in zip(groups, taken, strict=True)]


def report_dict(report: DataReport) -> dict[str, Any]:
    """The account of every row, as a run writes it to data_rows.json."""
    rows = [{"file": r.file, "row": r.row, "reason": r.reason, "detail": r.detail} for r in report.dropped_rows]
    notes = {note: {"rows": len(at), "first": list(map(str, at[:NOTED]))} for note, at in report.notes.items()}
    return {
        "sources": report.sources,
        "passed_over": report.passed_over,
        "formats": report.formats,
        "rows_read": report.rows_read,
        "pieces": {"rows": report.cut, "joined": report.joined, "pieces": report.pieces},
        "used": report.used,
        "dropped": report.dropped,
        "notes": notes,
        "dropped_rows": rows,
    }


def account_line(name: str, report: DataReport) -> str:
    """Such as ``pairs.jsonl: 348 rows read, 48 used, 300 dropped (300 empty answer)``, with the commonest reasons."""
    said = f"{name}: {counted(report.rows_read, 'row')} read, {in_pieces(report)}{report.used:,} used"
    if not report.dropped_rows:
        return said
    reasons = [f"{n:,} {reason}" for reason, n in report.dropped.items()]
    more = ["..."] if len(reasons) > REASONS else []
    return f"{said}, {len(report.dropped_rows):,} dropped ({', '.join(reasons[:REASONS] + more)})"


def stream_line(name: str, report: DataReport) -> str:
    """That documents see one another, where they do; empty where not."""
    if not report.joined:
        return ""
    return (
        f"{name}: data.over_length is stream, so documents within a piece see one another. It leaks across documents "
        "by design, for comparison with trainers that do so; pieces keeps documents apart"
    )


def control_line(name: str, report: DataReport) -> str:
    """That rows spell control tokens, which, where, and what has become of them; empty where none do."""
    spelt = [n for n in report.notes if n.startswith(WRITTEN) and n != RENDERED and not n.startswith(CUT)]
    noted = {note: report.notes[note] for note in spelt}
    rows = report.in_order(row for found in noted.values() for row in found)
    if not rows:
        return ""
    first = next(note for note, found in noted.items() if rows[0] in found)
    return (
        f"{name}: {counted(len(rows), 'row spells', 'rows spell')} control tokens of the tokenizer in their own words "
        f"(first: {rows[0]}, {first.removeprefix(WRITTEN).lstrip(', ')}). data.control_tokens says what these are: "
        "keep, as_text or drop"
    )


def check_names_used(config: DataConfig, *reports: DataReport) -> None:
    """Raise ConfigError where data.columns or data.roles name what no row of these has: a typing error, most likely."""
    fields = {name for report in reports for name in report.fields}
    notes = {note for report in reports for note in report.notes}
    complete = not any(report.dropped_rows for report in reports)
    check_renames_used(config.columns or {}, config.roles or {}, fields, notes, complete)


def dataset_digest(examples: Sequence[TokenExample]) -> str:
    """A hash of what is trained on, in order: ids, masks, labels, weights, margins, and groups where rows were asked
    for them; not of where it was read."""
    digest = xxhash.xxh3_128()
    for name in ("content", "label", "weight", "margin"):
        digest.update(column(examples, name).tobytes())
    if (group := column(examples, "group")).any():
        digest.update(group.tobytes())
    return digest.hexdigest()


def _unusable(report: DataReport, names: Sequence[str]) -> str:
    """That no row of these sources can be used, with each reason, its count and the first row that it befell."""
    files = {file for name in names for file in report.sources[name]}
    dropped = [row for row in report.dropped_rows if row.file in files]
    first: dict[str, DroppedRow] = {}
    for row in dropped:
        first.setdefault(row.reason, row)
    parts = []
    for reason, count in Counter(row.reason for row in dropped).most_common():
        row = first[reason]
        place = f"row {row.row}" if len(files) == 1 else f"{row.file}, row {row.row}"
        parts.append(f"{count:,} x {reason} (first: {place}{', ' if row.detail else ''}{row.detail})")
    n = len(dropped)
    none = "its only row cannot be used" if n == 1 else f"none of its {n:,} rows can be used"
    return f"{', '.join(names)}: {none}: {'; '.join(parts)}. Mend the rows or change the settings named here."
