"""Files: the values exactly as a file has them, and for every bad file a message that helps."""

from __future__ import annotations

import errno
import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bounds import within
from tests.data.rows import PAIR, read_examples, read_rows, write
from tests.data.tiny_tokenizers import CHATML, byte_bpe
from tuningfork.data.config import DataConfig
from tuningfork.data.prepare import prepare_examples
from tuningfork.data.tables import read
from tuningfork.data.tables.read import BATCH
from tuningfork.errors import DataError, OutOfMemory, RunFolderError
from tuningfork.records import Message


def test_plain_and_zipped_files_of_every_kind_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "c", "rejected": "r", "score": i} for i in range(3)]
    lines = write(tmp_path, rows)
    array = tmp_path / "array.json"
    array.write_text(json.dumps(rows, indent=1))
    lines_in_json = write(tmp_path, rows, "lines.json")
    parquet = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), parquet)
    for path in (lines, array, lines_in_json, parquet):
        zipped = tmp_path / f"{path.name}.gz"
        zipped.write_bytes(gzip.compress(path.read_bytes()))
        assert read_rows(path) == read_rows(zipped) == [(1, rows[0]), (2, rows[1]), (3, rows[2])], path


def test_strings_are_the_files_own(tmp_path: Path) -> None:
    """Column type guessing would make timestamps, numbers or line breaks of these."""
    for text in ("2020-01-01", "2020-01-01 10:00:00", "12", "null", "NaN", "a\u2028b\x85c", "tab\there", "\U0001f600"):
        rows = [{"prompt": text, "chosen": text, "rejected": f"{text}."}] * 2
        assert [row for _, row in read_rows(write(tmp_path, rows))] == rows
        path = tmp_path / "raw.jsonl"
        path.write_text(json.dumps(rows[0], ensure_ascii=False) + "\r\n", encoding="utf-8")
        assert read_rows(path) == [(1, rows[0])]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_any_text_survives(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "any.jsonl"
    path.write_text("\n".join(json.dumps({"a": t}, ensure_ascii=False) for t in texts), encoding="utf-8", newline="")
    assert [row["a"] for _, row in read_rows(path)] == texts


def test_big_numbers_nulls_and_missing_fields_stay_apart(tmp_path: Path) -> None:
    rows = [{"a": 123456789012345678901234567890}, {"a": None}, {"b": [{"c": 1}, {"d": "x"}]}, {}]
    assert [row for _, row in read_rows(write(tmp_path, rows))] == rows


def test_nulls_that_fill_up_the_objects_of_a_table_go_and_others_stay(tmp_path: Path) -> None:
    """A table gives all objects of a column the same fields; its items of lists and fields of rows are its own."""
    rows = [
        {"a": {"x": {"y": 1}}, "b": [[{"c": 1}], [{"d": "z"}]], "e": [1, None], "f": None},
        {"a": {"v": None}, "b": [[], [None]], "e": None, "f": "g"},
    ]
    table = pa.Table.from_pylist(rows)
    assert table.column("a")[1].as_py() == {"x": None, "v": None}  # so it is written
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(table, path)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    expected = [rows[0], {**rows[1], "a": {}}]
    for found in (read_rows(path), read_rows(tmp_path / "saved")):
        assert [row for _, row in found] == expected


def test_pictures_are_not_looked_at(tmp_path: Path) -> None:
    """Nobody reads them here, so they may be damaged, or lie in a list of objects, and no library for them be there."""
    kinds = datasets.Features(
        {"prompt": datasets.Value("string"), "face": datasets.Image(), "more": datasets.List({"one": datasets.Image()})}
    )
    stored = {"bytes": b"no picture", "path": None}
    table = datasets.Dataset.from_dict({"prompt": ["p"], "face": [stored], "more": [[{"one": stored}]]}, features=kinds)
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "t.parquet")
    for path in (tmp_path / "saved", tmp_path / "t.parquet"):
        ((number, row),) = read_rows(path)
        assert (number, row["prompt"]) == (1, "p")
        assert row["face"]["bytes"] == row["more"][0]["one"]["bytes"] == b"no picture"


