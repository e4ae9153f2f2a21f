"""One line of progress for a terminal of any width: what matters stays, the rest goes as it gets narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.text import Text

BARS = {100: 24, 80: 12}  # columns of a terminal, at least -> of the bar
SHORTEST_BAR = 8
SHORTEST_NAME = 10


class Part(NamedTuple):
    """A figure beside the bar. `short` stands for `text` where that is too long; an `extra` one may go altogether."""

    text: str
    short: str = ""
    extra: bool = False


class BarLine:
    """A name, a bar and figures, drawn anew at each refresh so that the clock runs on during a long step.

    The bar's width is that of its terminal's alone, so that it never seems to run back when a figure gets longer.
    Where the line is too long for its terminal, first the extra figures go, the last ones before the first; then the
    others take their short form, then the name loses its end, and at last the figures between the first and the last
    go. It never wraps.

    Args:
        state: (units done, units in all or 0, figures in the order in which they are read).
    """

    def __init__(self, name: str, state: Callable[[], tuple[int, int, Sequence[Part]]]) -> None:
        self.name, self.state = name, state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        done, total, parts = self.state()
        name = Text(self.name)
        bar = bar_width(options.max_width)
        figures = fitted(parts, options.max_width - bar - 2, name.cell_len)
        room = max(options.max_width - bar - 2 - len(figures), min(SHORTEST_NAME, name.cell_len))
        name.truncate(room, overflow="ellipsis")
        line = Text.assemble(name, " ")
        line.append_text(_drawn(ProgressBar(total=total or None, completed=done, width=bar), console, options))
        line.append(f" {figures}")
        line.truncate(options.max_width, overflow="ellipsis")  # of a terminal of a few columns
        yield line


def bar_width(columns: int) -> int:
    """Columns of the bar on a terminal of so many."""
    return next((bar for least, bar in BARS.items() if columns >= least), min(SHORTEST_BAR, max(1, columns // 4)))


def fitted(parts: Sequence[Part], room: int, name: int) -> str:
    """The figures that fit `room` columns together with a name of `name` columns, which they may shorten at last."""
    kept = list(parts)
    while len(_joined(kept)) + name > room and any(part.extra for part in kept):
        last = max(place for place, part in enumerate(kept) if part.extra)
        del kept[last]
    if len(_joined(kept)) + name > room:
        kept = [Part(part.short or part.text) for part in kept]
    if len(_joined(kept)) + min(name, SHORTEST_NAME) > room:
        del kept[1:-1]
    return _joined(kept)


def _joined(parts: Sequence[Part]) -> str:
    return ", ".join(part.text for part in parts)


def _drawn(bar: ProgressBar, console: Console, options: ConsoleOptions) -> Text:
    drawn = Text.assemble(*((segment.text, segment.style or "") for segment in console.render(bar, options)))
    drawn.align("left", bar.width or 0)  # without colours, the part that is still to come is not drawn
    return drawn
