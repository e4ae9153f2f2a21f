"""Tables whose buffers do not hold together, or stand for very much: named before values are made of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.bounds import within, without_much_memory
from tuningfork.data.tables import arrow_checks, parquet_pages, read
from tuningfork.data.tables.arrow_checks import check_buffers, of_bounded_size
from tuningfork.data.tables.parquet_pages import part_sizes
from tuningfork.data.tables.read import read_rows
from tuningfork.errors import DataError

TURN = {"role": "user", "content": "hello"}
ROWS = [{"prompt": f"question {i}", "chosen": [TURN] * (1 + i % 3), "rejected": [TURN]} for i in range(40)]


@pytest.fixture(autouse=True)
def _ceiling() -> Iterator[None]:
    with within(60), without_much_memory(1 << 30):
        yield


def saved(folder: Path, table: pa.Table, **options: Any) -> tuple[Path, Path]:
    """A table as `datasets` saves it, and its file."""
    datasets.Dataset.from_list([{"prompt": "q"}]).save_to_disk(folder / "saved")
    [file] = (folder / "saved").glob("*.arrow")
    written = datasets.Features.from_arrow_schema(table.schema).arrow_schema
    schema = table.schema.with_metadata(written.metadata)
    with (
        pa.OSFile(str(file), "wb") as out,
        pa.ipc.new_stream(out, schema, options=pa.ipc.IpcWriteOptions(**options)) as w,
    ):
        w.write_table(table.cast(schema))
    info = datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(table.schema))
    info.write_to_directory(str(folder / "saved"))
    return folder / "saved", file


def spoil(file: Path, numbers: Any, place: int, wrong: int) -> None:
    """Write another number in the place of one of these, which are a buffer of the file."""
    content, buffer = file.read_bytes(), np.array(numbers, np.int32)
    assert content.count(buffer.tobytes()) == 1
    spoilt = buffer.copy()
    spoilt[place] = wrong
    file.write_bytes(content.replace(buffer.tobytes(), spoilt.tobytes()))


@pytest.mark.parametrize("wrong", [2**31 - 256, 5_000_000, -400, 60_000])
def test_an_offset_that_leads_out_of_a_saved_data_set_is_named_and_not_followed(tmp_path: Path, wrong: int) -> None:
    folder, file = saved(tmp_path, pa.Table.from_pylist(ROWS))
    assert [row for _, row in read_rows(folder)] == ROWS
    lengths = [len(row["prompt"]) for row in ROWS]
    spoil(file, np.cumsum([0, *lengths]), 20, wrong)
    with pytest.raises(DataError, match=rf"^{folder}: its column 'prompt' is damaged \(.*Save it again"):
        read_rows(folder)


def test_an_offset_of_a_list_and_an_index_of_a_dictionary_that_lead_out(tmp_path: Path) -> None:
    folder, file = saved(tmp_path, pa.Table.from_pylist(ROWS))
    spoil(file, np.cumsum([0, *(len(row["chosen"]) for row in ROWS)]), 7, 9_000_000)
    with pytest.raises(DataError, match="its column 'chosen' is damaged"):
        read_rows(folder)
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 7], pa.int32()), pa.array(["a", "b"]), safe=False)
    with pytest.raises(DataError, match=r"^t: its column 'x' is damaged"):
        check_buffers("t", pa.table({"x": words}))
    with pytest.raises(DataError, match=r"^t: its column 'x' is damaged"):
        check_buffers("t", pa.table({"x": pa.ListArray.from_arrays([0, 3], words)}))


def test_what_a_value_is_as_text_or_a_date_is_left_to_who_reads_it() -> None:
    text = pa.array([b"a", b"\xff"]).view(pa.string())
    times = pa.array([1, 2**31 - 1], pa.int32()).view(pa.time32("s"))
    check_buffers("t", pa.table({"text": text, "list": pa.ListArray.from_arrays([0, 1, 2], text), "times": times}))


def test_a_saved_data_set_with_compressed_buffers_is_not_unpacked(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["x" * 100_000] * 10, "kind": pa.array(["a"] * 10).dictionary_encode()})
    folder, file = saved(tmp_path, table.select(["prompt"]), compression="zstd")
    with pytest.raises(DataError, match=rf"^{file}: holds compressed data, which `datasets` does not write"):
        read_rows(folder)
    saved(tmp_path / "other", table.select(["prompt"]))
    assert len(list(read_rows(tmp_path / "other" / "saved"))) == 10
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="holds compressed data"):
        arrow_checks.check_uncompressed(file)


def test_rows_that_take_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved(tmp_path, pa.table({"prompt": pa.nulls(50_000)}))
    assert next(iter(read_rows(folder)))[0] == 1
    monkeypatch.setattr(read, "ROWS", 20_000)
    with pytest.raises(DataError, match=r"saved: 50,000 rows in [\d,]+ bytes are the same row again and again"):
        read_rows(folder)


MANY = 3000
WORDS = pa.DictionaryArray.from_arrays(pa.array(np.zeros(MANY, np.int32)), pa.array(["ab"]))
LISTS = {
    "nulls": pa.ListArray.from_arrays([0, 1, MANY], pa.nulls(MANY)),
    "nulls of a list of fixed size": pa.FixedSizeListArray.from_arrays(pa.nulls(2 * MANY), MANY),
    "a dictionary": pa.ListArray.from_arrays([0, 1, MANY], WORDS),
    "a large list": pa.LargeListArray.from_arrays([0, 1, MANY], WORDS),
    "views of the same": pa.ListViewArray.from_arrays([0, 0], [1, MANY], WORDS),
    "lists in lists": pa.ListArray.from_arrays([0, 1, 2], pa.ListArray.from_arrays([0, 1, MANY], WORDS)),
    "a list in an object": pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, MANY], WORDS)], ["x"]),
    "objects": pa.ListArray.from_arrays([0, 1, MANY], pa.StructArray.from_arrays([pa.nulls(MANY)], ["x"])),
    "a map": pa.MapArray.from_arrays([0, 1, MANY], pa.array(["k"] * MANY), pa.nulls(MANY)),
    "a run": pa.ListArray.from_arrays([0, 1, MANY], pa.RunEndEncodedArray.from_arrays([MANY], ["a"])),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_row_with_a_giant_list_is_named_before_it_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"prompt": ["p", "q"], "other": LISTS[name]})
    assert sum(map(len, of_bounded_size("t", [table]))) == 2
    monkeypatch.setattr(arrow_checks, "MOST_VALUES", 2000)
    with pytest.raises(DataError, match=r"^t: row [12] holds more than 2,000 values, more than is read at once"):
        list(of_bounded_size("t", [table.slice(0, 0), table]))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), "dictionary", "list"])
def test_long_texts_are_made_few_at_a_time_and_one_may_be_too_long(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = pa.array(["x" * 900] * 16)
    text = text.dictionary_encode() if kind == "dictionary" else text if kind == "list" else text.cast(kind)
    if kind == "list":
        text = pa.ListArray.from_arrays(range(17), text)
    table = pa.table({"x": text, "y": range(16)})
    assert [len(part) for part in of_bounded_size("t", [table])] == [16]
    monkeypatch.setattr(arrow_checks, "MOST_BYTES", 4000)
    parts = list(of_bounded_size("t", [table]))
    assert [len(part) for part in parts] == [4] * 4 and pa.concat_tables(parts).equals(table)
    monkeypatch.setattr(arrow_checks, "MOST_BYTES", 800)
    with pytest.raises(DataError, match=r"^t: row 1 holds more than 0 MiB"):
        list(of_bounded_size("t", [table]))


# ---- Parquet


def giant_list(file: Path, entries: int) -> Path:
    """Three rows, one of which has a list of equal entries in a column that nobody reads: a thousand bytes or so."""
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(entries, np.int32)), pa.array(["xy"]))
    lists = pa.ListArray.from_arrays([0, entries, entries, entries], words)
    table = pa.table({"prompt": list("abc"), "chosen": list("xyz"), "rejected": list("pqr"), "other": lists})
    pyarrow.parquet.write_table(table, file, compression="zstd", data_page_size=1 << 30, write_statistics=False)
    return file


def test_a_small_parquet_file_with_a_giant_list(tmp_path: Path) -> None:
    file = giant_list(tmp_path / "a.parquet", 5_000_000)
    assert file.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"a.parquet: a part of it with 3 rows unpacks to 5,000,\d+ values of one col"):
        read_rows(file)


@pytest.mark.parametrize("claimed", [6, 19_000])
def test_what_a_footer_says_of_a_page_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: int
) -> None:
    file = giant_list(tmp_path / "a.parquet", 20_000)
    content = file.read_bytes()

    def number(value: int) -> bytes:  # in three bytes
        return bytes([2 * value & 127 | 128, 2 * value >> 7 & 127 | 128, 2 * value >> 14])

    assert content.count(number(20_002)) >= 1
    head, _, tail = content.rpartition(number(20_002))  # the last one is the footer's
    file.write_bytes(head + number(claimed) + tail)
    assert pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(3).num_values == claimed
    monkeypatch.setattr(read, "MOST_VALUES", 10_000)
    with pytest.raises(DataError, match=r"a.parquet: a part of it with 3 rows unpacks to 20,00\d values of one col"):
        read_rows(file)


@pytest.mark.parametrize(
    "options", [{}, {"data_page_version": "2.0"}, {"use_dictionary": False}, {"compression": "gzip"}]
)
def test_pages_are_counted_as_they_are_unpacked(tmp_path: Path, options: dict[str, Any]) -> None:
    table = pa.Table.from_pylist(ROWS * 50)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=900, data_page_size=500, **options)
    groups = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata
    for place, part in enumerate(part_sizes(tmp_path / "a.parquet")):
        group = groups.row_group(place)
        assert part.rows == group.num_rows
        most = max(group.column(column).num_values for column in range(group.num_columns))
        assert most <= part.values <= most + 100  # a dictionary has values of its own
        assert group.total_byte_size / 2 < part.bytes <= group.total_byte_size and 500 <= part.page < 20_000


def test_very_long_pages_are_read_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow.parquet.write_table(pa.table({"prompt": ["x" * 100_000] * 90}), tmp_path / "a.parquet")
    monkeypatch.setattr(read, "PAGES", 1_000_000)
    seen = []
    monkeypatch.setattr(read, "arrow_rows", lambda batches: seen.extend(map(len, batches)) or iter(()))
    with pytest.raises(DataError, match="has no rows"):
        read_rows(tmp_path / "a.parquet")
    assert seen == [9] * 10


def test_a_schema_beyond_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = pa.int8()
    for _ in range(70):
        kind = pa.struct([("x", kind)])
    pyarrow.parquet.write_table(pa.table({"prompt": pa.nulls(1, kind)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: is not a whole .* \(it has fields within fields, more than 64"):
        read_rows(tmp_path / "a.parquet")
    monkeypatch.setattr(parquet_pages, "MOST_COLUMNS", 50)
    pyarrow.parquet.write_table(pa.table({f"c{place}": [1] for place in range(60)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: is not a whole Parquet file \(it has 61 columns, 50 at most"):
        read_rows(tmp_path / "a.parquet")
