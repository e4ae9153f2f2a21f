"""What a run says: plain lines where there is no terminal, a bar where there is one, everything in the log."""

import io
import pty
import re
from contextlib import suppress

import pytest
from rich.console import Group
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tuningfork.report.run.console import Console, duration, number, side_by_side, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_a_phase_is_a_line_every_ten_seconds_and_the_last() -> None:
    out, clock, log = io.StringIO(), Clock(), []
    console = Console(out, clock=clock)
    console.attach(log.append)
    with console.phase("training", 320, "steps") as phase:
        for _ in range(12):
            clock.now += 3
            phase.advance(1, {"loss": 0.693147, "tokens/s": 12345.6, "mfu": None})
    assert out.getvalue().splitlines() == [
        "training: 4/320 steps, loss 0.6931, tokens/s 12,346, 0.3333 steps/s, 0:00:12 elapsed, 0:15:48 left",
        "training: 8/320 steps, loss 0.6931, tokens/s 12,346, 0.3333 steps/s, 0:00:24 elapsed, 0:15:36 left",
        "training: 12/320 steps, loss 0.6931, tokens/s 12,346, 0.3333 steps/s, 0:00:36 elapsed, 0:15:24 left",
    ]
    assert "\n".join(log) + "\n" == out.getvalue()


def test_a_short_phase_is_one_line() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(out, clock=clock).phase("tokenizing", 2000, "rows") as phase:
        for _ in range(1000):
            phase.advance(2)
        clock.now += 0.5
        phase.advance(0)
    assert out.getvalue() == "tokenizing: 2,000/2,000 rows, 4,000 rows/s, 0:00:00 elapsed\n"


def test_a_resumed_phase_counts_for_its_rate_only_what_it_did_itself() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(out, clock=clock).phase("training", 1010, "steps", done=1000) as phase:
        clock.now += 2
        phase.advance(4)
    assert out.getvalue() == "training: 1,004/1,010 steps, 2 steps/s, 0:00:02 elapsed, 0:00:03 left\n"


def test_other_work_in_the_middle_of_a_phase_is_no_time_of_it() -> None:
    """Neither of what has elapsed nor of the rate nor of what is left."""
    out, clock = io.StringIO(), Clock()
    console = Console(out, clock=clock)
    with console.phase("training", 10, "steps") as phase:
        clock.now += 2
        phase.advance(4)
        with phase.paused(), console.phase("evaluating", 3, "pairs") as inner:
            clock.now += 100
            inner.advance(3)
        phase.advance(0)
    assert out.getvalue().splitlines() == [
        "evaluating: 3/3 pairs, 0.03 pairs/s, 0:01:40 elapsed",
        "training: 4/10 steps, 2 steps/s, 0:00:02 elapsed, 0:00:03 left",
    ]


def test_on_a_terminal_one_bar_gives_way_to_the_other_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console = Console(out)
    with console.phase("training", 10, "steps") as phase:
        phase.advance(4)
        with phase.paused(), console.phase("evaluating", 3, "pairs") as inner:
            inner.advance(3)
        console.print("step 4: said")
        phase.advance(1)
    shown = out.getvalue()
    assert shown.index("evaluating: 3/3 pairs") < shown.index("step 4: said") < shown.rindex("training: 5/10 steps")


def test_a_reader_that_leaves_costs_no_step_and_no_line_of_the_log() -> None:
    """`tuningfork train recipe.yaml | tee log`: Ctrl-C ends tee at once, and the trainer after a checkpoint."""

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log: list[str] = []
    console = Console(Pipe(), clock=Clock())
    console.attach(log.append)
    for text in ("stopping after this step", "stopped after step 3"):
        console.print(text)
    assert log == ["stopping after this step", "stopped after step 3"]


def test_a_phase_that_fails_says_how_far_it_came() -> None:
    out = io.StringIO()
    with pytest.raises(ZeroDivisionError), Console(out, clock=Clock()).phase("evaluating", 7, "pairs") as phase:
        phase.advance(3)
        raise ZeroDivisionError
    assert out.getvalue() == "evaluating: 3/7 pairs, 0:00:00 elapsed, 0:00:00 left\n"


