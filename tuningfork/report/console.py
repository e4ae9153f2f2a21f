"""What a run says while it runs: a progress bar on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any, TextIO

from rich import box
from rich import console as rich_console
from rich import table as rich_table
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from tuningfork.report.stopwatch import Stopwatch

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

    def attach(self, log: Callable[[str], None]) -> None:
        """Also send every line to `log`, which is `RunWriter.log` as a rule; those said so far come first."""
        self._log = log
        for line in self._unlogged:
            log(line)
        self._unlogged.clear()

    def print(self, text: str = "") -> None:
        text = printable(text)
        if self.live:  # above the bar, if one is shown
            self._rich.print(text, soft_wrap=True)
        else:
            self._plain(text)
        self.log(text)

    def draw(self, renderable: Any, width: int = 100) -> None:
        """Print a rich object: on a terminal in colour and as wide as that is; elsewhere, and in the log, as text."""
        if self.live:
            self._rich.print(renderable)
            self.log(_drawn(renderable, width))
        else:
            self.print(_drawn(renderable, width))

    def log(self, text: str) -> None:
        """Send a line to the log only."""
        if self._log:
            self._log(text)
        else:
            self._unlogged.append(text)

    @contextmanager
    def phase(self, name: str, total: int, unit: str, done: int = 0) -> Iterator[Phase]:
        """A stretch of work of `total` units, such as `with console.phase("tokenizing", 512, "rows") as phase:`.

        `done` units are finished before it starts (a resumed run); they count for the bar, never for the rate.
        """
        phase = Phase(self, name, total, unit, done)
        try:
            with phase.bar:
                yield phase
        finally:
            phase.say()

    def _plain(self, text: str) -> None:
        encoding = self.stream.encoding or "utf-8"  # an ASCII-only stream gets ? for what it cannot show
        try:
            self.stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self.stream.flush()
        except BrokenPipeError:  # `| tee` has left, perhaps by the Ctrl-C that is to save a checkpoint: the log goes on
            self.stream = StringIO()


class Phase:
    """Progress of one stretch of work. Made by `Console.phase`."""

    def __init__(self, console: Console, name: str, total: int, unit: str, done: int) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = self._at_start = done
        self._console = console
        self._start = self._advanced_at = self._said_at = console.clock()
        self._said_done: int | None = None
        self._values: Values = {}
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _State(self),
            console=console._rich,
            disable=not console.live,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self.bar.add_task(name, total=total, completed=done)

    def advance(self, count: int = 1, values: Values | None = None) -> None:
        """`count` more units are done; `values` such as {"loss": 0.69} are shown until others replace them."""
        self.done += count
        self._values = self._values if values is None else values
        self._advanced_at = self._console.clock()
        self.bar.update(self._task, completed=self.done)
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
        fresh, spent = self.done - self._at_start, self._advanced_at - self._start
        parts = [f"{self.done:,}/{self.total:,} {self.unit}"]
        parts += [f"{key} {number(value)}" for key, value in self._values.items() if value is not None]
        if fresh and spent > 0:
            parts.append(f"{number(fresh / spent)} {self.unit}/s")
        parts.append(f"{duration(self._console.clock() - self._start)} elapsed")
        if fresh and self.done < self.total:
            parts.append(f"{duration(spent / fresh * (self.total - self.done))} left")
        return ", ".join(parts)

    def say(self, to_screen: bool = True) -> None:
        """Print the state as a line (only into the log, if not `to_screen`), unless nothing was done since the last."""
        if self.done == self._said_done:
            return
        self._said_done, self._said_at = self.done, self._console.clock()
        line = f"{self.name}: {self.state()}"
        if to_screen:
            self._console.print(line)
        else:
            self._console.log(line)


class _State(ProgressColumn):
    """The text beside a bar, made anew at each refresh so that the clock runs on during a long step."""

    def __init__(self, phase: Phase) -> None:
        super().__init__(table_column=rich_table.Column(no_wrap=True, overflow="ellipsis"))
        self._phase = phase

    def render(self, task: Task) -> Text:
        return Text(self._phase.state())


def number(value: float) -> str:
    """Four significant digits; from a thousand on, whole with separators: 0.6931, 5e-07, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def printable(text: str) -> str:
    """The text without control characters, which a model may well generate and a terminal would obey."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "�" for c in text)


def table(title: str, rows: Sequence[tuple[str, ...]], width: int = 100) -> str:
    """Rows of text in aligned columns under a title. All but the first column are set right."""
    columns = len(rows[0]) if rows else 0
    grid = rich_table.Table.grid(padding=(0, 2))
    for column in range(columns):
        grid.add_column(justify="left" if column == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return f"{title}\n{'-' * len(title)}\n{_drawn(grid, width)}"


def side_by_side(prompt: str, before: str, after: str, width: int = 100) -> str:
    """A prompt, and below it two answers to it in two columns."""
    columns = rich_table.Table(box=box.SIMPLE, width=width, title=None, pad_edge=False)
    for heading in ("before", "after"):
        columns.add_column(heading, ratio=1, overflow="fold")
    columns.add_row(Text(printable(before)), Text(printable(after)))
    return f"prompt: {printable(prompt)}\n{_drawn(columns, width)}"


def _drawn(renderable: Any, width: int) -> str:
    """A rich object as plain text without trailing spaces."""
    out = StringIO()
    rich_console.Console(file=out, width=width, color_system=None, force_terminal=False, emoji=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
