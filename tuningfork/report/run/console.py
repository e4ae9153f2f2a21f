"""What a run says while it runs: a progress bar on a terminal, a plain line now and then anywhere else.

A line may name a file or quote a row, and these may be a stranger's: whatever they hold is shown as characters. It
never ends a line of ours, gives the terminal an order, turns the writing direction or is read as markup.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import StringIO
from typing import Any, TextIO

from rich import box
from rich import console as rich_console
from rich import table as rich_table
from rich.cells import cell_len
from rich.console import RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from tuningfork.report.run.bar import BarLine, Part
from tuningfork.report.run.stopwatch import Stopwatch
from tuningfork.wording import visible

WIDEST = 100  # columns of a table
REFRESH = 2  # times a second that a bar is drawn: what records a terminal, as script does, keeps each

Values = Mapping[str, float | None]


class Console:
    """Everything that a run prints goes through here, and to the log too once one is attached.

    Phases show a bar if `stream` (standard output) is a terminal. Elsewhere, and in the log, they say a plain line at
    most every `every` seconds, and one at their end. `startup` times the phases of the start.
    """

    def __init__(
        self, stream: TextIO | None = None, every: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream or sys.stdout
        self.every, self.clock = every, clock
        self.startup = Stopwatch(clock)
        self._log: Callable[[str], None] | None = None
        self._unlogged: list[str] = []  # said before there was a log
        self._rich = rich_console.Console(file=self.stream, markup=False, highlight=False, emoji=False)
        self.live = self.stream.isatty() and not self._rich.is_dumb_terminal

    @property
    def width(self) -> int:
        """Columns that a table may take: those of the terminal, and no more than can be read well."""
        return min(self._rich.width, WIDEST) if self.live else WIDEST

    def attach(self, log: Callable[[str], None]) -> None:
        """Also send every line to `log`, which is `RunWriter.log` as a rule; those said so far come first."""
        self._log = log
        for line in self._unlogged:
            log(line)
        self._unlogged.clear()

    def print(self, *lines: str) -> None:
        """Say these lines, or an empty one. Each stays one line, with what a terminal would obey made visible."""
        self._say("\n".join(map(visible, lines)))

    def draw(self, renderable: Any, width: int = WIDEST) -> None:
        """Print a rich object: on a terminal in colour and as wide as that is; elsewhere, and in the log, as text."""
        if self.live:
            self._rich.print(_Visible(renderable))
            self._record(_drawn(renderable, width))
        else:
            self._say(_drawn(renderable, width))

    def log(self, line: str) -> None:
        """Send a line to the log only."""
        self._record(visible(line))

    def show(self, line: str) -> None:
        """Send a line to the screen only."""
        self._show(visible(line))

    def _say(self, text: str) -> None:
        self._show(text)
        self._record(text)

    def _show(self, text: str) -> None:
        if self.live:  # above the bar, if one is shown
            for line in text.split("\n"):
                self._rich.print(Text(self._wrapped(line)), soft_wrap=True)
        else:
            self._plain(text)

    def _wrapped(self, line: str) -> str:
        """A line that is too long for the terminal, with ends between its words. A path is never cut, and a command,
        which is to be copied, stays as it is with all behind it; these go on in the next row as the terminal has it."""
        head, command, tail = line.partition(" tuningfork ")
        if cell_len(line) <= self._rich.width or line[:1].isspace():
            return line
        wrapped = textwrap.wrap(head, self._rich.width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(wrapped) + (f"\n{command.lstrip()}{tail}" if command else "")

    def _record(self, text: str) -> None:
        if self._log:
            self._log(text)
        else:
            self._unlogged.append(text)

    @contextmanager
    def phase(self, name: str, total: int, unit: str, done: int = 0, begun: float | None = None) -> Iterator[Phase]:
        """A stretch of work of `total` units, such as `with console.phase("tokenizing", 512, "rows") as phase:`.

        `done` units are finished before it starts (a resumed run); they count for the bar, never for the rate.
        `begun` is when the work began by the console's clock, if not now.
        """
        phase = Phase(self, name, total, unit, done, begun)
        try:
            with phase.bar:
                yield phase
        except BaseException:
            if phase.done > done:  # else its error says all there is to say
                phase.say()
            raise
        phase.say()

    @contextmanager
    def bytes_phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """A stretch of work in megabytes, whose size is told with the first of its bytes: gives a function to call with
        (bytes done, bytes in all). The rate counts from here on; where it is never called, nothing is said."""
        begun = self.clock()
        with ExitStack() as stack:
            phase: Phase | None = None

            def progress(done: int, total: int) -> None:
                nonlocal phase
                megabytes = -(-total // 10**6)
                if phase is None:
                    phase = stack.enter_context(self.phase(name, megabytes, "MB", begun=begun))
                phase.total = megabytes
                phase.advance(-(-done // 10**6) - phase.done)

            yield progress

    @contextmanager
    def stage(self, name: str, doing: str) -> Iterator[None]:
        """A part of the start that has no units to count: timed as `name`, and said as what it is `doing`.

        On a terminal that is seen while it lasts; elsewhere it is a line as it begins. The log has the times instead.
        No phase may begin within it.
        """
        doing = visible(doing)
        with self.startup.time(name):
            if self.live:
                with self._rich.status(Text(doing), refresh_per_second=REFRESH):
                    yield
            else:
                self._plain(doing)
                yield

    def _plain(self, text: str) -> None:
        encoding = self.stream.encoding or "utf-8"  # an ASCII-only stream gets ? for what it cannot show
        try:
            self.stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self.stream.flush()
        except BrokenPipeError:  # `| tee` has left, perhaps by the Ctrl-C that is to save a checkpoint: the log goes on
            self.stream = StringIO()


class Phase:
    """Progress of one stretch of work. Made by `Console.phase`."""

    def __init__(
        self, console: Console, name: str, total: int, unit: str, done: int, begun: float | None = None
    ) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = self._at_start = done
        self._console = console
        self._advanced_at = self._said_at = console.clock()
        self._start = self._advanced_at if begun is None else begun
        self._logged_done: int | None = None  # units done when the log was last told, and the screen
        self._shown_done: int | None = None
        self._values: Values = {}
        self.bar = _Bar(BarLine(visible(name), lambda: (self.done, self.total, self._beside_bar())), console)

    def advance(self, count: int = 1, values: Values | None = None) -> None:
        """`count` more units are done; `values` such as {"loss": 0.69} are shown until others replace them."""
        self.done += count
        self._values = self._values if values is None else values
        self._advanced_at = self._console.clock()
        if self._advanced_at - self._said_at >= self._console.every:
            self.say(to_screen=not self._console.live)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Other work in the middle of this, such as a phase of its own: the bar gives way, and the clock stands."""
        before = self._console.clock()
        self.bar.stop()
        try:
            yield
        finally:
            away = self._console.clock() - before
            self._start, self._advanced_at = self._start + away, self._advanced_at + away
            self._said_at += away
            self.bar.start()

    def state(self) -> str:
        """Such as ``12/320 steps, loss 0.6931, 3.1 steps/s, 0:00:04 elapsed, 0:01:39 left``."""
        rate, left = self._pace()
        parts = [f"{self.done:,}/{self.total:,} {self.unit}", *self._figures()]
        parts += [] if rate is None else [f"{number(rate)} {self.unit}/s"]
        parts.append(f"{duration(self._console.clock() - self._start)} elapsed")
        parts += [f"{duration(left)} left"] if left is not None and self.done < self.total else []
        return ", ".join(parts)

    def _beside_bar(self) -> list[Part]:
        """The state as figures beside a bar: what is most looked for in front, each in its place from the start."""
        rate, left = self._pace()
        return [
            Part(f"{self.done:,}/{self.total:,} {visible(self.unit)}", f"{self.done / max(self.total, 1):.0%}"),
            Part(f"{'-' if rate is None else number(rate)} {visible(self.unit)}/s"),
            Part(f"{'-:--:--' if left is None else duration(left)} left"),
            *(Part(visible(figure), extra=True) for figure in self._figures()),
            Part(f"{duration(self._console.clock() - self._start)} elapsed", extra=True),
        ]

    def _figures(self) -> list[str]:
        return [f"{key} {score(key, value)}" for key, value in self._values.items() if value is not None]

    def _pace(self) -> tuple[float | None, float | None]:
        """(units a second, seconds left), as far as they are known."""
        fresh, spent = self.done - self._at_start, self._advanced_at - self._start
        rate = fresh / spent if fresh and spent > 0 else None
        return rate, spent / fresh * (self.total - self.done) if fresh else None

    def say(self, to_screen: bool = True) -> None:
        """Print the state as a line (only into the log, if not `to_screen`), where it was not said there before.

        On a terminal the log has lines that the screen, whose bar shows as much, has not. The bar goes at the end, so
        then the screen gets a line whatever the log has.
        """
        line = f"{self.name}: {self.state()}"
        if to_screen and self.done != self._shown_done:
            self._console.show(line)
            self._shown_done = self.done
        if self.done != self._logged_done:
            self._console.log(line)
            self._logged_done = self.done
        self._said_at = self._console.clock()


