"""What `tuningfork data` says in the terminal: the summary in short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tuningfork.data.summary.layouts import PLAIN_BATCH, Layout
from tuningfork.data.summary.records import (
    DataSummary,
    Finding,
    Leaks,
    LengthBias,
    Mix,
    Piece,
    SetSummary,
    ShownExample,
    SpecialToken,
    TableSummary,
    TokenizerFacts,
    Truncation,
)
from tuningfork.report.dataset.wording import (
    CUTS,
    account,
    amount,
    asked,
    by_reason,
    cut,
    given_numbers,
    headline,
    in_common,
    losses,
    rows,
    saving,
    sentence,
    share,
    short_names,
    trees_save,
)
from tuningfork.wording import counted, visible

Names = Mapping[str, str]
"""File -> what to call it beside a row's number."""

LAYOUTS = {
    "padded": f"padded, batches of {PLAIN_BATCH}",
    "packed": "packed, prompts repeated",
    "shared": "packed, prompts shared",
    "trees": "trees, in the run's order",
    "together": "trees, all side by side",
}
_COLORS = {"prompt": "cyan", "answer": "green", "chosen": "green", "rejected": "yellow"}
_PARTS = {
    "common_prompt": ("▒", "prompt of several"),
    "common_answer": ("▒", "answer of several"),
    "prompt": ("█", "prompt"),
    "prompt_again": ("▓", "prompt again"),
    "chosen": ("█", "chosen"),
    "rejected": ("█", "rejected"),
    "padding": ("░", "padding"),
}
_HEAD, _TAIL = 24, 12  # tokens shown of a long part of the example
_FEW = 8  # tokens that are not left out between them
_BAR = 30  # columns of the longest bar
_DETAIL = 120  # characters shown of a row's detail


def draw_report(summary: DataSummary) -> RenderableType:
    """The whole report as something that a console draws."""
    train, held_out = summary.train, summary.eval
    sets = [("train", train)] + ([("held-out", held_out)] if held_out is not None else [])
    names = short_names(summary)
    parts: list[RenderableType] = [Text(headline(summary), style="bold"), ""]
    parts += [*_findings(summary.findings, names), ""]
    for name, data in sets:
        parts += [*_rows(name, data, summary.mix if name == "train" else None, names), ""]
    parts += [_repeats(sets, summary.leaks), ""]
    parts += [_lengths(sets), *_cut(sets, summary.over_length), *_bias(train.length_bias), ""]
    parts += [_truncation(train.truncation, summary.over_length), ""]
    parts += [*_cost(summary), ""]
    parts += [_run(summary), _indented("memory and time depend on the GPU and are not counted here"), ""]
    parts += [*_example(summary.shown[0], names), ""]
    parts += [_tokenizer(summary.tokenizer), ""]
    parts.append(_verdict(summary.findings))
    return Group(*parts)


def _findings(found: Sequence[Finding], names: Names) -> Iterator[RenderableType]:
    if not found:
        yield Text("Nothing needs attention: no row is dropped, repeated, contradicted or leaked.", style="green")
    for finding in found:
        mark, style = ("!", "bold red") if finding.strict else ("·", "yellow")
        where = f" ({rows(finding.rows, names)}{' …' if finding.count > len(finding.rows) else ''})"
        words = visible(sentence(finding.text)) + (visible(where) if finding.rows else "")
        grid = Table.grid(padding=(0, 1))
        grid.add_row(Text(mark, style=style), Text(words, overflow="fold"))
        yield grid


