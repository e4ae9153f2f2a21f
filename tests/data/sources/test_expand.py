"""What a source stands for."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest

from tests.data.rows import PAIR, read_examples, read_rows, write
from tuningfork.data.sources.apart import would_read
from tuningfork.data.sources.expand import Tables, expand_source, expand_sources
from tuningfork.data.tables.read import digest_of
from tuningfork.errors import DataError

ROWS = [PAIR, {**PAIR, "chosen": "c"}]


def names(found: Tables, folder: Path) -> list[str]:
    return [str(Path(name).relative_to(folder)) for name in found.taken]


def test_a_file_stands_for_itself_also_one_named_like_a_pattern(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a[1].jsonl", "what?.jsonl"):
        path = str(write(tmp_path, ROWS, name))
        assert expand_source(path).taken == [path]
    assert expand_source("no/such.jsonl").taken == ["no/such.jsonl"]


def test_patterns_and_folders_are_their_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep" / ".cache").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "c.json", "deep/d.jsonl", "deep/.cache/e.jsonl", "notes.txt"):
        write(tmp_path, ROWS, name)
    assert names(expand_source(f"{tmp_path}/*.jsonl"), tmp_path) == ["a.jsonl", "b.jsonl"]
    assert names(expand_source(f"{tmp_path}/[bc].*"), tmp_path) == ["b.jsonl", "c.json"]
    assert names(expand_source(f"{tmp_path}/**/d.jsonl"), tmp_path) == ["deep/d.jsonl"]
    assert names(expand_source(str(tmp_path)), tmp_path) == ["a.jsonl", "b.jsonl", "c.json", "deep/d.jsonl"]
    with pytest.raises(DataError, match=r"\*\.parquet: no file matches"):
        expand_source(f"{tmp_path}/*.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: this folder has no \.jsonl"):
        expand_source(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "why"), [("x" * 300 + ".jsonl", "File name too long"), ("a\0.jsonl", "null byte"), ("circle.jsonl", "oop")]
)
def test_what_cannot_name_a_file_is_refused(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "circle.jsonl").symlink_to("circle.jsonl")
    with pytest.raises(DataError, match=rf"(?s)^{tmp_path}.*cannot be looked up \(.*{why}.*\)\. Check the path"):
        expand_source(str(tmp_path / name))


def test_a_part_of_a_folder_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    """A shard that is a link to nothing, as a broken download leaves it, is refused when it is read."""
    write(tmp_path, ROWS, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("nowhere.jsonl")
    (tmp_path / "c.jsonl").mkdir()
    for source in (str(tmp_path), f"{tmp_path}/*.jsonl"):
        assert names(expand_source(source), tmp_path) == ["a.jsonl", "b.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_closed_folder_is_named_wherever_it_lies(tmp_path: Path) -> None:
    write(tmp_path, ROWS, "a.jsonl")
    (closed := tmp_path / "closed").mkdir(mode=0)
    for source in (tmp_path, closed, closed / "a.jsonl"):
        with pytest.raises(DataError, match=rf"^{closed}.*cannot be looked up \(Permission denied\)"):
            expand_source(str(source))
    closed.chmod(0o700)


@pytest.mark.parametrize(
    "said", ["", "{", "[]", "{}", '{"splits": 3}', '{"splits": [1]}', '{"splits": []}', "[" * 10**5]
)
def test_a_saved_data_set_that_does_not_tell_its_splits_is_refused(said: str, tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(said)
    with pytest.raises(DataError, match=rf"^{tmp_path}/dataset_dict\.json: does not tell the splits .*Save it again"):
        expand_source(str(tmp_path))


def test_a_data_set_saved_by_the_library(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert expand_source(str(tmp_path / "one")).taken == [str(tmp_path / "one")]
    assert names(expand_source(str(tmp_path / "two")), tmp_path) == ["two/train"]
    assert expand_source(str(tmp_path / "two")).left == [str(tmp_path / "two" / "test")]
    assert names(expand_source(str(tmp_path / "two"), "eval"), tmp_path) == ["two/test"]
    assert expand_source(str(tmp_path / "two" / "test")).taken == [str(tmp_path / "two" / "test")]
    assert read_rows(tmp_path / "one") == [(1, ROWS[0]), (2, ROWS[1])]
    assert read_rows(tmp_path / "two" / "test") == [(1, ROWS[1])]
    (example,) = read_examples(str(tmp_path / "two" / "test"), as_text=True).examples
    assert example.id == f"{tmp_path}/two/test:1"
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"spoiled")
    with pytest.raises(DataError, match=r"one: cannot be loaded .*Save it again"):
        read_rows(tmp_path / "one")


def test_a_hub_name_goes_to_the_library_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, **settings: str | None) -> datasets.Dataset:
        asked.append((name, settings))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    for source, table in (
        ("hub:o/n", "hub:o/n:train"),
        ("hub:o/n:test", "hub:o/n:test"),
        ("hub:o/n@v1:test", "hub:o/n@v1:test"),
        ("hub:o/n@v1", "hub:o/n@v1:train"),
    ):
        assert expand_source(source).taken == [table]
        assert read_rows(table) == [(1, ROWS[0]), (2, ROWS[1])]
    assert asked == [
        ("o/n", {"split": "train", "revision": None, "keep_in_memory": False}),
        ("o/n", {"split": "test", "revision": None, "keep_in_memory": False}),
        ("o/n", {"split": "test", "revision": "v1", "keep_in_memory": False}),
        ("o/n", {"split": "train", "revision": "v1", "keep_in_memory": False}),
    ]


def test_a_hub_name_that_is_at_hand_is_read_by_the_library_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes owner/name for a folder where there is one."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name", ROWS, "train.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert read_rows("hub:owner/name") == [(1, ROWS[0]), (2, ROWS[1])]
    assert expand_source("hub:owner/name", "eval").taken == ["hub:owner/name:train"]  # the only split that there is
    with pytest.raises(DataError, match=r"hub:owner/name:test: cannot be loaded \(.*test.*\)\. Check the name"):
        read_rows("hub:owner/name:test")
    with pytest.raises(DataError, match=r"hub:no-one/nothing: cannot be loaded .*Check the name, and the network"):
        read_rows("hub:no-one/nothing")
    with pytest.raises(DataError, match=r"hub:no-one/nothing: cannot be loaded .*Check the name, and the network"):
        expand_source("hub:no-one/nothing", "eval")
    write(tmp_path / "owner" / "name", ROWS, "test.jsonl")
    assert expand_source("hub:owner/name", "eval") == Tables(
        "hub:owner/name", ["hub:owner/name:test"], ["hub:owner/name:train"]
    )


@pytest.mark.parametrize("most", [0, 10**9])
def test_hub_sets_are_told_apart_by_what_is_in_them(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the library is told to keep small ones in memory, which leaves no files to look into."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", most)
    for name, rows in (("one", ROWS), ("two", ROWS[:1]), ("again", ROWS)):
        (tmp_path / "o" / name).mkdir(parents=True)
        write(tmp_path / "o" / name, rows, "train.jsonl")
    digests = [digest_of(f"hub:o/{name}:train") for name in ("one", "two", "one")]
    assert digests[0] == digests[2] != digests[1]
    monkeypatch.setattr(datasets.Dataset, "cache_files", [])
    with pytest.raises(DataError, match=r"hub:o/one:train: is in memory only.*data.cache: null"):
        digest_of("hub:o/one:train")


# Files of a folder -> those for training and those for evaluation.
PARTED: list[tuple[list[str], list[str], list[str]]] = [
    (["train.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
    (["test.jsonl.gz", "train.jsonl", "valid.jsonl"], ["train.jsonl"], ["valid.jsonl"]),
    (
        ["data/test-00000-of-00001.parquet", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["data/test-00000-of-00001.parquet"],
    ),
    (["test/a.jsonl", "train/a.jsonl"], ["train/a.jsonl"], ["test/a.jsonl"]),
    (["hh_held_out.jsonl", "hh_train.jsonl"], ["hh_train.jsonl"], ["hh_held_out.jsonl"]),
    # Names that say the same of all files, or nothing, leave nothing to choose.
    (["test_a.jsonl", "test_b.jsonl"], ["test_a.jsonl", "test_b.jsonl"], ["test_a.jsonl", "test_b.jsonl"]),
    (["contest.jsonl", "trains.jsonl"], ["contest.jsonl", "trains.jsonl"], ["contest.jsonl", "trains.jsonl"]),
]


@pytest.mark.parametrize(("files", "train", "held_out"), PARTED, ids=[files[0] for files, *_ in PARTED])
def test_a_folder_is_parted_by_the_names_of_its_files(
    tmp_path: Path, files: list[str], train: list[str], held_out: list[str]
) -> None:
    folder = tmp_path / "test"  # what is above the files says nothing of them
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    for use, wanted in (("train", train), ("eval", held_out)):
        found = expand_source(str(folder), use)  # type: ignore[arg-type]
        assert names(found, folder) == wanted
        assert sorted([*found.taken, *found.left]) == sorted(str(folder / file) for file in files)


def test_a_folder_whose_names_do_not_tell_is_refused(tmp_path: Path) -> None:
    for file in ("a.jsonl", "test.jsonl"):
        (tmp_path / file).touch()
    told = rf"\(neither: a\.jsonl, test: test\.jsonl\), and which .* as data\.train .*such as {tmp_path}/a\.jsonl"
    with pytest.raises(DataError, match=told):
        expand_source(str(tmp_path))
    with pytest.raises(DataError, match=r"meant as data\.eval is not told"):
        expand_source(str(tmp_path), "eval")
    (tmp_path / "test.jsonl").rename(tmp_path / "train.jsonl")
    # nothing there is for evaluation
    assert names(expand_source(str(tmp_path)), tmp_path) == ["a.jsonl", "train.jsonl"]
    with pytest.raises(DataError, match=r"neither: a\.jsonl, train: train\.jsonl"):
        expand_source(str(tmp_path), "eval")


def test_splits_whose_names_do_not_tell_are_refused(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)

    def saved(*splits: str) -> str:
        folder = str(tmp_path / "-".join(splits))
        datasets.DatasetDict(dict.fromkeys(splits, table)).save_to_disk(folder)
        return folder

    several = saved("train_prefs", "train_sft", "test_prefs")
    with pytest.raises(
        DataError,
        match=rf"{several}: has the splits train_prefs, train_sft, test_prefs, .*data\.train.*: {several}/train_prefs",
    ):
        expand_source(several)
    assert names(expand_source(several, "eval"), Path(several)) == ["test_prefs"]
    for use in ("train", "eval"):
        with pytest.raises(DataError, match=r"has the splits harmless, helpful"):
            expand_source(saved("harmless", "helpful"), use)  # type: ignore[arg-type]
    exact = saved("train", "train_extra", "validation", "test")
    assert names(expand_source(exact), Path(exact)) == ["train"]
    assert names(expand_source(exact, "eval"), Path(exact)) == ["validation"]
    only = saved("test")
    assert names(expand_source(only), Path(only)) == ["test"]


def test_no_table_is_read_twice(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS, "a.jsonl")
    for sources in ([str(path), str(tmp_path)], [f"{tmp_path}/*.jsonl", str(tmp_path / "." / "a.jsonl")]):
        with pytest.raises(DataError, match=r"a\.jsonl: is named twice"):
            expand_sources(sources)


def test_a_folder_that_a_source_would_read_from(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    (data / "a.jsonl").write_text("{}")
    for source in (str(data), f"{data}/", f"{data}/**", f"{data}/**/*.json*", f"{data}/*/*.jsonl", f"{tmp_path}/data"):
        assert would_read(source, data / "run"), source
    for source in (str(data / "a.jsonl"), f"{data}/*", f"{data}/*.jsonl", str(data / "more"), "hub:owner/name"):
        assert not would_read(source, data / "run"), source
    assert not would_read(str(data), data / ".runs" / "first") and not would_read(str(data), tmp_path / "run")