class _Bar(Live):
    """A line that stays the last of the terminal; where there is none, nothing."""

    def __init__(self, line: BarLine, console: Console) -> None:
        super().__init__(line, console=console._rich, transient=True, refresh_per_second=REFRESH)
        self._shown = console.live

    def start(self, refresh: bool = False) -> None:
        if self._shown:
            super().start(refresh)


class _Visible:
    """A rich object, with what a terminal would obey made visible in all of its text."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: rich_console.Console, options: rich_console.ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, newline="\n"), segment.style)


def number(value: float) -> str:
    """Four significant digits; from a thousand on, whole with separators: 0.6931, 5e-07, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def score(heading: str, value: float) -> str:
    """A number of an evaluation or a step as it is shown under its heading: an accuracy as a percentage."""
    return f"{value:.1%}" if heading == "accuracy" else number(value)


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def table(title: str, rows: Sequence[tuple[str, ...]], width: int = WIDEST) -> str:
    """Rows of text in aligned columns under a title. All but the first column are set right."""
    columns = len(rows[0]) if rows else 0
    grid = rich_table.Table.grid(padding=(0, 2))
    for column in range(columns):
        grid.add_column(justify="left" if column == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    title = visible(title)
    return f"{title}\n{'-' * len(title)}\n{_drawn(grid, width)}"


def side_by_side(prompt: str, before: str, after: str, width: int = WIDEST) -> str:
    """A prompt, and below it two answers to it in two columns."""
    columns = rich_table.Table(box=box.SIMPLE, width=width, title=None, pad_edge=False)
    for heading in ("before", "after"):
        columns.add_column(heading, ratio=1, overflow="fold")
    columns.add_row(*(Text(visible(answer, newline="\n")) for answer in (before, after)))
    return f"prompt: {visible(prompt)}\n{_drawn(columns, width)}"


def _drawn(renderable: Any, width: int) -> str:
    """A rich object as plain text without trailing spaces."""
    out = StringIO()
    rich_console.Console(file=out, width=width, color_system=None, force_terminal=False, emoji=False).print(
        _Visible(renderable)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