def _rows(name: str, data: SetSummary, mix: Mix | None, names: Names) -> Iterator[RenderableType]:
    tables = data.tables
    title = visible(tables[0].file) if len(tables) == 1 else counted(len(tables), "table")
    yield Text.assemble((f"{name}: ", "bold"), title)
    yield _indented(account(data))
    if len(tables) == 1:
        yield _indented(f"form {tables[0].form}")
    else:
        yield _indented(_tables(tables, names))
    if data.passed_over:
        yield _indented(f"beside them, not read: {visible(cut(', '.join(data.passed_over), _DETAIL))}")
    if mix is not None:
        yield _indented(asked(mix))
        for part in mix.parts:
            taken = f"{part.used:,} of {counted(part.usable, 'row')} that can be used"
            yield _indented(f"{visible(part.source)}: {taken}, {share(part.used_share)} of the mix", 4)
    grouped = by_reason(data.dropped_rows)
    for reason, count in data.dropped.items():
        yield _indented(f"{count:,} x dropped: {visible(reason)}")
        for row in grouped[reason][:2]:
            detail = f": {visible(cut(row.detail, _DETAIL))}" if row.detail else ""
            yield _indented(Text(f"{visible(rows([row], names))}{detail}", style="dim"), 6)
    for reason, count in data.left_out.items():
        yield _indented(f"{count:,} x not used, on purpose: {visible(reason)}")
    for note, some in data.notes.items():
        where = rows(some.rows[:3], names) + (" …" if some.count > 3 else "")
        yield _indented(f"{some.count:,} x used: {visible(note)} ({visible(where)})")
    for words in [*given_numbers("weight", data.weights), *given_numbers("margin", data.margins)]:
        yield _indented(words)


def _tables(tables: Sequence[TableSummary], names: Names) -> Table:
    amounts: dict[str, Callable[[TableSummary], int]] = {
        "rows": lambda table: table.rows_read,
        "dropped": lambda table: table.dropped,
        "left out": lambda table: table.left_out,
        "used": lambda table: table.used,
    }
    if not any(table.left_out for table in tables):
        del amounts["left out"]
    grid = _grid("table", "form", *amounts, "", "tokens", "")
    for table in tables:
        numbers = (f"{look(table):,}" for look in amounts.values())
        used, tokens = share(table.used_share), share(table.tokens_share)
        grid.add_row(visible(names[table.file]), table.form, *numbers, used, f"{table.tokens:,}", tokens)
    grid.columns[1].justify = "left"
    return grid


def _repeats(sets: Sequence[tuple[str, SetSummary]], leaks: Leaks | None) -> Table:
    grid = _grid("repeats", *(name for name, _ in sets))
    counts: dict[str, Callable[[SetSummary], int]] = {
        "rows that repeat an earlier row": lambda data: data.repeats.duplicate_rows,
        "rows that contradict each other": lambda data: data.repeats.conflicting_rows,
        "dropped: chosen equals rejected": lambda data: data.identical_answers,
        "dropped: an answer is empty": lambda data: data.empty_answers,
        "different prompts": lambda data: data.repeats.distinct_prompts,
    }
    if not any(data.compares for _, data in sets):
        del counts["rows that contradict each other"], counts["dropped: chosen equals rejected"]
    for words, look in counts.items():
        grid.add_row(words, *(f"{look(data):,}" for _, data in sets))
    if leaks is not None:
        grid.add_row("prompt is trained on", "", f"{leaks.prompt_rows:,}")
        grid.add_row("prompt and answer are trained on", "", f"{leaks.answer_rows:,}")
    return grid


def _lengths(sets: Sequence[tuple[str, SetSummary]]) -> Table:
    grid = _grid("lengths in tokens", "mean", "p50", "p95", "p99", "max")
    for name, data in sets:
        for key, some in data.lengths.items():
            shown = [f"{some.mean:,.1f}", *(f"{n:,.0f}" for n in (some.p50, some.p95, some.p99, some.max))]
            grid.add_row(key if name == "train" else f"{key}, {name}", *shown)
    return grid


def _cut(sets: Sequence[tuple[str, SetSummary]], policy: str) -> Iterator[RenderableType]:
    for name, data in sets:
        if data.cut:
            cut_rows = f"{data.cut:,} of {counted(data.rows_used, 'row')}"
            yield _indented(f"{name}: before data.over_length {policy}, by which {CUTS[policy]} in {cut_rows}")


