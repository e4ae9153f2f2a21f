"""The page of `tuningfork data`: whole, harmless whatever the data says, and fit to be looked at."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.data.summary.workbench import pair, summary_of, summary_of_examples, summary_of_files, write
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tests.report.dataset.browser import browser, find_browser
from tests.tiny import random_examples
from tuningfork.data.config import DataConfig
from tuningfork.data.packing.tree import Share
from tuningfork.data.summary.records import DataSummary
from tuningfork.report.dataset.page import SECTIONS, draw_page
from tuningfork.report.dataset.terminal import draw_report
from tuningfork.report.run.console import Console

MADE_BY = "tuningfork data 1"
EVIL = "</script></style><img src=http://example.invalid/x.png onerror=alert(1)><b>\"'&amp;"
SEVERAL = [
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "two"},
]
VOID = {"meta", "input", "wbr"}


def harmful(folder: Path) -> DataSummary:
    """Everything that a page may have to show: drops, repeats, leaks, several turns, and rows that mean harm."""
    rows = [
        pair(EVIL, f"{EVIL} \u202eback\u200f \x00\x07 tab\there", "no"),
        pair("שלום عالم", "نعم 👩‍👩‍👧 日本", "لا"),
        pair("several", SEVERAL, "no"),
        *[pair("twice", "a", "b"), pair("twice", "a", "b"), pair("twice", "b", "a")],
        pair("empty", "", "b"),
        pair("role", "k", [{"role": EVIL, "content": "x"}]),
        pair("broken", "k", "half \ud800"),
        pair("x" * 5000, "long", "er"),
        *(pair(f"question {i}", "good " * (i % 9 + 1), "bad " * (i % 5 + 1)) for i in range(60)),
    ]
    held_out = [pair("twice", "a", "x"), pair("question 7", "x", "y"), pair("new", "x", "y")]
    tokenizer = byte_bpe(chat_template=CHATML)
    tokenizer.name_or_path = f"folder {EVIL}"
    summary = summary_of(folder, rows, held_out, tokenizer=tokenizer, template="chat", max_length=900)
    # Longer than the reading of rows lets it be: a page cuts, too.
    rows_lost = [
        replace(row, detail=row.detail + "q" * 100_000) if row.reason == "unknown role" else row
        for row in summary.train.dropped_rows
    ]
    return replace(summary, train=replace(summary.train, dropped_rows=rows_lost))


class Outline(HTMLParser):
    """Checks that every element is closed in its turn; collects tags, headings and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert len(dict(attributes)) == len(attributes), tag
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> DataSummary:
    return harmful(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(summary: DataSummary) -> str:
    return draw_page(summary, MADE_BY)


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    return outline


def test_what_the_data_says_stays_text(page: str, outline: Outline) -> None:
    assert {tag for tag, _ in outline.tags} & {"script", "img", "link", "iframe", "object", "base"} == set()
    assert not any(key.startswith("on") for _, attributes in outline.tags for key in attributes)
    whole = unescape(page.replace("<wbr>", ""))
    assert "http:" not in re.sub(r"http://example\.invalid", "", whole) and "url(" not in page
    assert outline.text.count("</script></style><img") >= 2  # a tokenizer's name and a row's detail
    page.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]", page)
    assert "⟨U+202E⟩" in outline.text and "⟨U+0000⟩" in outline.text


def test_a_long_row_is_cut_with_the_number_of_what_is_left_out(
    summary: DataSummary, page: str, outline: Outline
) -> None:
    assert len(page) < 400_000
    [left_out] = re.findall(r"… (\d+,\d+) more characters", outline.text)
    detail = max((row.detail for row in summary.train.dropped_rows), key=len)
    assert len(detail) > 100_000
    assert int(left_out.replace(",", "")) == len(detail) - 300


