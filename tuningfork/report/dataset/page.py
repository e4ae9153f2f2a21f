"""The page of `tuningfork data`: the summary as one HTML file for a person to look at.

Nothing is counted here, and the page needs nothing but itself: no script, no network. All that comes from the data is
escaped, and what cannot be seen is made visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from tuningfork.accounts import DroppedRow
from tuningfork.data.summary.layouts import PLAIN_BATCH
from tuningfork.data.summary.records import (
    DataSummary,
    Finding,
    Mix,
    SetSummary,
    SpecialToken,
    TableSummary,
    TokenizerFacts,
)
from tuningfork.report.dataset.charts import draw_bias, draw_cost, draw_lengths, draw_truncation
from tuningfork.report.dataset.html import breakable, facts, table, text
from tuningfork.report.dataset.plots import stacked
from tuningfork.report.dataset.tokens import examples
from tuningfork.report.dataset.wording import (
    Row,
    account,
    amount,
    asked,
    by_reason,
    cut,
    given_numbers,
    headline,
    rows,
    sentence,
    share,
    short_names,
)
from tuningfork.wording import counted

SECTIONS = {
    "rows": "Rows",
    "repeats": "Repeats and leaks",
    "lengths": "Lengths",
    "bias": "Which answer is longer",
    "truncation": "What a limit on length costs",
    "cost": "Where the tokens go",
    "run": "The run",
    "examples": "What the model sees",
    "tokenizer": "Tokenizer",
}
SAVED = {
    "none": "of the tokens saved: none is shared (pack.share is none)",
    "prompt": "of the tokens saved by sharing prompts",
    "tree": "of the tokens saved by trees",
}
ONCE = {
    "none": "nothing (pack.share is none)",
    "prompt": "each prompt, for all of its answers",
    "tree": "what a pack's examples begin with in common",
}
_DETAIL = 300  # characters shown of a row's detail


def draw_page(summary: DataSummary, made_by: str) -> str:
    """The whole page. `made_by` is the command that makes it, with its version."""
    names = short_names(summary)
    drawn = {
        "rows": _rows(summary, names),
        "repeats": _repeats(summary, names),
        "lengths": draw_lengths(_sets(summary), summary.over_length),
        "bias": draw_bias(summary.train.length_bias),
        "truncation": draw_truncation(summary.train.truncation, summary.over_length),
        "cost": draw_cost(summary),
        "run": _run(summary),
        "examples": examples(summary.shown, names),
        "tokenizer": _tokenizer(summary.tokenizer),
    }
    name = text(_titled(summary.train))
    sections = "".join(_section(key, SECTIONS[key], body) for key, body in drawn.items())
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title in SECTIONS.items())
    style = resources.files("tuningfork.report.dataset").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{text(made_by)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}: data</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"{_head(summary)}\n{_attention(summary, names)}\n{_figures(summary)}\n"
        f'<nav aria-label="Sections">{links}</nav>\n{sections}\n'
        f"<footer>{_footer(made_by)}</footer>\n</main>\n</body>\n</html>\n"
    )


def _head(summary: DataSummary) -> str:
    train, held_out, tokenizer = summary.train, summary.eval, summary.tokenizer
    template = "the chat template of" if tokenizer.template == "chat" else "plain text, tokenized by"
    beside = f", held-out rows from <b>{breakable(_titled(held_out))}</b>" if held_out else ""
    return (
        f'<header><p class="eyebrow">Preference data</p><h1>{headline(summary)}</h1>'
        f'<p class="lede"><b>{breakable(_titled(train))}</b>{beside}; {template} '
        f"<b>{breakable(tokenizer.name)}</b>; data.max_length {summary.max_length:,} tokens</p></header>"
    )


def _titled(data: SetSummary) -> str:
    """A data set by the names of its files."""
    first, *others = (Path(table.file).name for table in data.tables)
    return f"{first} and {counted(len(others), 'more table')}" if others else first


def _attention(summary: DataSummary, names: Mapping[str, str]) -> str:
    found = summary.findings
    if not found:
        return (
            '<section class="attention clear" aria-labelledby="attention"><h2 id="attention">Nothing needs attention'
            "</h2><p>No row is dropped, repeated, contradicted or leaked.</p></section>"
        )
    items = []
    for finding in found:
        tag, word = ("tag stop", "stops --strict") if finding.strict else ("tag", "worth a look")
        where = f' <span class="soft">{_few(finding, names)}</span>' if finding.rows else ""
        items.append(
            f'<li><span class="{tag}">{word}</span><span>{breakable(sentence(finding.text))}{where}</span></li>'
        )
    stops = any(finding.strict for finding in found)
    note = (
        '<p class="note"><code>tuningfork data --strict</code> fails on what is marked “stops --strict”.</p>'
        if stops
        else ""
    )
    return (
        '<section class="attention" aria-labelledby="attention"><h2 id="attention">Before you train</h2>'
        f"<ul>{''.join(items)}</ul>{note}</section>"
    )


def _few(finding: Finding, names: Mapping[str, str]) -> str:
    more = " …" if finding.count > len(finding.rows) else ""
    return breakable(f"({rows(finding.rows, names)}{more})")


def _figures(summary: DataSummary) -> str:
    cost, run, unit = summary.cost, summary.run, summary.unit
    ours = summary.layout
    times = cost.layout("padded").slots / ours.slots
    less, word = (times, "fewer") if times >= 1 else (1 / times, "more")
    step = "step" if run.steps == 1 else "steps"
    figures = [
        (f"{ours.tokens:,}", "tokens laid in an epoch"),
        (share(ours.tokens_saved), SAVED[summary.share]),
        (f"{less:.1f} ×", f"{word} token slots than padded batches of {PLAIN_BATCH} {unit}s"),
        (
            f"{run.steps:,}",
            f"{step} of {'about ' * run.by_tokens}{counted(run.examples_per_step, unit)} in the whole run",
        ),
    ]
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for value, name in figures)
    return f'<dl class="figures">{tiles}</dl>'


def _rows(summary: DataSummary, names: Mapping[str, str]) -> str:
    parts = []
    for role, data in _sets(summary):
        amounts = {
            "used": data.used,
            "dropped": sum(data.dropped.values()),
            "left-out": sum(data.left_out.values()),
        }
        bar = stacked(
            [(kind, kind.replace("-", " "), n) for kind, n in amounts.items()],
            data.rows_read,
            f"{data.used:,} of {counted(data.rows_read, 'row')} used",
        )
        legend = "".join(
            f'<span><span class="key {kind}"></span>{kind.replace("-", " ")}</span>' for kind, n in amounts.items() if n
        )
        parts.append(f"<h3>{role}</h3><p>{account(data)}.</p>{bar}<p class='legend'>{legend}</p>{_tables(data, names)}")
        if role == "Training" and summary.mix:
            parts.append(_mix(summary.mix))
        if data.dropped:
            grouped = by_reason(data.dropped_rows)
            body = [
                [text(reason), f"{n:,}", share(n / data.rows_read), _details(grouped[reason], names)]
                for reason, n in data.dropped.items()
            ]
            parts.append(table(["Dropped for", "Rows", "Share", "Examples"], body, "reasons", "Dropped rows"))
        if data.notes:
            body = [
                [
                    text(note),
                    f"{some.count:,}",
                    share(some.count / data.used),
                    breakable(rows(some.rows[:3], names) + (" …" if some.count > 3 else "")),
                ]
                for note, some in data.notes.items()
            ]
            parts.append(
                table(["Note on rows in use", "Rows", "Share", "Where"], body, "reasons", "Notes on rows in use")
            )
        said = [*given_numbers("weight", data.weights), *given_numbers("margin", data.margins)]
        said += [f"{counted(n, 'row is', 'rows are')} not used on purpose: {why}" for why, n in data.left_out.items()]
        parts += [f"<p>{text(sentence(words))}</p>" for words in said]
    dropped = any(data.dropped for _, data in _sets(summary))
    listed = "<p class='note'>Every dropped row is listed in data_report.json.</p>"
    return "".join(parts) + (listed if dropped else "")


def _tables(data: SetSummary, names: Mapping[str, str]) -> str:
    """A line for each table of a data set; and what lies beside them and is not read. A share is of all tables."""

    def of_all(n: int, part: float) -> str:
        return f"{n:,}" + (f' <span class="soft">{share(part)}</span>' if len(data.tables) > 1 else "")

    amounts: dict[str, Callable[[TableSummary], str]] = {
        "Rows": lambda one: f"{one.rows_read:,}",
        "Dropped": lambda one: f"{one.dropped:,}",
        "Left out": lambda one: f"{one.left_out:,}",
        "Used": lambda one: of_all(one.used, one.used_share),
        "Tokens": lambda one: of_all(one.tokens, one.tokens_share),
    }
    if not any(one.left_out for one in data.tables):
        del amounts["Left out"]
    body = [
        [
            _placed(one.file, names[one.file]),
            text(one.form),
            *(look(one) for look in amounts.values()),
        ]
        for one in data.tables
    ]
    beside = f"Beside them, not read: {', '.join(data.passed_over)}"
    passed_over = f'<p class="note">{text(cut(beside, _DETAIL))}</p>' if data.passed_over else ""
    return table(["Table", "Form", *amounts], body, "tables", "Tables") + passed_over


def _placed(file: str, name: str) -> str:
    """A file's name, and below it the folder that it lies in."""
    path = Path(file)
    if name == file or path.name == file:
        return breakable(file)
    return f'{breakable(path.name)} <span class="soft">in {breakable(path.parent)}</span>'


