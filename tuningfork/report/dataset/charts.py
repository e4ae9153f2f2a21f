"""The parts of the page of `tuningfork data` that are drawn: lengths, limits, and where the tokens go."""

from __future__ import annotations

from collections.abc import Sequence

from tuningfork.data.summary.layouts import PLAIN_BATCH, Layout
from tuningfork.data.summary.records import DataSummary, LengthBias, SetSummary, Truncation
from tuningfork.report.dataset.html import table, text
from tuningfork.report.dataset.plots import histogram, mirrored, stacked
from tuningfork.report.dataset.wording import CUTS, in_common, losses, saving, sentence, share, signed, trees_save
from tuningfork.wording import counted

LAYOUTS = {
    "padded": f"Padded: batches of {PLAIN_BATCH}, all sequences as long as the longest",
    "packed": "Packed: each sequence by itself, with a prompt of its own",
    "shared": "Packed and shared: the prompt once for all of its answers",
    "trees": "Trees, in the run's order: what a pack's {unit}s begin with in common once",
    "together": "Trees, all side by side: if all {unit}s that begin alike lay together",
}
ATTENTION = {"packed": "Each sequence by itself", "shared": "Prompt once for all of its answers"}
PARTS = {
    "common_prompt": "prompt of several {unit}s",
    "common_answer": "within answers, of several {unit}s",
    "prompt": "prompt",
    "prompt_again": "prompt again",
    "chosen": "chosen answers",
    "rejected": "rejected answers",
    "padding": "padding",
}
LENGTHS = {
    "prompt": "Prompt",
    "chosen": "Chosen answer",
    "rejected": "Rejected answer",
    "answer": "Answer",
    "sequence": "Whole sequence",
}


def draw_lengths(sets: Sequence[tuple[str, SetSummary]], policy: str) -> str:
    """Histograms of the training data's lengths, and the numbers of every data set, before data.over_length cuts."""
    plots = []
    for key, some in sets[0][1].lengths.items():
        name = LENGTHS[key]
        words = f"median {some.p50:,.0f}, 95% at most {some.p95:,.0f}, longest {some.max:,}"
        what = key if key in ("prompt", "sequence") else "answer"
        marks = {"median": some.p50, "p95": some.p95}
        drawn = histogram(some.histogram, what, key, f"Histogram of lengths, {name.lower()}: {words} tokens", marks)
        plots.append(
            f'<figure><figcaption><b>{name}</b>, in tokens <span class="soft">{words}</span></figcaption>'
            f"{drawn}</figure>"
        )
    body = [
        [
            name if role == "Training" else f"{name}, held-out",
            f"{some.mean:,.1f}",
            *(f"{tokens:,.0f}" for tokens in (some.p50, some.p95, some.p99, some.max)),
            f"{some.total:,}",
        ]
        for role, data in sets
        for name, some in ((LENGTHS[key], some) for key, some in data.lengths.items())
    ]
    numbers = table(
        ["Tokens", "Mean", "Median", "p95", "p99", "Longest", "Total"], body, "numbers", "Lengths in tokens"
    )
    keys = {"median": "median", "p95": "95% are at most this long (p95)"}
    legend = "".join(f'<span><span class="key-line {key}"></span>{words}</span>' for key, words in keys.items())
    notes = "".join(
        f'<p class="note">{role}: lengths before data.over_length {policy}, by which {CUTS[policy]} in '
        f"{data.cut:,} of {counted(data.rows_used, 'row')}.</p>"
        for role, data in sets
        if data.cut
    )
    return f'<p class="legend">{legend}</p><div class="grid">{"".join(plots)}</div>{notes}{numbers}'


def draw_bias(bias: LengthBias | None) -> str:
    """Which answer is longer, and by how much."""
    if bias is None:
        return "<p>No row has several answers, so none is the longer one.</p>"
    n = bias.longer + bias.equal + bias.shorter
    words = (
        f"The chosen answer is longer in {share(bias.longer / n)} of the pairs, shorter in "
        f"{share(bias.shorter / n)}, and equally long in {share(bias.equal / n)}. On average it has "
        f"{abs(bias.mean):,.1f} tokens {'more' if bias.mean >= 0 else 'fewer'}; the median difference is "
        f"{signed(round(bias.median))} tokens."
    )
    plot = mirrored(bias.shorter_by, bias.longer_by, words)
    ends = '<p class="ends" aria-hidden="true"><span>← rejected is longer</span><span>chosen is longer →</span></p>'
    caption = "Tokens of chosen − rejected"
    if bias.equal:
        caption += f"; {counted(bias.equal, 'pair of equal length is', 'pairs of equal length are')} not drawn"
    return f"<p>{words}</p><figure>{plot}{ends}<figcaption class='soft'>{caption}</figcaption></figure>"