def test_headings_links_and_labels(outline: Outline) -> None:
    assert [tag for tag, _ in outline.tags].count("h1") == 1
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(set(ids)) == len(ids) and set(SECTIONS) <= set(ids)
    named = [a[key] for _, a in outline.tags for key in ("aria-labelledby",) if key in a]
    targets = [str(attributes["href"])[1:] for tag, attributes in outline.tags if tag == "a"]
    assert set(named) | set(targets) <= set(ids)
    pictures = [attributes for tag, attributes in outline.tags if tag == "svg" or attributes.get("role") == "img"]
    assert len(pictures) == 5 + 2 + 5 + 4 and all(picture.get("aria-label") for picture in pictures)


def test_the_numbers_are_those_of_the_report(summary: DataSummary, outline: Outline) -> None:
    text = re.sub(r"\s+", " ", outline.text)
    assert "66 of 70 pairs can be trained on" in text
    for finding in summary.findings:
        assert finding.text[1:].split(EVIL)[0] in text
    assert text.count("stops --strict") == 4 + 1 and text.count("worth a look") == 2
    cost, run = summary.cost, summary.run
    for number in (cost.tokens, cost.unique_tokens, *(layout.attention_pairs for layout in cost.layouts)):
        assert f"{number:,}" in text
    assert all(f"{layout.slots:,} slots" in text for layout in cost.layouts)
    assert f"steps of 2 pairs in the whole run{run.steps:,}" in text and run.steps == 33
    assert "row 1 = training row 4; row 2 = training row 18" in text
    for some in summary.train.lengths.values():
        assert f"median {some.p50:,.0f}, 95% at most {some.p95:,.0f}, longest {some.max:,}" in text


def test_every_token_of_an_example_is_there_with_its_id(summary: DataSummary, outline: Outline) -> None:
    shown = [
        (attributes["class"], attributes["title"])
        for tag, attributes in outline.tags
        if tag == "span" and str(attributes.get("class", "")).startswith("t ")
    ]
    expected = []
    for example in summary.shown:
        for part in (example.prompt, *example.answers):
            for piece in (*part.head, *part.tail):
                kind = part.name if part.name == "prompt" or piece.counted else "silent"
                expected.append((f"t {kind}{' special' * piece.special}", " ".join(map(str, piece.ids))))
    assert shown == expected


def test_a_file_without_faults(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, [pair("one", "ab", "cde"), pair("two", "fgh", "ij")])
    outline = Outline()
    page = draw_page(summary, MADE_BY)
    outline.feed(page)
    assert "All 2 pairs can be trained on" in outline.text and "Nothing needs attention" in outline.text
    assert "No data.eval is set" in outline.text and "--strict" not in outline.text
    # Nothing stands empty: no column of places without any, no share of one table, no word on rows that are not there.
    heads = [attributes["data-head"] for tag, attributes in outline.tags if tag == "td"]
    assert not {"Where", "Left out"} & set(heads) and "dropped row" not in outline.text
    assert re.findall(r'data-head="Used">(.*?)</td>', page) == ["2"]


@pytest.mark.parametrize("answers", [(5,), (5, 3, 4)], ids=["single", "ranking"])
def test_examples_that_are_no_pairs(answers: tuple[int, ...]) -> None:
    """The page and the terminal take them, call them by their name, and leave out what only pairs have."""
    summary = summary_of_examples(random_examples([(3, answers), (4, answers[::-1])]))
    outline = Outline()
    outline.feed(draw_page(summary, MADE_BY))
    assert "All 2 examples can be trained on" in outline.text and "batches of 8 examples" in outline.text
    printed = io.StringIO()
    Console(printed).draw(draw_report(summary))
    last = "answer 3" if len(answers) == 3 else "answer"
    for text in (outline.text.lower(), printed.getvalue()):
        assert f"{last}, " in text or f"{last} {answers[-1]} tokens" in text
        assert ("chosen is longer" in text or "chosen answer is longer" in text) == (len(answers) == 3)
        assert ("sharing prompts saves nothing" in text) == (len(answers) == 1)
        assert ("rejected answer, counts" in text) == (len(answers) == 3 and text == outline.text.lower())