def test_rows_of_a_long_table_and_of_a_shuffled_one(tmp_path: Path) -> None:
    """More than are made at once, in the order that the data set was given."""
    table = datasets.Dataset.from_dict({"n": range(2 * BATCH + 5)}).shuffle(seed=0)
    table.save_to_disk(tmp_path / "saved")
    found = read_rows(tmp_path / "saved")
    assert [number for number, _ in found] == list(range(1, 2 * BATCH + 6))
    assert [row["n"] for _, row in found] == table["n"][:] != sorted(table["n"])


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = _parquet(gzip.compress, [PAIR])(tmp_path)
    made = tempfile.TemporaryDirectory
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryDirectory", full)
        with pytest.raises(RunFolderError, match=r"cannot be written: No space left.*set TMPDIR"):
            read_rows(path)

    def nearly_full(**kwargs: Any) -> Any:
        folder = made(**kwargs)
        (Path(folder.name) / "rows.parquet").symlink_to("/dev/full")
        return folder

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryDirectory", nearly_full)
        with pytest.raises(RunFolderError, match=r"rows.parquet cannot be written: No space left.*set TMPDIR"):
            read_rows(path)


def test_an_empty_object_of_a_table_stays_and_one_that_is_not_there_goes(tmp_path: Path) -> None:
    """A table holds the one as an object of nulls, such as a call's arguments, and the other as a null."""
    rows: list[Any] = [{"a": {}}, {"a": {"c": 1}}, {}]
    pyarrow.parquet.write_table(pa.table({"x": pa.array(rows)}), tmp_path / "t.parquet")
    assert [row["x"] for _, row in read_rows(tmp_path / "t.parquet")] == rows


def test_row_numbers_are_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('\n{"a": 1}\n\n  \n{"a": 2}\n')
    assert read_rows(path) == [(2, {"a": 1}), (5, {"a": 2})]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "x"}\n')
    assert read_rows(path) == [(1, {"a": "x"})]


def test_a_name_is_never_a_pattern(tmp_path: Path) -> None:
    write(tmp_path, [{"a": "other"}], "pairs1.jsonl")
    for name in ("pairs[1].jsonl", "pairs*.jsonl", "a::b.jsonl", "with space#%20.jsonl"):
        assert read_rows(write(tmp_path, [{"a": name}], name)) == [(1, {"a": name})]


def test_a_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [PAIR])
    monkeypatch.chdir(tmp_path)
    assert read_examples("pairs.jsonl", as_text=True).examples[0].id == "pairs.jsonl:1"
    with pytest.raises(DataError, match=r"^pair\.jsonl: .* did you mean pairs\.jsonl\? That is /.* recipe\.$"):
        read_examples("pair.jsonl", as_text=True)
    said = rf"^0123456789\.jsonl: no such file; check the path.*\. That is {tmp_path}/0123456789\.jsonl: relative paths"
    with pytest.raises(DataError, match=said):
        read_examples("./0123456789.jsonl", as_text=True)


def test_a_changed_file_gives_its_new_content_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work, temporary = tmp_path / "home", tmp_path / "work", tmp_path / "tmp"
    for folder in (home, work, temporary):
        folder.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for value in ("old", "new"):  # the same name, size and, as far as the clock can tell, time
        path = write(work, [{"a": value}])
        table = work / "t.parquet"
        pyarrow.parquet.write_table(pa.table({"a": [value]}), table)
        assert read_rows(path) == read_rows(table) == [(1, {"a": value})]
    assert list(home.iterdir()) == list(temporary.iterdir()) == []


def test_the_library_is_quiet_and_its_settings_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError):
        read_rows(bad)
    read_rows(write(tmp_path, [{"a": 1}]))
    assert capfd.readouterr() == ("", "")
    assert before == (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled())


