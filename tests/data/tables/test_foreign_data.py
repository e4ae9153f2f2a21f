"""Data sets that somebody else made: their files are rows, and nothing in them or beside them is run."""

from __future__ import annotations

import pickle
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.payload import Payload
from tuningfork.data.tables.read import hub_splits, read_rows
from tuningfork.errors import DataError

ROWS = [{"prompt": "q", "chosen": "a", "rejected": "b"}]


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Is there once something has been run."""
    return tmp_path / "ran"


@pytest.fixture
def table(ran: Path) -> pa.Table:
    """The rows, in a column whose type is a program: Arrow keeps types of Python's own as pickles."""
    plain = pa.Table.from_pylist(ROWS)
    own = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Payload(ran))}
    return plain.cast(pa.schema([plain.schema.field(0).with_metadata(own), *list(plain.schema)[1:]]))


def test_the_type_of_a_column_that_is_a_program(tmp_path: Path, ran: Path, table: pa.Table) -> None:
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    kept = pyarrow.parquet.read_schema(tmp_path / "rows.parquet").field(0).metadata
    assert kept[b"ARROW:extension:name"] == b"arrow.py_extension_type"
    assert [row for _, row in read_rows(tmp_path / "rows.parquet")] == ROWS
    assert not ran.exists()


def test_the_same_in_a_saved_data_set(tmp_path: Path, ran: Path, table: pa.Table) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    [file] = (tmp_path / "saved").glob("*.arrow")
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    assert b"py_extension_type" in file.read_bytes()
    assert [row for _, row in read_rows(tmp_path / "saved")] == ROWS
    assert not ran.exists()


@pytest.mark.parametrize("rows", [True, False])
def test_a_data_set_of_the_hub_with_a_script(
    tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch, rows: bool
) -> None:
    """The library reads a folder of that name as it reads the hub's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("builtins.input", None)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "name.py").write_text(f"import os\nos.mkdir({str(ran)!r})\n")
    if rows:
        (tmp_path / "owner" / "name" / "rows.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    for load in (read_rows, hub_splits):
        with pytest.raises(DataError, match=r"hub:owner/name: cannot be loaded \(Dataset scripts are no longer suppo"):
            load("hub:owner/name")
    assert not ran.exists()