def mixed(folder: Path) -> DataSummary:
    """Several tables, mixed and cut, with what their rows say of themselves, and splits of which one is taken."""
    (folder / "b").mkdir()
    said = {"weight": 2, "margin": 0.5}
    scores = {"score_chosen": 1, "score_rejected": 3}
    write(folder / "a.jsonl", [pair("q", "a", "b"), pair("r", "a" * 30, "b") | said, pair("s", "", "b")])
    write(folder / "b" / "train.jsonl", [*(pair(f"q{i}", "a", "b") | scores for i in range(9)), pair("q", "a", "b")])
    write(folder / "b" / "test.jsonl", [pair("t", "a", "b")])
    sources = [str(folder / "a.jsonl"), str(folder / "b")]
    config = DataConfig(sources, template="none", max_length=20, over_length="truncate_answers", counts=[2, 5])
    return summary_of_files(config)


def test_several_tables(tmp_path: Path) -> None:
    summary = mixed(tmp_path)
    outline = Outline()
    outline.feed(draw_page(summary, MADE_BY))
    printed = io.StringIO()
    Console(printed).draw(draw_report(summary))
    page, terminal = (" ".join(text.split()) for text in (outline.text, printed.getvalue()))
    for text in (page, terminal):
        assert "12 of 13 pairs can be trained on; 7 are used" in text
        assert "13 rows read, 7 used, 1 dropped, 5 left out on purpose" in text
        assert "Training data: 1 row is dropped: empty answer (1). (a.jsonl row 3)" in text
        assert "1 row has a weight of 2" in text and "1 row has a margin of 0.5" in text
        assert "chosen is not scored higher" in text and "answers cut at max_length" in text
        assert "answers are cut at their end in 1 of 7 rows" in text
        assert re.search(r"not read: \S*b/test\.jsonl", text)
    assert "a.jsonl pairs 3 1 0 2 28.6%" in terminal and "train.jsonl pairs 10 0 5 5 71.4%" in terminal
    assert "20 (recipe) 1 8.3% 0 0%" in terminal  # one of the twelve rows that can be used is cut
    assert "data.counts 2 : 5" in terminal and "5 of 10 rows that can be used, 71.4% of the mix" in terminal
    assert f"{tmp_path}/b510571.4%" in page  # asked for, usable, used, share
    heads = [cell["data-head"] for tag, cell in outline.tags if tag == "td"]
    assert [head for head in heads if head in ("Form", "Tokens")] == ["Form", "Tokens"] * 2


def tree_run(folder: Path) -> DataSummary:
    """A run that lays trees, compared with another order."""
    rows = [pair("q" * 40, "a" * 40, "no"), pair("q" * 40 + "a" * 40 + "b" * 20, "right", "no")]
    summary = summary_of(folder, rows, max_length=200, share="tree")
    other = replace(summary.cost.layout("trees"), order="grouped by <prompt>")
    layouts = [*summary.cost.layouts[:-1], other, summary.cost.layouts[-1]]
    return replace(summary, cost=replace(summary.cost, layouts=layouts, examples_packed=1))


def test_trees(tmp_path: Path) -> None:
    summary = tree_run(tmp_path)
    page = draw_page(summary, MADE_BY)
    outline = Outline()
    outline.feed(page)
    text = re.sub(r"\s+", " ", outline.text)
    trees = summary.cost.layout("trees")
    assert f"113tokens laid in an epoch{1 - 113 / 333:.1%}of the tokens saved by trees" in _tiles(page)
    assert "Trees, in the run's order: what a pack's pairs begin with in common once recipe" in text
    assert "Trees, grouped by <prompt>" in text and "Trees, all side by side: if all pairs that begin alike" in text
    assert f"{trees.attention_pairs:,} (query, key) pairs" in text
    assert (
        "70.8% of the tokens that they lay are common to several pairs, 35.4% as prompt and 35.4% within answers."
        in text
    )
    assert "They are made of the first 1 pair and scaled up" in text
    assert "Laid oncewhat a pack's examples begin with in common" in text
    assert page.count('class="part common-prompt"') == page.count('class="part common-answer"') == 3


