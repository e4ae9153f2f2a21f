"""Data sets of the hub in a recipe: a name becomes one at a commit, and a run keeps to it."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from tuningfork.data.sources.expand import check_sources
from tuningfork.data.sources.hub import commit_in, newest_commit, pinned_sources
from tuningfork.data.tables.read import read_rows
from tuningfork.errors import DataError

ONE, TWO = "1" * 40, "2" * 40


def at_one(repository: str, revision: str | None) -> str | None:
    return ONE if repository == "o/n" else None


@pytest.mark.parametrize(
    "source, found",
    [
        ("hub:o/n", f"hub:o/n@{ONE}"),
        ("hub:o/n:test", f"hub:o/n@{ONE}:test"),
        ("hub:o/n@v1:test", f"hub:o/n@{ONE}:test"),
        (f"hub:o/n@{TWO}:test", f"hub:o/n@{TWO}:test"),
        ("hub:o/other:test", "hub:o/other:test"),  # the hub could not be asked
        ("o/n", f"hub:o/n@{ONE}"),
        ("o/n:train_prefs", f"hub:o/n@{ONE}:train_prefs"),
        ("o/n.jsonl", "o/n.jsonl"),
        ("o/n.jsonl.gz", "o/n.jsonl.gz"),
        ("here/pairs", "here/pairs"),
        ("here/other", "here/other"),
        ("pairs.jsonl", "pairs.jsonl"),
        ("o/*", "o/*"),
        ("", ""),
        (["hub:o/n", "pairs.jsonl"], [f"hub:o/n@{ONE}", "pairs.jsonl"]),
    ],
)
def test_names_of_the_hub_get_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | list[str], found: str | list[str]
) -> None:
    (tmp_path / "here" / "pairs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert pinned_sources(source, at_one) == found


def test_a_continued_run_keeps_to_its_commits() -> None:
    """A name without a revision is that of the run; one with a revision says itself which is meant."""
    known = commit_in([f"hub:o/n@{ONE}:train", "pairs.jsonl", "hub:o/unknown"])
    assert pinned_sources(["o/n:train", "hub:o/n@v2", "hub:o/unknown"], known) == [
        f"hub:o/n@{ONE}:train",
        "hub:o/n@v2",
        "hub:o/unknown",
    ]
    assert pinned_sources("hub:o/n", commit_in(None)) == "hub:o/n"


def test_without_a_network_no_commit_is_known() -> None:
    assert newest_commit("o/n", None) is None


@pytest.mark.parametrize("name", ["/etc/passwd", "../../x", "./here", "o/../n", "o", "", "~/x", "o/n@../../x", "a/b/c"])
def test_what_is_no_name_on_the_hub_reaches_no_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: object, **__: object) -> None:
        raise AssertionError("the library is asked")

    monkeypatch.setattr(datasets, "load_dataset", loads)
    monkeypatch.setattr(datasets, "get_dataset_split_names", loads)
    for use in (read_rows, lambda source: check_sources(source, "train"), lambda source: check_sources(source, "eval")):
        with pytest.raises(DataError, match="is no name on the hub, which is owner/name"):
            use(f"hub:{name}")