def _mix(mix: Mix) -> str:
    body = [
        [
            breakable(part.source),
            f"{part.asked:,g}",
            f"{part.usable:,}",
            f"{part.used:,}",
            share(part.used_share),
        ]
        for part in mix.parts
    ]
    heads = ["Source of the mix", f"data.{mix.by}", "Usable", "Used", "Share"]
    return table(heads, body, "tables mix", f"The mix: {asked(mix)}")


def _details(dropped: Sequence[DroppedRow], names: Mapping[str, str]) -> str:
    """A few dropped rows with what is said of them."""
    first = "".join(
        f"<li>{breakable(rows([row], names))}{': ' if row.detail else ''}"
        f"<bdi>{text(cut(row.detail, _DETAIL))}</bdi></li>"
        for row in dropped[:3]
    )
    more = f"<li>… {len(dropped) - 3:,} more</li>" if len(dropped) > 3 else ""
    return f'<ul class="details">{first}{more}</ul>'


def _repeats(summary: DataSummary, names: Mapping[str, str]) -> str:
    def where(places: Sequence[Row]) -> str:
        return rows(places, names)

    kinds: dict[str, Callable[[SetSummary], tuple[int, str]]] = {
        "Rows that repeat an earlier row exactly": lambda data: (
            data.repeats.duplicate_rows,
            _groups([where(group) for group in data.repeats.duplicates]),
        ),
        "Rows that contradict each other": lambda data: (
            data.repeats.conflicting_rows,
            _groups([" against ".join(map(where, sides)) for sides in data.repeats.conflicts]),
        ),
        "Dropped: chosen equals rejected": lambda data: (data.identical_answers, ""),
        "Dropped: an answer is empty": lambda data: (data.empty_answers, ""),
        "Different prompts among the used rows": lambda data: (data.repeats.distinct_prompts, ""),
    }
    note = "Rows are compared by token ids, as the model meets them."
    if any(data.compares for _, data in _sets(summary)):
        note += " Contradicting rows have the same prompt and the same answers, and prefer another of them."
    else:
        del kinds["Rows that contradict each other"], kinds["Dropped: chosen equals rejected"]
    shown = [
        _placed_counts(
            ["What", "Count", "Where"],
            [[name, f"{count:,}", breakable(groups)] for name, look in kinds.items() for count, groups in [look(data)]],
            role,
        )
        for role, data in _sets(summary)
    ]
    leaks, held_out = summary.leaks, summary.eval
    if leaks is None or held_out is None:
        shown.append("<p>No data.eval is set, so there is nothing that could leak into it.</p>")
    else:
        found = {
            "Held-out rows whose prompt is trained on": (leaks.prompt_rows, leaks.prompts),
            "… and with an answer that is trained on with it": (leaks.answer_rows, leaks.answers),
        }
        body = [
            [
                name,
                f"{count:,}",
                share(count / held_out.used),
                breakable(_groups([f"{where([p.eval_row])} = training {where([p.train_row])}" for p in pairs])),
            ]
            for name, (count, pairs) in found.items()
        ]
        shown.append(_placed_counts(["Leak", "Rows", "Share", "Where"], body, "From training into held-out data"))
    return "".join(shown) + f'<p class="note">{note}</p>'