def test_a_long_line_ends_between_words_on_the_screen_and_nowhere_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path and a command, which are to be copied, are whole."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "30")
    out, log = Terminal(), []
    console = Console(out, clock=Clock())
    console.attach(log.append)
    path, command = "/a-long/path-of/many-parts/and-more.json", "tuningfork train runs/first/config.yaml --resume"
    console.print("start-up: data 3.1 s, evaluation 7.9 s, and", f"{path}: it is written", f"go on with {command}", "")
    assert out.getvalue().splitlines() == [
        *("start-up: data 3.1 s,", "evaluation 7.9 s, and"),
        *(f"{path}:", "it is written"),
        *("go on with", command),
        "",
    ]
    assert log == [f"start-up: data 3.1 s, evaluation 7.9 s, and\n{path}: it is written\ngo on with {command}\n"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_phase_that_fails_before_it_did_anything_leaves_the_word_to_its_error(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out, log = Terminal() if terminal else io.StringIO(), []
    console = Console(out, clock=Clock())
    console.attach(log.append)
    with pytest.raises(ZeroDivisionError), console.phase("reading a.jsonl", 0, "rows"):
        raise ZeroDivisionError
    assert "elapsed" not in out.getvalue().rpartition("\x1b[2K")[2] and log == []  # the bar is gone
    with console.phase("evaluating", 0, "pairs"):  # and one that has nothing to do says so
        pass
    assert log == ["evaluating: 0/0 pairs, 0:00:00 elapsed"]


def test_a_terminal_gets_a_bar_and_the_log_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    out, clock, log = Terminal(), Clock(), []
    console = Console(out, clock=clock)
    console.attach(log.append)
    with console.phase("training", 4, "steps") as phase:
        for step in range(4):
            clock.now += 11
            phase.advance(1, {"loss": float(step)})
            phase.bar.refresh()
        console.print("saved [bold]")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "━" in shown and "2/4 steps, 0.09091 steps/s, 0:00:22 left, loss 1, 0:00:22 elapsed" in shown
    assert log == [
        "training: 1/4 steps, loss 0, 0.09091 steps/s, 0:00:11 elapsed, 0:00:33 left",
        "training: 2/4 steps, loss 1, 0.09091 steps/s, 0:00:22 elapsed, 0:00:22 left",
        "training: 3/4 steps, loss 2, 0.09091 steps/s, 0:00:33 elapsed, 0:00:11 left",
        "training: 4/4 steps, loss 3, 0.09091 steps/s, 0:00:44 elapsed",
        "saved [bold]",
    ]
    assert "saved [bold]" in shown


def _all_of(terminal: int) -> str:
    """What was written to a terminal that nobody writes to any more."""
    pieces = []
    with open(terminal, "rb", buffering=0) as file, suppress(OSError):  # which is how it ends
        while piece := file.read(1 << 16):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_the_last_line_of_a_slow_phase_stays_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has had it while the bar showed as much; then the bar goes."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    reader, terminal = pty.openpty()
    clock, log = Clock(), []
    with open(terminal, "w") as out:
        console = Console(out, clock=clock)
        assert console.live
        console.attach(log.append)
        with console.phase("training", 8, "steps") as phase:
            for _ in range(8):
                clock.now += 12
                phase.advance(1, {"loss": 0.5})
    shown = _all_of(reader)
    line = "training: 8/8 steps, loss 0.5, 0.08333 steps/s, 0:01:36 elapsed"
    assert log[-1] == line and log.count(line) == 1 and len(log) == 8
    stays = shown.rpartition("\x1b[2K")[2]  # behind the last order to erase a line
    assert line in " ".join(stays.split())
    assert shown.count("training: 8/8") == 1


def test_text_is_printed_as_it_is_but_for_control_characters() -> None:
    out, log = io.StringIO(), []
    console = Console(out)
    console.attach(log.append)
    console.print("[red]x[/red] :smile: " + "long " * 40)
    console.print("\x1b[31mred\x07\ttab\nü \ud800")
    console.print("two", "lines")
    console.print()
    said = ["[red]x[/red] :smile: " + "long " * 40, "⟨U+001B⟩[31mred⟨U+0007⟩⇥tab↵ü ⟨U+D800⟩", "two\nlines", ""]
    assert log == said
    assert out.getvalue() == "\n".join(log) + "\n"


HOSTILE = "a\nstep-0 check: fine\r\x1b[2J\x9b1m\u202e\u2028[bold]b[/bold][link=http://x]c[/link]"
SHOWN = "a↵step-0 check: fine⟨U+000D⟩⟨U+001B⟩[2J⟨U+009B⟩1m⟨U+202E⟩⟨U+2028⟩[bold]b[/bold][link=http://x]c[/link]"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_strangers_name_is_shown_and_forges_nothing(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the screen, in the bar and in the log; whatever way it comes to be said."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "400")
    out, clock, log = Terminal() if terminal else io.StringIO(), Clock(), []
    console = Console(out, clock=clock)
    console.attach(log.append)
    with console.phase(f"reading {HOSTILE}", 4, HOSTILE) as phase:
        clock.now += 11
        phase.advance(2, {HOSTILE: 1.0})
        phase.bar.refresh()
        console.print(HOSTILE)
        console.log(HOSTILE)
    grid = Table.grid()
    grid.add_row(Text(HOSTILE[1:]), style=Style(bold=True))  # rich itself ends lines and drops the \r
    console.draw(Group(grid, Padding(Text(HOSTILE[2:]), (0, 0, 0, 2))), width=400)
    console.print(*table(HOSTILE, [(HOSTILE, "1")], width=400).split("\n"))
    console.print(*side_by_side(HOSTILE, HOSTILE, "", width=400).split("\n"))

    for said in (out.getvalue(), "\n".join(log)):
        assert "\x1b[2J" not in said and "\x1b]8" not in said
        if terminal:  # what the bar orders
            said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", said)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", said)
        assert said.count(SHOWN) >= 6
        assert said.count("⟨U+001B⟩[2J⟨U+009B⟩1m⟨U+202E⟩⟨U+2028⟩[bold]b[/bold]") >= 8
    assert f"reading {SHOWN}: 2/4 {SHOWN}, {SHOWN} 1, " in log[0]


def test_an_ascii_stream_shows_a_question_mark_rather_than_fail() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream).print("ü")
    assert raw.getvalue() == b"?\n"


def test_numbers_and_durations() -> None:
    assert [number(x) for x in (0.69314718, 5e-7, 0.0, -12.3456, 999.96, 1000.0, -12345.6)] == [
        "0.6931", "5e-07", "0", "-12.35", "1000", "1,000", "-12,346"]  # fmt: skip
    assert [duration(x) for x in (0.4, 59.6, 3599.4, 360000)] == ["0:00:00", "0:01:00", "0:59:59", "100:00:00"]


def test_a_table_is_aligned() -> None:
    rows = [("", "before", "after"), ("accuracy", "0.5", "0.9375"), ("margin [nats]", "0", "1.25")]
    assert table("Held-out pairs", rows) == "\n".join([
        "Held-out pairs",
        "--------------",
        "               before   after",
        "accuracy          0.5  0.9375",
        "margin [nats]       0    1.25",
    ])  # fmt: skip
    assert table("Nothing", []) == "Nothing\n-------\n"


def test_side_by_side_wraps_two_answers_in_two_columns() -> None:
    text = side_by_side("Why?", "one two three four five six", "short [x]", width=40)
    lines = text.splitlines()
    assert lines[0] == "prompt: Why?"
    assert lines[1].split() == ["before", "after"]
    column = lines[1].index("after")
    assert [line[:column].strip() for line in lines[3:]] == ["one two three four", "five six"]
    assert [line[column:].strip() for line in lines[3:]] == ["short [x]", ""]
    assert max(map(len, lines)) <= 40


def test_a_stage_is_a_line_as_it_begins_and_its_time_in_the_log() -> None:
    out, clock, log = io.StringIO(), Clock(), []
    console = Console(out, clock=clock)
    console.attach(log.append)
    with console.stage("self-check", "checking that all is well"):
        assert out.getvalue() == "checking that all is well\n"
        clock.now += 2
    assert console.startup.seconds == {"self-check": 2.0}
    assert log == []


def test_a_stage_is_seen_on_a_terminal_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    console = Console(out, clock=Clock())
    with console.stage("head check", "checking [the] head"):
        console.print("a line meanwhile")
    shown = re.sub(r"\x1b\[[0-9;?]*m", "", out.getvalue())
    assert "checking [the] head" in shown and "a line meanwhile\n" in shown.replace("\r", "")
    assert "\x1b[2K" in shown.rpartition("checking [the] head")[2]  # gone in the end
    with console.phase("training", 4, "steps") as phase:  # one live line after the other
        phase.advance(4)