def _tiles(page: str) -> str:
    """The figures at the top, each with its name behind it."""
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.partition('<dl class="figures">')[2].partition("</dl>")[0])
    return "".join(f"{value}{name}" for name, value in found)


@pytest.mark.parametrize(
    ("share", "saved", "once"),
    [
        ("none", "of the tokens saved: none is shared (pack.share is none)", "nothing (pack.share is none)"),
        ("prompt", "of the tokens saved by sharing prompts", "each prompt, for all of its answers"),
    ],
)
def test_the_figures_are_those_of_pack_share(tmp_path: Path, share: Share, saved: str, once: str) -> None:
    summary = summary_of(tmp_path, [pair("one", "ab", "cde"), pair("two", "fgh", "ij")], share=share)
    page = draw_page(summary, MADE_BY)
    # two prompts of 3 tokens, answers of 3 and 4 with their ends
    assert summary.layout.tokens == {"none": 4 * 3 + 2 * 7, "prompt": 2 * 3 + 2 * 7}[share]
    assert saved in _tiles(page) and once in page


needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium: put one on PATH, or name it in TUNINGFORK_CHROMIUM"
)


@needs_browser
def test_in_a_browser(page: str, tmp_path: Path) -> None:
    """Nothing is logged or asked for, every plot is to be seen, and nothing is wider than the screen."""
    path = tmp_path / "data_report.html"
    path.write_text(page, encoding="utf-8")
    boxes = "[...document.querySelectorAll('svg, [role=img]')].map(e => e.getBoundingClientRect())"
    paper = "getComputedStyle(document.body).backgroundColor"
    executable = find_browser()
    assert executable is not None
    with browser(executable) as tab:
        colours = set()
        for width in (390, 1280):
            for dark in (False, True):
                tab.open(path, width, dark)
                assert (tab.said, tab.requests) == ([], [])
                assert tab.value("document.documentElement.scrollWidth") <= tab.value("window.innerWidth") == width
                plots = tab.value(f"{boxes}.map(box => [box.width, box.height])")
                assert len(plots) == 16 and all(w > 250 and h >= 20 for w, h in plots)
                colours.add(tab.value(paper))
        assert len(colours) == 2  # light and dark
        assert tab.value("getComputedStyle(document.querySelector('.t'), '::after').content") == "none"
        tab.value("document.getElementById('ids').click()")
        assert tab.value("getComputedStyle(document.querySelector('.t'), '::after').content").strip('"') == "2"
        # The guard's guard: what this test looks for, it would see.
        tab.value("console.error('seen'); new Image().src = 'http://localhost:1/x.png'; 1")
        assert any("seen" in said for said in tab.said) and tab.requests == ["http://localhost:1/x.png"]


@needs_browser
def test_every_column_is_to_be_seen_on_a_phone_too(page: str, tmp_path: Path) -> None:
    """No table is wider than its box, and no box than the screen, with numbers as long as those of much data."""
    single = summary_of_examples(random_examples([(3, (5,)), (4, (2,))]))
    much = mixed(tmp_path)
    wide = [
        replace(row, rows_cut=123_456, rows_lost=123_456, tokens_lost=1_234_567_890, rows_cut_share=0.999)
        for row in much.train.truncation
    ]
    much = replace(much, train=replace(much.train, truncation=wide))
    hidden = (
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.innerText)"
    )
    executable = find_browser()
    assert executable is not None
    with browser(executable) as tab:
        for i, drawn in enumerate([page, *(draw_page(shown, MADE_BY) for shown in (much, single, tree_run(tmp_path)))]):
            path = tmp_path / f"{i}.html"
            path.write_text(drawn, encoding="utf-8")
            for width in (400, 768, 1280):
                tab.open(path, width)
                assert (width, tab.value(hidden)) == (width, [])
                assert tab.value("document.documentElement.scrollWidth") <= tab.value("window.innerWidth") == width
        # The guard's guard: a table that is too wide would be seen.
        tab.value("document.querySelector('table').style.width = '2000px'; 1")
        assert len(tab.value(hidden)) == 1
