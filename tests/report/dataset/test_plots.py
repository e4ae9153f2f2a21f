"""Plots as SVG: bars as tall as their counts, in their places, and words for those who do not see them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

from tuningfork.data.summary.records import Histogram
from tuningfork.report.dataset.plots import histogram, mirrored, stacked


def bars(drawn: str) -> list[tuple[float, float, float, str]]:
    """(left edge, width, height, what hovering says) of each bar; also checks that the plot is well-formed."""
    plot = ElementTree.fromstring(drawn)
    found = []
    for group in plot.iter("g"):
        title, _, bar = group
        found.append((*(float(bar.attrib[key]) for key in ("x", "width", "height")), title.text or ""))
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) == pytest.approx(100)
    return found


def texts(drawn: str, kind: str) -> list[str]:
    plot = ElementTree.fromstring(drawn)
    return [span.text or "" for box in plot.iter("div") if box.attrib.get("class") == kind for span in box]


def test_a_histogram() -> None:
    drawn = histogram(Histogram(10, [4, 0, 8, 0], 0), "prompt", "prompt", "In words", {"median": 15})
    found = bars(drawn)
    assert [(round(x), round(width), height) for x, width, height, _ in found] == [(0, 1, 50), (1, 1, 0), (2, 1, 100)]
    assert [words for *_, words in found] == [
        "0–9 tokens: 4 prompts",
        "10–19 tokens: 0 prompts",
        "20–29 tokens: 8 prompts",
    ]
    assert 'role="img" aria-label="In words" viewBox="0 0 3 100"' in drawn and 'x1="1.550" x2="1.550"' in drawn
    assert texts(drawn, "ticks") == ["0", "10", "20", "30"] and texts(drawn, "scale") == ["8 prompts"]


def test_where_a_bar_is_one_length_its_number_and_its_mark_stand_in_its_middle() -> None:
    drawn = histogram(Histogram(1, [0, 2, 0, 4], 0), "prompt", "prompt", "w", {"median": 3})
    assert 'x1="3.500" x2="3.500"' in drawn and texts(drawn, "ticks") == ["0", "1", "2", "3"]
    assert re.findall(r"left:(\S+)%", drawn) == ["12.500", "37.500", "62.500", "87.500"]


def test_what_lies_beyond_has_a_bar_apart_and_a_small_count_can_be_seen() -> None:
    drawn = histogram(Histogram(1, [9000, 0], 1), "answer", "chosen", "w", {"p95": 400})
    found = bars(drawn)
    assert [round(x) for x, *_ in found] == [0, 1, 3] and found[2][2] == pytest.approx(0.8)
    assert found[0][3] == "0 tokens: 9,000 answers" and found[2][3] == "2 tokens or more: 1 answer"
    assert 'x1="2.000"' in drawn  # a mark beyond the last bar stands at its end
    assert texts(drawn, "ticks")[-1] == "longer"


def test_a_mirrored_histogram() -> None:
    side = Histogram(5, [2, 1, 0], 0)
    drawn = mirrored(side, Histogram(5, [4, 0, 0], 1), "w")
    found = bars(drawn)
    # three bars to each side, and one apart on the right; the axis reaches as far to the left
    assert [words for *_, words in found] == [
        "chosen shorter by 11–15 tokens: 0 pairs",
        "chosen shorter by 6–10 tokens: 1 pair",
        "chosen shorter by 1–5 tokens: 2 pairs",
        "chosen longer by 1–5 tokens: 4 pairs",
        "chosen longer by 6–10 tokens: 0 pairs",
        "chosen longer by 11–15 tokens: 0 pairs",
        "chosen longer by more than 15 tokens: 1 pair",
    ]
    assert [round(x) for x, *_ in found] == [2, 3, 4, 5, 6, 7, 9] and 'viewBox="0 0 10 100"' in drawn
    assert texts(drawn, "ticks") == ["−10", "0", "+10"] and 'class="mark equal-length" x1="5.000"' in drawn


@pytest.mark.parametrize(
    "draw",
    [
        lambda: histogram(Histogram(1, [0, 0], 0), "x", "x", "w", {}),
        lambda: mirrored(Histogram(1, [0], 0), Histogram(1, [0], 0), "w"),
    ],
)
def test_nothing_to_draw(draw: Callable[[], str]) -> None:
    assert all(height == 0 for _, _, height, _ in bars(draw()))


def test_a_stacked_bar() -> None:
    parts = ElementTree.fromstring(
        stacked([("a", "left <", 30), ("b", "none", 0), ("c", "right", 20)], 200, "50 & more")
    )
    assert [part.attrib["style"] for part in parts] == ["width:15.0000%", "width:10.0000%"]
    assert parts[0].attrib["title"] == "left <: 30 (15.0% of the longest bar)" and parts.attrib["role"] == "img"
    assert parts.attrib["aria-label"] == "50 & more"