def _bias(bias: LengthBias | None) -> Iterator[RenderableType]:
    if bias is None:
        return
    n = bias.longer + bias.equal + bias.shorter
    yield _indented(
        f"chosen is longer in {share(bias.longer / n)} of the pairs, shorter in {share(bias.shorter / n)}; "
        f"chosen - rejected: mean {bias.mean:+,.1f}, median {bias.median:+,.0f}"
    )


def _truncation(limits: Sequence[Truncation], policy: str) -> Table:
    """What is lost at each limit; and what is cut, where the recipe cuts."""
    kinds = losses(policy)
    grid = _grid("at data.max_length", *(head for name in kinds for head in (name, "")))
    for row in limits:
        name = f"{row.max_length:,}{' (recipe)' if row.recipe else ''}"
        amounts = []
        for look in kinds.values():
            lost, share_of_all = look(row)
            amounts += [f"{lost:,}", share(share_of_all)]
        grid.add_row(name, *amounts, style="bold" if row.recipe else "")
    return grid


def _cost(summary: DataSummary) -> Iterator[RenderableType]:
    cost, unit = summary.cost, summary.unit
    grid = _grid("token slots of an epoch", "slots", "padding", "")
    longest = max(layout.slots for layout in cost.layouts)
    for layout in cost.layouts:
        style = "bold" if layout is summary.layout else ""
        grid.add_row(_name(layout), f"{layout.slots:,}", share(layout.pad_share), _Bar(layout, longest), style=style)
    grid.columns[-1].justify = "left"
    for column in grid.columns[1:-1]:
        column.no_wrap = True  # where there is little room, names fold and bars are shorter
    yield grid
    names = {key: name for key, (_, name) in _PARTS.items() if any(layout.parts[key] for layout in cost.layouts)}
    if "rejected" not in names:
        names["chosen"] = "answers"
    legend = Text()
    for key, name in names.items():
        legend.append(f"{_PARTS[key][0]} {name}  ", style=_color(key))
    yield _indented(legend)
    shared, trees, together = (cost.layout(name) for name in ("shared", "trees", "together"))
    if shared.tokens_saved:
        yield _indented(f"sharing prompts saves {saving(shared)}")
    else:
        yield _indented("every prompt has one answer, so sharing prompts saves nothing")
    if max(trees.tokens_saved, together.tokens_saved) > shared.tokens_saved:
        yield _indented(trees_save(trees, together, unit))
        yield _indented(in_common(trees, unit))
    else:
        yield _indented(f"too little is common to several {unit}s for trees to save more")
    if cost.examples_packed < summary.train.used:
        yield _indented(f"packs are counted on the first {counted(cost.examples_packed, unit)} and scaled up")


@dataclass(frozen=True, slots=True)
class _Bar:
    """Where a layout's slots go, as long as its share of the `longest` layout's, in the room that there is."""

    layout: Layout
    longest: int

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, _BAR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        bar, drawn, amount = Text(no_wrap=True), 0, 0
        for key, (block, _) in _PARTS.items():
            amount += self.layout.parts[key]
            columns = round(min(_BAR, options.max_width) * amount / self.longest) - drawn
            drawn += columns
            bar.append(block * columns, style=_color(key))
        yield bar


def _name(layout: Layout) -> str:
    return f"trees, {layout.order}" if layout.order else LAYOUTS[layout.name]


def _color(part: str) -> str:
    return _COLORS.get(part.removesuffix("_again").removeprefix("common_"), "dim")


def _run(summary: DataSummary) -> RenderableType:
    run = summary.run
    about = "" if run.steps_packed >= run.steps else "about "
    size = f"{'about ' * run.by_tokens}{counted(run.examples_per_step, summary.unit)}"
    return Text(
        f"run: {counted(run.steps, 'step')} of {size}, "
        f"{_many(run.epochs, 'epoch')} of {_many(run.steps_per_epoch, 'step')}, {run.order}; "
        f"{_many(run.packs_per_step, 'pack')} a step, {about}{run.packs:,} in all, "
        f"{share(run.pad_share)} padding, counted for {summary.counted_for}"
    )