def _placed_counts(heads: Sequence[str], body: Sequence[Sequence[str]], caption: str) -> str:
    """A table of counts whose last column says where they come from; without that column where it is empty."""
    if any(line[-1] for line in body):
        return table(heads, body, "repeats", caption)
    return table(heads[:-1], [line[:-1] for line in body], "counts", caption)


def _groups(named: Sequence[str], most: int = 3) -> str:
    return "; ".join(named[:most]) + (f"; … {len(named) - most:,} more" if len(named) > most else "")


def _run(summary: DataSummary) -> str:
    run = summary.run
    about = "" if run.steps_packed >= run.steps else "about "
    named = [
        (f"{summary.unit.capitalize()}s per step", f"{'about ' * run.by_tokens}{run.examples_per_step:,}"),
        ("Steps per epoch", amount(run.steps_per_epoch)),
        ("Epochs", amount(run.epochs)),
        ("Steps in the whole run", f"{run.steps:,}"),
        ("Order", text(run.order)),
        (f"Packs per step, of {summary.pack_tokens:,} tokens at most", amount(run.packs_per_step)),
        ("Packs per epoch", f"{about or 'on average ' * (run.epochs != 1)}{run.packs_per_epoch:,}"),
        ("Packs in the whole run", f"{about}{run.packs:,}"),
        ("Padding", f"{share(run.pad_share)} of the slots"),
        ("Packs, padding and slots are counted for", text(summary.counted_for)),
        ("Token slots in the whole run", f"{about}{run.slots:,}"),
        ("Laid once", ONCE[summary.share]),
    ]
    first = counted(run.steps_packed, "step")
    note = f'<p class="note">Packs, padding and slots are counted on the first {first} and scaled up.</p>'
    return facts(named) + (note if about else "")


