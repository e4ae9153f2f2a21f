"""The line of progress at several widths: what it keeps, what it gives up first, and that it never wraps."""

import io
import re
from typing import Literal

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from tuningfork.report.run.bar import Part, fitted
from tuningfork.report.run.console import Console, Phase

FIGURES = {"loss": 0.693147, "margin": -0.01234, "accuracy": 0.9375, "tokens/s": 123456.0}
PHASES = [  # as runs name them, with large numbers
    ("training", 320, "steps", FIGURES),
    ("evaluating the starting model", 12345, "pairs", None),
    ("reading ultrafeedback_binarized_train_prefs.jsonl.gz", 61000, "rows", None),
    ("checking the reference cache", 123456, "examples", None),
    ("reading 日本語のデータを読み込んでいます.jsonl", 500, "rows", None),
    ("reading [bold]x[/].jsonl", 500, "rows", None),
]


def line(phase: Phase, width: int, colours: Literal["standard"] | None = "standard") -> str:
    """The one line that a terminal of this width shows of a phase."""
    terminal = RichConsole(file=io.StringIO(), width=width, force_terminal=True, color_system=colours)
    found = terminal.render_lines(phase.bar.renderable, pad=False)
    assert len(found) == 1
    text = "".join(segment.text for segment in found[0])
    assert cell_len(text) <= width
    return text


def begun(name: str, total: int, unit: str, values: dict[str, float] | None) -> tuple[Phase, list[float]]:
    """A phase before its first unit, and the clock that it goes by."""
    now = [100.0]
    return Phase(Console(io.StringIO(), every=1e9, clock=lambda: now[0]), name, total, unit, done=0), now


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize(("name", "total", "unit", "values"), PHASES)
def test_task_bar_progress_rate_and_time_left_are_always_there(name, total, unit, values, width) -> None:
    phase, now = begun(name, total, unit, values)
    now[0] += 100
    phase.advance(total // 5, values)
    text = line(phase, width)
    assert text.startswith(name[:8])
    assert text.count("━") + text.count("╸") + text.count("╺") >= 8
    assert f" {total // 5:,}/{total:,} {unit}, " in text or " 20%, " in text
    assert re.search(rf", [\d.,]+ {unit}/s, 0:06:40 left", text)


@pytest.mark.parametrize("width", range(40, 60))
@pytest.mark.parametrize(("name", "total", "unit", "values"), PHASES)
def test_progress_and_time_left_are_whole_on_a_narrow_terminal(name, total, unit, values, width) -> None:
    """The rate gives way to them."""
    phase, now = begun(name, total, unit, values)
    now[0] += 100
    phase.advance(total // 5, values)
    text = line(phase, width)
    assert text.startswith(name[:8]) and (" 20%, " in text or f" {total // 5:,}/{total:,} {unit}, " in text)
    assert text.endswith(", 0:06:40 left")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_their_places_are_there_before_the_first_unit(width) -> None:
    phase, _ = begun("training", 320, "steps", None)
    assert re.match(r"training ━+ 0/320 steps, - steps/s, -:--:-- left", line(phase, width))


def test_figures_go_one_by_one_as_the_terminal_gets_narrow_the_last_ones_first() -> None:
    phase, now = begun("training", 320, "steps", FIGURES)
    now[0] += 100
    phase.advance(64, FIGURES)
    order = ["loss 0.6931", "margin -0.01234", "accuracy 93.8%", "tokens/s 123,456", "0:01:40 elapsed"]
    there = {width: [figure for figure in order if figure in line(phase, width)] for width in range(60, 171)}
    assert all(found == order[: len(found)] for found in there.values())
    for widths in (range(60, 80), range(80, 100), range(100, 171)):  # a wider bar may take a figure's room
        counts = [len(there[width]) for width in widths]
        assert counts == sorted(counts)
    assert {len(found) for found in there.values()} == {0, 1, 2, 3, 4, 5}
    assert "loss 0.6931" in line(phase, 80)


@pytest.mark.parametrize("width", range(1, 60))
def test_a_terminal_of_a_few_columns_gets_one_line_all_the_same(width) -> None:
    phase, now = begun(*PHASES[2])
    now[0] += 100
    phase.advance(64)
    assert line(phase, width)


def test_without_colours_figures_keep_their_place() -> None:
    """The part of the bar that is still to come is not drawn then."""
    phase, now = begun("training", 320, "steps", None)
    now[0] += 100
    phase.advance(64)
    plain, coloured = line(phase, 80, colours=None), line(phase, 80)
    assert plain.count("━") < coloured.count("━")
    assert plain.index("64/320") == coloured.index("64/320")


def test_the_total_may_become_known_later() -> None:
    """Reading begins without it."""
    phase, now = begun("reading pairs.jsonl", 0, "rows", None)
    assert "0/0 rows" in line(phase, 80)
    phase.total, now[0] = 200, 110.0
    phase.advance(50)
    assert "50/200 rows, 5 rows/s, 0:00:30 left" in line(phase, 80)


@pytest.mark.parametrize(("width", "bar"), [(60, 8), (79, 8), (80, 12), (99, 12), (100, 24), (200, 24)])
@pytest.mark.parametrize(("name", "total", "unit", "values"), PHASES)
def test_the_bar_has_one_width_whatever_the_figures(name, total, unit, values, width, bar) -> None:
    """It would seem to run back if a longer figure made it shorter."""
    phase, now = begun(name, total, unit, values)
    for done in (0, 1, total // 2, total - 1):
        now[0] += 100
        phase.advance(
            done - phase.done, None if values is None else {key: value * done for key, value in values.items()}
        )
        assert sum(line(phase, width).count(cell) for cell in "━╸╺") == bar


def test_nothing_is_shortened_where_there_is_room() -> None:
    parts = [Part("12/320 steps", "4%"), Part("3 steps/s"), Part("loss 0.7", extra=True)]
    assert fitted(parts, 43, 10) == "12/320 steps, 3 steps/s, loss 0.7"
    assert fitted(parts, 42, 10) == "12/320 steps, 3 steps/s"
    assert fitted(parts, 32, 10) == "4%, 3 steps/s"
