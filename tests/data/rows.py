"""Small files of rows, and what becomes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuningfork.accounts import DroppedRow
from tuningfork.data.examples import infer_format, row_reader
from tuningfork.data.examples.roles import MessageNames
from tuningfork.data.examples.values import Unusable
from tuningfork.data.tables import read
from tuningfork.records import Example, Message, Source


@dataclass(frozen=True)
class Read:
    """A whole table as examples."""

    format: str
    rows_read: int
    examples: list[Example]
    dropped: list[DroppedRow]
    notes: dict[str, list[Source]]


def read_examples(
    path: str | Path,
    as_text: bool,
    format: str = "auto",
    columns: dict[str, str | None] | None = None,
    names: MessageNames | None = None,
) -> Read:
    rows, whole, reader = infer_format.open_table(path, as_text, format, columns, names or MessageNames())
    found = Read(reader.format, whole.rows, [], [], {})
    not_read: dict[str, list[Source]] = {}
    for number, row in rows:
        source = Source(str(path), number)
        try:
            read_row = reader(number, row)
        except Unusable as unusable:
            found.dropped.append(DroppedRow(source.file, number, unusable.reason, unusable.detail))
            continue
        found.examples.append(read_row.example)
        for note in read_row.notes:
            found.notes.setdefault(note, []).append(source)
        for name in read_row.not_read:
            not_read.setdefault(name, []).append(source)
    if not_read:
        places = {source.row: source for sources in not_read.values() for source in sources}
        found.notes[row_reader.fields_not_read(list(not_read))] = [places[row] for row in sorted(places)]
    return found


def read_rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    return list(read.read_rows(path))


HH = "\n\nHuman: {}\n\nAssistant: {}"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def write(folder: Path, rows: list[Any], name: str = "pairs.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(*messages: dict[str, str]) -> tuple[Message, ...]:
    return tuple(Message(m["role"], m["content"]) for m in messages)


def one(folder: Path, row: dict[str, Any], as_text: bool = False) -> Example:
    result = read_examples(write(folder, [row]), as_text)
    assert result.dropped == []
    return result.examples[0]


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def drop(folder: Path, row: dict[str, Any], as_text: bool = False) -> tuple[str, str]:
    """Reason and detail for a bad row that lies behind a good one, which settles the file's format."""
    good = {
        tuple: {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        str: {"chosen": HH.format("q", "a"), "rejected": HH.format("q", "b")},
    }
    first = {"prompt": "q", "chosen": "a", "rejected": "b"}
    if "prompt" not in row:
        first = good[str] if isinstance(row.get("chosen"), str) else good[tuple]
    result = read_examples(write(folder, [first, row]), as_text)
    assert [e.source.row for e in result.examples] == [1] and result.rows_read == 2
    (dropped,) = result.dropped
    assert dropped.row == 2 and dropped.file == str(folder / "pairs.jsonl")
    return dropped.reason, dropped.detail
