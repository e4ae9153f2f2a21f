"""What `tuningfork data` says in the terminal: data_report.json in short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tuningfork.report.words import by_reason, cut, headline, rows, sentence, share, visible

Tree = Mapping[str, Any]

LAYOUTS = {
    "padded": "padded, batches of 8",
    "packed": "packed, a prompt for each answer",
    "shared": "packed, prompts shared",
}
_COLORS = {"prompt": "cyan", "chosen": "green", "rejected": "yellow"}
_PARTS = {"prompt": "█", "prompt_again": "▓", "chosen": "█", "rejected": "█", "padding": "░"}
_HEAD, _TAIL = 24, 12  # tokens shown of a long part of the example
_BAR = 40  # columns of the longest bar
_DETAIL = 120  # characters shown of a row's detail


def draw_report(report: Tree) -> RenderableType:
    """The whole report, from the content of data_report.json."""
    files = [("train", report["train"])] + ([("held-out", report["eval"])] if report["eval"] else [])
    parts: list[RenderableType] = [Text(headline(report), style="bold"), ""]
    parts += [*_findings(report["findings"]), ""]
    for name, file in files:
        parts += [*_rows(name, file), ""]
    parts += [_repeats(files, report["leaks"]), ""]
    parts += [_lengths(files), *_bias(report["train"]["length_bias"]), ""]
    parts += [_truncation(report["train"]["truncation"]), ""]
    parts += [*_cost(report["cost"]), ""]
    parts += [_run(report), ""]
    parts += [*_example(report["shown"][0]), ""]
    parts += [_tokenizer(report["tokenizer"]), ""]
    parts.append(_verdict(report["findings"]))
    return Group(*parts)


def _findings(found: Sequence[Tree]) -> Iterator[RenderableType]:
    if not found:
        yield Text("Nothing needs attention: no row is dropped, repeated, contradicted or leaked.", style="green")
    for finding in found:
        mark, style = ("!", "bold red") if finding["strict"] else ("·", "yellow")
        where = f" ({rows(finding['rows'])}{' …' if finding['count'] > len(finding['rows']) else ''})"
        words = visible(sentence(finding["text"])) + (where if finding["rows"] else "")
        grid = Table.grid(padding=(0, 1))
        grid.add_row(Text(mark, style=style), Text(words, overflow="fold"))
        yield grid


def _rows(name: str, file: Tree) -> Iterator[RenderableType]:
    yield Text.assemble((f"{name}: ", "bold"), visible(file["file"]))
    lost = file["rows_read"] - file["used"]
    yield _indented(f"{file['rows_read']:,} rows read, {file['used']:,} used, {lost:,} dropped")
    grouped = by_reason(file["dropped_rows"])
    for reason, count in file["dropped"].items():
        yield _indented(f"{count:,} x {visible(reason)}")
        for row in grouped[reason][:2]:
            detail = f": {visible(cut(row['detail'], _DETAIL))}" if row["detail"] else ""
            yield _indented(Text(f"row {row['row']}{detail}", style="dim"), 6)


def _repeats(files: Sequence[tuple[str, Tree]], leaks: Tree | None) -> Table:
    grid = _grid("repeats", *(name for name, _ in files))
    for words, look in {
        "rows that repeat an earlier row": lambda file: file["repeats"]["duplicate_rows"],
        "rows that contradict each other": lambda file: file["repeats"]["conflicting_rows"],
        "dropped: chosen equals rejected": lambda file: file["identical_answers"],
        "dropped: an answer is empty": lambda file: file["empty_answers"],
        "different prompts": lambda file: file["repeats"]["distinct_prompts"],
    }.items():
        grid.add_row(words, *(f"{look(file):,}" for _, file in files))
    if leaks is not None:
        grid.add_row("prompt is trained on", "", f"{leaks['prompt_rows']:,}")
        grid.add_row("prompt and answer are trained on", "", f"{leaks['answer_rows']:,}")
    return grid


def _lengths(files: Sequence[tuple[str, Tree]]) -> Table:
    grid = _grid("lengths in tokens", "mean", "p50", "p95", "p99", "max")
    for name, file in files:
        for key, some in file["lengths"].items():
            shown = [f"{some['mean']:,.1f}", *(f"{some[p]:,.0f}" for p in ("p50", "p95", "p99", "max"))]
            grid.add_row(key if name == "train" else f"{key}, {name}", *shown)
    return grid


def _bias(bias: Tree | None) -> Iterator[RenderableType]:
    if bias is None:
        return
    n = bias["longer"] + bias["equal"] + bias["shorter"]
    yield _indented(
        f"chosen is longer in {share(bias['longer'] / n)} of the pairs, shorter in {share(bias['shorter'] / n)}; "
        f"chosen - rejected: mean {bias['mean']:+,.1f}, median {bias['median']:+,.0f}"
    )


def _truncation(limits: Sequence[Tree]) -> Table:
    grid = _grid("lost at data.max_length", "rows", "", "tokens", "")
    for row in limits:
        style = "bold" if row["recipe"] else ""
        name = f"{row['max_length']:,}{' (recipe)' if row['recipe'] else ''}"
        lost = [
            *(f"{row['rows_lost']:,}", share(row["rows_lost_share"])),
            *(f"{row['tokens_lost']:,}", share(row["tokens_lost_share"])),
        ]
        grid.add_row(name, *lost, style=style)
    return grid


def _cost(cost: Tree) -> Iterator[RenderableType]:
    grid = _grid("token slots of an epoch", "slots", "padding", "")
    longest = max(layout["slots"] for layout in cost["layouts"])
    for layout in cost["layouts"]:
        bar, drawn, amount = Text(), 0, 0
        for key, block in _PARTS.items():
            amount += layout[key]
            columns = round(_BAR * amount / longest) - drawn
            drawn += columns
            bar.append(block * columns, style=_COLORS.get(key.removesuffix("_again"), "dim"))
        grid.add_row(LAYOUTS[layout["name"]], f"{layout['slots']:,}", share(layout["pad_share"]), bar)
    grid.columns[-1].justify = "left"
    yield grid
    names = {"prompt": "prompt", "prompt_again": "prompt again", "chosen": "chosen", "rejected": "rejected"}
    if not any(layout["rejected"] for layout in cost["layouts"]):
        names = {"prompt": "prompt", "chosen": "answers"}
    legend = Text()
    for key, name in (names | {"padding": "padding"}).items():
        legend.append(f"{_PARTS[key]} {name}  ", style=_COLORS.get(key.removesuffix("_again"), "dim"))
    yield _indented(legend)
    yield _indented(
        f"sharing prompts saves {share(cost['tokens_saved'])} of {cost['tokens']:,} tokens and "
        f"{share(cost['attention_saved'])} of {cost['attention_pairs']:,} attention (query, key) pairs"
    )


def _run(report: Tree) -> RenderableType:
    run = report["run"]
    return Text(
        f"run: {run['steps']:,} steps of {run['examples_per_step']:,} {report['unit']}, {run['epochs']:,.2f} epochs of "
        f"{run['steps_per_epoch']:,.1f} steps; {run['packs_per_step']:.1f} packs a step, about "
        f"{run['packs']:,} in all, {share(run['pad_share'])} padding"
    )


def _example(shown: Tree) -> Iterator[RenderableType]:
    yield Text.assemble((f"row {shown['row']} as the model sees it", "bold"), ", a │ after each token")
    parts = [
        ("prompt", shown["prompt"]),
        *(("rejected" if i else "chosen", part) for i, part in enumerate(shown["answers"])),
    ]
    for kind, part in parts:
        pieces, hidden = [*part["head"], *part["tail"]], part["hidden"]
        line = Text(f"{part['name']}, {part['tokens']:,} tokens", style="bold")
        line.append("" if kind == "prompt" else f", {part['counted']:,} count", style="not bold")
        yield _indented(line)
        first, last = pieces, []
        if len(pieces) > _HEAD + _TAIL or hidden:
            first, last = pieces[:_HEAD], pieces[-_TAIL:]
            hidden = part["tokens"] - sum(len(piece["ids"]) for piece in [*first, *last])
        text = Text(overflow="fold")
        for piece in first:
            _piece(text, piece, kind)
        if last:
            text.append(f" … {hidden:,} more tokens … ", style="dim italic")
        for piece in last:
            _piece(text, piece, kind)
        yield _indented(text)


def _piece(text: Text, piece: Tree, kind: str) -> None:
    counts = kind == "prompt" or piece["counted"]
    shown = visible(cut(piece["text"], 40))
    style = f"{_COLORS[kind]}{' bold' if piece['special'] else ''}" if counts else "dim strike"
    text.append(shown if counts else f"({shown})", style=style)
    text.append("│", style="dim")


def _tokenizer(facts: Tree) -> Table:
    grid = _grid("tokenizer", visible(facts["name"]))
    n = facts["sequences"]
    special = {
        name: "none" if facts[name] is None else f"{visible(facts[name]['text'])} (id {facts[name]['id']})"
        for name in ("bos", "eos", "pad")
    }
    grid.add_row("tokens, highest id", f"{facts['tokens']:,}, {facts['highest_id']:,}")
    grid.add_row("rows of the model's embedding", f"{facts['model_rows']:,}")
    grid.add_row("BOS", f"{special['bos']}, before {facts['begin_with_bos']:,} of {n:,} sequences")
    grid.add_row("EOS", f"{special['eos']}, ends {facts['end_with_eos']:,} of {n:,} sequences")
    grid.add_row("padding", f"{special['pad']}, not used in training here")
    grid.columns[-1].justify = "left"
    return grid


def _verdict(found: Sequence[Tree]) -> RenderableType:
    strict = [finding for finding in found if finding["strict"]]
    if not strict:
        return Text("--strict would pass", style="green")
    return Text("--strict would fail because of: " + ", ".join(_short(finding) for finding in strict), style="red")


def _short(finding: Tree) -> str:
    return f"{finding['kind'].replace('_', ' ')} in {visible(Path(finding['file']).name)} ({finding['count']:,})"


def _indented(text: Text | str, columns: int = 2) -> Padding:
    return Padding(Text(text) if isinstance(text, str) else text, (0, 0, 0, columns))


def _grid(title: str, *heads: str) -> Table:
    """A table without lines: the title over its first column, headings over the rest, which are set right."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column(title, overflow="fold")
    for head in heads:
        grid.add_column(head, justify="right", overflow="fold")
    return grid
