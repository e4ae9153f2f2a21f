"""Small plots as inline SVG and HTML: no script, no font, no colour of their own, so that a page's style rules them.

Bars stretch with the page; what is to be read stands beside them as text and keeps its size. Hovering over a bar says
its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tuningfork.data.summary.records import Histogram
from tuningfork.report.dataset.wording import share, signed
from tuningfork.wording import counted

_HEIGHT = 100.0
_GAP = 1.0  # bars between the last bar and the one of what lies beyond


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from `start` to `stop` on the axis, with its count and what hovering over it says."""

    start: float
    stop: float
    count: int
    words: str
    kind: str


def histogram(values: Histogram, what: str, kind: str, label: str, marks: Mapping[str, float]) -> str:
    """A histogram of lengths in tokens, with marked places such as {"median": 128}.

    `what` names one of what is counted, `kind` is the CSS class of the bars, `label` says in words what the plot shows.
    """
    width = values.width
    counts = _without_empty_end(values.counts, values.beyond)
    bars = [
        Bar(i, i + 1, n, f"{_range(i * width, (i + 1) * width - 1)} tokens: {counted(n, what)}", kind)
        for i, n in enumerate(counts)
    ]
    end = float(len(counts))
    if n := values.beyond:
        words = f"{len(counts) * width:,} tokens or more: {counted(n, what)}"
        bars.append(Bar(end + _GAP, end + _GAP + 1, n, words, f"{kind} beyond"))
    # A bar holds the lengths from its start on, so one of them stands half a token further right.
    places = {name: min((value + 0.5) / width, end) for name, value in marks.items()}
    step = _tick_step(end * width)
    right = bars[-1].stop
    last = len(counts) * width - (width == 1)  # where each bar is one length, none stands for the axis's end
    ticks = [(min((at + 0.5) / width, end), f"{at:,}") for at in range(0, last + 1, step)]
    if values.beyond:
        ticks = [tick for tick in ticks if tick[0] < 0.85 * right] + [(right, "longer")]
    return _plot(bars, 0.0, right, label, what, ticks, places)


def mirrored(shorter: Histogram, longer: Histogram, label: str) -> str:
    """Differences of two lengths, to either side of zero: `shorter` to the left, `longer` to the right."""
    width = longer.width
    n = max(len(_without_empty_end(side.counts, side.beyond)) for side in (shorter, longer))
    bars = []
    for side, values, word in ((-1, shorter, "shorter"), (1, longer, "longer")):
        for i, count in enumerate(values.counts[:n]):
            words = f"chosen {word} by {_range(i * width + 1, (i + 1) * width)} tokens: {counted(count, 'pair')}"
            bars.append(Bar(min(side * i, side * (i + 1)), max(side * i, side * (i + 1)), count, words, word))
        if count := values.beyond:
            words = f"chosen {word} by more than {n * width:,} tokens: {counted(count, 'pair')}"
            edge = side * (n + _GAP)
            bars.append(Bar(min(edge, edge + side), max(edge, edge + side), count, words, f"{word} beyond"))
    bars.sort(key=lambda bar: bar.start)
    reach = max(max(abs(bar.start), abs(bar.stop)) for bar in bars)
    step = _tick_step(2 * n * width)
    places = range(-int(n * width / step), int(n * width / step) + 1)
    ticks = [(i * step / width, signed(i * step)) for i in places]
    return _plot(bars, -reach, reach, label, "pair", ticks, {"equal length": 0.0})


def stacked(parts: Sequence[tuple[str, str, int]], whole: int, label: str) -> str:
    """One bar of (CSS class, name, amount) parts, as long as its share of `whole`."""
    pieces = "".join(
        f'<span class="part {kind}" style="width:{100 * amount / whole:.4f}%" '
        f'title="{escape(name)}: {amount:,} ({share(amount / whole)} of the longest bar)"></span>'
        for kind, name, amount in parts
        if amount
    )
    return f'<div class="stack" role="img" aria-label="{escape(label)}">{pieces}</div>'


def _plot(
    bars: Sequence[Bar],
    left: float,
    right: float,
    label: str,
    what: str,
    ticks: Sequence[tuple[float, str]],
    marks: Mapping[str, float],
) -> str:
    """Bars on an axis from `left` to `right`, with ticks below and marked places."""
    span = right - left
    tallest = max((bar.count for bar in bars), default=0)
    drawn = []
    for bar in bars:
        x, width = bar.start - left + 0.04, bar.stop - bar.start - 0.08
        # A bar that holds anything is to be seen, however small it is beside the tallest.
        height = max(_HEIGHT * bar.count / tallest, 0.8) if bar.count else 0.0
        drawn.append(
            f'<g><title>{escape(bar.words)}</title><rect class="hit" x="{x:.2f}" y="0" width="{width:.2f}" '
            f'height="{_HEIGHT:g}"/><rect class="bar {bar.kind}" x="{x:.2f}" y="{_HEIGHT - height:.2f}" '
            f'width="{width:.2f}" height="{height:.2f}"/></g>'
        )
    lines = "".join(
        f'<line class="mark {name.replace(" ", "-")}" x1="{place - left:.3f}" x2="{place - left:.3f}" y1="0" '
        f'y2="{_HEIGHT:g}"/>'
        for name, place in marks.items()
    )
    shown = "".join(
        f'<span class="{_edge(place)}" style="left:{place:.3%}">{escape(text)}</span>'
        for place, text in (((place - left) / span, text) for place, text in ticks)
    )
    return (
        f'<div class="plot"><div class="scale" aria-hidden="true"><span>{escape(counted(tallest, what))}</span></div>'
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {span:g} {_HEIGHT:g}" preserveAspectRatio="none">'
        f'{"".join(drawn)}{lines}</svg><div class="ticks" aria-hidden="true">{shown}</div></div>'
    )


def _edge(place: float) -> str:
    """A label at an end of the axis is set inwards."""
    return "first" if place < 0.03 else "last" if place > 0.97 else "tick"


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _without_empty_end(counts: Sequence[int], beyond: int) -> list[int]:
    """The counts, up to the last that is not 0; all of them where something lies beyond."""
    filled = [i for i, count in enumerate(counts) if count]
    return list(counts) if beyond else list(counts[: filled[-1] + 1 if filled else 1])


def _tick_step(reach: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 .. that cuts the axis into at most five parts."""
    steps = [step * 10**n for n in range(12) for step in (1, 2, 5)]
    return next(step for step in steps if reach / step <= 5)