def _tokenizer(tokenizer: TokenizerFacts) -> str:
    n = tokenizer.sequences

    def special(token: SpecialToken | None) -> str:
        return "none" if token is None else f"<code>{text(token.text)}</code> (id {token.id:,})"

    def of_all(count: int) -> str:
        return "every sequence" if count == n else f"{count:,} of {counted(n, 'sequence')}"

    return facts(
        [
            ("Name", f"{text(tokenizer.name)} ({text(tokenizer.kind)})"),
            ("Tokens", f"{tokenizer.tokens:,}, the highest id is {tokenizer.highest_id:,}"),
            ("Rows of the model's embedding", f"{tokenizer.model_rows:,}"),
            (
                "Positions that the model knows",
                f"{tokenizer.model_positions:,}" if tokenizer.model_positions else "not said",
            ),
            ("Begin of text (BOS)", special(tokenizer.bos)),
            ("End of text (EOS)", special(tokenizer.eos)),
            ("Padding", f"{special(tokenizer.pad)}; not used in training here"),
            ("Template", "chat template" if tokenizer.template == "chat" else "none: text as it is"),
            *([("Day that the template prints", tokenizer.date)] if tokenizer.date else []),
            ("BOS stands before", of_all(tokenizer.begin_with_bos)),
            ("EOS ends", of_all(tokenizer.end_with_eos)),
        ]
    )


def _footer(made_by: str) -> str:
    return (
        f"Made by {text(made_by)}. All numbers, and the rows behind them, are in "
        "data_report.json beside this page. Lengths are in tokens; 95% of them are at most p95. Percentiles lie "
        "between two lengths by linear interpolation."
    )


def _sets(summary: DataSummary) -> list[tuple[str, SetSummary]]:
    return [("Training", summary.train)] + ([("Held-out", summary.eval)] if summary.eval else [])


def _section(key: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{key}"><h2 id="{key}">{title}</h2>{body}</section>'