def _many(value: float, what: str) -> str:
    shown = amount(value)
    return f"{shown} {what if shown == '1' else what + 's'}"


def _example(shown: ShownExample, names: Names) -> Iterator[RenderableType]:
    yield Text.assemble((f"{visible(rows([shown], names))} as the model sees it", "bold"), ", a │ after each token")
    parts = [
        ("prompt", shown.prompt),
        *(("rejected" if i else "chosen", part) for i, part in enumerate(shown.answers)),
    ]
    for kind, part in parts:
        pieces, hidden = [*part.head, *part.tail], part.hidden
        line = Text(f"{part.name}, {counted(part.tokens, 'token')}", style="bold")
        line.append(
            "" if kind == "prompt" else f", {counted(part.counted, 'counts in the loss', 'count in the loss')}",
            style="not bold",
        )
        yield _indented(line)
        first, last = pieces, []
        if len(pieces) > _HEAD + _TAIL + _FEW or hidden:  # to leave out a few would save nothing
            first, last = pieces[:_HEAD], pieces[-_TAIL:]
            hidden = part.tokens - sum(len(piece.ids) for piece in [*first, *last])
        text = Text(overflow="fold")
        for piece in first:
            _piece(text, piece, kind)
        if last:
            text.append(f" … {hidden:,} more tokens … ", style="dim italic")
        for piece in last:
            _piece(text, piece, kind)
        yield _indented(text)


def _piece(text: Text, piece: Piece, kind: str) -> None:
    counts = kind == "prompt" or piece.counted
    shown = visible(cut(piece.text, 40))
    style = f"{_COLORS[kind]}{' bold' if piece.special else ''}" if counts else "dim strike"
    text.append(shown if counts else f"({shown})", style=style)
    text.append("│", style="dim")


def _tokenizer(facts: TokenizerFacts) -> Table:
    grid = _grid("tokenizer", visible(facts.name))
    n = facts.sequences

    def special(token: SpecialToken | None) -> str:
        return "none" if token is None else f"{visible(token.text)} (id {token.id})"

    grid.add_row("tokens, highest id", f"{facts.tokens:,}, {facts.highest_id:,}")
    grid.add_row("rows of the model's embedding", f"{facts.model_rows:,}")
    grid.add_row("BOS", f"{special(facts.bos)}, before {facts.begin_with_bos:,} of {n:,} sequences")
    grid.add_row("EOS", f"{special(facts.eos)}, ends {facts.end_with_eos:,} of {n:,} sequences")
    grid.add_row("padding", f"{special(facts.pad)}, not used in training here")
    if facts.date:
        grid.add_row("day that the template prints", facts.date)
    grid.columns[-1].justify = "left"
    return grid


def _verdict(found: Sequence[Finding]) -> RenderableType:
    strict = [finding for finding in found if finding.strict]
    if not strict:
        return Text("--strict would pass", style="green")
    start = "training would refuse to start; " if any(finding.refuses for finding in strict) else ""
    because = ", ".join(_short(finding) for finding in strict)
    return Text(f"{start}--strict would fail because of: {because}", style="red")


def _short(finding: Finding) -> str:
    return f"{finding.kind.replace('_', ' ')} in {visible(finding.name)} ({finding.count:,})"


def _indented(text: RenderableType, columns: int = 2) -> Padding:
    return Padding(Text(text) if isinstance(text, str) else text, (0, 0, 0, columns))


def _grid(title: str, *heads: str) -> Table:
    """A table without lines: the title over its first column, headings over the rest, which are set right."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column(title, overflow="fold")
    for head in heads:
        grid.add_column(head, justify="right", overflow="fold")
    return grid
