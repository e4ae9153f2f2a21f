"""Small files that hold very much: what is read at once has a bound, and the file is named with it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.bounds import within, without_much_memory
from tuningfork.data.tables import delimited, json_rows, json_values, read
from tuningfork.data.tables.json_values import loads, values_of
from tuningfork.data.tables.read import read_rows
from tuningfork.errors import DataError

ROW = {"prompt": "q", "chosen": "a", "rejected": "b"}
LINE = json.dumps(ROW).encode() + b"\n"


@pytest.fixture(autouse=True)
def _ceiling() -> Iterator[None]:
    with within(120), without_much_memory(1 << 30):
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that small files reach."""
    monkeypatch.setattr(json_rows, "LONGEST_LINE", 1 << 20)
    monkeypatch.setattr(json_rows, "LONGEST_ARRAY", 2 << 20)
    monkeypatch.setattr(json_rows, "UNZIPPED", 3 << 20)
    monkeypatch.setattr(json_rows, "BLANK", 1000)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_an_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    """400 MB in half a megabyte, read with the real bound."""
    file = tmp_path / "pairs.jsonl.gz"
    with gzip.open(file, "wb", 1) as out:
        out.write(LINE + b'{"prompt": "')
        for _ in range(400):
            out.write(b"\0" * 1_000_000)
    with pytest.raises(DataError, match=r"pairs.jsonl.gz: line 2 has more than 64 MiB"), without_much_memory(300 << 20):
        list(read_rows(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
@pytest.mark.usefixtures("small")
def test_a_line_is_as_long_as_it_may_be_and_no_longer(name: str, tmp_path: Path) -> None:
    longest = LINE[:-3] + b"x" * ((1 << 20) - len(LINE)) + LINE[-3:]
    assert len(longest) == 1 << 20
    file = write(tmp_path / name, LINE + longest + LINE)
    assert [number for number, _ in read_rows(file)] == [1, 2, 3]
    write(file, LINE + longest[:-1] + b" \n" + LINE)
    with pytest.raises(DataError, match=rf"{name}: line 2 has more than 1 MiB"):
        list(read_rows(file))


@pytest.mark.usefixtures("small")
def test_an_array_may_be_one_line_but_not_larger_than_is_read_at_once(tmp_path: Path) -> None:
    rows = [{**ROW, "chosen": "x" * 700_000}, ROW, ROW]
    for indent in (None, 1):
        file = write(tmp_path / "a.json", json.dumps([*rows, rows[0]], indent=indent).encode())
        assert len(list(read_rows(file))) == 4
        write(file, json.dumps([rows[0]] * 3, indent=indent).encode())
        with pytest.raises(DataError, match=r"a.json: .* has more than 2 MiB.*"):
            read_rows(file)


@pytest.mark.parametrize("content", [LINE * 100_000, b"[" + LINE * 30 + b"\n" * 4_000_000])
@pytest.mark.usefixtures("small")
def test_a_gzipped_file_that_says_the_same_again_and_again(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "BLANK", 10**9)
    monkeypatch.setattr(json_rows, "LONGEST_ARRAY", 1 << 30)
    for name in ("a.jsonl.gz", "a.json.gz", "a.parquet.gz"):
        head = b"PAR1" if name == "a.parquet.gz" else b""
        file = write(tmp_path / name, head + content.lstrip(b"[" if name == "a.jsonl.gz" else b""))
        assert 200 * file.stat().st_size < len(content)
        with pytest.raises(DataError, match=rf"{name}: unpacks to more than 3,[\d,]+ bytes, 200 times its size"):
            list(read_rows(file))


@pytest.mark.usefixtures("small")
def test_blank_lines_without_end(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", LINE + b"\n \n" * 500 + LINE)
    assert [number for number, _ in read_rows(file)] == [1, 1002]
    write(file, LINE + b"\n \n" * 501 + LINE)
    with pytest.raises(DataError, match=r"a.jsonl: the 1,001 lines before line 1,003 are blank"):
        list(read_rows(file))


def test_a_table_of_one_row_a_thousand_times_is_made_a_few_rows_at_a_time(tmp_path: Path) -> None:
    """A thousand texts of a megabyte, of which the file holds one."""
    file = tmp_path / "a.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), ["x" * (1 << 20)])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text.dictionary_encode()}), file)
    assert file.stat().st_size < 4 << 20
    with without_much_memory(500 << 20):
        assert sum(len(row["prompt"]) for _, row in read_rows(file)) == 1000 << 20


def test_a_table_that_says_it_holds_very_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({name: ["x"] * 50_000 for name in ROW}), file)
    assert sum(1 for _ in read_rows(file)) == 50_000
    monkeypatch.setattr(read, "ROWS", 20_000)
    with pytest.raises(DataError, match=r"a.parquet: 50,000 rows in [\d,]+ bytes are the same row again and again"):
        read_rows(file)
    plain = pyarrow.table({"prompt": ["x" * 4_000_000]})
    pyarrow.parquet.write_table(plain, file, compression="zstd", use_dictionary=False, write_statistics=False)
    assert sum(1 for _ in read_rows(file)) == 1
    monkeypatch.setattr(read, "UNZIPPED", 1 << 20)
    with pytest.raises(DataError, match=r"a.parquet: a part of it with 1 row unpacks to 4,0[\d,]+ bytes, more"):
        read_rows(file)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_very_many_small_rows_of_a_zipped_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"a.jsonl.gz": b"{}\n" * 30_000, "a.json.gz": b"[" + b"{}," * 30_000 + b"{}]", "a.csv.gz": b"a\n" * 30_001}
    file = write(tmp_path / name, rows[name])
    assert sum(1 for _ in read_rows(file)) >= 30_000
    monkeypatch.setattr(read, "ROWS", 20_000)
    with pytest.raises(DataError, match=rf"{name}: 20,001 rows in [\d,]+ bytes are the same row again and again"):
        list(read_rows(file))


def test_an_array_is_read_row_by_row(tmp_path: Path) -> None:
    """Its rows, made all at once, would take several times the memory that is there."""
    file = write(tmp_path / "a.json.gz", b" [ " + b"{}, " * 5_000_000 + b"{}]\n")
    rows = read_rows(file)
    with without_much_memory(50 << 20), pytest.raises(DataError, match="are the same row again and again"):
        for _ in rows:
            pass


VALUES = [
    ("[1, 2, 3]", 4),
    ('{"a": [{}, []], "b": ",,,[[[", "c\\\\": "\\",,", "d": "[[', 7),
    ("[[[[]]]]", 4),
    ('["a,b", "{", "\\\\"]', 4),
]


@pytest.mark.parametrize(("text", "values"), VALUES)
def test_values_of_a_json_text_are_counted_before_they_are_made(
    text: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(values_of(text)) == []
    monkeypatch.setattr(json_values, "MOST_VALUES", 1)
    assert list(values_of(text)) == [values]


def test_a_row_of_very_many_values_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_rows, json_values):
        monkeypatch.setattr(module, "MOST_VALUES", 1000)
    many, texts = {**ROW, "x": [[]] * 1000}, {**ROW, "x": ",[{" * 4000}
    lines = write(tmp_path / "a.jsonl", b"\n".join(json.dumps(row).encode() for row in (ROW, texts, many)))
    with pytest.raises(DataError, match=r"a.jsonl: line 3 is not JSON \(it holds 1,005 values, 1,000 at most\)"):
        list(read_rows(lines))
    fine = [{**ROW, "x": [1] * 900}, texts] * 5
    array = write(tmp_path / "a.json", json.dumps(fine).encode())
    assert [row for _, row in read_rows(array)] == fine
    write(array, json.dumps([*fine, many]).encode())
    with pytest.raises(DataError, match=r"a.json: line 1 is not JSON \(row 11 holds 1,005 values, 1,000 at most"):
        list(read_rows(array))
    with pytest.raises(ValueError, match=r"it holds 1,00\d values, 1,000 at most"):
        loads(json.dumps([[[]] * 1000]))


def test_a_quote_that_never_ends_makes_no_endless_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "LONGEST_LINE", 100_000)
    row = b'"' + b"x\n" * 40_000 + b'",b,c\n'
    file = write(tmp_path / "a.csv", b"prompt,chosen,rejected\n" + row * 3)
    assert len(list(read_rows(file))) == 3
    write(file, b"prompt,chosen,rejected\np,a,b\n" + b'"\n",' * 40_000)
    with pytest.raises(DataError, match=r"a.csv: row 2, at line \d+, cannot be read \(a row of more than 0 MiB"):
        list(read_rows(file))


def test_more_columns_than_any_table_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "MOST_COLUMNS", 1000)
    names = b",".join(b"c%d" % place for place in range(1001))
    with pytest.raises(DataError, match=r"a.csv: its header names 1,001 columns, 1,000 at most"):
        list(read_rows(write(tmp_path / "a.csv", names + b"\n" + names + b"\n")))