def _bytes(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def _parquet(damage: Callable[[bytes], bytes], rows: list[Any] | None = None) -> Callable[[Path], Path]:
    table = pa.Table.from_pylist(rows) if rows else pa.table({"prompt": pa.array([], pa.string())})

    def make(folder: Path) -> Path:
        path = folder / "t.parquet"
        pyarrow.parquet.write_table(table, path)
        path.write_bytes(damage(path.read_bytes()))
        return path

    return make


def _twice(folder: Path) -> Path:
    column = pa.array(["a"])
    table = pa.Table.from_arrays([column, column], names=["chosen", "chosen"])
    pyarrow.parquet.write_table(table, folder / "t.parquet")
    return folder / "t.parquet"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.jsonl")
    return folder / "a.jsonl"


def _link(folder: Path) -> Path:
    (folder / "a.jsonl").symlink_to("b.jsonl")
    return folder / "a.jsonl"


GOOD = b'{"prompt": "p", "chosen": "c", "rejected": "r"}\n'
LONG = b"".join(b'{"prompt": "%d", "chosen": "c", "rejected": "r"}\n' % i for i in range(999))
BAD_FILES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "typo": (
        lambda folder: _bytes("pairs.jsonl", GOOD)(folder).with_name("pair.jsonl"),
        ["did you mean", "pairs.jsonl?"],
    ),
    "no such folder": (lambda folder: folder / "nowhere" / "a.jsonl", ["no such file", "no folder", "nowhere"]),
    "folder": (lambda folder: _bytes("a.jsonl.gz", b"")(folder).parent, ["is a folder", "a.jsonl.gz"]),
    "folder without data": (lambda folder: folder, ["is a folder", "no .jsonl, .json, .parquet, .csv, .tsv file"]),
    "unknown suffix": (_bytes("pairs.xlsx", b"a,b"), ["unknown suffix '.xlsx'", ".jsonl, .json, .parquet, .csv"]),
    "unknown zipped suffix": (_bytes("pairs.txt.gz", b"a"), ["unknown suffix '.txt'"]),
    "empty": (_bytes("a.jsonl", b""), ["file is empty"]),
    "empty zipped": (_bytes("a.jsonl.gz", gzip.compress(b"")), ["no rows"]),
    "blank": (_bytes("a.jsonl", b"\n \n"), ["no rows"]),
    "empty array": (_bytes("a.json", b"[]"), ["no rows"]),
    "empty table": (_parquet(lambda data: data), ["no rows"]),
    "malformed": (
        _bytes("a.jsonl", GOOD + b'\n{"prompt": "a" "b"}\n'),
        ["line 3 is not JSON", "column 16", "',' delim"],
    ),
    "cut": (_bytes("a.jsonl", GOOD + GOOD[:20]), ["line 2 is not JSON", "column 17"]),
    "several malformed": (
        _bytes("a.jsonl", b"{}}\n\n" + 7 * GOOD + 6 * b'{"a"\n' + GOOD + b"\xff\n{\n"),
        [
            "7 lines are not JSON: line 1 (Extra data, column 3), line 10 (Expecting ':' delimiter, column 5), line 11",
            "line 13 (Expecting ':' delimiter, column 5) and 2 more. Mend or remove them: a file has one object",
        ],
    ),
    "all malformed": (_bytes("a.jsonl", b"{\n" * 5000), ["1,000 lines or more are not JSON: line 1 (", "and 995 more"]),
    "no end": (_bytes("a.jsonl", b'{"prompt": "a"\r\n' + GOOD), ["line 1 is not JSON", "',' delimiter"]),
    "malformed array": (_bytes("a.json", b'[\n{"prompt": 1},\n{"prompt" 1}]'), ["line 3 is not JSON", "column 11"]),
    "field twice": (_bytes("a.jsonl", GOOD + b'{"chosen": "a", "chosen": "b"}'), ["line 2", "'chosen' is given twice"]),
    "deep": (_bytes("a.jsonl", b'{"a": ' + b"[" * 100_000), ["line 1 is not JSON", "recursion"]),
    "not objects": (_bytes("a.jsonl", GOOD + b"[1]\n"), ["line 2 is a list, not an object"]),
    "not objects in an array": (_bytes("a.json", b'[{"a": 1}, "b"]'), ["row 2 is a string, not an object"]),
    "comma behind the last of an array": (_bytes("a.json", b"[" + GOOD + b",\n]"), ["line 3 is not JSON", "column 1"]),
    "comma behind the last field": (
        _bytes("a.jsonl", GOOD + b'{"prompt": "a",}\n'),
        ["line 2 is not JSON", "column 16"],
    ),
    "control character": (
        _bytes("a.jsonl", GOOD + b'{"prompt": "a\0"}\n'),
        ["line 2", "control character", "column 14"],
    ),
    "nothing but NULs": (_bytes("a.jsonl", b"\0" * 5000), ["line 1 is not JSON", "column 1"]),
    "a number beyond use": (
        _bytes("a.jsonl", b'{"weight": ' + b"9" * 5000 + b"}"),
        ["line 1 is not JSON", "5000 digits"],
    ),
    "a mark of byte order within": (_bytes("a.jsonl", GOOD + b"\xef\xbb\xbf" + GOOD), ["line 2 is not JSON", "BOM"]),
    "pipe": (_pipe, ["is a pipe or a device", "Write it to a file first"]),
    "link to nothing": (_link, ["is a link to b.jsonl, which is not there"]),
    "Latin-1": (_bytes("a.jsonl", GOOD + '{"prompt": "\xe9"}\n'.encode("latin-1")), ["line 2 is not UTF-8", "byte 12"]),
    "UTF-16 without a mark": (_bytes("a.jsonl", GOOD.decode().encode("utf-16-le")), ["is UTF-16 text", "UTF-16LE"]),
    "table without columns": (_parquet(lambda data: data, [{}]), ["no rows"]),
    "not UTF-8": (
        _bytes("a.jsonl", GOOD * 2 + b'{"prompt": "\xff"}\n'),
        ["line 3 is not UTF-8", "Save the file as UTF-8"],
    ),
    "UTF-16": (_bytes("a.jsonl", GOOD.decode().encode("utf-16")), ["is UTF-16 text", "as UTF-8"]),
    "gzip cut short": (_bytes("a.jsonl.gz", gzip.compress(LONG)[:-200]), ["gzip data is cut short or damaged"]),
    "gzip damaged": (_bytes("a.jsonl.gz", gzip.compress(LONG)[:60] + b"xxxx"), ["gzip data is cut short or damaged"]),
    "parquet cut short": (_parquet(lambda data: data[:-9], [{"prompt": "p"}]), ["not a whole Parquet file"]),
    "parquet with a name twice": (_twice, ["its rows cannot be read", "each with a name of its own"]),
    "parquet behind a damaged gzip": (
        _bytes("a.parquet.gz", gzip.compress(LONG) + b"junk"),
        ["gzip data is cut short or damaged", "Not a gzipped file"],
    ),
    "not parquet": (_bytes("a.parquet", b"nothing that is known"), ["not a whole Parquet file"]),
    "unknown fields": (
        _bytes("a.jsonl", b'{"input": "i", "label": 1}'),
        [
            "Fields found: input, label",
            "Nearest are unpaired_messages (messages, label) lacks messages; ",
            "data.columns: {...: messages}",
        ],
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_what_where_and_what_to_do(case: str, tmp_path: Path) -> None:
    make, expected = BAD_FILES[case]
    path = make(tmp_path)
    with pytest.raises(DataError) as caught:
        read_examples(path, as_text=False)
    message = str(caught.value)
    assert message.startswith(str(path)) and all(part in message for part in expected), message


# ---- values of tables that cannot be read, or are not what a field holds


def _saved(folder: Path, noted: list[Any], damage: Callable[[bytes], bytes], kind: Any) -> Path:
    kinds = datasets.Features({**{key: datasets.Value("string") for key in PAIR}, "noted": kind})
    rows = {key: [value] * len(noted) for key, value in PAIR.items()}
    datasets.Dataset.from_dict({**rows, "noted": noted}, features=kinds).save_to_disk(folder / "saved")
    (file,) = (folder / "saved").glob("*.arrow")
    file.write_bytes(damage(file.read_bytes()))
    return folder / "saved"


def _table(folder: Path, column: pa.Array, damage: Callable[[bytes], bytes] = lambda data: data) -> Path:
    table = pa.table({**{key: [value] * len(column) for key, value in PAIR.items()}, "noted": column})
    path = folder / "t.parquet"
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    path.write_bytes(damage(path.read_bytes()))
    return path


def _spoil(data: bytes) -> bytes:
    return data.replace(b"spoilt", b"spoil\xff")


UNREADABLE: dict[str, tuple[Callable[[Path], Path], int, str]] = {
    "a date after the year 9999": (lambda f: _table(f, pa.array([1, 10**8], pa.date32())), 2, "date value out of"),
    "text that is not UTF-8": (lambda f: _table(f, pa.array(["fine", "spoilt"]), _spoil), 2, "0xff"),
    "a saved data set with such text": (
        lambda f: _saved(f, ["fine", "spoilt"], _spoil, datasets.Value("string")),
        *(2, "0xff"),
    ),
    "a saved data set with JSON that is none": (  # behind the first rows that are made at once
        lambda f: _saved(
            f,
            [{"said": "fine"}] * (BATCH + 1) + [{"said": "spoilt"}],
            lambda data: data.replace(b'"spoilt"', b'"spoilt}'),
            datasets.Json(),
        ),
        *(BATCH + 2, ""),
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_value_that_cannot_be_read_costs_the_row_of_who_reads_it_and_no_other(case: str, tmp_path: Path) -> None:
    make, bad, why = UNREADABLE[case]
    path = make(tmp_path)
    result = read_examples(path, as_text=False)
    assert (len(result.examples), result.dropped) == (bad, [])
    assert list(result.notes) == ["fields that are not read: noted"]
    read = read_examples(path, as_text=False, columns={"noted": "margin"})
    (dropped,) = [row for row in read.dropped if row.row == bad]
    assert dropped.reason == "unreadable value" and dropped.detail.startswith("noted cannot be read (")
    assert why in dropped.detail


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_bytes_that_are_text_are_read_as_text(kind: pa.DataType, tmp_path: Path) -> None:
    content = pa.struct([("role", kind), ("content", kind)])
    table = pa.table(
        {
            "prompt": pa.array([[{"role": b"user", "content": "é".encode()}]] * 3, pa.list_(content)),
            "chosen": pa.array([b"a", b"a\xff", b"a"], kind),
            "rejected": pa.array([b"b", b"b", b"b"], kind),
            "picture": pa.array([b"\xff\xd8", b"x", None], kind),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    result = read_examples(tmp_path / "t.parquet", as_text=False)
    assert [example.prompt for example in result.examples] == [(Message("user", "é"),)] * 2
    (dropped,) = result.dropped
    assert (dropped.row, dropped.reason) == (2, "wrong type")
    assert dropped.detail.startswith("field 'chosen' is bytes that are no UTF-8 text")


def test_a_map_is_an_object(tmp_path: Path) -> None:
    text = pa.map_(pa.string(), pa.string())
    call = pa.struct([("name", pa.string()), ("arguments", text)])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    said = {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": [("x", "1"), ("y", None)]}]}
    table = pa.table(
        {
            "prompt": ["q", "q"],
            "chosen": pa.array([[said]] * 2, pa.list_(message)),
            "rejected": ["b", "b"],
            "meta": pa.array([[("k", "v"), ("k", "w")], []], text),  # nobody reads it, so a key may stand twice
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    result = read_examples(tmp_path / "t.parquet", as_text=False)
    assert result.dropped == [] and "fields that are not read: meta" in result.notes
    (turn,) = result.examples[0].answers[0]
    assert isinstance(turn, Message)
    assert turn.extra["tool_calls"][0]["function"]["arguments"] == {"x": "1", "y": None}


def test_keys_of_a_map_are_text(tmp_path: Path) -> None:
    said = [("role", "assistant"), ("content", "a"), ("17", "x")]
    for kind, key in ((pa.int32(), 17), (pa.binary(), b"17"), (pa.float64(), 1.5)):
        meta = pa.array([[(key, "x")]], pa.map_(kind, pa.string()))
        text = pa.array([said], pa.map_(pa.string(), pa.string()))
        pyarrow.parquet.write_table(pa.table({"prompt": ["q"], "meta": meta, "chosen": text}), tmp_path / "t.parquet")
        ((_, row),) = read_rows(tmp_path / "t.parquet")
        assert row == {"prompt": "q", "meta": {str(key) if kind != pa.binary() else "17": "x"}, "chosen": dict(said)}


# ---- files that are not what their names say

OTHER_KINDS: dict[str, tuple[str, bytes, list[str]]] = {
    "Parquet": ("a.jsonl", b"PAR1" + b"\0" * 40, ["is a Parquet file, not what its name says (.jsonl)", ".parquet"]),
    "Parquet, zipped": ("a.json.gz", gzip.compress(b"PAR1" + b"\0" * 40), ["is a Parquet file", "Name it .parquet"]),
    "zip": ("a.jsonl", b"PK\x03\x04\x14", ["is a zip archive", "Unpack it"]),
    "zip named Parquet": ("a.parquet", b"PK\x03\x04\x14", ["is a zip archive", "(.parquet)"]),
    "zstd": ("a.jsonl", b"\x28\xb5\x2f\xfd\x04", ["compressed by zstd", "zstd -d"]),
    "xz": ("a.jsonl", b"\xfd7zXZ\x00", ["compressed by xz"]),
    "zipped twice": ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD)), ["gzipped file within", "Unpack it once"]),
    "tar": ("a.json", b"a.jsonl".ljust(257, b"\0") + b"ustar", ["is a tar archive"]),
    "Arrow": ("a.parquet", b"ARROW1\0\0", ["is an Arrow file", "Write it as Parquet"]),
    "SQLite": ("a.jsonl", b"SQLite format 3\0", ["is an SQLite database"]),
    "pickle": ("a.json", b"\x80\x04\x95\x10", ["is a Python pickle"]),
    "web page": ("a.jsonl", b"\n<!DOCTYPE html><html>", ["is a web page", "Download the file itself"]),
    "LFS": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", ["pointer of Git LFS", "git lfs pull"]),
    "UTF-16, the other order": ("a.json", GOOD.decode().encode("utf-16-be"), ["is UTF-16 text", "UTF-16BE"]),
    "UTF-32": ("a.jsonl", GOOD.decode().encode("utf-32"), ["is UTF-32 text"]),
    "JSON named Parquet": ("a.parquet", GOOD, ["is JSON text", "Name it .jsonl"]),
    "an array named Parquet": ("a.parquet", b"[\n" + GOOD + b"]", ["is one JSON array", "Name it .json"]),
    "an array named JSONL": ("a.jsonl", b"[" + GOOD + b"]", ["is one JSON array, not an object a line", ".json."]),
    "CSV": (
        "a.jsonl",
        b"prompt,chosen,rejected\na,b,c\n",
        ["a table as text", "prompt,chosen,rejected", "Name it .csv"],
    ),
    "TSV": ("a.json", b"prompt\tchosen\tits rejected\r\na\tb\tc\n", ["a table as text", "Name it .tsv"]),
    "semicolons": ("a.jsonl", b"prompt;chosen;rejected\na;b;c\n", ["a table as text", "with commas"]),
    "JSON named CSV": ("a.csv", GOOD, ["is JSON text", "Name it .jsonl"]),
    "Parquet named TSV": ("a.tsv", b"PAR1abc", ["is a Parquet file", "Name it .parquet"]),
}


@pytest.mark.parametrize("case", OTHER_KINDS)
def test_a_file_of_another_kind_is_refused_with_what_it_is_and_the_cure(case: str, tmp_path: Path) -> None:
    name, content, expected = OTHER_KINDS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / name)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / name}: is ") and all(part in message for part in expected), message


def test_gzip_is_read_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(GOOD))
    (tmp_path / "b.jsonl.gz").write_bytes(GOOD)
    assert read_rows(tmp_path / "a.jsonl") == read_rows(tmp_path / "b.jsonl.gz")


def test_a_saved_data_set_names_files_of_its_own_folder(tmp_path: Path) -> None:
    """A pipe among them would be waited for."""
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"prompt": ["q"], "chosen": ["a"], "rejected": ["b"]}).save_to_disk(folder)
    state = json.loads((folder / "state.json").read_text())
    for name, why in (("../saved/part", "does not lie in this folder"), ("pipe", "pipe: it is a named pipe")):
        if not (folder / "pipe").exists():
            os.mkfifo(folder / "pipe")
        (folder / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
        with pytest.raises(DataError, match=rf"saved: cannot be loaded \(.*{why}.*Save it again"), within(30):
            read_rows(folder)


def test_pipes_and_devices_are_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    for name in ("a.jsonl", "b.jsonl"):
        with pytest.raises(DataError, match=rf"{name}: is a pipe or a device, and data is read more"), within(30):
            read_rows(tmp_path / name)


def test_a_want_of_memory_is_not_the_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": ["q"], "chosen": ["a"], "rejected": ["b"]}), file)

    def refuses(*_: object) -> None:
        raise pa.lib.ArrowMemoryError("malloc of size 8 failed")

    monkeypatch.setattr(read, "arrow_rows", refuses)
    with pytest.raises(OutOfMemory, match=r"a.parquet: there is not the memory .*malloc of size 8.*data.workers"):
        prepare_examples(file, byte_bpe(chat_template=CHATML), DataConfig(), 260)