def draw_truncation(limits: Sequence[Truncation], policy: str) -> str:
    """What values of max_length would cost: rows and tokens lost, and rows cut where the recipe cuts."""
    kinds = losses(policy)
    body = [
        [
            f"{row.max_length:,}" + (' <span class="tag">recipe</span>' if row.recipe else ""),
            *(f"{n:,} {_meter(share_of_all)}" for n, share_of_all in (look(row) for look in kinds.values())),
        ]
        for row in limits
    ]
    what = "A row with a longer sequence is dropped whole."
    if policy in CUTS:
        what = f"Of a row with a longer sequence, {CUTS[policy]}; it is lost where that would leave nothing of a side."
    note = f"{what} Tokens count the prompt once per answer."
    return (
        table(["max_length", *(name.capitalize() for name in kinds)], body, "limits", "Rows and tokens lost at a limit")
        + f'<p class="note">{note}</p>'
    )


def _meter(value: float) -> str:
    bar = f'<span class="meter"><span style="width:{100 * value:.2f}%"></span></span>'
    return f'{bar} <span class="soft">{share(value)}</span>'


def draw_cost(summary: DataSummary) -> str:
    """Token slots by layout, and attention."""
    cost, unit, ours = summary.cost, summary.unit, summary.layout
    longest = max(layout.slots for layout in cost.layouts)
    names = {
        key: name.format(unit=unit) for key, name in PARTS.items() if any(layout.parts[key] for layout in cost.layouts)
    }
    if "rejected" not in names:
        names["chosen"] = "answers"
    bars = []
    for layout in cost.layouts:
        parts = [(key.replace("_", "-"), name, layout.parts[key]) for key, name in names.items()]
        words = ", ".join(f"{name} {share(amount / layout.slots)}" for _, name, amount in parts if amount)
        label = f"{layout.slots:,} slots: {words}"
        times = f", {layout.slots / ours.slots:.2f}&nbsp;× the recipe's"
        tag = ' <span class="tag">recipe</span>' if layout is ours else ""
        bars.append(
            f"<figure><figcaption><b>{text(_name(layout, unit))}</b>{tag} <span class='soft'>{layout.slots:,} slots, "
            f"{share(layout.pad_share)} padding{'' if layout is ours else times}</span></figcaption>"
            f"{stacked(parts, longest, label)}</figure>"
        )
    legend = "".join(
        f'<span><span class="key {key.replace("_", "-")}"></span>{name}</span>' for key, name in names.items()
    )
    scaled = ""
    if cost.examples_packed < summary.train.used:
        scaled = f" They are made of the first {counted(cost.examples_packed, unit)} and scaled up."
    return (
        f"<p>One epoch has {cost.tokens:,} tokens with the prompt once per answer, {cost.unique_tokens:,} with "
        f"the prompt once per example; {cost.counted_tokens:,} of them count in the loss.</p>"
        f'<div class="bars">{"".join(bars)}</div><p class="legend">{legend}</p>{_saved(summary)}'
        '<p class="note">A slot is the place of one token, or of padding, in a batch or a pack; a pack holds the '
        "sequences of several examples end to end. Slots are counted; no speed is measured. The padded layout is the "
        "mean over all orders of the file; the packed ones are really packed, step by step, with the recipe's "
        f"settings; only for the last no step says which {unit}s share a pack.{scaled}</p>"
    )


def _name(layout: Layout, unit: str) -> str:
    if layout.order:
        return f"Trees, {layout.order}"
    return LAYOUTS[layout.name].format(unit=unit)


def _saved(summary: DataSummary) -> str:
    """What laying tokens once saves of them and of causal attention."""
    cost, unit = summary.cost, summary.unit
    shared, trees, together = (cost.layout(name) for name in ("shared", "trees", "together"))
    words = []
    if shared.tokens_saved:
        words.append(f"Sharing prompts saves {saving(shared)}.")
    else:
        words.append("Every prompt has one answer, so sharing prompts saves nothing.")
    if max(trees.tokens_saved, together.tokens_saved) > shared.tokens_saved:
        words.append(sentence(trees_save(trees, together, unit)))
        words.append(sentence(in_common(trees, unit)))
    else:
        words.append(f"Too little is common to several {unit}s for trees to save more.")
    whole = cost.layout("packed").attention_pairs
    attention = "".join(
        f"<figure><figcaption><b>{text(name)}</b> <span class='soft'>{layout.attention_pairs:,} (query, key) pairs"
        f"</span></figcaption>{stacked([('pairs', name, layout.attention_pairs)], whole, label)}</figure>"
        for layout in cost.layouts
        if layout.name != "padded"
        for name in [ATTENTION.get(layout.name) or _name(layout, unit)]
        for label in [f"{name}: {layout.attention_pairs:,} pairs"]
    )
    return (
        f"<p>{' '.join(words)}</p><h3>Causal attention</h3>"
        f'<div class="bars">{attention}</div><p class="note">A (query, key) pair is a token and one that it looks at: '
        "itself or one before it. The work of attention grows with their number.</p>"
    )
