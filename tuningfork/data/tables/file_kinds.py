"""What a file is by its first bytes, where that is not what its name says, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path

from tuningfork.data.tables.delimited import DELIMITERS
from tuningfork.data.tables.json_rows import unzipped_pieces
from tuningfork.errors import DataError

HEAD = 1000  # bytes that tell

PARQUET = b"PAR1"
# What files of other kinds begin with; what they are, and what makes a file of ours of them.
BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (PARQUET, "a Parquet file", "Name it .parquet"),
    (b"PK\x03\x04", "a zip archive", "Unpack it, and name the files in it"),
    (b"\x1f\x8b", "a gzipped file within a gzipped one", "Unpack it once"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "Unpack it: zstd -d"),
    (b"\xfd7zXZ\x00", "compressed by xz", "Unpack it: xz -d"),
    (b"BZh", "compressed by bzip2", "Unpack it: bzip2 -d"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "Unpack it: lz4 -d"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "Unpack it, and name the files in it"),
    (b"ARROW1", "an Arrow file", "Write it as Parquet, or name the folder that `datasets` saved"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "Write it as Parquet, or name the folder that `datasets` saved"),
    (b"SQLite format 3\x00", "an SQLite database", "Write its table as JSONL or Parquet"),
    (b"Obj\x01", "an Avro file", "Write it as JSONL or Parquet"),
    (b"ORC", "an ORC file", "Write it as Parquet"),
    (b"\x89HDF", "an HDF5 file", "Write its table as JSONL or Parquet"),
    (b"\x93NUMPY", "a NumPy array", "Write it as JSONL or Parquet"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data itself", "Fetch the data: git lfs pull"),
    (b"/annex/objects/", "a pointer of git-annex, not the data itself", "Fetch the data: git annex get"),
    (b"\xff\xfe\x00\x00", "UTF-32 text", "Save it as UTF-8: iconv -f UTF-32 -t UTF-8"),
    (b"\x00\x00\xfe\xff", "UTF-32 text", "Save it as UTF-8: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "Save it as UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "Save it as UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"<!doctype html", "a web page", "Download the file itself; perhaps the page says why it was not to be had"),
    (b"<html", "a web page", "Download the file itself; perhaps the page says why it was not to be had"),
    (b"<?xml", "XML", "Write it as JSONL or Parquet; if it is an error of a download, download the file again"),
)
# Text of other kinds, by a pattern of its beginning.
PICKLE = re.compile(rb"\x80[\x02-\x05][\x95\x8a\x7d\x5d\x63(\x8c]")
WIDE = (  # two bytes or four for each letter, without the mark that says so
    (re.compile(rb"[\[{]\x00\x00\x00"), "UTF-32 text", "Save it as UTF-8: iconv -f UTF-32LE -t UTF-8"),
    (re.compile(rb"\x00\x00\x00[\[{]"), "UTF-32 text", "Save it as UTF-8: iconv -f UTF-32BE -t UTF-8"),
    (re.compile(rb"[\[{]\x00"), "UTF-16 text", "Save it as UTF-8: iconv -f UTF-16LE -t UTF-8"),
    (re.compile(rb"\x00[\[{]"), "UTF-16 text", "Save it as UTF-8: iconv -f UTF-16BE -t UTF-8"),
)
TABLE = re.compile(r"\"?\w[\w .-]*\"?([,;\t]\"?\w[\w .-]*\"?)+\r?$")  # a line of names


def check_kind(path: Path, suffix: str) -> None:
    """Raise DataError where a file, behind gzip or not, is not of the kind that its suffix says, and it is told which
    one it is. What is merely damaged is left to who reads it."""
    head = next(unzipped_pieces(path), b"")[:HEAD]
    if found := _kind(head, suffix):
        what, cure = found
        raise DataError(f"{path}: is {what}, not what its name says ({suffix}). {cure}.")


def _kind(head: bytes, suffix: str) -> tuple[str, str] | None:
    """What a file is that begins so, and what to do, where its suffix says something else."""
    lowered = head.lstrip().lower()
    for start, what, cure in BEGINNINGS:
        if start == PARQUET and suffix == ".parquet":
            continue
        if head.startswith(start) or (start[:1] == b"<" and lowered.startswith(start)):
            return what, cure
    for pattern, what, cure in WIDE:
        if pattern.match(head):
            return what, cure
    if head[257:262] == b"ustar":
        return "a tar archive", "Unpack it, and name the files in it"
    if PICKLE.match(head):
        return "a Python pickle", "Write its rows as JSONL or Parquet; a pickle is a program, and is not run here"
    return _text_kind(head.decode(errors="replace").removeprefix("\ufeff").lstrip(), suffix)


def _text_kind(head: str, suffix: str) -> tuple[str, str] | None:
    first = head.split("\n", 1)[0]
    if suffix in (".parquet", *DELIMITERS):
        if head.startswith("{"):
            return "JSON text", "Name it .jsonl"
        return ("one JSON array", "Name it .json") if head.startswith("[") else None
    if suffix == ".jsonl" and re.match(r"\[\s*\{", head):
        return "one JSON array, not an object a line", "Name it .json"
    if "\n" in head and TABLE.match(first):
        called = next((kind for kind, mark in DELIMITERS.items() if mark in first), None)
        cure = f"Name it {called}" if called else "Write it with commas, and name it .csv"
        return f"a table as text, with the columns {first.strip()[:80]}", cure
    return None
